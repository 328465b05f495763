// Order: sorting, largest values, unique values, search in sorted values.
#include "opapi/kernels.h"

namespace sim::opapi {

SIM_OPERATOR(Sort, In self, bool stable, int64_t dim, bool descending, Out values, Out indices) {
  const auto [sorted, where] = at::sort(self, stable, dim, descending);
  values.set(sorted);
  indices.set(where);
}
SIM_OPERATOR(Argsort, In self, int64_t dim, bool descending, Out out) { out.set(at::argsort(self, dim, descending)); }
SIM_OPERATOR(Topk, In self, int64_t k, int64_t dim, bool largest, bool sorted, Out values, Out indices) {
  const auto [best, where] = at::topk(self, k, dim, largest, sorted);
  values.set(best);
  indices.set(where);
}
SIM_OPERATOR(Kthvalue, In self, int64_t k, int64_t dim, bool keep, Out values, Out indices) {
  const auto [value, where] = at::kthvalue(self, k, dim, keep);
  values.set(value);
  indices.set(where);
}
SIM_OPERATOR(Unique, In self, bool sorted, bool return_inverse, DynamicOut values, Out inverse) {
  const auto [unique, where] = at::_unique(self, sorted, return_inverse);
  values.set(unique);
  if (return_inverse) inverse.set(where);
}
SIM_OPERATOR(Unique2, In self, bool sorted, bool return_inverse, bool return_counts, DynamicOut values, Out inverse,
             DynamicOut counts) {
  const auto [unique, where, count] = at::_unique2(self, sorted, return_inverse, return_counts);
  values.set(unique);
  if (return_inverse || return_counts) inverse.set(where);
  if (return_counts) counts.set(count);
}
SIM_OPERATOR(UniqueConsecutive, In self, bool return_inverse, bool return_counts, int64_t dim, DynamicOut values,
             DynamicOut inverse, DynamicOut counts) {
  constexpr int64_t kNoDim = 1000;  // how torch_npu says that there is none
  const auto [unique, where, count] = at::unique_consecutive(
      self, return_inverse, return_counts, dim == kNoDim ? std::nullopt : std::optional<int64_t>(dim));
  values.set(unique);
  if (return_inverse) inverse.set(where);
  if (return_counts) counts.set(count);
}
SIM_OPERATOR(UniqueDim, In self, bool sorted, bool return_inverse, int64_t dim, DynamicOut values, DynamicOut inverse,
             DynamicOut counts) {
  const auto [unique, where, count] = at::unique_dim(self, dim, sorted, return_inverse, true);
  values.set(unique);
  if (return_inverse) inverse.set(where);
  counts.set(count);
}
SIM_OPERATOR(SearchSorted, In sequence, In self, bool int32, bool right, OptIn sorter, Out out) {
  out.set(at::searchsorted(sequence, self, int32, right, std::nullopt, sorter));
}
SIM_OPERATOR(SearchSorteds, In sequence, Scalar self, bool int32, bool right, OptIn sorter, Out out) {
  out.set(at::searchsorted(sequence, self, int32, right, std::nullopt, sorter).view(out.sizes()));
}
SIM_OPERATOR(Bucketize, In self, In boundaries, bool int32, bool right, Out out) {
  out.set(at::bucketize(self, boundaries, int32, right));
}
SIM_OPERATOR(Bincount, In self, OptIn weights, int64_t minimum, Out out) {
  const at::Tensor counts = at::bincount(self, weights, std::max(minimum, out.numel()));
  out.set(counts);
}
SIM_OPERATOR(IsInTensorScalar, In elements, Scalar test, bool unique, bool invert, Out out) {
  out.set(at::isin(elements, test, unique, invert));
}
SIM_OPERATOR(IsInScalarTensor, Scalar element, In tests, bool unique, bool invert, Out out) {
  out.set(at::isin(element, tests, unique, invert).view(out.sizes()));
}

}  // namespace sim::opapi
