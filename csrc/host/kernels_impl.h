// The kernels, written once for all instruction sets. A kernels_<isa>.cpp defines TT_VECTOR_BYTES (width of a vector
// register), TT_HARDWARE_FLOAT16 (1 if the target converts float16 itself) and TT_KERNELS (name of its table function),
// switches the compiler to its target, and includes this file last. The standard headers come before the switch, so
// that no inline function of theirs is compiled for a target that other files must not run.
//
// There are no separate loops for the last elements: they are copied to a padded vector and take the same way.
// Sums and casts never add to a product, so contraction to FMA cannot change their results.

namespace tt::host {
namespace {

#define TT_INLINE inline __attribute__((always_inline))

// ---- vectors
// ----------------------------------------------------------------------------------------------------------

template <typename T, std::size_t kLanes>
struct VectorOf {
  typedef T type __attribute__((vector_size(sizeof(T) * kLanes)));
};
template <typename T, std::size_t kLanes>
using Vector = typename VectorOf<T, kLanes>::type;

template <typename To, typename From>
TT_INLINE To bit_cast_to(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename V>
TT_INLINE V load_bits(const std::byte* from) {
  V value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}

template <typename V>
TT_INLINE void store_bits(std::byte* to, const V& value) {
  __builtin_memcpy(to, &value, sizeof(value));
}

// ---- 16-bit types
// -----------------------------------------------------------------------------------------------------

template <std::size_t L>
TT_INLINE Vector<float, L> bfloat16_to_float(Vector<std::uint16_t, L> bits) {
  return bit_cast_to<Vector<float, L>>(__builtin_convertvector(bits, Vector<std::uint32_t, L>) << 16);
}

template <std::size_t L>
TT_INLINE Vector<std::uint16_t, L> float_to_bfloat16(Vector<float, L> value) {
  using U32 = Vector<std::uint32_t, L>;
  const U32 bits = bit_cast_to<U32>(value);
  const U32 rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16;  // to nearest, ties to even
  const U32 quiet_nan = (bits >> 16) | 0x40;                       // rounding could carry a NaN over to infinity
  const U32 is_nan = bit_cast_to<U32>(value != value);
  const U32 result = (is_nan & quiet_nan) | (~is_nan & rounded);
#if TT_VECTOR_BYTES == 32
  if constexpr (L == 8) {  // one pack instead of the byte shuffles that the compiler makes of a narrowing conversion
    const __m256i packed = _mm256_packus_epi32((__m256i)result, _mm256_setzero_si256());
    return bit_cast_to<Vector<std::uint16_t, L>>(
        _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, _MM_SHUFFLE(3, 1, 2, 0))));
  } else {
    return __builtin_convertvector(result, Vector<std::uint16_t, L>);
  }
#else
  return __builtin_convertvector(result, Vector<std::uint16_t, L>);
#endif
}

#if TT_HARDWARE_FLOAT16 && defined(__x86_64__)

template <std::size_t L>
TT_INLINE Vector<float, L> float16_to_float(Vector<std::uint16_t, L> bits) {
  if constexpr (L == 4) {
    return (Vector<float, L>)_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(&bits)));
  } else if constexpr (L == 8) {
    return (Vector<float, L>)_mm256_cvtph_ps((__m128i)bits);
#if TT_VECTOR_BYTES == 64
  } else {
    static_assert(L == 16);
    return (Vector<float, L>)_mm512_cvtph_ps((__m256i)bits);
#endif
  }
}

template <std::size_t L>
TT_INLINE Vector<std::uint16_t, L> float_to_float16(Vector<float, L> value) {
  constexpr int kNearestEven = 0;  // _MM_FROUND_TO_NEAREST_INT
  if constexpr (L == 4) {
    Vector<std::uint16_t, L> bits;
    _mm_storel_epi64(reinterpret_cast<__m128i*>(&bits), _mm_cvtps_ph((__m128)value, kNearestEven));
    return bits;
  } else if constexpr (L == 8) {
    return (Vector<std::uint16_t, L>)_mm256_cvtps_ph((__m256)value, kNearestEven);
#if TT_VECTOR_BYTES == 64
  } else {
    static_assert(L == 16);
    return (Vector<std::uint16_t, L>)_mm512_cvtps_ph((__m512)value, kNearestEven);
#endif
  }
}

