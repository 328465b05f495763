// Rotary position embeddings.
#include "opapi/kernels.h"

namespace sim::opapi {

namespace {

enum Mode : int64_t { kHalf = 0, kInterleave = 1, kQuarter = 2, kInterleaveHalf = 3 };

// x rotated by a quarter turn in each plane; the planes are (i, i + D/2) or (2i, 2i + 1).
at::Tensor rotate(const at::Tensor& x, int64_t mode) {
  if (mode == kHalf) {
    const auto halves = x.chunk(2, -1);
    return at::cat({-halves[1], halves[0]}, -1);
  }
  require(mode == kInterleave, "rotary mode " + std::to_string(mode) + " is not simulated");
  const at::Tensor pairs = x.unflatten(-1, {x.size(-1) / 2, 2});
  return at::stack({-pairs.select(-1, 1), pairs.select(-1, 0)}, -1).flatten(-2);
}

// The rotation the other way.
at::Tensor rotate_back(const at::Tensor& x, int64_t mode) { return -rotate(x, mode); }

}  // namespace

SIM_OPERATOR(RotaryPositionEmbedding, In x, In cos, In sin, int64_t mode, Out y) {
  require(x.size(-1) % 2 == 0 && cos.sizes() == sin.sizes(), "an even last size and equal shapes of cos and sin");
  y.set(wide(x) * wide(cos) + rotate(wide(x), mode) * wide(sin));
}
SIM_OPERATOR(RotaryPositionEmbeddingGrad, In dy, In cos, In sin, OptIn x, int64_t mode, Out dx, OptOut dcos,
             OptOut dsin) {
  const at::Tensor g = wide(dy);
  dx.set(g * wide(cos) + rotate_back(g * wide(sin), mode));
  if (!x) return;
  if (dcos) dcos.set((g * wide(*x)).sum_to_size(dcos->sizes()));
  if (dsin) dsin.set((g * rotate(wide(*x), mode)).sum_to_size(dsin->sizes()));
}

}  // namespace sim::opapi
