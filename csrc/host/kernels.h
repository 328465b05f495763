// Cast, add and sum over arrays in host memory, in one version per instruction set, chosen when the program runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/dtype.h"

namespace tt::host {

enum class Isa : std::uint8_t { kPortable, kAvx2, kAvx512 };

constexpr const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::kPortable:
      return "portable";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "?";
}

// One call of `sum`; runtime::SumSpec explains the members. Null sources count as zeros.
struct SumArguments {
  std::byte* dst;
  const std::byte* const* sources;
  std::size_t num_sources;
  std::size_t numel;
  DType round_to;
  double divisor;
  double exact_reciprocal;  // 1 / divisor where multiplying by it is exact (powers of two), else 0
  bool accumulate;
};

inline constexpr std::size_t kFloatTypes = 4;  // kFloat32 … kFloat64: the first values of DType

// The kernels of one instruction set, indexed by DType. Casts to the same type are null: they are memcpy.
// Pointers need no alignment. Casts between float64 and 16-bit types go through float32, as PyTorch's do.
struct KernelTable {
  using Cast = void (*)(std::byte* dst, const std::byte* src, std::size_t numel);
  using Add = void (*)(std::byte* dst, const std::byte* src, std::size_t numel);
  using Sum = void (*)(const SumArguments& arguments);
  using SumSquares = double (*)(const std::byte* src, std::size_t numel);

  Cast cast[kFloatTypes][kFloatTypes];  // [dst][src]
  Add add[kFloatTypes][kFloatTypes];    // [dst][src]
  Sum sum[kFloatTypes][kFloatTypes];    // [result][wire]; null where SumSpec does not allow the pair
  SumSquares sum_squares[kFloatTypes];
};

// Instruction sets that this processor can run, slowest first; kPortable is always there.
const std::vector<Isa>& available_isas();

// Throws ValueError if this processor (or this build) does not have `isa`.
const KernelTable& kernels(Isa isa);

// Defined in one file each; only called where the processor has the instruction set.
const KernelTable& portable_kernels();
const KernelTable& avx2_kernels();
const KernelTable& avx512_kernels();

}  // namespace tt::host
