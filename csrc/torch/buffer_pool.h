// Buffers of a few sizes that come and go in every step, kept so that their memory does not move.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "torch/stream_event.h"

namespace tt {

// May be used by several threads.
class BufferPool {
 public:
  explicit BufferPool(c10::Device device) : device_(device) {}

  // (bytes,) uint8, not initialised. Work of the current stream comes after what its last user has submitted.
  at::Tensor take(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    if (const auto found = free_.find(bytes); found != free_.end()) {
      auto [buffer, left] = std::move(found->second);
      free_.erase(found);
      if (left != nullptr) {
        left->block(stream());
      }
      return buffer;
    }
    bytes_ += bytes;
    return at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).device(device_));
  }

  void give_back(at::Tensor buffer) {
    std::unique_ptr<StreamEvent> left;
    if (!device_.is_cpu()) {
      left = std::make_unique<StreamEvent>(device_);
      left->record(stream());
    }
    const std::lock_guard lock(mutex_);
    const auto bytes = static_cast<std::size_t>(buffer.numel());
    free_.emplace(bytes, Entry{std::move(buffer), std::move(left)});
  }

  // Of all buffers ever made.
  std::size_t bytes() const { return bytes_; }

 private:
  using Entry = std::pair<at::Tensor, std::unique_ptr<StreamEvent>>;

  c10::Stream stream() const { return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_); }

  const c10::Device device_;
  std::mutex mutex_;
  std::multimap<std::size_t, Entry> free_;
  std::atomic<std::size_t> bytes_{0};
};

}  // namespace tt
