// Putting tensors together, taking them apart, and moving elements.
#include "opapi/kernels.h"

namespace sim::opapi {

SIM_OPERATOR(Cat, Ins tensors, int64_t dim, Out out) { out.set(at::cat(tensors, dim)); }
SIM_OPERATOR(Stack, Ins tensors, int64_t dim, Out out) { out.set(at::stack(tensors, dim)); }
SIM_OPERATOR(ChunkCat, Ins tensors, int64_t dim, int64_t chunks, Out out) {
  out.set(at::_chunk_cat(tensors, dim, chunks));
}
SIM_OPERATOR(SplitWithSize, In self, IntArray sizes, int64_t dim, Outs outs) {
  const auto parts = at::split_with_sizes(self, sizes, dim);
  require(parts.size() == outs.size(), "as many outputs as sizes are needed");
  for (size_t i = 0; i < parts.size(); ++i) outs[i].set(parts[i]);
}
SIM_OPERATOR(SplitTensor, In self, uint64_t size, int64_t dim, Outs outs) {
  const auto parts = at::split(self, static_cast<int64_t>(size), dim);
  require(parts.size() == outs.size(), "as many outputs as parts are needed");
  for (size_t i = 0; i < parts.size(); ++i) outs[i].set(parts[i]);
}
SIM_OPERATOR(Flip, In self, IntArray dims, Out out) { out.set(at::flip(self, dims)); }
SIM_OPERATOR(Roll, In self, IntArray shifts, IntArray dims, Out out) { out.set(at::roll(self, shifts, dims)); }
SIM_OPERATOR(Repeat, In self, IntArray repeats, Out out) { out.set(self.repeat(repeats)); }
SIM_OPERATOR(Permute, In self, IntArray dims, Out out) { out.set(self.permute(dims)); }
SIM_OPERATOR(Expand, In self, IntArray sizes, Out out) { out.set(self.expand(sizes)); }
SIM_OPERATOR(Flatten, In self, int64_t /*axis*/, Out out) { out.set(self.reshape(out.sizes())); }
SIM_OPERATOR(Tril, In self, int64_t diagonal, Out out) { out.set(at::tril(self, diagonal)); }
SIM_OPERATOR(InplaceTril, InOut self, int64_t diagonal) { self.set(at::tril(self, diagonal)); }
SIM_OPERATOR(Triu, In self, int64_t diagonal, Out out) { out.set(at::triu(self, diagonal)); }
SIM_OPERATOR(InplaceTriu, InOut self, int64_t diagonal) { self.set(at::triu(self, diagonal)); }
SIM_OPERATOR(Diag, In self, int64_t diagonal, Out out) { out.set(at::diag(self, diagonal)); }
SIM_OPERATOR(DiagFlat, In self, int64_t diagonal, Out out) { out.set(at::diagflat(self, diagonal)); }
SIM_OPERATOR(ConstantPadNd, In self, IntArray padding, Scalar value, Out out) {
  out.set(at::constant_pad_nd(self, padding, value));
}
SIM_OPERATOR(Slice, In self, int64_t dim, int64_t start, int64_t end, int64_t step, Out out) {
  out.set(at::slice(self, dim, start, end, step));
}
SIM_OPERATOR(SliceV2, In self, IntArray starts, IntArray ends, IntArray axes, IntArray steps, Out out) {
  at::Tensor part = self;
  for (size_t i = 0; i < axes.size(); ++i) part = at::slice(part, axes[i], starts[i], ends[i], steps[i]);
  out.set(part);
}
SIM_OPERATOR(UnfoldGrad, In gradient, IntArray sizes, int64_t dim, int64_t size, int64_t step, Out out) {
  out.set(at::unfold_backward(gradient, sizes, dim, size, step));
}
SIM_OPERATOR(Im2col, In self, IntArray kernel, IntArray dilation, IntArray padding, IntArray stride, Out out) {
  out.set(at::im2col(self, kernel, dilation, padding, stride));
}

SIM_OPERATOR(RepeatInterleave, In self, In repeats, int64_t size, Out out) {
  out.set(at::repeat_interleave(self, repeats.to(at::kLong), std::nullopt, size));
}
SIM_OPERATOR(RepeatInterleaveWithDim, In self, In repeats, int64_t dim, int64_t size, Out out) {
  out.set(at::repeat_interleave(self, repeats.to(at::kLong), dim, size));
}
SIM_OPERATOR(RepeatInterleaveInt, In self, int64_t repeats, int64_t size, Out out) {
  out.set(at::repeat_interleave(self, repeats, std::nullopt, size));
}
SIM_OPERATOR(RepeatInterleaveIntWithDim, In self, int64_t repeats, int64_t dim, int64_t size, Out out) {
  out.set(at::repeat_interleave(self, repeats, dim, size));
}
SIM_OPERATOR(RepeatInterleaveTensor, In repeats, int64_t size, Out out) {
  out.set(at::repeat_interleave(repeats.to(at::kLong), size));
}

#define SIM_PAD(Name, function)                                                                    \
  SIM_OPERATOR(Name, In self, IntArray padding, Out out) { out.set(at::function(self, padding)); } \
  SIM_OPERATOR(Name##Backward, In gradient, In self, IntArray padding, Out out) {                  \
    out.set(at::function##_backward(gradient, self, padding));                                     \
  }
SIM_PAD(ReflectionPad1d, reflection_pad1d)
SIM_PAD(ReflectionPad2d, reflection_pad2d)
SIM_PAD(ReflectionPad3d, reflection_pad3d)
SIM_PAD(ReplicationPad1d, replication_pad1d)
SIM_PAD(ReplicationPad2d, replication_pad2d)
SIM_PAD(ReplicationPad3d, replication_pad3d)

}  // namespace sim::opapi
