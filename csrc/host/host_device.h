// The host as a device: its memory is ordinary memory, and every call is done when it returns.
#pragma once

#include "host/kernels.h"
#include "runtime/device.h"

namespace tt::host {

class HostDevice final : public runtime::Device {
 public:
  HostDevice();                  // best kernels of this processor
  explicit HostDevice(Isa isa);  // ValueError if this processor does not have them

  Isa isa() const { return isa_; }

  void cast(std::byte* dst, DType dst_dtype, const std::byte* src, DType src_dtype, std::size_t numel) override;
  void add(std::byte* dst, DType dst_dtype, const std::byte* src, DType src_dtype, std::size_t numel) override;
  void sum(std::byte* dst, std::span<const std::byte* const> sources, std::size_t numel,
           const runtime::SumSpec& spec) override;
  double sum_squares(const std::byte* src, DType dtype, std::size_t numel) override;
  void zero(std::byte* dst, std::size_t bytes) override;

 private:
  Isa isa_;
  const KernelTable& kernels_;
};

}  // namespace tt::host
