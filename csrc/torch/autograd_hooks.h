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

// Pre-hook of a node that made an output of `unit`, when its pieces had been changed in place `versions` times.
std::unique_ptr<torch::autograd::FunctionPreHook> make_before_backward(std::int32_t unit,
                                                                       std::vector<std::uint32_t> versions,
                                                                       const std::weak_ptr<TorchEngine>& engine);

}  // namespace tt
