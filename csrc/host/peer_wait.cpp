#include "host/peer_wait.h"

#include <cstring>
#include <thread>
#include <utility>

#include "base/error.h"

namespace tt::host {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// A wake-up costs some 50 microseconds, so spinning for longer gains nothing. With more ranks than processors, a
// spinning rank only takes the time that the one it waits for needs.
constexpr microseconds kSpin{50};
// Between looks at deadlines, dead peers and this rank's own progress.
constexpr milliseconds kSlice{20};
// A rank that was just woken may still show as waiting.
constexpr microseconds kStuckNap{300};

// Shows the peers that this rank is blocked, for as long as it lives.
class WaitingMark {
 public:
  WaitingMark(ControlBlock& control, int rank, const WaitReason& reason) : state_(control.rank(rank)) {
    state_.waiting_item.store(reason.item, std::memory_order_relaxed);
    state_.waiting_number.store(reason.number, std::memory_order_relaxed);
    state_.waiting.store(static_cast<std::uint32_t>(reason.kind), std::memory_order_release);
    Header& header = control.header();
    if (header.stuck_watchers.load(std::memory_order_relaxed) != 0) header.bell.ring();
  }
  ~WaitingMark() { state_.waiting.store(static_cast<std::uint32_t>(WaitKind::kNone), std::memory_order_release); }
  WaitingMark(const WaitingMark&) = delete;
  WaitingMark& operator=(const WaitingMark&) = delete;

 private:
  RankState& state_;
};

class CountMark {
 public:
  CountMark(std::atomic<std::uint32_t>& counter, bool counts) : counter_(counts ? &counter : nullptr) {
    if (counter_ != nullptr) counter_->fetch_add(1, std::memory_order_relaxed);
  }
  ~CountMark() {
    if (counter_ != nullptr) counter_->fetch_sub(1, std::memory_order_relaxed);
  }
  CountMark(const CountMark&) = delete;
  CountMark& operator=(const CountMark&) = delete;

 private:
  std::atomic<std::uint32_t>* counter_;
};

}  // namespace

PeerWait::PeerWait(ControlBlock control, int rank, std::vector<std::string> names, const runtime::MemoryLayout& memory,
                   double timeout_seconds)
    : control_(control),
      rank_(rank),
      names_(std::move(names)),
      unit_names_(memory.unit_names),
      bucket_units_(memory.bucket_units),
      timeout_seconds_(timeout_seconds),
      watches_(names_.size()),
      spin_time_(control_.num_ranks() > usable_processors() ? microseconds(0) : kSpin) {}

void PeerWait::watch_peers() {
  for (std::size_t rank = 0; rank < watches_.size(); ++rank) {
    const std::int32_t pid = control_.rank(static_cast<int>(rank)).pid.load(std::memory_order_acquire);
    if (!watches_[rank] && pid != 0) watches_[rank].emplace(pid);
  }
}

void PeerWait::wait_attached(double timeout_seconds, const Arrived& arrived) {
  wait_slowly({WaitKind::kAttach}, arrived, timeout_seconds,
              "See the logs of these ranks, or raise HCCL_CONNECT_TIMEOUT", false);
}

void PeerWait::fail(const std::string& why) noexcept {
  if (has_failed_.test_and_set()) return;
  RankState& state = control_.rank(rank_);
  std::strncpy(state.failure, why.c_str(), sizeof(state.failure) - 1);
  state.phase.store(static_cast<std::uint32_t>(RankPhase::kFailed), std::memory_order_release);
  control_.header().bell.ring();
}

void PeerWait::check_not_failed() {
  if (!has_failed_.test()) return;
  throw PeerError(str(my_name(), " gave up before: ", control_.rank(rank_).failure));
}

bool PeerWait::spin(const Arrived& arrived) {
  const Clock::time_point end = Clock::now() + spin_time_;
  do {
    for (int i = 0; i < 32; ++i) {
      if (all(arrived)) return true;
      cpu_relax();
    }
  } while (Clock::now() < end);
  return false;
}

bool PeerWait::wait_slowly(const WaitReason& reason, const Arrived& arrived, double timeout_seconds, const char* hint,
                           bool return_if_stuck) {
  if (spin(arrived)) return true;
  const Clock::time_point deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_seconds));
  // Others may wait for what this rank has still to finish.
  if (progress_) progress_();
  const CountMark watcher(control_.header().stuck_watchers, return_if_stuck);
  const WaitingMark mark(control_, rank_, reason);
  while (true) {
    if (all(arrived)) return true;
    check_peers(reason, arrived);
    if (return_if_stuck && is_stuck(reason, arrived)) return false;
    check_mutual(reason, arrived);
    if (Clock::now() >= deadline) throw_late(reason, arrived, timeout_seconds, hint);
    control_.header().bell.sleep_unless([&] { return all(arrived); }, kSlice);
    if (progress_) progress_();
  }
}

