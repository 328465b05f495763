// Where the collectives of one queue are launched from.
//
// Each queue has a stream of its own: on one stream for two queues, ranks that interleave the two differently would
// wait in a circle.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <optional>
#include <utility>

#include "torch/collective_queue.h"
#include "torch/stream_event.h"

namespace tt {

class LaunchStream {
 public:
  // On the host there are no streams: a launch is then what it is.
  explicit LaunchStream(c10::Device device) : device_(device) {
    if (!device.is_cpu()) {
      stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
    }
  }

  // What `launch` does, after all that the caller has submitted to its current stream, whichever thread runs it later.
  CollectiveQueue::Launch after_current(CollectiveQueue::Launch launch) const {
    if (!stream_) return launch;
    const auto written = std::make_shared<StreamEvent>(device_);
    written->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
    return [launch = std::move(launch), written, stream = *stream_](const CollectiveQueue::Job& job) {
      const c10::StreamGuard on(stream);
      written->block(stream);
      return launch(job);
    };
  }

 private:
  c10::Device device_;
  std::optional<c10::Stream> stream_;
};

}  // namespace tt
