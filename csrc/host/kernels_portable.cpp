// Kernels for any processor of the target architecture (SSE2 on x86-64, NEON on aarch64).
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "base/dtype.h"
#include "host/kernels.h"

#define TT_VECTOR_BYTES 16
#if defined(__aarch64__)
#define TT_HARDWARE_FLOAT16 1
#else
#define TT_HARDWARE_FLOAT16 0
#endif
#define TT_KERNELS portable_kernels

#include "host/kernels_impl.h"