void PeerWait::check_peers(const WaitReason& reason, const Arrived& arrived) {
  // The most telling reason first: ranks that die or leave often do so because another one has failed.
  check_not_failed();
  for (int peer = 0; peer < control_.num_ranks(); ++peer) {
    RankState& state = control_.rank(peer);
    if (phase_of(state) == RankPhase::kFailed) throw PeerError(str(name(peer), " failed: ", state.failure));
  }
  if (const Clock::time_point now = Clock::now(); now >= next_death_check_) {
    next_death_check_ = now + kSlice;  // a system call per peer: not at every ring of the bell
    watch_peers();
    for (std::size_t rank = 0; rank < watches_.size(); ++rank) {
      const int peer = static_cast<int>(rank);
      if (peer == rank_ || arrived(peer) || !watches_[rank] || !watches_[rank]->is_dead()) continue;
      // What it said and published before it died counts, also what came after the look above.
      const RankPhase phase = phase_of(control_.rank(peer));
      if (arrived(peer) || phase == RankPhase::kFailed || phase == RankPhase::kLeft) continue;
      throw PeerError(
          str(who(peer), " died while ", my_name(), " waited for it in ", describe(reason),
              ". See its log for the reason (out of memory? `dmesg`), then start again from the last checkpoint"));
    }
  }
  // Ranks that give the same backward pass up at the same place do not wait in it for what comes after that place.
  const std::uint64_t ended = control_.rank(rank_).closed_round.load(std::memory_order_relaxed);
  for (int peer = 0; peer < control_.num_ranks(); ++peer) {
    const std::uint64_t given_up = control_.rank(peer).aborted_round.load(std::memory_order_acquire);
    if (given_up > ended && !arrived(peer) && reason.kind != WaitKind::kReduceUnlessStuck) {
      const std::string message =
          str(who(peer), " gave up backward pass ", given_up, " because of an exception there, while ", my_name(),
              " waited for it in ", describe(reason), ". See its log; an exception on one rank must stop all");
      fail(message);
      throw PeerError(message);
    }
  }
  for (int peer = 0; peer < control_.num_ranks(); ++peer) {
    if (phase_of(control_.rank(peer)) == RankPhase::kLeft && !arrived(peer)) {
      throw PeerError(str(who(peer), " has closed its communicator while ", my_name(), " waited for it in ",
                          describe(reason), ". All ranks must run the same number of steps"));
    }
  }
}

bool PeerWait::is_stuck(const WaitReason& reason, const Arrived& arrived) {
  const auto any = [&] {
    for (int peer = 0; peer < control_.num_ranks(); ++peer) {
      if (peer != rank_ && !arrived(peer) && control_.rank(peer).waiting.load(std::memory_order_acquire) != 0)
        return true;
    }
    return false;
  };
  // One that has given the backward pass up will not come either, and this rank may be about to do the same.
  for (int peer = 0; peer < control_.num_ranks(); ++peer) {
    const std::uint64_t closed = control_.rank(peer).closed_round.load(std::memory_order_acquire);
    if (closed >= reason.number && !arrived(peer)) return true;  // read first: its launches came before
  }
  if (!any()) return false;
  std::this_thread::sleep_for(kStuckNap);
  return any();
}

bool PeerWait::waits_for_me(const WaitReason& reason) {
  switch (reason.kind) {
    case WaitKind::kGather:
      return control_.rank(rank_).gathered.load(std::memory_order_relaxed) < reason.number;
    case WaitKind::kPlace:
      return reason.item < control_.num_places() &&
             control_.released(rank_, reason.item).load(std::memory_order_relaxed) < reason.number;
    case WaitKind::kReduce: {
      if (reason.item >= control_.num_buckets()) return false;
      const auto& slots = control_.bucket(rank_, reason.item).slots;
      return slots[0].round.load(std::memory_order_relaxed) != reason.number &&
             slots[1].round.load(std::memory_order_relaxed) != reason.number;
    }
    case WaitKind::kNone:
    case WaitKind::kAttach:
    case WaitKind::kReduceUnlessStuck:  // goes on by itself
    case WaitKind::kContribution:       // this rank's progress, called inside its wait, may end that one
      return false;
  }
  return false;
}

