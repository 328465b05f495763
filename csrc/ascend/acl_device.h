// An Ascend NPU as the engine sees it: elements are moved, cast and added by aclnn operators.
#pragma once

#include <functional>
#include <memory>

#include "ascend/queue.h"
#include "runtime/device.h"

namespace tt::ascend {

class AclDevice final : public runtime::Device {
 public:
  // `streams`: the same card through torch, which owns streams and events: lanes, events, and what has no operator
  // here. `queue`: how work gets to a stream. Throws Error where CANN is missing.
  AclDevice(std::shared_ptr<runtime::Device> streams, std::shared_ptr<Queue> queue);

  std::unique_ptr<runtime::Event> make_event() override { return streams_->make_event(); }
  void enter(runtime::Lane lane) override { streams_->enter(lane); }
  void leave() noexcept override { streams_->leave(); }

  void cast(std::byte* dst, DType dst_dtype, const std::byte* src, DType src_dtype, std::size_t numel) override;
  void add(std::byte* dst, DType dst_dtype, const std::byte* src, DType src_dtype, std::size_t numel) override;
  // One operator where the sources are a block of equal rows and their average is wanted; else through torch.
  void sum(std::byte* dst, std::span<const std::byte* const> sources, std::size_t numel,
           const runtime::SumSpec& spec) override;
  double sum_squares(const std::byte* src, DType dtype, std::size_t numel) override {
    return streams_->sum_squares(src, dtype, numel);
  }
  void zero(std::byte* dst, std::size_t bytes) override;

 private:
  std::shared_ptr<runtime::Device> streams_;
  std::shared_ptr<Queue> queue_;
};

}  // namespace tt::ascend