#elif TT_HARDWARE_FLOAT16  // aarch64

template <std::size_t L>
TT_INLINE Vector<float, L> float16_to_float(Vector<std::uint16_t, L> bits) {
  return __builtin_convertvector(bit_cast_to<Vector<__fp16, L>>(bits), Vector<float, L>);
}

template <std::size_t L>
TT_INLINE Vector<std::uint16_t, L> float_to_float16(Vector<float, L> value) {
  return bit_cast_to<Vector<std::uint16_t, L>>(__builtin_convertvector(value, Vector<__fp16, L>));
}

#else

// By integers and exact float arithmetic, in all lanes at once.
template <std::size_t L>
TT_INLINE Vector<float, L> float16_to_float(Vector<std::uint16_t, L> bits) {
  using F32 = Vector<float, L>;
  using U32 = Vector<std::uint32_t, L>;
  const U32 wide = __builtin_convertvector(bits, U32);
  const U32 sign = (wide & 0x8000) << 16;
  const U32 magnitude = wide & 0x7FFF;
  const U32 shifted = magnitude << 13;
  const U32 normal = shifted + (std::uint32_t{127 - 15} << 23);
  const U32 special = shifted | (std::uint32_t{0xFF} << 23) | ((magnitude > 0x7C00) & (std::uint32_t{1} << 22));
  // A subnormal is its mantissa times 2^-24: put the mantissa under the exponent of 2^-14 and take 2^-14 off again.
  const U32 bias = U32{} + (std::uint32_t{127 - 14} << 23);
  const U32 subnormal = bit_cast_to<U32>(bit_cast_to<F32>(shifted + bias) - bit_cast_to<F32>(bias));
  const U32 is_special = bit_cast_to<U32>(magnitude >= 0x7C00);
  const U32 is_subnormal = bit_cast_to<U32>(magnitude < 0x0400);
  return bit_cast_to<F32>(sign | (is_special & special) | (is_subnormal & subnormal) |
                          (~(is_special | is_subnormal) & normal));
}

