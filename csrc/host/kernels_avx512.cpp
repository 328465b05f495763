// Kernels for x86-64 processors with AVX-512 (F, BW, DQ, VL).
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "base/dtype.h"
#include "host/kernels.h"

#define TT_VECTOR_BYTES 64
#define TT_HARDWARE_FLOAT16 1
#define TT_KERNELS avx512_kernels

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
// GCC's own intrinsics start from undefined registers and set off its warning.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif

#include "host/kernels_impl.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__
