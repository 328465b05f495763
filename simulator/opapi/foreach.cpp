// One operator on many tensors.
#include "opapi/kernels.h"

namespace sim::opapi {

namespace {

void same_number(size_t a, size_t b) {
  require(a == b, "lists of " + std::to_string(a) + " and " + std::to_string(b) + " tensors");
}

// The number that older variants hand over in a tensor.
at::Scalar number(const at::Tensor& tensor) {
  require(tensor.numel() == 1, "a tensor of one element is needed");
  return tensor.reshape({}).item();
}

template <typename Function>
void each(const Outs& outs, size_t count, Function function) {
  same_number(count, outs.size());
  for (size_t i = 0; i < count; ++i) outs[i].set(function(i));
}

}  // namespace

#define SIM_FOREACH_UNARY(Name, function)                                    \
  SIM_OPERATOR(Foreach##Name, Ins self, Outs out) {                          \
    each(out, self.size(), [&](size_t i) { return at::function(self[i]); }); \
  }
SIM_FOREACH_UNARY(Abs, abs)
SIM_FOREACH_UNARY(Acos, acos)
SIM_FOREACH_UNARY(Asin, asin)
SIM_FOREACH_UNARY(Atan, atan)
SIM_FOREACH_UNARY(Cos, cos)
SIM_FOREACH_UNARY(Cosh, cosh)
SIM_FOREACH_UNARY(Erf, erf)
SIM_FOREACH_UNARY(Erfc, erfc)
SIM_FOREACH_UNARY(Exp, exp)
SIM_FOREACH_UNARY(Expm1, expm1)
SIM_FOREACH_UNARY(Log, log)
SIM_FOREACH_UNARY(Log10, log10)
SIM_FOREACH_UNARY(Log1p, log1p)
SIM_FOREACH_UNARY(Log2, log2)
SIM_FOREACH_UNARY(Neg, neg)
SIM_FOREACH_UNARY(Reciprocal, reciprocal)
SIM_FOREACH_UNARY(Sigmoid, sigmoid)
SIM_FOREACH_UNARY(Sign, sign)
SIM_FOREACH_UNARY(Sin, sin)
SIM_FOREACH_UNARY(Sinh, sinh)
SIM_FOREACH_UNARY(Sqrt, sqrt)
SIM_FOREACH_UNARY(Tan, tan)
SIM_FOREACH_UNARY(Tanh, tanh)

#define SIM_FOREACH_LIST(Name, function)                                               \
  SIM_OPERATOR(Foreach##Name##List, Ins self, Ins other, Outs out) {                   \
    same_number(self.size(), other.size());                                            \
    each(out, self.size(), [&](size_t i) { return at::function(self[i], other[i]); }); \
  }
#define SIM_FOREACH_SCALAR(Name, function)                                             \
  SIM_OPERATOR(Foreach##Name##Scalar, Ins self, In other, Outs out) {                  \
    const at::Scalar value = number(other);                                            \
    each(out, self.size(), [&](size_t i) { return at::function(self[i], value); });    \
  }                                                                                    \
  SIM_OPERATOR(Foreach##Name##ScalarV2, Ins self, Scalar other, Outs out) {            \
    each(out, self.size(), [&](size_t i) { return at::function(self[i], other); });    \
  }                                                                                    \
  SIM_OPERATOR(Foreach##Name##ScalarList, Ins self, Scalars other, Outs out) {         \
    same_number(self.size(), other.size());                                            \
    each(out, self.size(), [&](size_t i) { return at::function(self[i], other[i]); }); \
  }
SIM_FOREACH_SCALAR(Add, add)
SIM_FOREACH_SCALAR(Sub, sub)
SIM_FOREACH_LIST(Mul, mul)
SIM_FOREACH_SCALAR(Mul, mul)
SIM_FOREACH_LIST(Div, div)
SIM_FOREACH_SCALAR(Div, div)
SIM_FOREACH_LIST(Maximum, maximum)
SIM_FOREACH_SCALAR(Maximum, clamp_min)
SIM_FOREACH_LIST(Minimum, minimum)
SIM_FOREACH_SCALAR(Minimum, clamp_max)
SIM_FOREACH_LIST(Pow, pow)
SIM_FOREACH_SCALAR(Pow, pow)
SIM_OPERATOR(ForeachPowScalarAndTensor, Scalar self, Ins exponents, Outs out) {
  each(out, exponents.size(), [&](size_t i) { return at::pow(self, exponents[i]); });
}

SIM_OPERATOR(ForeachAddList, Ins self, Ins other, In alpha, Outs out) {
  same_number(self.size(), other.size());
  const at::Scalar factor = number(alpha);
  each(out, self.size(), [&](size_t i) { return at::add(self[i], other[i], factor); });
}
SIM_OPERATOR(ForeachAddListV2, Ins self, Ins other, Scalar alpha, Outs out) {
  same_number(self.size(), other.size());
  each(out, self.size(), [&](size_t i) { return at::add(self[i], other[i], alpha); });
}
SIM_OPERATOR(ForeachSubList, Ins self, Ins other, In alpha, Outs out) {
  same_number(self.size(), other.size());
  const at::Scalar factor = number(alpha);
  each(out, self.size(), [&](size_t i) { return at::sub(self[i], other[i], factor); });
}
SIM_OPERATOR(ForeachSubListV2, Ins self, Ins other, Scalar alpha, Outs out) {
  same_number(self.size(), other.size());
  each(out, self.size(), [&](size_t i) { return at::sub(self[i], other[i], alpha); });
}

#define SIM_FOREACH_TERNARY(Name, function)                                                                    \
  SIM_OPERATOR(Foreach##Name##Scalar, Ins self, Ins a, Ins b, In value, Outs out) {                            \
    const at::Scalar factor = number(value);                                                                   \
    each(out, self.size(), [&](size_t i) { return at::function(self[i], a[i], b[i], factor); });               \
  }                                                                                                            \
  SIM_OPERATOR(Foreach##Name##ScalarV2, Ins self, Ins a, Ins b, Scalar value, Outs out) {                      \
    each(out, self.size(), [&](size_t i) { return at::function(self[i], a[i], b[i], value); });                \
  }                                                                                                            \
  SIM_OPERATOR(Foreach##Name##ScalarList, Ins self, Ins a, Ins b, In values, Outs out) {                       \
    same_number(self.size(), static_cast<size_t>(values.numel()));                                             \
    each(out, self.size(),                                                                                     \
         [&](size_t i) { return at::function(self[i], a[i], b[i], values[static_cast<int64_t>(i)].item()); }); \
  }
SIM_FOREACH_TERNARY(Addcmul, addcmul)
SIM_FOREACH_TERNARY(Addcdiv, addcdiv)

SIM_OPERATOR(ForeachLerpList, Ins self, Ins end, Ins weight, Outs out) {
  each(out, self.size(), [&](size_t i) { return at::lerp(self[i], end[i], weight[i]); });
}
SIM_OPERATOR(ForeachLerpScalar, Ins self, Ins end, Scalar weight, Outs out) {
  each(out, self.size(), [&](size_t i) { return at::lerp(self[i], end[i], weight); });
}
SIM_OPERATOR(ForeachCopy, Ins self, Outs out) {
  each(out, self.size(), [&](size_t i) { return self[i].expand(out[i].sizes()); });
}
SIM_OPERATOR(ForeachZeroInplace, InOuts self) {
  for (const InOut& tensor : self) tensor.zero_();
}
SIM_OPERATOR(ForeachNorm, Ins self, Scalar p, Outs out) {
  same_number(self.size(), out.size());
  for (size_t i = 0; i < self.size(); ++i) {
    out[i].set(at::linalg_vector_norm(wide(self[i]), p).view(out[i].sizes()));
  }
}

namespace {

// The modes are those of the card's vector unit.
at::Tensor round_off(const at::Tensor& self, int64_t mode) {
  switch (mode) {
    case 1:
      return at::round(self);
    case 2:
      return at::floor(self);
    case 3:
      return at::ceil(self);
    case 5:
      return at::trunc(self);
    case 7:
      return at::frac(self);
    default:
      throw InvalidArgument("rounding mode " + std::to_string(mode) + " is not simulated");
  }
}

}  // namespace

SIM_OPERATOR(ForeachRoundOffNumber, Ins self, In mode, Outs out) {
  const int64_t value = number(mode).toLong();
  each(out, self.size(), [&](size_t i) { return round_off(self[i], value); });
}
SIM_OPERATOR(ForeachRoundOffNumberV2, Ins self, Scalar mode, Outs out) {
  each(out, self.size(), [&](size_t i) { return round_off(self[i], mode.toLong()); });
}
SIM_OPERATOR(ForeachNonFiniteCheckAndUnscale, InOuts self, InOut found, In inverse_scale) {
  const at::Tensor scale = inverse_scale.reshape({});
  for (const InOut& tensor : self) {
    if (!at::isfinite(tensor).all().item<bool>()) found.fill_(1);
    tensor.set(wide(tensor) * scale);
  }
}

}  // namespace sim::opapi
