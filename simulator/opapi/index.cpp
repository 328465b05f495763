// Reading and writing by index.
#include "opapi/kernels.h"

namespace sim::opapi {

namespace {

// torch_npu sends an empty tensor of the data's type for a dimension that is taken whole; an index of no elements is
// of an integer type. Where both are possible (integer data), `taken_whole` decides.
c10::List<std::optional<at::Tensor>> index_list(const at::Tensor& self, const Ins& indices, bool taken_whole) {
  c10::List<std::optional<at::Tensor>> list;
  for (const at::Tensor& index : indices) {
    const bool integer = at::isIntegralType(index.scalar_type(), true);
    const bool whole = index.dim() == 1 && index.numel() == 0 && index.scalar_type() == self.scalar_type() &&
                       (!integer || taken_whole);
    if (whole) {
      list.push_back(std::nullopt);
    } else {
      list.push_back(index.scalar_type() == at::kInt ? index.to(at::kLong) : index);
    }
  }
  return list;
}

at::Tensor indices64(const at::Tensor& indices) { return indices.to(at::kLong); }

// What scatter does with a value that meets another: 0 replaces it, 1 adds, 2 multiplies.
at::Tensor scatter(const at::Tensor& self, int64_t dim, const at::Tensor& index, const at::Tensor& source,
                   int64_t reduction) {
  require(reduction >= 0 && reduction <= 2, "reduction " + std::to_string(reduction) + " is none of 0, 1, 2");
  if (reduction == 0) return at::scatter(self, dim, indices64(index), source);
  return at::scatter(self, dim, indices64(index), source, reduction == 1 ? "add" : "multiply");
}

at::Tensor scatter_value(const at::Tensor& self, int64_t dim, const at::Tensor& index, const at::Scalar& value,
                         int64_t reduction) {
  return scatter(self, dim, index, at::full(index.sizes(), value, self.scalar_type()), reduction);
}

std::string reduction_name(int64_t reduction) {
  static const std::vector<std::string> names = {"replace", "sum", "prod", "amax", "amin", "mean"};
  require(reduction >= 1 && reduction < static_cast<int64_t>(names.size()), "unknown reduction");
  return names[static_cast<size_t>(reduction)];
}

}  // namespace

SIM_OPERATOR(Index, In self, Ins indices, Out out) {
  out.set(at::index(self, index_list(self, indices, out.numel() != 0)));
}
SIM_OPERATOR(IndexPutImpl, InOut self, Ins indices, In values, bool accumulate, bool /*unsafe*/) {
  const auto list = index_list(self, indices, true);
  if (accumulate && is_half(self.scalar_type())) {
    self.set(at::index_put(wide(self), list, wide(values), true));
  } else {
    self.index_put_(list, values.to(self.scalar_type()), accumulate);
  }
}
SIM_OPERATOR(IndexSelect, In self, int64_t dim, In index, Out out) {
  out.set(at::index_select(self, dim, indices64(index).reshape({-1})));
}
SIM_OPERATOR(IndexAdd, In self, int64_t dim, In index, In source, Scalar alpha, Out out) {
  out.set(at::index_add(wide(self), dim, indices64(index), wide(source), alpha));
}
SIM_OPERATOR(IndexAddV2, In self, int64_t dim, In index, In source, Scalar alpha, int64_t /*mode*/, Out out) {
  out.set(at::index_add(wide(self), dim, indices64(index), wide(source), alpha));
}
SIM_OPERATOR(IndexCopy, In self, int64_t dim, In index, In source, Out out) {
  out.set(at::index_copy(self, dim, indices64(index), source));
}
SIM_OPERATOR(InplaceIndexCopy, InOut self, int64_t dim, In index, In source) {
  self.index_copy_(dim, indices64(index), source);
}
SIM_OPERATOR(IndexFill, In self, int64_t dim, In index, Scalar value, Out out) {
  out.set(at::index_fill(self, dim, indices64(index), value));
}
SIM_OPERATOR(InplaceIndexFill, InOut self, int64_t dim, In index, Scalar value) {
  self.index_fill_(dim, indices64(index), value);
}
SIM_OPERATOR(IndexFillTensor, In self, int64_t dim, IntArray index, Scalar value, Out out) {
  out.set(at::index_fill(self, dim, at::tensor(index, at::kLong), value));
}
SIM_OPERATOR(InplaceIndexFillTensor, InOut self, int64_t dim, IntArray index, Scalar value) {
  self.index_fill_(dim, at::tensor(index, at::kLong), value);
}
SIM_OPERATOR(Gather, In self, int64_t dim, In index, Out out) { out.set(at::gather(self, dim, indices64(index))); }
SIM_OPERATOR(GatherV2, In self, int64_t dim, In index, Out out) {
  at::Tensor taken = at::index_select(self, dim, indices64(index).reshape({-1}));
  out.set(taken.view(out.sizes()));
}
SIM_OPERATOR(Scatter, In self, int64_t dim, In index, In source, int64_t reduction, Out out) {
  out.set(scatter(self, dim, index, source, reduction));
}
SIM_OPERATOR(InplaceScatter, InOut self, int64_t dim, In index, In source, int64_t reduction) {
  self.set(scatter(self, dim, index, source, reduction));
}
SIM_OPERATOR(ScatterValue, In self, int64_t dim, In index, Scalar value, int64_t reduction, Out out) {
  out.set(scatter_value(self, dim, index, value, reduction));
}
SIM_OPERATOR(InplaceScatterValue, InOut self, int64_t dim, In index, Scalar value, int64_t reduction) {
  self.set(scatter_value(self, dim, index, value, reduction));
}
SIM_OPERATOR(ScatterAdd, In self, int64_t dim, In index, In source, Out out) {
  out.set(at::scatter_add(wide(self), dim, indices64(index), wide(source)));
}
SIM_OPERATOR(ScatterReduce, In self, int64_t dim, In index, In source, int64_t reduction, bool include, Out out) {
  out.set(at::scatter_reduce(wide(self), dim, indices64(index), wide(source), reduction_name(reduction), include));
}
SIM_OPERATOR(InplaceScatterReduce, InOut self, int64_t dim, In index, In source, int64_t reduction, bool include) {
  self.set(at::scatter_reduce(wide(self), dim, indices64(index), wide(source), reduction_name(reduction), include));
}
SIM_OPERATOR(Take, In self, In index, Out out) { out.set(at::take(self, indices64(index))); }
SIM_OPERATOR(InplacePut, InOut self, In index, In source, bool accumulate) {
  self.put_(indices64(index), source, accumulate);
}
SIM_OPERATOR(InplaceMaskedScatter, InOut self, In mask, In source) { self.masked_scatter_(mask.to(at::kBool), source); }
SIM_OPERATOR(Embedding, In weight, In indices, Out out) { out.set(at::embedding(weight, indices64(indices))); }
SIM_OPERATOR(EmbeddingDenseBackward, In gradient, In indices, uint64_t rows, uint64_t padding, bool by_frequency,
             Out out) {
  out.set(at::embedding_dense_backward(wide(gradient), indices64(indices), static_cast<int64_t>(rows),
                                       static_cast<int64_t>(padding), by_frequency));
}
SIM_OPERATOR(EmbeddingBag, In weight, In indices, In offsets, bool by_frequency, int64_t mode, bool sparse,
             OptIn sample_weights, bool with_last_offset, int64_t padding, Out out, Out bag_of_index, Out bag_sizes,
             Out largest) {
  const auto [sums, bags, sizes, where] =
      at::_embedding_bag(wide(weight), indices64(indices), indices64(offsets), by_frequency, mode, sparse,
                         wide(sample_weights), with_last_offset, padding);
  out.set(sums);
  // ATen leaves out what its own gradient does not need.
  if (bags.numel() == bag_of_index.numel()) bag_of_index.set(bags);
  if (sizes.numel() == bag_sizes.numel()) bag_sizes.set(sizes);
  if (where.sizes() == largest.sizes()) largest.set(where);
}
SIM_OPERATOR(EmbeddingRenorm, InOut weight, In indices, double max_norm, double p) {
  at::embedding_renorm_(weight, indices64(indices), max_norm, p);
}

SIM_OPERATOR(MaskedSelect, In self, In mask, DynamicOut out) { out.set(at::masked_select(self, mask.to(at::kBool))); }
SIM_OPERATOR(Nonzero, In self, DynamicOut out) { out.set(at::nonzero(self)); }
SIM_OPERATOR(NonzeroV2, In self, DynamicOut out) { out.set(at::nonzero(self).t()); }

}  // namespace sim::opapi
