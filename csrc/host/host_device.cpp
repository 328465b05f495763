#include "host/host_device.h"

#include <cmath>
#include <cstring>

#include "base/error.h"
#include "base/stress.h"

namespace tt::host {
namespace {

std::size_t index_of(DType dtype) { return static_cast<std::size_t>(dtype); }

void check_floating(DType dtype, const char* what) {
  TT_CHECK(is_floating(dtype), what, " of ", name_of(dtype), " is not defined");
}

}  // namespace

HostDevice::HostDevice() : HostDevice(available_isas().back()) {}

HostDevice::HostDevice(Isa isa) : isa_(isa), kernels_(kernels(isa)) {}

void HostDevice::cast(std::byte* dst, DType dst_dtype, const std::byte* src, DType src_dtype, std::size_t numel) {
  stress_delay();
  if (numel == 0) return;
  if (dst_dtype == src_dtype) {
    std::memcpy(dst, src, numel * size_of(dst_dtype));
    return;
  }
  check_floating(dst_dtype, "a cast to");
  check_floating(src_dtype, "a cast from");
  kernels_.cast[index_of(dst_dtype)][index_of(src_dtype)](dst, src, numel);
}

void HostDevice::add(std::byte* dst, DType dst_dtype, const std::byte* src, DType src_dtype, std::size_t numel) {
  stress_delay();
  check_floating(dst_dtype, "an addition to");
  check_floating(src_dtype, "an addition of");
  kernels_.add[index_of(dst_dtype)][index_of(src_dtype)](dst, src, numel);
}

void HostDevice::sum(std::byte* dst, std::span<const std::byte* const> sources, std::size_t numel,
                     const runtime::SumSpec& spec) {
  stress_delay();
  check_floating(spec.wire, "a sum");
  check_floating(spec.result, "a sum to");
  check_floating(spec.round_to, "a rounding to");
  TT_CHECK(!sources.empty(), "a sum needs a source");
  const KernelTable::Sum kernel = kernels_.sum[index_of(spec.result)][index_of(spec.wire)];
  TT_CHECK(kernel != nullptr, "a sum of ", name_of(spec.wire), " into ", name_of(spec.result), " is not defined");
  int exponent = 0;
  const bool power_of_two = std::frexp(spec.divisor, &exponent) == 0.5;
  kernel({dst, sources.data(), sources.size(), numel, spec.round_to, spec.divisor, power_of_two ? 1 / spec.divisor : 0,
          spec.accumulate});
}

double HostDevice::sum_squares(const std::byte* src, DType dtype, std::size_t numel) {
  check_floating(dtype, "a norm");
  return kernels_.sum_squares[index_of(dtype)](src, numel);
}

void HostDevice::zero(std::byte* dst, std::size_t bytes) {
  stress_delay();
  if (bytes != 0) std::memset(dst, 0, bytes);
}

}  // namespace tt::host
