// Losses and their gradients, computed in fp32.
#include "opapi/kernels.h"

namespace sim::opapi {

namespace {

int64_t reduction_of(const std::string& name) {
  if (name == "none") return at::Reduction::None;
  if (name == "mean") return at::Reduction::Mean;
  if (name == "sum") return at::Reduction::Sum;
  throw InvalidArgument("reduction '" + name + "' is none of none, mean, sum");
}

at::Tensor target64(const at::Tensor& target) { return target.to(at::kLong); }

}  // namespace

SIM_OPERATOR(NLLLoss, In self, In target, In weight, int64_t reduction, int64_t ignored, Out out, Out total_weight) {
  const auto [loss, total] = at::nll_loss_forward(wide(self), target64(target), wide(weight), reduction, ignored);
  out.set(loss);
  total_weight.set(total.view(total_weight.sizes()));
}
SIM_OPERATOR(NLLLossBackward, In gradient, In self, In target, In weight, int64_t reduction, int64_t ignored,
             In total_weight, Out out) {
  const at::Tensor g = wide(gradient);
  out.set(at::nll_loss_backward(reduction == at::Reduction::None ? g : g.reshape({}), wide(self), target64(target),
                                wide(weight), reduction, ignored, wide(total_weight).reshape({})));
}
SIM_OPERATOR(NLLLoss2d, In self, In target, In weight, int64_t reduction, int64_t ignored, Out out, Out total_weight) {
  const auto [loss, total] = at::nll_loss2d_forward(wide(self), target64(target), wide(weight), reduction, ignored);
  out.set(loss);
  total_weight.set(total.view(total_weight.sizes()));
}
SIM_OPERATOR(NLLLoss2dBackward, In gradient, In self, In target, In weight, int64_t reduction, int64_t ignored,
             In total_weight, Out out) {
  out.set(at::nll_loss2d_backward(wide(gradient), wide(self), target64(target), wide(weight), reduction, ignored,
                                  wide(total_weight).reshape({})));
}

// Loss over log_softmax(x), optionally with smoothed labels; log_prob is kept for the gradient.
SIM_OPERATOR(CrossEntropyLoss, In x, In target, OptIn weight, Text reduction, int64_t ignored, double smoothing,
             double /*lse_square_scale*/, bool z_loss, Out loss, Out log_prob, OptOut /*z*/, OptOut /*lse*/) {
  require(!z_loss, "the z-loss is not simulated");
  const at::Tensor log_probabilities = at::log_softmax(wide(x), -1);
  log_prob.set(log_probabilities);
  loss.set(at::cross_entropy_loss(wide(x), target64(target), wide(weight), reduction_of(reduction), ignored, smoothing)
               .view(loss.sizes()));
}
SIM_OPERATOR(CrossEntropyLossGrad, In gradient, In log_prob, In target, OptIn weight, OptIn /*z_gradient*/,
             OptIn /*lse*/, Text reduction, int64_t ignored, double smoothing, double /*lse_square_scale*/, Out out) {
  const at::Tensor p = wide(log_prob);
  const at::Tensor labels = target64(target);
  const int64_t classes = p.size(1);
  const at::Tensor valid = labels.ne(ignored);
  const at::Tensor safe = at::where(valid, labels, at::zeros_like(labels));
  const at::Tensor class_weight = weight ? wide(*weight) : at::ones({classes}, p.scalar_type());
  const at::Tensor row_weight = class_weight.index_select(0, safe) * valid;
  // d loss / d log_prob, row by row
  at::Tensor d = at::zeros_like(p).scatter_(1, safe.unsqueeze(1), -(row_weight * (1 - smoothing)).unsqueeze(1));
  if (smoothing > 0) d = d - class_weight.unsqueeze(0) * (smoothing / classes) * valid.unsqueeze(1);
  at::Tensor scale = wide(gradient);
  if (reduction == "mean") scale = scale.reshape({}) / row_weight.sum();
  d = d * (reduction == "none" ? scale.unsqueeze(1) : scale.reshape({}));
  out.set(d - at::exp(p) * d.sum(1, true));
}

#define SIM_LOSS(Name, function)                                                              \
  SIM_OPERATOR(Name, In self, In target, int64_t reduction, Out out) {                        \
    out.set(at::function(wide(self), wide(target), reduction));                               \
  }                                                                                           \
  SIM_OPERATOR(Name##Backward, In gradient, In self, In target, int64_t reduction, Out out) { \
    out.set(opapi::function##_backward(wide(gradient), wide(self), wide(target), reduction)); \
  }

namespace {

// What every loss does with the gradient of its reduced value.
at::Tensor spread(const at::Tensor& gradient, const at::Tensor& local, int64_t reduction) {
  const at::Tensor product = gradient * local;
  return reduction == at::Reduction::Mean ? product / local.numel() : product;
}

at::Tensor mse_loss_backward(const at::Tensor& gradient, const at::Tensor& self, const at::Tensor& target,
                             int64_t reduction) {
  return spread(gradient, 2 * (self - target), reduction);
}

at::Tensor l1_loss_backward(const at::Tensor& gradient, const at::Tensor& self, const at::Tensor& target,
                            int64_t reduction) {
  return spread(gradient, at::sign(self - target), reduction);
}

at::Tensor soft_margin_loss_backward(const at::Tensor& gradient, const at::Tensor& self, const at::Tensor& target,
                                     int64_t reduction) {
  return spread(gradient, -target * at::sigmoid(-target * self), reduction);
}

}  // namespace

SIM_LOSS(MseLoss, mse_loss)
SIM_LOSS(L1Loss, l1_loss)
SIM_LOSS(SoftMarginLoss, soft_margin_loss)
SIM_OPERATOR(SmoothL1Loss, In self, In target, int64_t reduction, float beta, Out out) {
  out.set(at::smooth_l1_loss(wide(self), wide(target), reduction, beta));
}
SIM_OPERATOR(SmoothL1LossBackward, In gradient, In self, In target, int64_t reduction, float beta, Out out) {
  out.set(at::smooth_l1_loss_backward(wide(gradient), wide(self), wide(target), reduction, beta));
}
SIM_OPERATOR(BinaryCrossEntropy, In self, In target, OptIn weight, int64_t reduction, Out out) {
  out.set(at::binary_cross_entropy(wide(self), wide(target), wide(weight), reduction));
}
SIM_OPERATOR(BinaryCrossEntropyBackward, In gradient, In self, In target, OptIn weight, int64_t reduction, Out out) {
  out.set(at::binary_cross_entropy_backward(wide(gradient), wide(self), wide(target), wide(weight), reduction));
}
SIM_OPERATOR(BinaryCrossEntropyWithLogits, In self, In target, OptIn weight, OptIn positive, int64_t reduction,
             Out out) {
  out.set(at::binary_cross_entropy_with_logits(wide(self), wide(target), wide(weight), wide(positive), reduction));
}
SIM_OPERATOR(BinaryCrossEntropyWithLogitsBackward, In gradient, In self, In target, OptIn weight, OptIn positive,
             int64_t reduction, Out out) {
  const at::Tensor s = at::sigmoid(wide(self));
  const at::Tensor t = wide(target);
  at::Tensor local = s - t;
  if (positive) local = (wide(*positive) * t + 1 - t) * s - wide(*positive) * t;
  if (weight) local = local * wide(*weight);
  out.set(spread(wide(gradient), local, reduction));
}
SIM_OPERATOR(KlDiv, In self, In target, int64_t reduction, bool log_target, Out out) {
  out.set(at::kl_div(wide(self), wide(target), reduction, log_target));
}
SIM_OPERATOR(KlDivBackward, In gradient, In self, In target, int64_t reduction, bool log_target, Out out) {
  const at::Tensor t = wide(target);
  const at::Tensor local = log_target ? -at::exp(t) : at::where(t > 0, -t, at::zeros_like(t));
  out.set(spread(wide(gradient), local.expand(self.sizes()), reduction));
}

}  // namespace sim::opapi
