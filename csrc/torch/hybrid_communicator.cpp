#include "torch/hybrid_communicator.h"

#include <ATen/ATen.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/error.h"
#include "torch/dtypes.h"

namespace tt {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// Numbers that every sum dtype holds exactly.
constexpr std::uint64_t kRoundModulus = 1 << 16;

bool any(const std::vector<std::uint64_t>& bits) {
  return std::any_of(bits.begin(), bits.end(), [](std::uint64_t word) { return word != 0; });
}

// The values behind a shard in a staged tensor.
void write_value(const at::Tensor& data, std::size_t index, double value) {
  if (data.scalar_type() == at::kDouble) {
    data.mutable_data_ptr<double>()[index] = value;
  } else {
    data.mutable_data_ptr<float>()[index] = static_cast<float>(value);
  }
}

double read_value(const at::Tensor& data, std::size_t index) {
  return data.scalar_type() == at::kDouble ? data.const_data_ptr<double>()[index]
                                           : static_cast<double>(data.const_data_ptr<float>()[index]);
}

std::vector<std::string> names_of(const std::vector<int>& global_ranks) {
  std::vector<std::string> names;
  for (const int rank : global_ranks) {
    names.push_back(str("rank ", rank));
  }
  return names;
}

}  // namespace

// Sleeps between looks at what other ranks do, a little longer each time.
class HybridCommunicator::Patience {
 public:
  // `to_the_end`: this rank's part of the backward is done, so what does not come now is an error.
  Patience(HybridCommunicator& owner, bool to_the_end) : owner_(owner), to_the_end_(to_the_end) {}

  void pause() {
    std::this_thread::sleep_for(pause_);
    since_progress_ += pause_;
    since_look_ += pause_;
    pause_ = std::min(pause_ * 2, microseconds(500));
    if (since_progress_ > milliseconds(50)) {
      since_progress_ = microseconds(0);
      if (owner_.progress_) {
        owner_.progress_();
      }
    }
    if (since_look_ > milliseconds(100)) {
      since_look_ = microseconds(0);
      look_at_board();
      if (to_the_end_) {
        look_at_clock();
      }
    }
  }

 private:
  // What this rank waits for now; not with the same bucket in all of a wait.
  std::string awaited() const {
    const auto first = first_wanted();
    return first != owner_.travels_.end() ? owner_.describe(first->bucket, first->round) : "the sum over replicas";
  }

  // The first that is waited for: those behind it wait for the same.
  std::deque<Travel>::const_iterator first_wanted() const {
    return std::find_if(owner_.travels_.begin(), owner_.travels_.end(), [](const Travel& t) { return t.wanted; });
  }

  void look_at_clock() {
    if (std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count() > owner_.timeout_seconds_) {
      owner_.give_up(str("rank ", owner_.global_ranks_[owner_.replica_], " waited ", owner_.timeout_seconds_,
                         " seconds for ", awaited(),
                         ": a rank did not come to it. See the logs and stacks of all ranks (`py-spy dump --pid`). If "
                         "the others are only slow (first compilation, slow storage), raise HCCL_EXEC_TIMEOUT"));
    }
  }

  void look_at_board() {
    const auto first = first_wanted();
    const bool travels = first != owner_.travels_.end();
    std::string why = owner_.board_.failure();
    if (why.empty() && to_the_end_) {
      why = owner_.board_.stop(travels ? first->number : owner_.sent_ + 1);
    }
    if (why.empty() || (travels && first->work->isCompleted())) {
      return;
    }
    owner_.give_up(str("rank ", owner_.global_ranks_[owner_.replica_], ": ", awaited(), " will not come: ", why));
  }

  HybridCommunicator& owner_;
  bool to_the_end_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  microseconds pause_{10};
  microseconds since_progress_{0};
  microseconds since_look_{0};
};

