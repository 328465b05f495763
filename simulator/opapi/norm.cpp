// Normalizations, computed in fp32.
#include "opapi/kernels.h"

namespace sim::opapi {

namespace {

using Dims = std::vector<int64_t>;

Dims last_dims(const at::Tensor& self, int64_t count) {
  Dims dims;
  for (int64_t d = self.dim() - count; d < self.dim(); ++d) dims.push_back(d);
  return dims;
}

Dims first_dims(int64_t count) {
  Dims dims;
  for (int64_t d = 0; d < count; ++d) dims.push_back(d);
  return dims;
}

at::Tensor sum_of(const at::Tensor& tensor, const Dims& dims, bool keep) {
  return dims.empty() ? tensor : tensor.sum(dims, keep);
}

void require_last_sizes(const at::Tensor& x, const at::Tensor& gamma) {
  require(gamma.dim() <= x.dim() && x.sizes().slice(static_cast<size_t>(x.dim() - gamma.dim())) == gamma.sizes(),
          "gamma must have the last sizes of x");
}

struct Normalized {
  at::Tensor y, rstd;
};

// x / sqrt(mean(x^2) + eps) * gamma over the dimensions of gamma
Normalized rms_norm(const at::Tensor& x, const at::Tensor& gamma, double eps) {
  require_last_sizes(x, gamma);
  const at::Tensor wide_x = wide(x);
  const at::Tensor rstd = (wide_x.pow(2).mean(last_dims(x, gamma.dim()), true) + eps).rsqrt();
  return {wide_x * rstd * wide(gamma), rstd};
}

}  // namespace

SIM_CHECKED_OPERATOR(RmsNorm, In x, In gamma, double eps, Out y, Out rstd) {
  require_last_sizes(x, gamma);
  require(y.sizes() == x.sizes(), "x and y have different shapes");
  if (checking()) return;
  const Normalized result = rms_norm(x, gamma, eps);
  y.set(result.y);
  rstd.set(result.rstd);
}
SIM_OPERATOR(RmsNormGrad, In dy, In x, In rstd, In gamma, Out dx, Out dgamma) {
  const at::Tensor normalized = wide(x) * rstd;
  const at::Tensor g = wide(dy) * wide(gamma);
  const at::Tensor projection = (g * normalized).mean(last_dims(x, gamma.dim()), true);
  dx.set((g - normalized * projection) * rstd);
  dgamma.set(sum_of(wide(dy) * normalized, first_dims(x.dim() - gamma.dim()), false));
}
SIM_OPERATOR(AddRmsNorm, In a, In b, In gamma, double eps, Out y, Out rstd, Out sum) {
  const at::Tensor x = (wide(a) + wide(b)).to(a.scalar_type());
  const Normalized result = rms_norm(x, gamma, eps);
  y.set(result.y);
  rstd.set(result.rstd);
  sum.set(x);
}

SIM_OPERATOR(LayerNorm, In x, IntArray shape, OptIn weight, OptIn bias, double eps, Out y, OptOut mean, OptOut rstd) {
  const Dims dims = last_dims(x, static_cast<int64_t>(shape.size()));
  const at::Tensor m = wide(x).mean(dims, true);
  const at::Tensor centered = wide(x) - m;
  const at::Tensor r = (centered.pow(2).mean(dims, true) + eps).rsqrt();
  at::Tensor result = centered * r;
  if (weight) result = result * wide(*weight);
  if (bias) result = result + wide(*bias);
  y.set(result);
  mean.set(m);
  rstd.set(r);
}
SIM_OPERATOR(LayerNormBackward, In dy, In x, IntArray shape, In mean, In rstd, OptIn weight, OptIn /*bias*/,
             BoolArray wanted, OptOut dx, OptOut dweight, OptOut dbias) {
  require(wanted.size() == 3, "three flags say which gradients are wanted");
  const Dims inner = last_dims(x, static_cast<int64_t>(shape.size()));
  const Dims outer = first_dims(x.dim() - static_cast<int64_t>(shape.size()));
  const at::Tensor normalized = (wide(x) - wide(mean)) * wide(rstd);
  const at::Tensor g = weight ? wide(dy) * wide(*weight) : wide(dy);
  if (wanted[0]) {
    dx.set((g - g.mean(inner, true) - normalized * (g * normalized).mean(inner, true)) * wide(rstd));
  }
  if (wanted[1]) dweight.set(sum_of(wide(dy) * normalized, outer, false));
  if (wanted[2]) dbias.set(sum_of(wide(dy), outer, false));
}

SIM_OPERATOR(GroupNorm, In x, OptIn weight, OptIn bias, int64_t n, int64_t channels, int64_t pixels, int64_t groups,
             double eps, Out y, Out mean, Out rstd) {
  const auto [result, m, r] =
      at::native_group_norm(wide(x).contiguous(), wide(weight), wide(bias), n, channels, pixels, groups, eps);
  y.set(result);
  mean.set(m);
  rstd.set(r);
}
SIM_OPERATOR(GroupNormBackward, In dy, In x, In mean, In rstd, OptIn weight, int64_t n, int64_t channels,
             int64_t pixels, int64_t groups, BoolArray wanted, OptOut dx, OptOut dweight, OptOut dbias) {
  require(wanted.size() == 3, "three flags say which gradients are wanted");
  const auto [gx, gw, gb] = at::native_group_norm_backward(
      wide(dy).contiguous(), wide(x).contiguous(), wide(mean).contiguous(), wide(rstd).contiguous(), wide(weight), n,
      channels, pixels, groups, {wanted[0], wanted[1], wanted[2]});
  if (wanted[0]) dx.set(gx);
  if (wanted[1]) dweight.set(gw);
  if (wanted[2]) dbias.set(gb);
}
SIM_OPERATOR(BatchNorm, In x, OptIn weight, OptIn bias, OptIn running_mean, OptIn running_var, bool training,
             double momentum, double eps, Out y, OptOut mean, OptOut rstd) {
  const auto [result, m, r] =
      at::native_batch_norm(wide(x), wide(weight), wide(bias), running_mean, running_var, training, momentum, eps);
  y.set(result);
  if (training) {
    mean.set(m);
    rstd.set(r);
  }
}
SIM_OPERATOR(BatchNormBackward, In dy, In x, OptIn weight, OptIn running_mean, OptIn running_var, OptIn mean,
             OptIn rstd, bool training, double eps, BoolArray wanted, OptOut dx, OptOut dweight, OptOut dbias) {
  require(wanted.size() == 3, "three flags say which gradients are wanted");
  const auto [gx, gw, gb] =
      at::native_batch_norm_backward(wide(dy), wide(x), wide(weight), running_mean, running_var, mean, rstd, training,
                                     eps, {wanted[0], wanted[1], wanted[2]});
  if (wanted[0]) dx.set(gx);
  if (wanted[1]) dweight.set(gw);
  if (wanted[2]) dbias.set(gb);
}
SIM_OPERATOR(Renorm, In self, Scalar p, int64_t dim, Scalar max_norm, Out out) {
  out.set(at::renorm(wide(self), p, dim, max_norm));
}
SIM_OPERATOR(InplaceRenorm, InOut self, Scalar p, int64_t dim, Scalar max_norm) {
  self.set(at::renorm(wide(self), p, dim, max_norm));
}

}  // namespace sim::opapi
