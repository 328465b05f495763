// What kernels share.
#pragma once

#include "opapi/operator.h"

namespace sim::opapi {

inline bool is_half(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

// Half types as float: cards accumulate sums of them in fp32 and round the result once.
inline at::Tensor wide(const at::Tensor& tensor) {
  return is_half(tensor.scalar_type()) ? tensor.to(at::kFloat) : tensor;
}
inline at::ScalarType wide(at::ScalarType type) { return is_half(type) ? at::kFloat : type; }
inline std::optional<at::Tensor> wide(const std::optional<at::Tensor>& tensor) {
  return tensor ? std::optional<at::Tensor>(wide(*tensor)) : std::nullopt;
}

// The dimensions a reduction takes: an empty list means all of them.
inline std::vector<int64_t> all_if_empty(const IntArray& dims, const at::Tensor& self) {
  if (!dims.empty()) return dims;
  std::vector<int64_t> all(static_cast<size_t>(self.dim()));
  for (size_t d = 0; d < all.size(); ++d) all[d] = static_cast<int64_t>(d);
  return all;
}

inline void require(bool condition, const std::string& rule) {
  if (!condition) throw InvalidArgument(rule);
}

}  // namespace sim::opapi
