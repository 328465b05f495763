// Functions of one tensor, element by element.
#include "opapi/kernels.h"

namespace sim::opapi {

#define SIM_UNARY(Name, function) \
  SIM_POINTWISE_OPERATOR(Name, In self, Out out) { out.set(at::function(self)); }
#define SIM_UNARY_AND_INPLACE(Name, function) \
  SIM_UNARY(Name, function)                   \
  SIM_POINTWISE_OPERATOR(Inplace##Name, InOut self) { self.set(at::function(self)); }

SIM_UNARY_AND_INPLACE(Acos, acos)
SIM_UNARY_AND_INPLACE(Acosh, acosh)
SIM_UNARY_AND_INPLACE(Asin, asin)
SIM_UNARY_AND_INPLACE(Asinh, asinh)
SIM_UNARY_AND_INPLACE(Atan, atan)
SIM_UNARY_AND_INPLACE(Atanh, atanh)
SIM_UNARY_AND_INPLACE(Ceil, ceil)
SIM_UNARY_AND_INPLACE(Cos, cos)
SIM_UNARY_AND_INPLACE(Cosh, cosh)
SIM_UNARY_AND_INPLACE(Erf, erf)
SIM_UNARY_AND_INPLACE(Erfc, erfc)
SIM_UNARY_AND_INPLACE(Erfinv, erfinv)
SIM_UNARY_AND_INPLACE(Exp, exp)
SIM_UNARY_AND_INPLACE(Exp2, exp2)
SIM_UNARY_AND_INPLACE(Expm1, expm1)
SIM_UNARY_AND_INPLACE(Floor, floor)
SIM_UNARY_AND_INPLACE(Frac, frac)
SIM_UNARY_AND_INPLACE(Log, log)
SIM_UNARY_AND_INPLACE(Log10, log10)
SIM_UNARY_AND_INPLACE(Log1p, log1p)
SIM_UNARY_AND_INPLACE(Log2, log2)
SIM_UNARY_AND_INPLACE(LogicalNot, logical_not)
SIM_UNARY_AND_INPLACE(Neg, neg)
SIM_UNARY_AND_INPLACE(Reciprocal, reciprocal)
SIM_UNARY_AND_INPLACE(Round, round)
SIM_UNARY_AND_INPLACE(Rsqrt, rsqrt)
SIM_UNARY_AND_INPLACE(Sigmoid, sigmoid)
SIM_UNARY_AND_INPLACE(Sin, sin)
SIM_UNARY_AND_INPLACE(Sinc, sinc)
SIM_UNARY_AND_INPLACE(Sinh, sinh)
SIM_UNARY_AND_INPLACE(Sqrt, sqrt)
SIM_UNARY_AND_INPLACE(Tan, tan)
SIM_UNARY_AND_INPLACE(Tanh, tanh)
SIM_UNARY_AND_INPLACE(Trunc, trunc)
SIM_UNARY_AND_INPLACE(Relu, relu)
SIM_UNARY_AND_INPLACE(Hardsigmoid, hardsigmoid)
SIM_UNARY_AND_INPLACE(Hardswish, hardswish)
SIM_UNARY_AND_INPLACE(Mish, mish)
SIM_UNARY_AND_INPLACE(Selu, selu)
SIM_UNARY(Abs, abs)
SIM_UNARY(Sign, sign)
SIM_UNARY(Signbit, signbit)
SIM_UNARY(BitwiseNot, bitwise_not)
SIM_UNARY(Square, square)
SIM_UNARY(Digamma, digamma)
SIM_UNARY(Lgamma, lgamma)
SIM_UNARY(Silu, silu)
SIM_UNARY(LogSigmoid, log_sigmoid)
SIM_UNARY(Real, real)
SIM_UNARY(IsFinite, isfinite)
SIM_UNARY(IsInf, isinf)
SIM_UNARY(IsNegInf, isneginf)
SIM_UNARY(IsPosInf, isposinf)
SIM_UNARY(AngleV2, angle)

SIM_POINTWISE_OPERATOR(Gelu, In self, Out out) { out.set(at::gelu(self)); }
SIM_POINTWISE_OPERATOR(GeluV2, In self, int64_t approximate, Out out) {
  out.set(at::gelu(self, approximate == 1 ? "tanh" : "none"));
}
SIM_POINTWISE_OPERATOR(FastGelu, In self, Out out) { out.set(self * at::sigmoid(self * 1.702)); }
SIM_POINTWISE_OPERATOR(LeakyRelu, In self, Scalar slope, Out out) { out.set(at::leaky_relu(self, slope)); }
SIM_POINTWISE_OPERATOR(InplaceLeakyRelu, InOut self, Scalar slope) { self.set(at::leaky_relu(self, slope)); }
SIM_POINTWISE_OPERATOR(Elu, In self, Scalar alpha, Scalar scale, Scalar input_scale, Out out) {
  out.set(at::elu(self, alpha, scale, input_scale));
}
SIM_POINTWISE_OPERATOR(InplaceElu, InOut self, Scalar alpha, Scalar scale, Scalar input_scale) {
  self.set(at::elu(self, alpha, scale, input_scale));
}
SIM_POINTWISE_OPERATOR(Celu, In self, Scalar alpha, Out out) { out.set(at::celu(self, alpha)); }
SIM_POINTWISE_OPERATOR(InplaceCelu, InOut self, Scalar alpha) { self.set(at::celu(self, alpha)); }
SIM_POINTWISE_OPERATOR(Hardshrink, In self, Scalar bound, Out out) { out.set(at::hardshrink(self, bound)); }
SIM_POINTWISE_OPERATOR(Softshrink, In self, Scalar bound, Out out) { out.set(at::softshrink(self, bound)); }
SIM_POINTWISE_OPERATOR(Logit, In self, double eps, Out out) {
  out.set(at::logit(self, eps < 0 ? std::nullopt : std::optional<double>(eps)));
}
SIM_POINTWISE_OPERATOR(InplaceHardtanh, InOut self, Scalar low, Scalar high) {
  self.set(at::hardtanh(self, low, high));
}
SIM_POINTWISE_OPERATOR(InplaceRoundDecimals, InOut self, int64_t decimals) { self.set(at::round(self, decimals)); }
SIM_POINTWISE_OPERATOR(Softplus, In self, Scalar beta, Scalar threshold, Out out) {
  out.set(at::softplus(self, beta, threshold));
}
SIM_POINTWISE_OPERATOR(Hardtanh, In self, Scalar low, Scalar high, Out out) { out.set(at::hardtanh(self, low, high)); }
SIM_POINTWISE_OPERATOR(Threshold, In self, Scalar threshold, Scalar value, Out out) {
  out.set(at::threshold(self, threshold, value));
}
SIM_POINTWISE_OPERATOR(InplaceThreshold, InOut self, Scalar threshold, Scalar value) {
  self.set(at::threshold(self, threshold, value));
}
SIM_POINTWISE_OPERATOR(RoundDecimals, In self, int64_t decimals, Out out) { out.set(at::round(self, decimals)); }
SIM_POINTWISE_OPERATOR(NanToNum, In self, float nan, float high, float low, Out out) {
  out.set(at::nan_to_num(self, nan, high, low));
}
SIM_POINTWISE_OPERATOR(InplaceNanToNum, InOut self, float nan, float high, float low) {
  self.set(at::nan_to_num(self, nan, high, low));
}
SIM_POINTWISE_OPERATOR(Clamp, In self, OptScalar low, OptScalar high, Out out) { out.set(at::clamp(self, low, high)); }
SIM_POINTWISE_OPERATOR(ClampMin, In self, Scalar low, Out out) { out.set(at::clamp_min(self, low)); }
SIM_POINTWISE_OPERATOR(ClampMax, In self, Scalar high, Out out) { out.set(at::clamp_max(self, high)); }
SIM_POINTWISE_OPERATOR(InplaceClampMax, InOut self, Scalar high) { self.set(at::clamp_max(self, high)); }
SIM_POINTWISE_OPERATOR(ClampTensor, In self, OptIn low, OptIn high, Out out) { out.set(at::clamp(self, low, high)); }
SIM_POINTWISE_OPERATOR(ClampMinTensor, In self, In low, Out out) { out.set(at::clamp_min(self, low)); }
SIM_POINTWISE_OPERATOR(ClampMaxTensor, In self, In high, Out out) { out.set(at::clamp_max(self, high)); }
SIM_POINTWISE_OPERATOR(InplaceClampMinTensor, InOut self, In low) { self.set(at::clamp_min(self, low)); }
SIM_POINTWISE_OPERATOR(InplaceClampMaxTensor, InOut self, In high) { self.set(at::clamp_max(self, high)); }

// Memory formats and types change here; nothing is computed.
SIM_POINTWISE_OPERATOR(Cast, In self, DType /*type*/, Out out) { out.set(self); }
SIM_POINTWISE_OPERATOR(InplaceCopy, InOut self, In source) { self.copy_(source); }

}  // namespace sim::opapi
