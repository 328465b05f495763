// Kernels for x86-64 processors with AVX2 and F16C.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "base/dtype.h"
#include "host/kernels.h"

#define TT_VECTOR_BYTES 32
#define TT_HARDWARE_FLOAT16 1
#define TT_KERNELS avx2_kernels

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif

#include "host/kernels_impl.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__