HybridCommunicator::HybridCommunicator(std::shared_ptr<runtime::Communicator> inner, Group between,
                                       std::vector<int> global_ranks, c10::intrusive_ptr<c10d::Store> board,
                                       std::shared_ptr<runtime::Device> device, double timeout_seconds)
    : inner_(std::move(inner)),
      between_(std::move(between)),
      global_ranks_(std::move(global_ranks)),
      replica_(static_cast<std::size_t>(between_->getRank())),
      device_(std::move(device)),
      timeout_seconds_(timeout_seconds),
      name_(str(inner_->name(), " inside and c10d between ", global_ranks_.size(), " replicas")),
      owner_pid_(::getpid()),
      board_(std::move(board), str("rank ", global_ranks_.at(replica_)), names_of(global_ranks_)) {
  if (static_cast<std::size_t>(between_->getSize()) != global_ranks_.size()) {
    throw ValueError(str(global_ranks_.size(), " global ranks for a group of ", between_->getSize()));
  }
  if (!(timeout_seconds_ > 0)) {
    throw ValueError(str("a timeout of ", timeout_seconds_, " seconds: it must be positive"));
  }
}

HybridCommunicator::~HybridCommunicator() {
  if (::getpid() == owner_pid_) {
    board_.post_stop(sent_);
  }
}

template <typename Body>
auto HybridCommunicator::guarded(const Body& body) {
  if (!failure_.empty()) {
    throw PeerError(str("rank ", global_ranks_[replica_], " gave up before: ", failure_));
  }
  try {
    return body();
  } catch (const PeerError& error) {  // the inner communicator tells its own peers
    if (failure_.empty()) {
      failure_ = error.what();
      board_.post_failure(failure_);
    }
    throw;
  }
}

void HybridCommunicator::give_up(const std::string& message) {
  if (failure_.empty()) {
    failure_ = message;
    fail(message);
  }
  throw PeerError(message);
}

void HybridCommunicator::fail(const std::string& why) noexcept {
  inner_->fail(why);
  board_.post_failure(why);
}

std::string HybridCommunicator::replica(std::size_t index) const {
  return str("replica ", index, " (rank ", global_ranks_[index], ")");
}

std::string HybridCommunicator::describe(std::uint32_t bucket, std::uint64_t round) const {
  std::string ranks;
  for (const int rank : global_ranks_) {
    ranks += str(ranks.empty() ? "" : ", ", rank);
  }
  return str("the sum of bucket ", bucket, " over replicas (ranks ", ranks, ") in backward pass ", round);
}

void HybridCommunicator::allocate(const runtime::MemoryLayout& layout) {
  guarded([&] { inner_->allocate(layout); });
  layout_ = layout;
  TT_CHECK(layout_.staging.size() == layout_.bucket_params.size(), "the arena was laid out for one replica");
  staging_memory_ = at::empty({static_cast<std::int64_t>(layout_.staging_bytes)}, at::TensorOptions().dtype(at::kByte));
  reductions_.resize(layout_.bucket_params.size());
}

// ---- gather: inside the replica
// ---------------------------------------------------------------------------------------

bool HybridCommunicator::place_is_free(std::uint32_t place) {
  return guarded([&] { return inner_->place_is_free(place); });
}

void HybridCommunicator::wait_place_free(std::uint32_t place) {
  guarded([&] { inner_->wait_place_free(place); });
}

void HybridCommunicator::launch_gather(std::uint32_t place, const runtime::Tag& tag,
                                       std::span<const runtime::Segments> buckets) {
  guarded([&] { inner_->launch_gather(place, tag, buckets); });
}

void HybridCommunicator::wait_gather(std::uint32_t place, const runtime::Tag& tag) {
  guarded([&] { inner_->wait_gather(place, tag); });
}

void HybridCommunicator::release(std::uint32_t place) { inner_->release(place); }

// ---- reduce: inside the replica, then between them
// --------------------------------------------------------------------

