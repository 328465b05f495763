// What the FSDP core asks of a device: move, cast and sum elements that lie in its memory, in an order that it can say.
//
// Work is submitted to one of three lanes. The compute lane is the caller's own stream, where modules run; gathers and
// reductions have lanes of the engine's. Work of one lane runs in the order of submission; between lanes only events
// give an order. On the host, work is done when the call returns: there are no lanes, and events are nothing.
//
// Gathers and reductions do not share a lane, since ranks may submit the two in different orders: where a parameter has
// a gradient on some ranks only, its bucket is complete at different moments. One lane for both could then wait in a
// circle through the ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/dtype.h"

namespace tt::runtime {

// How gradients of all ranks become one: dst = round((src[0] + src[1] + …) / divisor), added in source order in
// float32 (float64 for float64 sources).
struct SumSpec {
  DType wire;      // element type of the sources
  DType result;    // element type of dst; a 16-bit one only if `wire` is the same or wider
  DType round_to;  // reduce_dtype: the quotient is rounded to it before it is stored; equal to `result` for no rounding
  double divisor = 1;       // number of ranks that share the average
  bool accumulate = false;  // add to what dst holds instead of replacing it
};

enum class Lane : std::uint8_t { kGather, kReduce };

// A point in the work of a lane. It can be recorded again and again; waits refer to the last record before them.
class Event {
 public:
  virtual ~Event() = default;
  virtual void record() = 0;  // after what this thread has submitted to its current lane so far
  virtual void wait() = 0;    // what is submitted to the current lane from now on runs after it; the host goes on
};

class Device {
 public:
  virtual ~Device() = default;

  // A new event, or null where work is done when a call returns.
  virtual std::unique_ptr<Event> make_event() { return nullptr; }
  // What this thread submits from here on goes to `lane`, until leave(). May be nested.
  virtual void enter(Lane lane) { static_cast<void>(lane); }
  virtual void leave() noexcept {}

  // dst[i] = src[i], cast with round-to-nearest-even. kBytes copies `numel` bytes and needs dst_dtype == src_dtype.
  virtual void cast(std::byte* dst, DType dst_dtype, const std::byte* src, DType src_dtype, std::size_t numel) = 0;

  // dst[i] += src[i], added in dst's type (float32 when dst is a 16-bit type, then rounded).
  virtual void add(std::byte* dst, DType dst_dtype, const std::byte* src, DType src_dtype, std::size_t numel) = 0;

  // Sums `sources` (all of `numel` elements of spec.wire; a null source counts as zeros) into dst.
  virtual void sum(std::byte* dst, std::span<const std::byte* const> sources, std::size_t numel,
                   const SumSpec& spec) = 0;

  // Sum of squares, formed in float64 so that it does not depend on how a tensor is cut.
  virtual double sum_squares(const std::byte* src, DType dtype, std::size_t numel) = 0;

  virtual void zero(std::byte* dst, std::size_t bytes) = 0;
};

// For the length of a scope, this thread submits to a lane of the engine's.
class LaneGuard {
 public:
  LaneGuard(Device& device, Lane lane) : device_(device) { device_.enter(lane); }
  ~LaneGuard() { device_.leave(); }
  LaneGuard(const LaneGuard&) = delete;
  LaneGuard& operator=(const LaneGuard&) = delete;

 private:
  Device& device_;
};

// An event that may be none.
class Mark {
 public:
  explicit Mark(Device& device) : event_(device.make_event()) {}
  void record() {
    if (event_ != nullptr) {
      event_->record();
    }
  }
  void wait() {
    if (event_ != nullptr) {
      event_->wait();
    }
  }

 private:
  std::unique_ptr<Event> event_;
};

}  // namespace tt::runtime
