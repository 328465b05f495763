// All streams and events of the process. Submissions form one sequence: under one lock, a task is checked, ordered and
// queued. What the host has waited for is part of that order: everything submitted later lies after it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "abi/acl.h"
#include "runtime/clock.h"
#include "runtime/race_detector.h"
#include "runtime/stream.h"
#include "runtime/stream_thread.h"

namespace sim {

struct Stream {
  std::shared_ptr<StreamThread> thread;
  Clock clock;  // of the task that was submitted last
  Slot slot = 0;
  std::uint64_t last_work = 0;  // the number of the last task that is no wait and no record
};

struct Event {
  bool timed = false;
  // Made by aclrtCreateEventEx…: may be destroyed while its record is pending, which torch_npu does at every
  // wait_stream; what was submitted keeps its meaning.
  bool extended = false;
  std::shared_ptr<Record> record;  // submitted last; null before the first one
};

using Milliseconds = std::int64_t;
constexpr Milliseconds kForever = -1;

class Scheduler {
 public:
  aclrtStream create_stream(int card);
  aclError destroy_stream(aclrtStream stream, bool force);
  aclError synchronize_stream(aclrtStream stream, Milliseconds timeout);
  aclError synchronize_card(int card, Milliseconds timeout);  // -1: all cards
  aclError query_stream(aclrtStream stream, bool* complete);
  int card_of_stream(aclrtStream stream);
  int stream_id(aclrtStream stream);
  aclError submit(aclrtStream stream, Task task);

  // The function may conclude that all before it on the stream is done.
  aclError submit_host_function(aclrtStream stream, std::string name, std::function<aclError()> function);

  aclrtEvent create_event(bool timed, bool extended);
  aclError destroy_event(aclrtEvent event);
  aclError record_event(aclrtEvent event, aclrtStream stream);
  aclError reset_event(aclrtEvent event);
  aclError wait_for_event(aclrtStream stream, aclrtEvent event);
  aclError synchronize_event(aclrtEvent event);
  // Complete: the last record has been reached. An event without any is not complete, and pending is false.
  aclError query_event(aclrtEvent event, bool* complete, bool* pending);
  aclError elapsed_milliseconds(aclrtEvent start, aclrtEvent end, float* result);
  aclError event_timestamp(aclrtEvent event, std::uint64_t* microseconds);

  // Card memory is about to be freed: whatever still uses it is a violation.
  void check_free(const void* begin, std::size_t bytes);
  // The host itself copies now.
  void host_access(const std::string& name, const std::vector<Access>& accesses);
  // The host heard, inside a task, that all before it is done.
  void host_learns(const Clock& clock);

  // Streams end when they have run what is queued; false if some did not until then.
  bool stop_all(std::chrono::milliseconds patience);

 private:
  aclrtStream make_stream(int card);
  Stream* find_stream(aclrtStream stream);
  // Null for what is no event. One that was destroyed is a violation: on a card, the handle may be another event's by
  // then. Here handles are numbers that no address is, and are never used again.
  std::shared_ptr<Event> find_event(aclrtEvent event, const char* use);
  // The next task of the stream: what the host knows lies behind it.
  std::uint64_t advance(Stream& stream);
  void check(const Clock& clock, Slot slot, std::uint64_t time, const std::string& name,
             const std::vector<Access>& accesses);
  std::string describe(Stamp stamp) const;
  aclError failure_of(StreamThread& thread) const;

  std::mutex mutex_;
  std::unordered_map<aclrtStream, std::unique_ptr<Stream>> streams_;
  std::unordered_map<aclrtEvent, std::shared_ptr<Event>> events_;
  std::vector<int> slot_streams_ = {0};  // the id of the stream that has each slot
  std::vector<Slot> free_slots_;
  std::vector<std::uint64_t> slot_times_ = {0};
  Clock host_;
  std::uint64_t host_time_ = 0;
  RaceDetector races_;
  std::size_t prune_at_ = 4096;
  int next_stream_id_ = 0;
  std::uint64_t next_event_ = 1;
};

Scheduler& scheduler();

}  // namespace sim