// A peer that waits for what this rank has not done, while this rank waits for it: neither will ever go on. Ranks in
// step do not get there: each has launched what others wait for, and released a place, before it waits for the next.
void PeerWait::check_mutual(const WaitReason& reason, const Arrived& arrived) {
  if (reason.kind != WaitKind::kGather && reason.kind != WaitKind::kPlace && reason.kind != WaitKind::kReduce) return;
  const auto blocked = [&](int peer) -> std::optional<WaitReason> {
    RankState& state = control_.rank(peer);
    const WaitReason its{static_cast<WaitKind>(state.waiting.load(std::memory_order_acquire)),
                         state.waiting_item.load(std::memory_order_relaxed),
                         state.waiting_number.load(std::memory_order_relaxed)};
    return waits_for_me(its) && !arrived(peer) ? std::optional(its) : std::nullopt;
  };
  for (int peer = 0; peer < control_.num_ranks(); ++peer) {
    if (peer == rank_) continue;
    const auto before = blocked(peer);
    if (!before) continue;
    std::this_thread::sleep_for(kStuckNap);  // the three values are not read at once, and may be of a wait just ended
    const auto its = blocked(peer);
    if (!its || its->kind != before->kind || its->item != before->item || its->number != before->number) continue;
    const std::uint64_t ended = control_.rank(rank_).closed_round.load(std::memory_order_relaxed);
    if (its->kind == WaitKind::kReduce && ended >= its->number)
      throw_skipped(rank_, ended, its->item, its->number, peer);
    throw_apart(str(my_name(), " waits for ", name(peer), " in ", describe(reason), ", and ", name(peer), " for ",
                    my_name(), " in ", describe(*its)));
  }
}

void PeerWait::throw_apart(const std::string& what) {
  const std::string message =
      str("ranks have come apart: ", what,
          ". All ranks must run the same modules in the same order, also where the data differ, and an exception on "
          "one must stop all");
  fail(message);
  throw PeerError(message);
}

void PeerWait::throw_skipped(int skipper, std::uint64_t ended, std::uint32_t bucket, std::uint64_t round, int waiter) {
  throw_apart(str(name(skipper), " has ended backward pass ", ended, " without the reduction of ", this->bucket(bucket),
                  " in backward pass ", round, " that ", name(waiter), " waits for"));
}

void PeerWait::throw_late(const WaitReason& reason, const Arrived& arrived, double timeout_seconds, const char* hint) {
  std::string late;
  for (int peer = 0; peer < control_.num_ranks(); ++peer) {
    if (arrived(peer)) continue;
    if (!late.empty()) late += ", ";
    late += who(peer);
    RankState& state = control_.rank(peer);
    const WaitReason its{static_cast<WaitKind>(state.waiting.load(std::memory_order_acquire)),
                         state.waiting_item.load(std::memory_order_relaxed),
                         state.waiting_number.load(std::memory_order_relaxed)};
    if (peer != rank_ && its.kind != WaitKind::kNone) late += str(", itself waiting in ", describe(its));
  }
  const std::string message = str(my_name(), " waited ", timeout_seconds, " seconds in ", describe(reason), " for ",
                                  late, ". See the logs and stacks of these ranks (`py-spy dump --pid`). ", hint);
  fail(message);
  throw PeerError(message);
}

std::string PeerWait::who(int rank) {
  const std::int32_t pid = control_.rank(rank).pid.load(std::memory_order_relaxed);
  return pid == 0 ? name(rank) : str(name(rank), " (pid ", pid, ")");
}

std::string PeerWait::unit(std::uint32_t unit) const {
  return unit < unit_names_.size() ? str("unit '", unit_names_[unit], "'") : str("unit ", unit);
}

std::string PeerWait::bucket(std::uint32_t bucket) const {
  return str("bucket ", bucket, bucket < bucket_units_.size() ? str(" of ", unit(bucket_units_[bucket])) : "");
}

std::string PeerWait::describe(const WaitReason& reason) const {
  switch (reason.kind) {
    case WaitKind::kNone:
      break;
    case WaitKind::kAttach:
      return "mapping the shared memory";
    case WaitKind::kGather:
      return str("gather ", reason.number, " of ", unit(reason.item));
    case WaitKind::kPlace:
      return str("the release of gather place ", reason.item, " (last used by gather ", reason.number, ")");
    case WaitKind::kReduce:
    case WaitKind::kReduceUnlessStuck:
      return str("the reduction of ", bucket(reason.item), " (backward pass ", reason.number, ")");
    case WaitKind::kContribution:
      return str("the release of its gradients of ", bucket(reason.item), " (backward pass ", reason.number, ")");
  }
  return "no wait";
}

}  // namespace tt::host