HybridCommunicator::Reduction& HybridCommunicator::reduction(std::uint32_t bucket, std::uint64_t round) {
  auto& r = reductions_.at(bucket);
  TT_CHECK(r.round == round, "bucket ", bucket, " is in round ", r.round, ", not ", round);
  return r;
}

void HybridCommunicator::launch_reduce(const runtime::Contribution& contribution) {
  guarded([&] { inner_->launch_reduce(contribution); });
  reductions_.at(contribution.bucket) = {
      Phase::kInner, contribution.round, contribution.shard_numel, contribution.wire, {}};
  to_stage_.push_back(contribution.bucket);
}

void HybridCommunicator::close_round(std::uint64_t round) {
  guarded([&] { inner_->close_round(round); });
}

bool HybridCommunicator::staging_is_free(std::uint32_t bucket) const {
  const auto& mine = layout_.staging[bucket];
  return std::none_of(in_staging_.begin(), in_staging_.end(), [&](std::uint32_t other) {
    const auto& its = layout_.staging[other];
    return mine.offset < its.offset + its.bytes && its.offset < mine.offset + mine.bytes;
  });
}

void HybridCommunicator::leave_staging(std::uint32_t bucket) {
  in_staging_.erase(std::remove(in_staging_.begin(), in_staging_.end(), bucket), in_staging_.end());
}

std::int64_t HybridCommunicator::numel_of(std::uint32_t bucket, std::size_t shard_numel) const {
  return static_cast<std::int64_t>(runtime::staged_numel(shard_numel, layout_.bucket_params[bucket], replicas()));
}

void HybridCommunicator::advance() {
  while (!to_stage_.empty()) {
    const std::uint32_t bucket = to_stage_.front();
    if (!inner_->reduce_is_ready(bucket, reductions_[bucket].round) || !staging_is_free(bucket)) {
      break;
    }
    to_stage_.pop_front();
    stage(bucket);
  }
  for (auto travel = travels_.begin(); travel != travels_.end();) {
    if (!travel->work->isCompleted()) {
      ++travel;
      continue;
    }
    arrive(*travel);
    travel = travels_.erase(travel);
  }
}

void HybridCommunicator::stage(std::uint32_t bucket) {
  auto& r = reductions_[bucket];
  const auto& staging = layout_.staging[bucket];
  std::byte* where = static_cast<std::byte*>(staging_memory_.mutable_data_ptr()) + staging.offset;
  const DType sum = runtime::sum_dtype(r.wire);
  r.reported = inner_->reported_anywhere(bucket, r.round);
  if (any(r.reported)) {
    const auto segments = inner_->my_segment_everywhere(bucket, r.round);
    device_->sum(where, segments, r.shard_numel, {inner_->segment_dtype(r.wire), sum, sum});
  } else {
    device_->zero(where, r.shard_numel * size_of(sum));
  }
  inner_->finish_reduce(bucket, r.round);
  const std::int64_t numel = numel_of(bucket, r.shard_numel);
  TT_CHECK(static_cast<std::size_t>(numel) * size_of(sum) <= staging.bytes, "bucket ", bucket, " has no room");
  in_staging_.push_back(bucket);
  // A view, which keeps the memory alive as long as the all-reduce runs, also when this communicator is gone.
  const auto bytes = numel * static_cast<std::int64_t>(size_of(sum));
  auto data = staging_memory_.narrow(0, static_cast<std::int64_t>(staging.offset), bytes).view(to_torch(sum));
  std::size_t next = r.shard_numel;
  for (std::size_t i = 0; i < layout_.bucket_params[bucket]; ++i) {
    write_value(data, next++, static_cast<double>(r.reported[i / 64] >> (i % 64) & 1U));
  }
  for (std::size_t index = 0; index < global_ranks_.size(); ++index) {
    write_value(data, next++, index == replica_ ? bucket + 1.0 : 0.0);
    write_value(data, next++, index == replica_ ? static_cast<double>(r.round % kRoundModulus) : 0.0);
  }
  send(bucket, r.round, std::move(data), true);
  r.phase = Phase::kBetween;
}

