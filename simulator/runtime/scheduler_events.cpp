#include <utility>

#include "runtime/checks.h"
#include "runtime/error_message.h"
#include "runtime/scheduler.h"

namespace sim {
namespace {

constexpr aclError kEventNotComplete = 507006;

constexpr std::uintptr_t kFirstHandle = std::uintptr_t{1} << 56;

std::uintptr_t handle_number(std::uint64_t event) { return kFirstHandle + event * 16; }

std::chrono::duration<float, std::milli> between(const Record& start, const Record& end) {
  return end.completed_at() - start.completed_at();
}

}  // namespace

std::shared_ptr<Event> Scheduler::find_event(aclrtEvent handle, const char* use) {
  auto found = events_.find(handle);
  if (found != events_.end()) return found->second;
  const auto value = reinterpret_cast<std::uintptr_t>(handle);
  if (value > kFirstHandle && value < handle_number(next_event_)) {
    violation("use of a destroyed event", std::string(use) + " of an event that was destroyed");
  }
  return nullptr;
}

aclrtEvent Scheduler::create_event(bool timed, bool extended) {
  auto event = std::make_shared<Event>();
  event->timed = timed;
  event->extended = extended;
  std::scoped_lock lock(mutex_);
  auto* handle = reinterpret_cast<aclrtEvent>(handle_number(next_event_++));
  events_.emplace(handle, std::move(event));
  return handle;
}

aclError Scheduler::destroy_event(aclrtEvent handle) {
  std::scoped_lock lock(mutex_);
  auto event = find_event(handle, "aclrtDestroyEvent");
  if (event == nullptr) return error(ACL_ERROR_RT_PARAM_INVALID, "aclrtDestroyEvent: not an event");
  const auto& record = event->record;
  if (record && !event->extended && !host_.covers(record->slot, record->time)) {
    violation("event destroyed while pending", "an event that was recorded as task " + std::to_string(record->time) +
                                                   " of stream " + std::to_string(slot_streams_[record->slot]) +
                                                   " is destroyed, and the host has not waited for that");
  }
  events_.erase(handle);
  return ACL_SUCCESS;
}

aclError Scheduler::record_event(aclrtEvent event_handle, aclrtStream stream_handle) {
  std::scoped_lock lock(mutex_);
  auto event = find_event(event_handle, "aclrtRecordEvent");
  Stream* stream = find_stream(stream_handle);
  if (event == nullptr) return error(ACL_ERROR_RT_PARAM_INVALID, "aclrtRecordEvent: not an event");
  if (stream == nullptr) return error(ACL_ERROR_RT_PARAM_INVALID, "aclrtRecordEvent: not a stream");
  auto record = std::make_shared<Record>();
  record->time = advance(*stream);
  record->slot = stream->slot;
  record->clock = stream->clock;
  event->record = record;
  stream->thread->push({"aclrtRecordEvent", nullptr, nullptr, std::move(record)});
  return ACL_SUCCESS;
}

aclError Scheduler::reset_event(aclrtEvent handle) {
  std::scoped_lock lock(mutex_);
  auto event = find_event(handle, "aclrtResetEvent");
  if (event == nullptr) return error(ACL_ERROR_RT_PARAM_INVALID, "aclrtResetEvent: not an event");
  event->record = nullptr;
  return ACL_SUCCESS;
}

aclError Scheduler::wait_for_event(aclrtStream stream_handle, aclrtEvent event_handle) {
  std::scoped_lock lock(mutex_);
  auto event = find_event(event_handle, "aclrtStreamWaitEvent");
  Stream* stream = find_stream(stream_handle);
  if (event == nullptr) return error(ACL_ERROR_RT_PARAM_INVALID, "aclrtStreamWaitEvent: not an event");
  if (stream == nullptr) return error(ACL_ERROR_RT_PARAM_INVALID, "aclrtStreamWaitEvent: not a stream");
  // Nothing was recorded yet: there is nothing to wait for, and a later record does not count.
  if (event->record == nullptr) return ACL_SUCCESS;
  advance(*stream);
  stream->clock.join(event->record->clock);
  stream->thread->push({"aclrtStreamWaitEvent", event->record, nullptr, nullptr});
  return ACL_SUCCESS;
}

aclError Scheduler::synchronize_event(aclrtEvent handle) {
  std::shared_ptr<Record> record;
  {
    std::scoped_lock lock(mutex_);
    auto event = find_event(handle, "aclrtSynchronizeEvent");
    if (event == nullptr) return error(ACL_ERROR_RT_PARAM_INVALID, "aclrtSynchronizeEvent: not an event");
    record = event->record;
  }
  if (record == nullptr) return ACL_SUCCESS;
  const aclError failed = record->wait();
  host_learns(record->clock);
  if (failed != ACL_SUCCESS) set_error_message("the stream of the event failed before the event was reached");
  return failed;
}

aclError Scheduler::query_event(aclrtEvent handle, bool* complete, bool* pending) {
  std::scoped_lock lock(mutex_);
  auto event = find_event(handle, "query");
  if (event == nullptr) return error(ACL_ERROR_RT_PARAM_INVALID, "query of an event: not an event");
  const auto& record = event->record;
  *complete = record != nullptr && record->completed();
  *pending = record != nullptr && !*complete;
  if (*complete) host_.join(record->clock);
  return ACL_SUCCESS;
}

aclError Scheduler::elapsed_milliseconds(aclrtEvent start_handle, aclrtEvent end_handle, float* result) {
  std::scoped_lock lock(mutex_);
  auto start = find_event(start_handle, "aclrtEventElapsedTime");
  auto end = find_event(end_handle, "aclrtEventElapsedTime");
  if (start == nullptr || end == nullptr) return error(ACL_ERROR_RT_PARAM_INVALID, "elapsed time: not an event");
  if (!start->timed || !end->timed || start->record == nullptr || end->record == nullptr) {
    return error(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID,
                 "elapsed time: both events must be created with ACL_EVENT_TIME_LINE, and recorded");
  }
  if (!start->record->completed() || !end->record->completed()) {
    return error(kEventNotComplete, "elapsed time: an event has not been reached yet");
  }
  *result = between(*start->record, *end->record).count();
  return ACL_SUCCESS;
}

aclError Scheduler::event_timestamp(aclrtEvent handle, std::uint64_t* microseconds) {
  std::scoped_lock lock(mutex_);
  auto event = find_event(handle, "aclrtEventGetTimestamp");
  if (event == nullptr) return error(ACL_ERROR_RT_PARAM_INVALID, "timestamp of an event: not an event");
  if (!event->timed || event->record == nullptr || !event->record->completed()) {
    return error(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "timestamp of an event: not recorded, or not reached yet");
  }
  const auto since_start = event->record->completed_at().time_since_epoch();
  *microseconds =
      static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(since_start).count());
  return ACL_SUCCESS;
}

}  // namespace sim
