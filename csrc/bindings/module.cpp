#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include "base/error.h"
#include "bindings/bindings.h"
#include "torch/error_bridge.h"
#include "torch/profiler_spans.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
  m.doc() = "Native core of torchtitan_npu.";
  // Translators run last registered first: the most derived classes come last.
  py::register_exception<tt::Error>(m, "Error", PyExc_RuntimeError);
  auto peer_error = py::register_exception<tt::PeerError>(m, "PeerError", PyExc_RuntimeError);
  tt::peer_error_type() = peer_error.ptr();
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) {
        std::rethrow_exception(error);
      }
    } catch (const tt::ValueError& e) {
      PyErr_SetString(PyExc_ValueError, e.what());
    } catch (python_error& e) {
      e.restore();
    }
  });
  tt::install_profiler_spans();
  bind_plan(m);
  bind_host(m);
  bind_ascend(m);
  bind_c10d(m);
  bind_engine(m);
}
