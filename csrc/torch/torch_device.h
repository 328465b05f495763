// Any device that torch knows, through torch's own operators, streams and events; no code for one kind of device.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <vector>

#include "runtime/device.h"

namespace tt {

class TorchDevice final : public runtime::Device {
 public:
  // On an accelerator, takes streams of high priority from torch's pool as lanes.
  explicit TorchDevice(c10::Device device);

  std::unique_ptr<runtime::Event> make_event() override;
  void enter(runtime::Lane lane) override;
  void leave() noexcept override;

  void cast(std::byte* dst, DType dst_dtype, const std::byte* src, DType src_dtype, std::size_t numel) override;
  void add(std::byte* dst, DType dst_dtype, const std::byte* src, DType src_dtype, std::size_t numel) override;
  void sum(std::byte* dst, std::span<const std::byte* const> sources, std::size_t numel,
           const runtime::SumSpec& spec) override;
  // Waits for the device.
  double sum_squares(const std::byte* src, DType dtype, std::size_t numel) override;
  void zero(std::byte* dst, std::size_t bytes) override;

 private:
  c10::Device device_;
  std::vector<c10::Stream> lanes_;  // gather, reduce; empty where work is done when a call returns
  std::vector<c10::Stream> left_;   // the streams to go back to, outermost first
};

}  // namespace tt
