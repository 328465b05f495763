// How a backward pass reaches the engine.
#pragma once

#include <cstdint>
#include <memory>

#include "torch/compat.h"

namespace tt {

class TorchEngine;

// Gradient accumulator of a gathered leaf: hands the gradient to the engine and drops it; the leaf's .grad stays
// undefined.
torch_compat::GradientNode make_gradient_sink(const at::Tensor& leaf, std::int32_t param,
                                              const std::weak_ptr<TorchEngine>& engine);

// Pre-hook of a node that made an output of `unit`: the node's sequence number, and the first one of the call.
std::unique_ptr<torch::autograd::FunctionPreHook> make_before_backward(std::int32_t unit, std::uint64_t node,
                                                                       std::uint64_t began,
                                                                       const std::weak_ptr<TorchEngine>& engine);

}  // namespace tt
