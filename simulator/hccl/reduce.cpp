#include "hccl/reduce.h"

#include <bit>
#include <cstdint>
#include <type_traits>

namespace sim::hccl {
namespace {

struct Bfloat16 {
  std::uint16_t bits;
  operator float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
  static Bfloat16 round(float value) {
    const auto word = std::bit_cast<std::uint32_t>(value);
    if (value != value) return {static_cast<std::uint16_t>(word >> 16 | 0x40)};
    return {static_cast<std::uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16)};
  }
};

// Conversions by arithmetic on the bits, since not every compiler and machine has the type.
struct Half {
  std::uint16_t bits;
  operator float() const {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000) << 16;
    const std::uint32_t rest = static_cast<std::uint32_t>(bits & 0x7fff) << 13;
    if (rest >= 0x7c00u << 13) return std::bit_cast<float>(sign | 0x7f800000 | rest);  // infinity and NaN: all ones
    // Subnormal numbers are built beside the smallest normal one, so that no float is ever subnormal.
    const float magnitude = rest < 0x0400u << 13 ? std::bit_cast<float>(rest + (113u << 23)) - 0x1p-14f
                                                 : std::bit_cast<float>(rest + (112u << 23));
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
  }
  static Half round(float value) {
    const auto word = std::bit_cast<std::uint32_t>(value);
    const auto sign = static_cast<std::uint16_t>(word >> 16 & 0x8000);
    const std::uint32_t magnitude = word & 0x7fffffff;
    if (magnitude > 0x7f800000) return {static_cast<std::uint16_t>(sign | 0x7e00)};
    if (magnitude >= 0x477ff000) return {static_cast<std::uint16_t>(sign | 0x7c00)};  // rounds to 65536 or more
    if (magnitude < 0x38800000) {  // subnormal: the sum with 0.5 has its last place at 2^-24
      const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
      return {static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000))};
    }
    const std::uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return {static_cast<std::uint16_t>(sign | ((rounded - 0x38000000) >> 13))};
  }
};

template <typename T>
constexpr bool kSmallFloat = std::is_same_v<T, Bfloat16> || std::is_same_v<T, Half>;

template <HcclReduceOp op, typename T>
T combine(T a, T b) {
  if constexpr (op == HCCL_REDUCE_MAX) return a >= b || a != a ? a : b;
  if constexpr (op == HCCL_REDUCE_MIN) return a <= b || a != a ? a : b;
  if constexpr (kSmallFloat<T>) {
    return T::round(op == HCCL_REDUCE_SUM ? float(a) + float(b) : float(a) * float(b));
  } else if constexpr (std::is_integral_v<T>) {  // wraps around
    using Wide = std::conditional_t<sizeof(T) < 4, std::uint32_t, std::make_unsigned_t<T>>;
    const Wide x = static_cast<Wide>(a), y = static_cast<Wide>(b);
    return static_cast<T>(op == HCCL_REDUCE_SUM ? x + y : x * y);
  } else {
    return op == HCCL_REDUCE_SUM ? a + b : a * b;
  }
}

template <HcclReduceOp op, typename T>
void reduce(void* accumulator, const void* source, std::size_t count) {
  T* to = static_cast<T*>(accumulator);
  const T* from = static_cast<const T*>(source);
  for (std::size_t i = 0; i < count; ++i) to[i] = combine<op>(to[i], from[i]);
}

template <typename T>
void reduce(void* accumulator, const void* source, std::size_t count, HcclReduceOp op) {
  switch (op) {
    case HCCL_REDUCE_SUM:
      return reduce<HCCL_REDUCE_SUM, T>(accumulator, source, count);
    case HCCL_REDUCE_PROD:
      return reduce<HCCL_REDUCE_PROD, T>(accumulator, source, count);
    case HCCL_REDUCE_MAX:
      return reduce<HCCL_REDUCE_MAX, T>(accumulator, source, count);
    case HCCL_REDUCE_MIN:
      return reduce<HCCL_REDUCE_MIN, T>(accumulator, source, count);
    default:
      return;
  }
}

}  // namespace

std::size_t element_bytes(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_UINT8:
    case HCCL_DATA_TYPE_HIF8:
    case HCCL_DATA_TYPE_FP8E4M3:
    case HCCL_DATA_TYPE_FP8E5M2:
    case HCCL_DATA_TYPE_FP8E8M0:
      return 1;
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_UINT16:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16:
      return 2;
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_UINT32:
    case HCCL_DATA_TYPE_FP32:
      return 4;
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_UINT64:
    case HCCL_DATA_TYPE_FP64:
      return 8;
    case HCCL_DATA_TYPE_INT128:
      return 16;
    default:
      return 0;
  }
}

const char* type_name(HcclDataType type) {
  constexpr const char* kNames[] = {"int8",   "int16",   "int32",  "fp16",    "fp32",    "int64",
                                    "uint64", "uint8",   "uint16", "uint32",  "fp64",    "bf16",
                                    "int128", "unknown", "hif8",   "fp8e4m3", "fp8e5m2", "fp8e8m0"};
  return element_bytes(type) != 0 ? kNames[type] : "unknown";
}

const char* op_name(HcclReduceOp op) {
  constexpr const char* kNames[] = {"sum", "prod", "max", "min"};
  return op >= 0 && op <= HCCL_REDUCE_MIN ? kNames[op] : "unknown";
}

bool can_reduce(HcclDataType type, HcclReduceOp op) {
  if (op < HCCL_REDUCE_SUM || op > HCCL_REDUCE_MIN) return false;
  switch (type) {
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_BFP16:
      return op != HCCL_REDUCE_PROD;
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_FP32:
      return true;
    default:
      return false;
  }
}

void reduce_into(void* accumulator, const void* source, std::size_t count, HcclDataType type, HcclReduceOp op) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
      return reduce<std::int8_t>(accumulator, source, count, op);
    case HCCL_DATA_TYPE_INT16:
      return reduce<std::int16_t>(accumulator, source, count, op);
    case HCCL_DATA_TYPE_INT32:
      return reduce<std::int32_t>(accumulator, source, count, op);
    case HCCL_DATA_TYPE_INT64:
      return reduce<std::int64_t>(accumulator, source, count, op);
    case HCCL_DATA_TYPE_FP16:
      return reduce<Half>(accumulator, source, count, op);
    case HCCL_DATA_TYPE_BFP16:
      return reduce<Bfloat16>(accumulator, source, count, op);
    case HCCL_DATA_TYPE_FP32:
      return reduce<float>(accumulator, source, count, op);
    default:
      return;  // can_reduce() is asked before anything is submitted
  }
}

}  // namespace sim::hccl
