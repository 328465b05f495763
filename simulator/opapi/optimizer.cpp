// Steps of optimizers, and of the gradient scaler.
#include <cmath>

#include "opapi/kernels.h"

namespace sim::opapi {

SIM_CHECKED_OPERATOR(ApplyAdamWV2, InOut parameter, InOut m, InOut v, OptOut max_v, In gradient, In step, float lr,
                     float beta1, float beta2, float decay, float eps, bool amsgrad, bool maximize) {
  require(gradient.sizes() == parameter.sizes() && m.sizes() == parameter.sizes() && v.sizes() == parameter.sizes(),
          "parameter, moments and gradient have different shapes");
  require(!amsgrad || max_v.has_value(), "amsgrad needs the maximum of the second moments");
  require(step.numel() == 1, "the step must have one element");
  if (checking()) return;
  // The caller's count is of the steps before this one.
  const double t = step.reshape({}).item<double>() + 1;
  const at::Tensor g = maximize ? -wide(gradient) : wide(gradient);
  const at::Tensor m_new = wide(m) * beta1 + g * (1 - beta1);
  const at::Tensor v_new = wide(v) * beta2 + g * g * (1 - beta2);
  at::Tensor second = v_new;
  if (amsgrad) {
    second = at::maximum(wide(static_cast<const at::Tensor&>(*max_v)), v_new);
    max_v.set(second);
  }
  const double correction1 = 1 - std::pow(static_cast<double>(beta1), t);
  const double correction2 = std::sqrt(1 - std::pow(static_cast<double>(beta2), t));
  const at::Tensor denominator = second.sqrt() / correction2 + eps;
  const at::Tensor decayed = wide(parameter) * (1 - static_cast<double>(lr) * decay);
  parameter.set(decayed - m_new / denominator * (lr / correction1));
  m.set(m_new);
  v.set(v_new);
}

SIM_OPERATOR(AmpUpdateScale, In scale, In growth, In found, double up, double down, int64_t interval, Out scale_out,
             Out growth_out) {
  at::Tensor new_scale = scale.clone();
  at::Tensor new_growth = growth.clone();
  at::_amp_update_scale_(new_scale, new_growth, found, up, down, interval);
  scale_out.set(new_scale);
  growth_out.set(new_growth);
}

SIM_OPERATOR(FusedSgd, InOuts parameters, InOuts gradients, InOuts momenta, OptIn scale, float decay, float momentum,
             float lr, float dampening, bool nesterov, bool maximize, bool first_step) {
  const double unscale = scale ? 1 / scale->reshape({}).item<double>() : 1;
  for (size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor g = wide(gradients[i]) * (maximize ? -unscale : unscale);
    if (decay != 0) g = g + wide(parameters[i]) * decay;
    if (momentum != 0) {
      require(momenta.size() == parameters.size(), "momentum needs a buffer for each parameter");
      const at::Tensor buffer = first_step ? g : wide(momenta[i]) * momentum + g * (1 - dampening);
      momenta[i].set(buffer);
      g = nesterov ? g + buffer * momentum : buffer;
    }
    parameters[i].set(wide(parameters[i]) - g * lr);
  }
}

}  // namespace sim::opapi
