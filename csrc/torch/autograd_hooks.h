// How a backward pass reaches the engine.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "torch/compat.h"

namespace tt {

class TorchEngine;

// Gradient accumulator of a gathered leaf: hands the gradient to the engine and drops it; the leaf's .grad stays
// undefined.
torch_compat::GradientNode make_gradient_sink(const at::Tensor& leaf, std::int32_t param,
                                              const std::weak_ptr<TorchEngine>& engine);

// One call of a unit, as a node that made an output of it remembers it.
struct UnitCall {
  std::uint64_t node = 0;               // the node's sequence number
  std::uint64_t began = 0;              // the first sequence number of the call
  std::vector<std::uint32_t> versions;  // how often the unit's pieces had been changed in place
};

// Pre-hook of that node.
std::unique_ptr<torch::autograd::FunctionPreHook> make_before_backward(std::int32_t unit, UnitCall call,
                                                                       const std::weak_ptr<TorchEngine>& engine);

}  // namespace tt
