#include "torch/torch_device.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdint>

#include "base/error.h"
#include "torch/compat.h"
#include "torch/dtypes.h"
#include "torch/stream_event.h"

namespace tt {
namespace {

class LaneEvent final : public runtime::Event {
 public:
  explicit LaneEvent(c10::Device device) : device_(device), event_(device) {}

  void record() override { event_.record(current()); }
  void wait() override { event_.block(current()); }

 private:
  c10::Stream current() const { return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_); }

  c10::Device device_;
  StreamEvent event_;
};

// A flat tensor of `numel` elements at `where`. Memory is only read where the caller has it const.
at::Tensor elements(const std::byte* where, DType dtype, std::size_t numel, c10::Device device) {
  return torch_compat::tensor_at(const_cast<std::byte*>(where), {static_cast<std::int64_t>(numel)}, to_torch(dtype),
                                 device);
}

}  // namespace

TorchDevice::TorchDevice(c10::Device device) : device_(device) {
  if (!device.is_cpu()) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    if (!device_.has_index()) {
      device_ = guard.getDevice();
    }
    for (int lane = 0; lane < 2; ++lane) {
      lanes_.push_back(guard.getStreamFromGlobalPool(device_, /*isHighPriority=*/true));
    }
  }
}

std::unique_ptr<runtime::Event> TorchDevice::make_event() {
  return !lanes_.empty() ? std::make_unique<LaneEvent>(device_) : nullptr;
}

void TorchDevice::enter(runtime::Lane lane) {
  if (!lanes_.empty()) {
    const c10::impl::VirtualGuardImpl guard(device_.type());
    left_.push_back(guard.exchangeStream(lanes_[static_cast<std::size_t>(lane)]));
  }
}

void TorchDevice::leave() noexcept {
  if (!lanes_.empty()) {
    c10::impl::VirtualGuardImpl(device_.type()).exchangeStream(left_.back());
    left_.pop_back();
  }
}

void TorchDevice::cast(std::byte* dst, DType dst_dtype, const std::byte* src, DType src_dtype, std::size_t numel) {
  if (numel == 0) {
    return;
  }
  const at::NoGradGuard no_grad;
  elements(dst, dst_dtype, numel, device_).copy_(elements(src, src_dtype, numel, device_), /*non_blocking=*/true);
}

void TorchDevice::add(std::byte* dst, DType dst_dtype, const std::byte* src, DType src_dtype, std::size_t numel) {
  if (numel == 0) {
    return;
  }
  const at::NoGradGuard no_grad;
  elements(dst, dst_dtype, numel, device_).add_(elements(src, src_dtype, numel, device_));
}

void TorchDevice::sum(std::byte* dst, std::span<const std::byte* const> sources, std::size_t numel,
                      const runtime::SumSpec& spec) {
  TT_CHECK(!sources.empty(), "a sum needs a source");
  if (numel == 0) {
    return;
  }
  const at::NoGradGuard no_grad;
  auto result = elements(dst, spec.result, numel, device_);
  const auto wide = spec.wire == DType::kFloat64 ? c10::kDouble : c10::kFloat;
  const bool in_place = !spec.accumulate && spec.round_to == spec.result && result.scalar_type() == wide;
  if (in_place && sources.size() == 1 && sources[0] != nullptr && from_torch(wide) == spec.wire) {
    at::div_out(result, elements(sources[0], spec.wire, numel, device_), at::scalar_tensor(spec.divisor));
    return;
  }
  auto total = in_place ? result : at::empty_like(result, result.options().dtype(wide));
  bool first = true;
  for (const std::byte* source : sources) {
    if (source == nullptr) {
      first ? total.zero_() : total.add_(0);
    } else {
      const auto part = elements(source, spec.wire, numel, device_);
      first ? total.copy_(part) : total.add_(part);
    }
    first = false;
  }
  if (spec.divisor != 1) {
    total.div_(spec.divisor);
  }
  if (in_place) {
    return;
  }
  // Storing rounds to the result's type anyway; adding needs the rounded quotient.
  if (spec.round_to != spec.result || spec.accumulate) {
    total = total.to(to_torch(spec.round_to));
  }
  if (spec.accumulate) {
    result.add_(total);
  } else {
    result.copy_(total);
  }
}

double TorchDevice::sum_squares(const std::byte* src, DType dtype, std::size_t numel) {
  const auto values = elements(src, dtype, numel, device_);
  return at::linalg_vector_norm(values, 2, std::nullopt, false, c10::kDouble).square().item<double>();
}

void TorchDevice::zero(std::byte* dst, std::size_t bytes) { elements(dst, DType::kBytes, bytes, device_).zero_(); }

}  // namespace tt
