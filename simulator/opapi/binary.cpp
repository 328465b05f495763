// Functions of two and three tensors, or a tensor and a number, element by element.
#include "opapi/kernels.h"

namespace sim::opapi {

#define SIM_BINARY(Name, function) \
  SIM_POINTWISE_OPERATOR(Name, In self, In other, Out out) { out.set(at::function(self, other)); }
#define SIM_INPLACE_BINARY(Name, function) \
  SIM_POINTWISE_OPERATOR(Inplace##Name, InOut self, In other) { self.set(at::function(self, other)); }
#define SIM_SCALAR(Name, function) \
  SIM_POINTWISE_OPERATOR(Name, In self, Scalar other, Out out) { out.set(at::function(self, other)); }
#define SIM_INPLACE_SCALAR(Name, function) \
  SIM_POINTWISE_OPERATOR(Inplace##Name, InOut self, Scalar other) { self.set(at::function(self, other)); }
#define SIM_TENSOR_AND_SCALAR(Name, function) \
  SIM_BINARY(Name##Tensor, function)          \
  SIM_INPLACE_BINARY(Name##Tensor, function)  \
  SIM_SCALAR(Name##Scalar, function)          \
  SIM_INPLACE_SCALAR(Name##Scalar, function)

SIM_POINTWISE_OPERATOR(Add, In self, In other, Scalar alpha, Out out) { out.set(at::add(self, other, alpha)); }
SIM_POINTWISE_OPERATOR(InplaceAdd, InOut self, In other, Scalar alpha) { self.set(at::add(self, other, alpha)); }
SIM_POINTWISE_OPERATOR(Adds, In self, Scalar other, Scalar alpha, Out out) { out.set(at::add(self, other, alpha)); }
SIM_POINTWISE_OPERATOR(InplaceAdds, InOut self, Scalar other, Scalar alpha) { self.set(at::add(self, other, alpha)); }
SIM_POINTWISE_OPERATOR(AddV3, Scalar self, In other, Scalar alpha, Out out) {
  out.set(at::add(at::mul(other, alpha), self));
}
SIM_POINTWISE_OPERATOR(Sub, In self, In other, Scalar alpha, Out out) { out.set(at::sub(self, other, alpha)); }
SIM_POINTWISE_OPERATOR(InplaceSub, InOut self, In other, Scalar alpha) { self.set(at::sub(self, other, alpha)); }
SIM_POINTWISE_OPERATOR(Subs, In self, Scalar other, Scalar alpha, Out out) { out.set(at::sub(self, other, alpha)); }
SIM_POINTWISE_OPERATOR(InplaceSubs, InOut self, Scalar other, Scalar alpha) { self.set(at::sub(self, other, alpha)); }
SIM_POINTWISE_OPERATOR(Rsub, In self, In other, Scalar alpha, Out out) { out.set(at::rsub(self, other, alpha)); }
SIM_POINTWISE_OPERATOR(Rsubs, In self, Scalar other, Scalar alpha, Out out) { out.set(at::rsub(self, other, alpha)); }

SIM_BINARY(Mul, mul)
SIM_INPLACE_BINARY(Mul, mul)
SIM_SCALAR(Muls, mul)
SIM_INPLACE_SCALAR(Muls, mul)
SIM_BINARY(Div, div)
SIM_INPLACE_BINARY(Div, div)
SIM_SCALAR(Divs, div)
SIM_INPLACE_SCALAR(Divs, div)
SIM_BINARY(FloorDivide, floor_divide)
SIM_INPLACE_BINARY(FloorDivide, floor_divide)
SIM_SCALAR(FloorDivides, floor_divide)
SIM_INPLACE_SCALAR(FloorDivides, floor_divide)

namespace {

std::optional<std::string_view> rounding(int32_t mode) {
  if (mode == 1) return "trunc";
  if (mode == 2) return "floor";
  require(mode == 0, "rounding mode " + std::to_string(mode) + " is none of 0 (none), 1 (trunc), 2 (floor)");
  return std::nullopt;
}

}  // namespace

SIM_POINTWISE_OPERATOR(DivMod, In self, In other, int32_t mode, Out out) {
  out.set(at::div(self, other, rounding(mode)));
}
SIM_POINTWISE_OPERATOR(InplaceDivMod, InOut self, In other, int32_t mode) {
  self.set(at::div(self, other, rounding(mode)));
}
SIM_POINTWISE_OPERATOR(DivMods, In self, Scalar other, int32_t mode, Out out) {
  out.set(at::div(self, other, rounding(mode)));
}
SIM_POINTWISE_OPERATOR(InplaceDivMods, InOut self, Scalar other, int32_t mode) {
  self.set(at::div(self, other, rounding(mode)));
}

SIM_TENSOR_AND_SCALAR(Eq, eq)
SIM_TENSOR_AND_SCALAR(Ne, ne)
SIM_TENSOR_AND_SCALAR(Gt, gt)
SIM_TENSOR_AND_SCALAR(Ge, ge)
SIM_TENSOR_AND_SCALAR(Lt, lt)
SIM_TENSOR_AND_SCALAR(Le, le)
SIM_TENSOR_AND_SCALAR(BitwiseAnd, bitwise_and)
SIM_TENSOR_AND_SCALAR(BitwiseOr, bitwise_or)
SIM_TENSOR_AND_SCALAR(BitwiseXor, bitwise_xor)
SIM_TENSOR_AND_SCALAR(Fmod, fmod)

SIM_BINARY(RemainderTensorTensor, remainder)
SIM_INPLACE_BINARY(RemainderTensorTensor, remainder)
SIM_SCALAR(RemainderTensorScalar, remainder)
SIM_INPLACE_SCALAR(RemainderTensorScalar, remainder)
SIM_POINTWISE_OPERATOR(RemainderScalarTensor, Scalar self, In other, Out out) { out.set(at::remainder(self, other)); }
SIM_BINARY(PowTensorTensor, pow)
SIM_INPLACE_BINARY(PowTensorTensor, pow)
SIM_SCALAR(PowTensorScalar, pow)
SIM_INPLACE_SCALAR(PowTensorScalar, pow)
SIM_POINTWISE_OPERATOR(PowScalarTensor, Scalar self, In exponent, Out out) { out.set(at::pow(self, exponent)); }

SIM_BINARY(Maximum, maximum)
SIM_BINARY(Minimum, minimum)
SIM_BINARY(Atan2, atan2)
SIM_INPLACE_BINARY(Atan2, atan2)
SIM_BINARY(LogicalAnd, logical_and)
SIM_INPLACE_BINARY(LogicalAnd, logical_and)
SIM_BINARY(LogicalOr, logical_or)
SIM_INPLACE_BINARY(LogicalOr, logical_or)
SIM_BINARY(LogicalXor, logical_xor)
SIM_BINARY(LeftShift, bitwise_left_shift)
SIM_BINARY(RightShift, bitwise_right_shift)
SIM_BINARY(LogAddExp, logaddexp)
SIM_BINARY(LogAddExp2, logaddexp2)
SIM_BINARY(Gcd, gcd)
SIM_BINARY(XLogYTensor, xlogy)
SIM_SCALAR(XLogYScalarOther, xlogy)
SIM_INPLACE_SCALAR(XLogYScalarOther, xlogy)
SIM_POINTWISE_OPERATOR(XLogYScalarSelf, Scalar self, In other, Out out) { out.set(at::xlogy(self, other)); }
SIM_BINARY(Complex, complex)
SIM_BINARY(Polar, polar)

// One boolean for all elements.
SIM_OPERATOR(Equal, In self, In other, Out out) { out.set(at::full(out.sizes(), at::equal(self, other), at::kBool)); }
SIM_OPERATOR(IsClose, In self, In other, double rtol, double atol, bool equal_nan, Out out) {
  out.set(at::isclose(self, other, rtol, atol, equal_nan));
}

SIM_POINTWISE_OPERATOR(Lerp, In self, In end, In weight, Out out) { out.set(at::lerp(self, end, weight)); }
SIM_POINTWISE_OPERATOR(InplaceLerp, InOut self, In end, In weight) { self.set(at::lerp(self, end, weight)); }
SIM_POINTWISE_OPERATOR(Lerps, In self, In end, Scalar weight, Out out) { out.set(at::lerp(self, end, weight)); }
SIM_POINTWISE_OPERATOR(InplaceLerps, InOut self, In end, Scalar weight) { self.set(at::lerp(self, end, weight)); }
SIM_POINTWISE_OPERATOR(Addcdiv, In self, In a, In b, Scalar value, Out out) { out.set(at::addcdiv(self, a, b, value)); }
SIM_POINTWISE_OPERATOR(InplaceAddcdiv, InOut self, In a, In b, Scalar value) {
  self.set(at::addcdiv(self, a, b, value));
}
SIM_POINTWISE_OPERATOR(Addcmul, In self, In a, In b, Scalar value, Out out) { out.set(at::addcmul(self, a, b, value)); }
SIM_POINTWISE_OPERATOR(InplaceAddcmul, InOut self, In a, In b, Scalar value) {
  self.set(at::addcmul(self, a, b, value));
}
SIM_POINTWISE_OPERATOR(SWhere, In condition, In self, In other, Out out) { out.set(at::where(condition, self, other)); }

}  // namespace sim::opapi
