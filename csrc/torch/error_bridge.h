// Our errors on their way through autograd, which keeps the Python type only of torch's own exception classes.
#pragma once

#include <torch/csrc/Exceptions.h>

#include <string>
#include <utility>

#include "base/error.h"

namespace tt {

// The Python class PeerError; set once by the module.
PyObject*& peer_error_type();

struct PeerErrorInPython : public torch::PyTorchError {
  explicit PeerErrorInPython(std::string message) : PyTorchError(std::move(message)) {}
  PyObject* python_type() override { return peer_error_type(); }
};

// Runs `body` inside a backward pass.
template <typename Body>
void in_autograd(Body&& body) {
  try {
    body();
  } catch (const PeerError& error) {
    throw PeerErrorInPython(error.what());
  }
}

}  // namespace tt
