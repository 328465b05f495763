// What the FSDP core asks of a device: move, cast and sum elements that lie in its memory.
#pragma once

#include <cstddef>
#include <span>

#include "base/dtype.h"

namespace tt::runtime {

// How gradients of all ranks become one: dst = round((src[0] + src[1] + …) / divisor), added in source order in
// float32 (float64 for float64 sources).
struct SumSpec {
  DType wire;      // element type of the sources
  DType result;    // element type of dst; a 16-bit one only if `wire` is the same or wider
  DType round_to;  // reduce_dtype: the quotient is rounded to it before it is stored; equal to `result` for no rounding
  double divisor = 1;       // number of ranks that share the average
  bool accumulate = false;  // add to what dst holds instead of replacing it
};

class Device {
 public:
  virtual ~Device() = default;

  // dst[i] = src[i], cast with round-to-nearest-even. kBytes copies `numel` bytes and needs dst_dtype == src_dtype.
  virtual void cast(std::byte* dst, DType dst_dtype, const std::byte* src, DType src_dtype, std::size_t numel) = 0;

  // dst[i] += src[i], added in dst's type (float32 when dst is a 16-bit type, then rounded).
  virtual void add(std::byte* dst, DType dst_dtype, const std::byte* src, DType src_dtype, std::size_t numel) = 0;

  // Sums `sources` (all of `numel` elements of spec.wire; a null source counts as zeros) into dst.
  virtual void sum(std::byte* dst, std::span<const std::byte* const> sources, std::size_t numel,
                   const SumSpec& spec) = 0;

  // Sum of squares, formed in float64 so that it does not depend on how a tensor is cut.
  virtual double sum_squares(const std::byte* src, DType dtype, std::size_t numel) = 0;

  virtual void zero(std::byte* dst, std::size_t bytes) = 0;
};

}  // namespace tt::runtime
