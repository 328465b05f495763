// Sums, extremes and other functions over dimensions.
#include "opapi/kernels.h"

namespace sim::opapi {

SIM_OPERATOR(ReduceSum, In self, IntArray dims, bool keep, DType type, Out out) {
  out.set(at::sum(wide(self), all_if_empty(dims, self), keep, wide(type.type)));
}
SIM_OPERATOR(ReduceNansum, In self, IntArray dims, bool keep, DType type, Out out) {
  out.set(at::nansum(wide(self), all_if_empty(dims, self), keep, wide(type.type)));
}
SIM_OPERATOR(Mean, In self, IntArray dims, bool keep, DType type, Out out) {
  out.set(at::mean(wide(self), all_if_empty(dims, self), keep, wide(type.type)));
}
SIM_OPERATOR(Prod, In self, DType type, Out out) { out.set(at::prod(wide(self), wide(type.type))); }
SIM_OPERATOR(ProdDim, In self, int64_t dim, bool keep, DType type, Out out) {
  out.set(at::prod(wide(self), dim, keep, wide(type.type)));
}
SIM_OPERATOR(Amax, In self, IntArray dims, bool keep, Out out) {
  out.set(at::amax(self, all_if_empty(dims, self), keep));
}
SIM_OPERATOR(Amin, In self, IntArray dims, bool keep, Out out) {
  out.set(at::amin(self, all_if_empty(dims, self), keep));
}
SIM_OPERATOR(Max, In self, Out out) { out.set(at::amax(self, all_if_empty({}, self))); }
SIM_OPERATOR(Min, In self, Out out) { out.set(at::amin(self, all_if_empty({}, self))); }
SIM_OPERATOR(AminmaxAll, In self, Out low, Out high) {
  low.set(at::amin(self, all_if_empty({}, self)));
  high.set(at::amax(self, all_if_empty({}, self)));
}
SIM_OPERATOR(AminmaxDim, In self, int64_t dim, bool keep, Out low, Out high) {
  low.set(at::amin(self, {dim}, keep));
  high.set(at::amax(self, {dim}, keep));
}
SIM_OPERATOR(Aminmax, In self, IntArray dims, bool keep, Out low, Out high) {
  low.set(at::amin(self, all_if_empty(dims, self), keep));
  high.set(at::amax(self, all_if_empty(dims, self), keep));
}
SIM_OPERATOR(MaxDim, In self, int64_t dim, bool keep, Out values, Out indices) {
  const auto [best, where] = at::max(self, dim, keep);
  values.set(best);
  indices.set(where);
}
SIM_OPERATOR(MinDim, In self, int64_t dim, bool keep, Out values, Out indices) {
  const auto [best, where] = at::min(self, dim, keep);
  values.set(best);
  indices.set(where);
}
SIM_OPERATOR(ArgMax, In self, int64_t dim, bool keep, Out out) { out.set(at::argmax(self, dim, keep)); }
SIM_OPERATOR(ArgMin, In self, int64_t dim, bool keep, Out out) { out.set(at::argmin(self, dim, keep)); }
SIM_OPERATOR(All, In self, IntArray dims, bool keep, Out out) {
  const auto reduced = all_if_empty(dims, self);
  out.set(reduced.empty() ? self.to(at::kBool) : at::all(self, at::OptionalIntArrayRef(reduced), keep));
}
SIM_OPERATOR(Any, In self, IntArray dims, bool keep, Out out) {
  const auto reduced = all_if_empty(dims, self);
  out.set(reduced.empty() ? self.to(at::kBool) : at::any(self, at::OptionalIntArrayRef(reduced), keep));
}

SIM_OPERATOR(Var, In self, IntArray dims, bool unbiased, bool keep, Out out) {
  out.set(at::var(wide(self), at::OptionalIntArrayRef(all_if_empty(dims, self)), at::Scalar(unbiased ? 1 : 0), keep));
}
SIM_OPERATOR(VarCorrection, In self, IntArray dims, int64_t correction, bool keep, Out out) {
  out.set(at::var(wide(self), at::OptionalIntArrayRef(all_if_empty(dims, self)), at::Scalar(correction), keep));
}
SIM_OPERATOR(Std, In self, IntArray dims, int64_t correction, bool keep, Out out) {
  out.set(at::std(wide(self), at::OptionalIntArrayRef(all_if_empty(dims, self)), at::Scalar(correction), keep));
}
SIM_OPERATOR(VarMean, In self, IntArray dims, int64_t correction, bool keep, Out variance, Out mean) {
  const auto [v, m] =
      at::var_mean(wide(self), at::OptionalIntArrayRef(all_if_empty(dims, self)), at::Scalar(correction), keep);
  variance.set(v);
  mean.set(m);
}
SIM_OPERATOR(StdMeanCorrection, In self, IntArray dims, int64_t correction, bool keep, Out deviation, Out mean) {
  const auto [s, m] =
      at::std_mean(wide(self), at::OptionalIntArrayRef(all_if_empty(dims, self)), at::Scalar(correction), keep);
  deviation.set(s);
  mean.set(m);
}

SIM_OPERATOR(Norm, In self, Scalar p, IntArray dims, bool keep, Out out) {
  const auto reduced = all_if_empty(dims, self);
  out.set(at::linalg_vector_norm(wide(self), p, at::OptionalIntArrayRef(reduced), keep));
}
SIM_OPERATOR(LinalgVectorNorm, In self, Scalar p, IntArray dims, bool keep, DType type, Out out) {
  const auto reduced = all_if_empty(dims, self);
  out.set(at::linalg_vector_norm(wide(self), p, at::OptionalIntArrayRef(reduced), keep, wide(type.type)));
}
SIM_OPERATOR(LogSumExp, In self, IntArray dims, bool keep, Out out) {
  out.set(at::logsumexp(wide(self), all_if_empty(dims, self), keep));
}
SIM_OPERATOR(Cumsum, In self, int64_t dim, DType type, Out out) {
  out.set(at::cumsum(wide(self), dim, wide(type.type)));
}
SIM_OPERATOR(CumsumV2, In self, int64_t dim, bool exclusive, bool reverse, Out out) {
  const at::Tensor ordered = reverse ? at::flip(wide(self), {dim}) : wide(self);
  at::Tensor sums = at::cumsum(ordered, dim);
  if (exclusive) sums = sums - ordered;
  out.set(reverse ? at::flip(sums, {dim}) : sums);
}
SIM_OPERATOR(Cumprod, In self, Scalar dim, DType type, Out out) {
  out.set(at::cumprod(wide(self), dim.toLong(), wide(type.type)));
}
SIM_OPERATOR(Cummax, In self, int64_t dim, Out values, Out indices) {
  const auto [best, where] = at::cummax(self, dim);
  values.set(best);
  indices.set(where);
}
SIM_OPERATOR(Cummin, In self, int64_t dim, Out values, Out indices) {
  const auto [best, where] = at::cummin(self, dim);
  values.set(best);
  indices.set(where);
}
SIM_OPERATOR(Median, In self, Out out) { out.set(at::median(self)); }
SIM_OPERATOR(MedianDim, In self, int64_t dim, bool keep, Out values, Out indices) {
  const auto [middle, where] = at::median(self, dim, keep);
  values.set(middle);
  indices.set(where);
}
SIM_OPERATOR(Trace, In self, Out out) { out.set(at::trace(self)); }
SIM_OPERATOR(Histc, In self, int64_t bins, Scalar low, Scalar high, Out out) {
  out.set(at::histc(self.to(at::kFloat), bins, low, high));
}

}  // namespace sim::opapi
