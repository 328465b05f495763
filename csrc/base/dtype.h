// Element types that the core moves, casts and sums.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/error.h"

namespace tt {

enum class DType : std::uint8_t { kFloat32, kFloat16, kBFloat16, kFloat64, kBytes };

// Bytes per element. kBytes stands for every type that is moved but never cast or summed.
constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 8;
    case DType::kFloat32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kBytes:
      return 1;
  }
  return 0;
}

constexpr const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return "float64";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kBytes:
      return "bytes";
  }
  return "?";
}

constexpr bool is_floating(DType dtype) { return dtype != DType::kBytes; }

}  // namespace tt
