#include "torch/error_bridge.h"

namespace tt {

PyObject*& peer_error_type() {
  static PyObject* type = nullptr;
  return type;
}

}  // namespace tt