template <std::size_t L>
TT_INLINE Vector<std::uint16_t, L> float_to_float16(Vector<float, L> value) {
  using F32 = Vector<float, L>;
  using U32 = Vector<std::uint32_t, L>;
  const U32 bits = bit_cast_to<U32>(value);
  const U32 sign = (bits >> 16) & 0x8000;
  const U32 magnitude = bits & 0x7FFFFFFF;
  // Rounds half to even; the carry may run into the exponent, up to infinity, as it should.
  const U32 normal = (magnitude - (std::uint32_t{127 - 15} << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
  // Adding 0.5 leaves multiples of 2^-24 in the mantissa, rounded to even by the addition itself.
  const U32 half = U32{} + (std::uint32_t{126} << 23);
  const U32 subnormal = bit_cast_to<U32>(bit_cast_to<F32>(magnitude) + bit_cast_to<F32>(half)) - half;
  const U32 is_nan = bit_cast_to<U32>(magnitude > 0x7F800000);
  const U32 nan = 0x7E00 | ((magnitude >> 13) & 0x3FF);
  const U32 is_large = bit_cast_to<U32>(magnitude >= (std::uint32_t{127 + 16} << 23)) & ~is_nan;
  const U32 is_subnormal = bit_cast_to<U32>(magnitude < (std::uint32_t{127 - 14} << 23));
  const U32 result = (is_nan & nan) | (is_large & 0x7C00) | (is_subnormal & subnormal) |
                     (~(is_nan | is_large | is_subnormal) & normal);
  return __builtin_convertvector(sign | result, Vector<std::uint16_t, L>);
}

#endif

// ---- elements
// ---------------------------------------------------------------------------------------------------------

// kLanes elements of type kType as a vector of A (float or double), and back.
template <DType kType, typename A, std::size_t L>
TT_INLINE Vector<A, L> load(const std::byte* from) {
  if constexpr (kType == DType::kFloat64) {
    return __builtin_convertvector(load_bits<Vector<double, L>>(from), Vector<A, L>);
  } else if constexpr (kType == DType::kFloat32) {
    return __builtin_convertvector(load_bits<Vector<float, L>>(from), Vector<A, L>);
  } else if constexpr (kType == DType::kBFloat16) {
    return __builtin_convertvector(bfloat16_to_float<L>(load_bits<Vector<std::uint16_t, L>>(from)), Vector<A, L>);
  } else {
    return __builtin_convertvector(float16_to_float<L>(load_bits<Vector<std::uint16_t, L>>(from)), Vector<A, L>);
  }
}

template <DType kType, typename A, std::size_t L>
TT_INLINE void store(std::byte* to, Vector<A, L> value) {
  if constexpr (kType == DType::kFloat64) {
    store_bits(to, __builtin_convertvector(value, Vector<double, L>));
  } else {
    const Vector<float, L> narrow = __builtin_convertvector(value, Vector<float, L>);
    if constexpr (kType == DType::kFloat32) {
      store_bits(to, narrow);
    } else if constexpr (kType == DType::kBFloat16) {
      store_bits(to, float_to_bfloat16<L>(narrow));
    } else {
      store_bits(to, float_to_float16<L>(narrow));
    }
  }
}

// Lanes that fit a register; where doubles take part, half as many.
template <typename A>
inline constexpr std::size_t kLanesOf = TT_VECTOR_BYTES / sizeof(A);

// The type in which `a += b` is added.
template <DType kDst>
using AddType = std::conditional_t<kDst == DType::kFloat64, double, float>;

// Widest type that takes part, for the number of lanes.
template <DType kA, DType kB>
using WidestType = std::conditional_t<kA == DType::kFloat64 || kB == DType::kFloat64, double, float>;

// ---- cast and add
// -----------------------------------------------------------------------------------------------------

template <DType kDst, DType kSrc, bool kAdd, std::size_t L>
TT_INLINE void move_vector(std::byte* dst, const std::byte* src) {
  using A = AddType<kDst>;
  Vector<A, L> value = load<kSrc, A, L>(src);
  if constexpr (kAdd) value = load<kDst, A, L>(dst) + value;
  store<kDst, A, L>(dst, value);
}

template <DType kDst, DType kSrc, bool kAdd>
void move(std::byte* dst, const std::byte* src, std::size_t numel) {
  constexpr std::size_t L = kLanesOf<WidestType<kDst, kSrc>>;
  constexpr std::size_t kDstBytes = size_of(kDst), kSrcBytes = size_of(kSrc);
  std::size_t i = 0;
  for (; i + 4 * L <= numel; i += 4 * L) {
    for (std::size_t k = 0; k < 4 * L; k += L) {
      move_vector<kDst, kSrc, kAdd, L>(dst + (i + k) * kDstBytes, src + (i + k) * kSrcBytes);
    }
  }
  for (; i + L <= numel; i += L) move_vector<kDst, kSrc, kAdd, L>(dst + i * kDstBytes, src + i * kSrcBytes);
  if (const std::size_t rest = numel - i; rest != 0) {
    std::byte padded_dst[L * kDstBytes] = {}, padded_src[L * kSrcBytes] = {};
    __builtin_memcpy(padded_src, src + i * kSrcBytes, rest * kSrcBytes);
    if constexpr (kAdd) __builtin_memcpy(padded_dst, dst + i * kDstBytes, rest * kDstBytes);
    move_vector<kDst, kSrc, kAdd, L>(padded_dst, padded_src);
    __builtin_memcpy(dst + i * kDstBytes, padded_dst, rest * kDstBytes);
  }
}

// ---- sum
// --------------------------------------------------------------------------------------------------------------

template <DType kType, typename A, std::size_t L>
TT_INLINE Vector<A, L> rounded_through(Vector<A, L> value) {
  alignas(64) std::byte bits[L * size_of(kType)];
  store<kType, A, L>(bits, value);
  return load<kType, A, L>(bits);
}

template <typename A, std::size_t L>
TT_INLINE Vector<A, L> rounded_to(DType type, Vector<A, L> value) {
  switch (type) {
    case DType::kBFloat16:
      return rounded_through<DType::kBFloat16, A, L>(value);
    case DType::kFloat16:
      return rounded_through<DType::kFloat16, A, L>(value);
    case DType::kFloat32:
      return rounded_through<DType::kFloat32, A, L>(value);
    default:
      return value;
  }
}

// The first `count` (< L) elements, padded with zeros.
template <DType kType, typename A, std::size_t L>
TT_INLINE Vector<A, L> load_first(const std::byte* from, std::size_t count) {
  std::byte padded[L * size_of(kType)] = {};
  __builtin_memcpy(padded, from, count * size_of(kType));
  return load<kType, A, L>(padded);
}

// Adds source `s` to kVectors vectors; kPartial: to the first `count` elements of one.
template <DType kWire, std::size_t L, std::size_t kVectors, bool kPartial, typename A>
TT_INLINE void add_source(Vector<A, L> (&sum)[kVectors], const std::byte* source, std::size_t count, bool is_first) {
  for (std::size_t v = 0; v < kVectors; ++v) {
    Vector<A, L> term{};  // zeros are added, too: -0 + 0 is +0
    if (source != nullptr) {
      if constexpr (kPartial) {
        term = load_first<kWire, A, L>(source, count);
      } else {
        term = load<kWire, A, L>(source + v * L * size_of(kWire));
      }
    }
    sum[v] = is_first ? term : sum[v] + term;
  }
}

// kVectors vectors of the result, from element `first` of the sources on. Register-sized blocks: each source and dst
// goes through the caches once, whatever their number.
template <DType kResult, DType kWire, std::size_t L, std::size_t kVectors, bool kPartial = false>
TT_INLINE void sum_vectors(const SumArguments& a, std::byte* dst, std::size_t first, std::size_t count = 0) {
  using A = AddType<kWire>;
  using R = AddType<kResult>;
  const std::size_t offset = first * size_of(kWire);
  Vector<A, L> sum[kVectors] = {};
  add_source<kWire, L, kVectors, kPartial, A>(sum, a.sources[0] ? a.sources[0] + offset : nullptr, count, true);
  for (std::size_t s = 1; s < a.num_sources; ++s) {
    add_source<kWire, L, kVectors, kPartial, A>(sum, a.sources[s] ? a.sources[s] + offset : nullptr, count, false);
  }
  const A divisor = static_cast<A>(a.divisor);
  const A reciprocal = static_cast<A>(a.exact_reciprocal);
  for (std::size_t v = 0; v < kVectors; ++v) {
    if (reciprocal != 0) {
      sum[v] = sum[v] * reciprocal;
    } else {
      sum[v] = sum[v] / divisor;
    }
    // Storing rounds to kResult anyway; adding needs the rounded quotient.
    if (a.round_to != kResult || a.accumulate) sum[v] = rounded_to<A, L>(a.round_to, sum[v]);
    Vector<R, L> result = __builtin_convertvector(sum[v], Vector<R, L>);
    std::byte* to = dst + v * L * size_of(kResult);
    if (a.accumulate) result = load<kResult, R, L>(to) + result;
    store<kResult, R, L>(to, result);
  }
}

template <DType kResult, DType kWire>
void sum(const SumArguments& a) {
  constexpr std::size_t L = kLanesOf<WidestType<kResult, kWire>>;
  constexpr std::size_t kVectors = 4;
  constexpr std::size_t kBytes = size_of(kResult);
  std::size_t i = 0;
  for (; i + kVectors * L <= a.numel; i += kVectors * L) {
    sum_vectors<kResult, kWire, L, kVectors>(a, a.dst + i * kBytes, i);
  }
  for (; i + L <= a.numel; i += L) sum_vectors<kResult, kWire, L, 1>(a, a.dst + i * kBytes, i);
  if (const std::size_t rest = a.numel - i; rest != 0) {
    std::byte padded[L * kBytes] = {};
    if (a.accumulate) __builtin_memcpy(padded, a.dst + i * kBytes, rest * kBytes);
    sum_vectors<kResult, kWire, L, 1, true>(a, padded, i, rest);
    __builtin_memcpy(a.dst + i * kBytes, padded, rest * kBytes);
  }
}

// ---- norm
// ------------------------------------------------------------------------------------------------------------

// In float64, so that the result does not depend on how a tensor is cut into pieces (to float32's precision).
template <DType kType>
double sum_squares(const std::byte* src, std::size_t numel) {
  constexpr std::size_t L = kLanesOf<double>;
  constexpr std::size_t kVectors = 4;
  Vector<double, L> sums[kVectors] = {};
  std::size_t i = 0;
  for (; i + kVectors * L <= numel; i += kVectors * L) {
    for (std::size_t v = 0; v < kVectors; ++v) {
      const Vector<double, L> value = load<kType, double, L>(src + (i + v * L) * size_of(kType));
      sums[v] += value * value;
    }
  }
  for (; i < numel; i += L) {
    const Vector<double, L> value =
        load_first<kType, double, L>(src + i * size_of(kType), numel - i < L ? numel - i : L);
    sums[0] += value * value;
  }
  double total = 0;
  for (std::size_t lane = 0; lane < L; ++lane) {
    for (std::size_t v = 0; v < kVectors; ++v) total += sums[v][lane];
  }
  return total;
}

// ---- table
// ------------------------------------------------------------------------------------------------------------

template <std::size_t kDst, std::size_t kSrc>
constexpr void fill_pair(KernelTable& table) {
  constexpr DType kDstType = static_cast<DType>(kDst), kSrcType = static_cast<DType>(kSrc);
  if constexpr (kDst != kSrc) table.cast[kDst][kSrc] = &move<kDstType, kSrcType, false>;
  table.add[kDst][kSrc] = &move<kDstType, kSrcType, true>;
  if constexpr (kDst == kSrc || kDstType == DType::kFloat32 || kDstType == DType::kFloat64 || size_of(kSrcType) > 2) {
    table.sum[kDst][kSrc] = &sum<kDstType, kSrcType>;
  }
}

template <std::size_t... kPairs>
constexpr KernelTable make_table(std::index_sequence<kPairs...>) {
  KernelTable table{};
  (fill_pair<kPairs / kFloatTypes, kPairs % kFloatTypes>(table), ...);
  table.sum_squares[static_cast<std::size_t>(DType::kFloat32)] = &sum_squares<DType::kFloat32>;
  table.sum_squares[static_cast<std::size_t>(DType::kFloat16)] = &sum_squares<DType::kFloat16>;
  table.sum_squares[static_cast<std::size_t>(DType::kBFloat16)] = &sum_squares<DType::kBFloat16>;
  table.sum_squares[static_cast<std::size_t>(DType::kFloat64)] = &sum_squares<DType::kFloat64>;
  return table;
}

constexpr KernelTable kTable = make_table(std::make_index_sequence<kFloatTypes * kFloatTypes>{});

}  // namespace

const KernelTable& TT_KERNELS() { return kTable; }

}  // namespace tt::host