void HybridCommunicator::send(std::uint32_t bucket, std::uint64_t round, at::Tensor data, bool staged) {
  std::vector<at::Tensor> tensors{data};
  Work work;
  try {
    work = between_->allreduce(tensors);
  } catch (const std::exception& error) {
    give_up(str("rank ", global_ranks_[replica_], ": ", describe(bucket, round), " failed (", error.what(), ")"));
  }
  travels_.push_back({bucket, round, ++sent_, std::move(work), std::move(data), staged, staged});
}

// The all-reduce has ended.
void HybridCommunicator::arrive(Travel& travel) {
  ++arrived_;
  try {
    travel.work->wait();
  } catch (const std::exception& error) {
    give_up(str("rank ", global_ranks_[replica_], ": ", describe(travel.bucket, travel.round),
                " failed: a peer died, failed, or did not arrive in time (", error.what(), ")"));
  }
  if (!travel.wanted) {
    if (travel.staged) {
      leave_staging(travel.bucket);
    }
    return;
  }
  auto& r = reduction(travel.bucket, travel.round);
  if (!all_sent(travel)) {
    r.phase = Phase::kVoid;
    return;
  }
  std::fill(r.reported.begin(), r.reported.end(), 0);
  for (std::size_t i = 0; i < layout_.bucket_params[travel.bucket]; ++i) {
    if (read_value(travel.data, r.shard_numel + i) != 0) {
      r.reported[i / 64] |= std::uint64_t{1} << (i % 64);
    }
  }
  r.phase = Phase::kReady;
}

bool HybridCommunicator::all_sent(const Travel& travel) {
  bool all = true;
  const std::size_t first = reductions_[travel.bucket].shard_numel + layout_.bucket_params[travel.bucket];
  for (std::size_t index = 0; index < global_ranks_.size(); ++index) {
    const auto bucket = static_cast<std::uint64_t>(read_value(travel.data, first + 2 * index));
    const auto round = static_cast<std::uint64_t>(read_value(travel.data, first + 2 * index + 1));
    if (bucket == travel.bucket + 1 && round == travel.round % kRoundModulus) {
      continue;
    }
    if (bucket == 0) {
      all = false;
      continue;
    }
    give_up(str("replicas have come apart: ", replica(replica_), " sums bucket ", travel.bucket, " of backward pass ",
                travel.round, ", ", replica(index), " bucket ", bucket - 1, " of backward pass ", round,
                ". All ranks must run the same number of backward passes, and an exception on one must stop all"));
  }
  return all;
}

void HybridCommunicator::send_void(std::uint32_t bucket, std::uint64_t round, std::size_t shard_numel, DType wire) {
  const auto options = at::TensorOptions().dtype(to_torch(runtime::sum_dtype(wire)));
  send(bucket, round, at::zeros({numel_of(bucket, shard_numel)}, options), false);
}

void HybridCommunicator::abort_round(std::uint64_t round, std::span<const runtime::Contribution> not_launched) {
  inner_->abort_round(round, not_launched);
  for (auto& travel : travels_) {
    travel.wanted = false;
  }
  std::vector<std::pair<std::uint32_t, Reduction>> unsent;
  for (const std::uint32_t bucket : to_stage_) {
    unsent.emplace_back(bucket, reductions_[bucket]);
  }
  to_stage_.clear();
  for (std::uint32_t bucket = 0; bucket < reductions_.size(); ++bucket) {
    auto& r = reductions_[bucket];
    if (r.phase == Phase::kReady || r.phase == Phase::kVoid) {
      leave_staging(bucket);
    }
    r = Reduction{};
  }
  if (!failure_.empty()) {
    return;
  }
  try {
    // Replicas that give up at the same place may have sent different numbers of sums, and one that goes on reads in
    // these that this one did not.
    for (const auto& [bucket, r] : unsent) {
      send_void(bucket, round, r.shard_numel, r.wire);
    }
    for (const auto& c : not_launched) {
      send_void(c.bucket, round, c.shard_numel, c.wire);
    }
  } catch (const PeerError&) {
    // failure_ has it: whatever comes next says so.
  }
}

