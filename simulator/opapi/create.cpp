// Tensors filled with something.
#include "opapi/kernels.h"

namespace sim::opapi {

SIM_OPERATOR(InplaceFillScalar, InOut self, Scalar value) { self.fill_(value); }
SIM_OPERATOR(InplaceFillTensor, InOut self, In value) {
  require(value.numel() == 1, "the value must have one element");
  self.fill_(value.reshape({}));
}
SIM_OPERATOR(InplaceZero, InOut self) { self.zero_(); }
SIM_OPERATOR(InplaceOne, InOut self) { self.fill_(1); }
SIM_OPERATOR(InplaceFillDiagonal, InOut self, Scalar value, bool wrap) { self.fill_diagonal_(value, wrap); }
SIM_OPERATOR(InplaceMaskedFillScalar, InOut self, In mask, Scalar value) {
  self.masked_fill_(mask.to(at::kBool), value);
}
SIM_OPERATOR(InplaceMaskedFillTensor, InOut self, In mask, In value) {
  self.masked_fill_(mask.to(at::kBool), value.reshape({}));
}

namespace {

// Values start, start + step …, as many as the output has: torch computes how many that are.
void arange(const at::Scalar& start, const at::Scalar& step, const Out& out) {
  if (at::isIntegralType(out.scalar_type(), false)) {
    out.set(at::arange(out.numel(), at::kLong).mul_(step.toLong()).add_(start.toLong()).view(out.sizes()));
  } else {
    out.set(at::arange(out.numel(), at::kDouble).mul_(step.toDouble()).add_(start.toDouble()).view(out.sizes()));
  }
}

}  // namespace

SIM_OPERATOR(Arange, Scalar start, Scalar /*end*/, Scalar step, Out out) { arange(start, step, out); }
SIM_OPERATOR(Range, Scalar start, Scalar /*end*/, Scalar step, Out out) { arange(start, step, out); }
SIM_OPERATOR(Linspace, Scalar start, Scalar end, int64_t steps, Out out) {
  out.set(at::linspace(start, end, steps, wide(out.scalar_type())));
}
SIM_OPERATOR(LogSpace, Scalar start, Scalar end, int64_t steps, double base, Out out) {
  out.set(at::logspace(start, end, steps, base, wide(out.scalar_type())));
}
SIM_OPERATOR(Eye, int64_t rows, int64_t columns, Out out) { out.set(at::eye(rows, columns, out.scalar_type())); }
SIM_OPERATOR(OneHot, In self, int32_t classes, In on, In off, int64_t axis, Out out) {
  const at::Tensor hot = at::one_hot(self.to(at::kLong), classes).to(at::kBool);
  const at::Tensor values = at::where(hot, on.reshape({}), off.reshape({}));
  out.set(axis < 0 ? values : values.movedim(-1, axis));
}

}  // namespace sim::opapi
