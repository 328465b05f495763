// Blocking until all ranks have got somewhere, and the errors when one of them never will.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/stress.h"
#include "host/control_block.h"

namespace tt::host {

class PeerWait {
 public:
  using Clock = std::chrono::steady_clock;
  // Whether a rank has got to where this one waits for it. May throw PeerError.
  using Arrived = std::function<bool(int rank)>;

  // `names` of the ranks, and those in `memory`, are for messages.
  PeerWait(ControlBlock control, int rank, std::vector<std::string> names, const runtime::MemoryLayout& memory,
           double timeout_seconds);

  // Begins to watch every rank whose process id is known by now.
  void watch_peers();
  void set_progress(std::function<void()> progress) { progress_ = std::move(progress); }

  // Returns when arrived(rank) for every rank. Throws PeerError if one of those missing is dead, has failed or left, or
  // has not arrived at the deadline; and what `progress` throws.
  template <typename ArrivedFunction>
  void wait(const WaitReason& reason, const ArrivedFunction& arrived) {
    stress_delay();
    if (all(arrived)) return;
    wait_slowly(reason, arrived, timeout_seconds_, kTimeoutHint, false);
  }

  // As wait(), but returns false when one of those missing is itself blocked in a wait.
  template <typename ArrivedFunction>
  bool wait_or_stuck(const WaitReason& reason, const ArrivedFunction& arrived) {
    stress_delay();
    if (all(arrived)) return true;
    return wait_slowly(reason, arrived, timeout_seconds_, kTimeoutHint, true);
  }

  // The wait for all ranks to map the memory.
  void wait_attached(double timeout_seconds, const Arrived& arrived);

  // Marks this rank as failed. The first reason stays.
  void fail(const std::string& why) noexcept;
  // Marks this rank as failed and throws PeerError: ranks do not run the same program any more.
  [[noreturn]] void throw_apart(const std::string& what);
  // ... since `skipper` has ended backward pass `ended` and never reduced what `waiter` waits for. Either may see it
  // first.
  [[noreturn]] void throw_skipped(int skipper, std::uint64_t ended, std::uint32_t bucket, std::uint64_t round,
                                  int waiter);
  // Throws if this rank has failed: its peers count on nothing more from it.
  void check_not_failed();

  template <typename ArrivedFunction>
  bool all(const ArrivedFunction& arrived) {
    for (int rank = 0; rank < control_.num_ranks(); ++rank) {
      if (!arrived(rank)) return false;
    }
    return true;
  }

  const std::string& name(int rank) const { return names_[static_cast<std::size_t>(rank)]; }
  const std::string& my_name() const { return name(rank_); }
  std::string unit(std::uint32_t unit) const;            // "unit 'layers.3'"
  std::string bucket(std::uint32_t bucket) const;        // "bucket 5 of unit 'layers.3'"
  std::string describe(const WaitReason& reason) const;  // "gather 17 of unit 'layers.3'"

 private:
  static constexpr const char* kTimeoutHint =
      "If the others are only slow (first compilation, slow storage), raise HCCL_EXEC_TIMEOUT";

  bool wait_slowly(const WaitReason& reason, const Arrived& arrived, double timeout_seconds, const char* hint,
                   bool return_if_stuck);
  bool spin(const Arrived& arrived);
  void check_peers(const WaitReason& reason, const Arrived& arrived);
  bool is_stuck(const WaitReason& reason, const Arrived& arrived);
  // Whether a rank that waits for `reason` waits for this rank, which will not get there before its own wait ends.
  bool waits_for_me(const WaitReason& reason);
  void check_mutual(const WaitReason& reason, const Arrived& arrived);
  [[noreturn]] void throw_late(const WaitReason& reason, const Arrived& arrived, double timeout_seconds,
                               const char* hint);
  std::string who(int rank);  // "rank 1 (pid 4711)"

  ControlBlock control_;
  int rank_;
  std::vector<std::string> names_;
  std::vector<std::string> unit_names_;
  std::vector<std::uint32_t> bucket_units_;
  double timeout_seconds_;
  std::vector<std::optional<ProcessWatch>> watches_;
  std::chrono::microseconds spin_time_;
  Clock::time_point next_death_check_{};
  std::function<void()> progress_;
  std::atomic_flag has_failed_ = ATOMIC_FLAG_INIT;
};

}  // namespace tt::host
