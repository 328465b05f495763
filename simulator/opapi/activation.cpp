// Activations with a gradient of their own, and the gradients.
#include "opapi/kernels.h"

namespace sim::opapi {

SIM_OPERATOR(Softmax, In self, int64_t dim, Out out) { out.set(at::softmax(wide(self), dim)); }
SIM_OPERATOR(SoftmaxBackward, In gradient, In output, int64_t dim, Out out) {
  out.set(at::_softmax_backward_data(wide(gradient), wide(output), dim, wide(output.scalar_type())));
}
SIM_OPERATOR(LogSoftmax, In self, int64_t dim, Out out) { out.set(at::log_softmax(wide(self), dim)); }
SIM_OPERATOR(LogSoftmaxBackward, In gradient, In output, int64_t dim, Out out) {
  out.set(at::_log_softmax_backward_data(wide(gradient), wide(output), dim, wide(output.scalar_type())));
}
SIM_POINTWISE_OPERATOR(SiluBackward, In gradient, In self, Out out) { out.set(at::silu_backward(gradient, self)); }
SIM_POINTWISE_OPERATOR(SigmoidBackward, In gradient, In output, Out out) {
  out.set(at::sigmoid_backward(gradient, output));
}
SIM_POINTWISE_OPERATOR(TanhBackward, In gradient, In output, Out out) { out.set(at::tanh_backward(gradient, output)); }
SIM_POINTWISE_OPERATOR(GeluBackward, In gradient, In self, Out out) { out.set(at::gelu_backward(gradient, self)); }
SIM_POINTWISE_OPERATOR(GeluBackwardV2, In gradient, In self, Text approximate, Out out) {
  out.set(at::gelu_backward(gradient, self, approximate));
}
SIM_POINTWISE_OPERATOR(FastGeluBackward, In gradient, In self, Out out) {
  const at::Tensor x = wide(self);
  const at::Tensor s = at::sigmoid(x * 1.702);
  out.set(wide(gradient) * (s + x * 1.702 * s * (1 - s)));
}
SIM_POINTWISE_OPERATOR(ThresholdBackward, In gradient, In self, Scalar threshold, Out out) {
  out.set(at::threshold_backward(gradient, self, threshold));
}
SIM_POINTWISE_OPERATOR(LeakyReluBackward, In gradient, In self, Scalar slope, bool is_result, Out out) {
  out.set(at::leaky_relu_backward(gradient, self, slope, is_result));
}
SIM_POINTWISE_OPERATOR(EluBackward, In gradient, Scalar alpha, Scalar scale, Scalar input_scale, bool is_result,
                       In self, Out out) {
  out.set(at::elu_backward(gradient, alpha, scale, input_scale, is_result, self));
}
SIM_OPERATOR(SeluBackward, In gradient, In output, Out out) {
  constexpr double kAlpha = 1.6732632423543772848170429916717;
  constexpr double kScale = 1.0507009873554804934193349852946;
  out.set(at::elu_backward(gradient, kAlpha, kScale, 1, true, output));
}
SIM_POINTWISE_OPERATOR(SoftplusBackward, In gradient, In self, Scalar beta, Scalar threshold, Out out) {
  out.set(at::softplus_backward(gradient, self, beta, threshold));
}
SIM_POINTWISE_OPERATOR(HardtanhBackward, In gradient, In self, Scalar low, Scalar high, Out out) {
  out.set(at::hardtanh_backward(gradient, self, low, high));
}
SIM_OPERATOR(HardswishBackward, In gradient, In self, Out out) { out.set(at::hardswish_backward(gradient, self)); }
SIM_POINTWISE_OPERATOR(HardsigmoidBackward, In gradient, In self, Out out) {
  out.set(at::hardsigmoid_backward(gradient, self));
}
SIM_OPERATOR(MishBackward, In gradient, In self, Out out) { out.set(at::mish_backward(gradient, self)); }
SIM_OPERATOR(LogSigmoidForward, In self, Out out, Out buffer) {
  const auto [result, kept] = at::log_sigmoid_forward(self);
  out.set(result);
  if (kept.numel() == buffer.numel()) buffer.set(kept.view(buffer.sizes()));
}
SIM_OPERATOR(LogSigmoidBackward, In gradient, In self, In /*buffer*/, Out out) {
  out.set(wide(gradient) * at::sigmoid(-wide(self)));
}
SIM_OPERATOR(Glu, In self, int64_t dim, Out out) { out.set(at::glu(self, dim)); }
SIM_OPERATOR(GluBackward, In gradient, In self, int64_t dim, Out out) {
  out.set(at::glu_backward(gradient, self, dim));
}

// silu(first half) * second half
SIM_OPERATOR(SwiGlu, In self, int64_t dim, Out out) {
  require(self.size(dim) % 2 == 0, "the size of the dimension to split is odd");
  const auto halves = wide(self).chunk(2, dim);
  out.set(at::silu(halves[0]) * halves[1]);
}
SIM_OPERATOR(SwiGluGrad, In gradient, In self, int64_t dim, Out out) {
  require(self.size(dim) % 2 == 0, "the size of the dimension to split is odd");
  const auto halves = wide(self).chunk(2, dim);
  const at::Tensor g = wide(gradient);
  out.set(at::cat({at::silu_backward(g * halves[1], halves[0]), g * at::silu(halves[0])}, dim));
}

}  // namespace sim::opapi