bool HybridCommunicator::has_arrived(std::uint32_t bucket, std::uint64_t round) {
  advance();
  const Phase phase = reduction(bucket, round).phase;
  return phase == Phase::kReady || phase == Phase::kFinished;
}

void HybridCommunicator::check_not_void(std::uint64_t round) {
  for (std::uint32_t bucket = 0; bucket < reductions_.size(); ++bucket) {
    if (reductions_[bucket].phase == Phase::kVoid) {
      give_up(str("replicas have come apart: ", replica(replica_), " has run backward pass ", round,
                  " to its end, another replica has given it up. An exception on one rank must stop all"));
    }
  }
}

bool HybridCommunicator::reduce_is_ready(std::uint32_t bucket, std::uint64_t round) {
  return guarded([&] { return has_arrived(bucket, round); });
}

void HybridCommunicator::wait_reduce_ready(std::uint32_t bucket, std::uint64_t round) {
  guarded([&] {
    Patience patience(*this, true);
    while (!has_arrived(bucket, round)) {
      if (reduction(bucket, round).phase == Phase::kInner) {
        const std::uint32_t first = to_stage_.front();
        inner_->wait_reduce_ready(first, reductions_[first].round);
      }
      check_not_void(round);
      patience.pause();
    }
  });
}

bool HybridCommunicator::wait_reduce_ready_or_stuck(std::uint32_t bucket, std::uint64_t round) {
  // Launches in other replicas cannot be seen, so waiting for longer than they usually take could be a deadlock.
  constexpr milliseconds kUsual{200};
  return guarded([&] {
    Patience patience(*this, false);
    std::uint64_t arrived = arrived_;
    auto deadline = std::chrono::steady_clock::now() + kUsual;
    while (!has_arrived(bucket, round)) {
      if (reduction(bucket, round).phase == Phase::kInner) {
        const std::uint32_t first = to_stage_.front();
        if (!inner_->wait_reduce_ready_or_stuck(first, reductions_[first].round)) {
          return false;
        }
      }
      if (arrived != arrived_) {
        arrived = arrived_;
        deadline = std::chrono::steady_clock::now() + kUsual;
      }
      if (std::chrono::steady_clock::now() > deadline || reduction(bucket, round).phase == Phase::kVoid) {
        return false;
      }
      patience.pause();
    }
    return true;
  });
}

std::vector<std::uint64_t> HybridCommunicator::reported_anywhere(std::uint32_t bucket, std::uint64_t round) {
  return reduction(bucket, round).reported;
}

std::vector<const std::byte*> HybridCommunicator::my_segment_everywhere(std::uint32_t bucket, std::uint64_t round) {
  TT_CHECK(reduction(bucket, round).phase == Phase::kReady, "bucket ", bucket, " has not arrived");
  return {static_cast<const std::byte*>(staging_memory_.const_data_ptr()) + layout_.staging[bucket].offset};
}

void HybridCommunicator::finish_reduce(std::uint32_t bucket, std::uint64_t round) {
  reduction(bucket, round).phase = Phase::kFinished;
  leave_staging(bucket);
}

bool HybridCommunicator::contribution_is_free(std::uint32_t bucket, std::uint64_t round) {
  return guarded([&] { return inner_->contribution_is_free(bucket, round); });
}

void HybridCommunicator::wait_contribution_free(std::uint32_t bucket, std::uint64_t round) {
  guarded([&] { inner_->wait_contribution_free(bucket, round); });
}

void HybridCommunicator::set_progress(std::function<void()> progress) {
  progress_ = progress;
  inner_->set_progress(std::move(progress));
}

}  // namespace tt
