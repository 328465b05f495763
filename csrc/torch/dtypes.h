// torch's element types and ours.
#pragma once

#include <c10/core/ScalarType.h>

#include "base/dtype.h"
#include "base/error.h"

namespace tt {

inline DType from_torch(c10::ScalarType type) {
  switch (type) {
    case c10::kFloat:
      return DType::kFloat32;
    case c10::kHalf:
      return DType::kFloat16;
    case c10::kBFloat16:
      return DType::kBFloat16;
    case c10::kDouble:
      return DType::kFloat64;
    default:
      return DType::kBytes;
  }
}

inline c10::ScalarType to_torch(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return c10::kFloat;
    case DType::kFloat16:
      return c10::kHalf;
    case DType::kBFloat16:
      return c10::kBFloat16;
    case DType::kFloat64:
      return c10::kDouble;
    case DType::kBytes:
      return c10::kByte;
  }
  throw Error("unknown dtype");
}

}  // namespace tt
