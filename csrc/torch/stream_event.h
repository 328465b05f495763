// Events of an accelerator that may be dropped at any time.
//
// c10::Event destroys its event at once, also where a stream has still to reach it; AscendCL does not promise that this
// is right. So events come from a pool and go back to it, which costs less, too: recording one again is allowed at any
// time, and whoever waits for it goes on waiting for the record before.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace tt {

class StreamEvent {
 public:
  explicit StreamEvent(c10::Device device) : device_(device), event_(pool().take(device)) {}
  ~StreamEvent() { pool().give_back(device_, std::move(event_)); }
  StreamEvent(const StreamEvent&) = delete;
  StreamEvent& operator=(const StreamEvent&) = delete;

  void record(c10::Stream stream) { event_->record(stream); }
  void block(c10::Stream stream) const { event_->block(stream); }
  bool query() const { return event_->query(); }

 private:
  using EventPtr = std::unique_ptr<c10::Event>;

  class Pool {
   public:
    EventPtr take(c10::Device device) {
      const std::lock_guard lock(mutex_);
      auto& free = free_[device];
      if (free.empty()) {
        return std::make_unique<c10::Event>(device.type());
      }
      auto event = std::move(free.back());
      free.pop_back();
      return event;
    }
    void give_back(c10::Device device, EventPtr event) {
      const std::lock_guard lock(mutex_);
      free_[device].push_back(std::move(event));
    }

   private:
    std::mutex mutex_;
    std::map<c10::Device, std::vector<EventPtr>, bool (*)(const c10::Device&, const c10::Device&)> free_{
        [](const c10::Device& a, const c10::Device& b) {
          return std::pair(a.type(), a.index()) < std::pair(b.type(), b.index());
        }};
  };

  // Never destroyed: at the end of the process there may be no device left to destroy events of.
  static Pool& pool() {
    static auto* const kept = new Pool;
    return *kept;
  }

  c10::Device device_;
  EventPtr event_;
};

}  // namespace tt
