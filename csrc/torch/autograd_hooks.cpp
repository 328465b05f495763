#include "torch/autograd_hooks.h"

#include <utility>
#include <vector>

#include "torch/error_bridge.h"
#include "torch/torch_engine.h"

namespace tt {
namespace {

// A subclass of AccumulateGrad, not a bare node, so that register_hook on the leaf keeps working.
struct GradientSink : public torch::autograd::AccumulateGrad {
  GradientSink(at::Tensor leaf, std::int32_t param_index, std::weak_ptr<TorchEngine> owner)
      : AccumulateGrad(std::move(leaf)), param(param_index), engine(std::move(owner)) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const at::Tensor gradient = std::move(grads.at(0));
    if (gradient.defined()) {
      if (const auto locked = engine.lock()) {
        in_autograd([&] { locked->accumulate(param, gradient); });
      }
    }
    return {};
  }

  std::int32_t param;
  std::weak_ptr<TorchEngine> engine;
};

struct BeforeBackward : public torch::autograd::FunctionPreHook {
  BeforeBackward(std::int32_t unit_index, UnitCall of_call, std::weak_ptr<TorchEngine> owner)
      : unit(unit_index), call(std::move(of_call)), engine(std::move(owner)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    if (const auto locked = engine.lock()) {
      in_autograd([&] { locked->before_backward(unit, call); });
    }
    return grads;
  }

  std::int32_t unit;
  UnitCall call;
  std::weak_ptr<TorchEngine> engine;
};

}  // namespace

torch_compat::GradientNode make_gradient_sink(const at::Tensor& leaf, std::int32_t param,
                                              const std::weak_ptr<TorchEngine>& engine) {
  return c10::make_intrusive<GradientSink>(leaf, param, engine);
}

std::unique_ptr<torch::autograd::FunctionPreHook> make_before_backward(std::int32_t unit, UnitCall call,
                                                                       const std::weak_ptr<TorchEngine>& engine) {
  return std::make_unique<BeforeBackward>(unit, std::move(call), engine);
}

}  // namespace tt
