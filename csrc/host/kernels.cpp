#include "host/kernels.h"

#include "base/error.h"

namespace tt::host {

const std::vector<Isa>& available_isas() {
  static const std::vector<Isa> isas = [] {
    std::vector<Isa> found{Isa::kPortable};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
      found.push_back(Isa::kAvx2);
      if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        found.push_back(Isa::kAvx512);
      }
    }
#endif
    return found;
  }();
  return isas;
}

const KernelTable& kernels(Isa isa) {
  for (Isa available : available_isas()) {
    if (available != isa) continue;
#if defined(__x86_64__)
    if (isa == Isa::kAvx2) return avx2_kernels();
    if (isa == Isa::kAvx512) return avx512_kernels();
#endif
    return portable_kernels();
  }
  throw ValueError(str("this processor does not run ", name_of(isa), " kernels"));
}

}  // namespace tt::host
