#include "runtime/scheduler.h"

#include <signal.h>

#include <cinttypes>
#include <cstdio>
#include <utility>

#include "runtime/allocations.h"
#include "runtime/card_memory.h"
#include "runtime/checks.h"
#include "runtime/context.h"
#include "runtime/counters.h"
#include "runtime/error_message.h"
#include "runtime/settings.h"
#include "runtime/statistics.h"

namespace sim {
namespace {

std::string hex(std::uintptr_t number) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%" PRIxPTR, number);
  return text;
}

std::string range(std::uintptr_t begin, std::uintptr_t end) {
  std::string text = "bytes " + hex(begin) + " to " + hex(end);
  const auto* address = reinterpret_cast<const void*>(begin);
  const int card = card_of_address(address);
  if (card < 0) return text + " of host memory";
  text += " of card " + std::to_string(card);
  if (auto allocation = allocation_of(address)) {
    text += " (allocation of " + std::to_string(allocation->bytes) + " bytes at " +
            hex(reinterpret_cast<std::uintptr_t>(allocation->begin)) + ")";
  }
  return text;
}

void check_allocated(const std::string& name, const Access& access) {
  if (card_of_address(access.begin) < 0) return;
  const std::string what = name + (access.writes ? " writes " : " reads ") + std::to_string(access.bytes) +
                           " bytes at " + hex(reinterpret_cast<std::uintptr_t>(access.begin));
  auto allocation = allocation_of(access.begin);
  if (!allocation) {
    violation("use after free", what + ", which " + describe_unallocated(access.begin));
    return;
  }
  const auto* end = static_cast<const char*>(access.begin) + access.bytes;
  if (end > allocation->begin + allocation->bytes) {
    violation("out of bounds", what + ", beyond the allocation of " + std::to_string(allocation->bytes) + " bytes at " +
                                   hex(reinterpret_cast<std::uintptr_t>(allocation->begin)));
  }
}

const char* copy_direction(const Task& task) {
  bool from_card = false;
  bool to_card = false;
  for (const Access& access : task.accesses) {
    (access.writes ? to_card : from_card) |= card_of_address(access.begin) >= 0;
  }
  return from_card ? (to_card ? "d2d" : "d2h") : (to_card ? "h2d" : "h2h");
}

std::size_t written_bytes(const Task& task) {
  std::size_t bytes = 0;
  for (const Access& access : task.accesses) bytes += access.writes ? access.bytes : 0;
  return bytes;
}

}  // namespace

// libhccl and libopapi leave the counting to this.
static void count_task(const Task& task) {
  switch (task.kind) {
    case TaskKind::kOperator:
      count_launch(task.name);
      count_bytes_written(task.name, written_bytes(task));
      break;
    case TaskKind::kCopy:
      count_copy(copy_direction(task), task.bytes_moved);
      break;
    case TaskKind::kMemset:
      count_copy("memset", task.bytes_moved);
      break;
    case TaskKind::kCollective:
      count_collective(task.name, task.bytes_moved);
      break;
    case TaskKind::kHostFunction:
      break;
  }
}

std::uint64_t Scheduler::advance(Stream& stream) {
  const std::uint64_t time = ++slot_times_[stream.slot];
  stream.clock.join(host_);
  stream.clock.set(stream.slot, time);
  return time;
}

std::string Scheduler::describe(Stamp stamp) const {
  if (stamp.slot == 0) return races_.name_of(stamp) + " on the host";
  return races_.name_of(stamp) + " (task " + std::to_string(stamp.time) + " of stream " +
         std::to_string(slot_streams_[stamp.slot]) + ")";
}

void Scheduler::check(const Clock& clock, Slot slot, std::uint64_t time, const std::string& name,
                      const std::vector<Access>& accesses) {
  const Stamp now = races_.stamp(slot, time, name);
  for (const Access& access : accesses) {
    if (access.bytes == 0) continue;
    check_allocated(name, access);
    const auto begin = reinterpret_cast<std::uintptr_t>(access.begin);
    if (auto conflict = races_.access(clock, now, begin, begin + access.bytes, access.writes)) {
      violation("race", describe(now) + (access.writes ? " writes " : " reads ") +
                            range(conflict->begin, conflict->end) + ", which " + describe(conflict->earlier) +
                            (conflict->earlier_wrote ? " writes" : " reads") +
                            "; no event and no synchronisation orders the two");
    }
  }
  if (races_.size() > prune_at_) {
    races_.prune(host_);
    prune_at_ = std::max<std::size_t>(4096, 2 * races_.size());
  }
}

aclError Scheduler::submit(aclrtStream handle, Task task) {
  if (fault_is_due("peer_death", "")) raise(SIGKILL);
  std::scoped_lock lock(mutex_);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return error(ACL_ERROR_RT_PARAM_INVALID, task.name + ": not a stream");
  if (aclError failed = failure_of(*stream->thread); failed != ACL_SUCCESS) return failed;
  const std::uint64_t time = advance(*stream);
  stream->last_work = time;
  check(stream->clock, stream->slot, time, task.name, task.accesses);
  count_task(task);
  if (task.kind == TaskKind::kOperator && fault_is_due("operator", task.name)) {
    task.run = [] { return error(ACL_ERROR_RT_AICORE_EXCEPTION, "TT_SIM_FAULT made it fail"); };
  }
  stream->thread->push({std::move(task.name), nullptr, std::move(task.run), nullptr});
  return ACL_SUCCESS;
}

aclError Scheduler::submit_host_function(aclrtStream handle, std::string name, std::function<aclError()> function) {
  std::scoped_lock lock(mutex_);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return error(ACL_ERROR_RT_PARAM_INVALID, name + ": not a stream");
  if (aclError failed = failure_of(*stream->thread); failed != ACL_SUCCESS) return failed;
  stream->last_work = advance(*stream);
  auto run = [this, function = std::move(function), clock = stream->clock] {
    host_learns(clock);
    return function();
  };
  stream->thread->push({std::move(name), nullptr, std::move(run), nullptr});
  return ACL_SUCCESS;
}

void Scheduler::check_free(const void* address, std::size_t bytes) {
  std::scoped_lock lock(mutex_);
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  if (auto conflict = races_.unordered(host_, begin, begin + bytes)) {
    violation("free while in use", "aclrtFree of " + range(begin, begin + bytes) + ", which " +
                                       describe(conflict->earlier) + (conflict->earlier_wrote ? " writes" : " reads") +
                                       "; the host has not waited for that");
  }
  races_.forget(begin, begin + bytes);
}

void Scheduler::host_access(const std::string& name, const std::vector<Access>& accesses) {
  std::scoped_lock lock(mutex_);
  host_.set(0, ++host_time_);
  check(host_, 0, host_time_, name, accesses);
}

void Scheduler::host_learns(const Clock& clock) {
  std::scoped_lock lock(mutex_);
  host_.join(clock);
}

Scheduler& scheduler() { return immortal<Scheduler>(); }

aclError submit(aclrtStream stream, Task task) { return scheduler().submit(stream, std::move(task)); }

int card_of_stream(aclrtStream stream) { return scheduler().card_of_stream(stream); }

}  // namespace sim
