#include <algorithm>
#include <utility>

#include "runtime/checks.h"
#include "runtime/context.h"
#include "runtime/error_message.h"
#include "runtime/scheduler.h"

namespace sim {
namespace {

StreamThread::Deadline deadline_after(Milliseconds timeout) {
  if (timeout < 0) return {};
  return std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout);
}

}  // namespace

Stream* Scheduler::find_stream(aclrtStream handle) {
  if (handle == nullptr) {
    Context* context = current_context();
    if (context == nullptr) return nullptr;
    if (context->default_stream == nullptr) context->default_stream = make_stream(context->card);
    handle = context->default_stream;
  }
  auto found = streams_.find(handle);
  return found == streams_.end() ? nullptr : found->second.get();
}

aclrtStream Scheduler::make_stream(int card) {
  auto stream = std::make_unique<Stream>();
  const int id = next_stream_id_++;
  if (free_slots_.empty()) {
    stream->slot = static_cast<Slot>(slot_times_.size());
    slot_times_.push_back(0);
    slot_streams_.push_back(id);
  } else {
    // The clock of the slot goes on: what its last owner did is over.
    stream->slot = free_slots_.back();
    free_slots_.pop_back();
    slot_streams_[stream->slot] = id;
  }
  stream->thread = std::make_shared<StreamThread>(card, id);
  stream->thread->start();
  aclrtStream handle = stream.get();
  streams_.emplace(handle, std::move(stream));
  return handle;
}

aclrtStream Scheduler::create_stream(int card) {
  std::scoped_lock lock(mutex_);
  return make_stream(card);
}

aclError Scheduler::failure_of(StreamThread& thread) const {
  std::string message;
  const aclError failed = thread.error(&message);
  if (failed != ACL_SUCCESS) set_error_message(std::move(message));
  return failed;
}

aclError Scheduler::destroy_stream(aclrtStream handle, bool force) {
  std::shared_ptr<StreamThread> thread;
  Slot slot = 0;
  {
    std::scoped_lock lock(mutex_);
    auto found = streams_.find(handle);
    if (found == streams_.end()) return error(ACL_ERROR_RT_PARAM_INVALID, "aclrtDestroyStream: not a stream");
    Stream& stream = *found->second;
    thread = stream.thread;
    slot = stream.slot;
    if (!force && !host_.covers(slot, stream.last_work)) {
      violation("stream destroyed while busy", "stream " + std::to_string(thread->id) +
                                                   " is destroyed, and the host has not waited for its last task");
    }
    streams_.erase(found);
  }
  thread->stop();
  // What the stream still had to do is done before the handle is gone; a stream that hangs is left behind.
  const auto patience = force ? std::chrono::seconds(1) : std::chrono::hours(1);
  if (thread->wait_until_stopped(std::chrono::steady_clock::now() + patience)) {
    std::scoped_lock lock(mutex_);
    host_.join([&] {
      Clock over;
      over.set(slot, slot_times_[slot]);
      return over;
    }());
    free_slots_.push_back(slot);
  }
  return ACL_SUCCESS;
}

aclError Scheduler::synchronize_stream(aclrtStream handle, Milliseconds timeout) {
  std::shared_ptr<StreamThread> thread;
  Clock clock;
  {
    std::scoped_lock lock(mutex_);
    Stream* stream = find_stream(handle);
    if (stream == nullptr) return error(ACL_ERROR_RT_PARAM_INVALID, "aclrtSynchronizeStream: not a stream");
    thread = stream->thread;
    clock = stream->clock;
  }
  if (!thread->drain(deadline_after(timeout))) {
    return error(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT,
                 "stream " + std::to_string(thread->id) + " has work left after " + std::to_string(timeout) + " ms");
  }
  host_learns(clock);
  return failure_of(*thread);
}

aclError Scheduler::synchronize_card(int card, Milliseconds timeout) {
  std::vector<std::pair<std::shared_ptr<StreamThread>, Clock>> all;
  {
    std::scoped_lock lock(mutex_);
    for (auto& [handle, stream] : streams_) {
      if (card < 0 || stream->thread->card == card) all.emplace_back(stream->thread, stream->clock);
    }
  }
  const auto deadline = deadline_after(timeout);
  aclError result = ACL_SUCCESS;
  for (auto& [thread, clock] : all) {
    if (!thread->drain(deadline)) {
      return error(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "stream " + std::to_string(thread->id) + " has work left");
    }
    host_learns(clock);
    if (aclError failed = failure_of(*thread); failed != ACL_SUCCESS) result = failed;
  }
  return result;
}

aclError Scheduler::query_stream(aclrtStream handle, bool* complete) {
  std::scoped_lock lock(mutex_);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return error(ACL_ERROR_RT_PARAM_INVALID, "aclrtStreamQuery: not a stream");
  *complete = stream->thread->idle();
  if (*complete) host_.join(stream->clock);
  return failure_of(*stream->thread);
}

int Scheduler::card_of_stream(aclrtStream handle) {
  std::scoped_lock lock(mutex_);
  Stream* stream = find_stream(handle);
  return stream == nullptr ? -1 : stream->thread->card;
}

int Scheduler::stream_id(aclrtStream handle) {
  std::scoped_lock lock(mutex_);
  Stream* stream = find_stream(handle);
  return stream == nullptr ? -1 : stream->thread->id;
}

bool Scheduler::stop_all(std::chrono::milliseconds patience) {
  std::vector<std::shared_ptr<StreamThread>> all;
  {
    std::scoped_lock lock(mutex_);
    for (auto& [handle, stream] : streams_) all.push_back(stream->thread);
  }
  const auto deadline = std::chrono::steady_clock::now() + patience;
  for (auto& thread : all) thread->stop();
  return std::all_of(all.begin(), all.end(), [&](auto& thread) { return thread->wait_until_stopped(deadline); });
}

}  // namespace sim
