#include "torch/hybrid_communicator.h"

#include <ATen/ATen.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/error.h"
#include "torch/dtypes.h"
#include "torch/group_transport.h"

namespace tt {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

bool any(const std::vector<std::uint64_t>& bits) {
  return std::any_of(bits.begin(), bits.end(), [](std::uint64_t word) { return word != 0; });
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
    return first != owner_.travels_.end() ? owner_.describe(first->job->mine()) : "the sum over replicas";
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
      why = owner_.board_.stop(travels ? first->job->number() : owner_.queue_->added() + 1);
    }
    if (why.empty()) {
      why = owner_.transport_->error();
    }
    if (why.empty() || (travels && first->job->has_come(owner_.on_host()))) {
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
                                       Place place, double timeout_seconds, std::shared_ptr<DataTransport> transport)
    : inner_(std::move(inner)),
      between_(std::move(between)),
      global_ranks_(std::move(global_ranks)),
      replica_(static_cast<std::size_t>(between_->getRank())),
      place_(std::move(place)),
      transport_(transport ? std::move(transport) : std::make_shared<GroupTransport>(between_)),
      launches_(place_.where),
      timeout_seconds_(timeout_seconds),
      name_(str(inner_->name(), " inside and ", transport_->name(), " between ", global_ranks_.size(), " replicas")),
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
    board_.post_stop(queue_ ? queue_->stop() : 0);
  } else {
    static_cast<void>(queue_.release());
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

std::string HybridCommunicator::describe(const Header& header) const {
  std::string ranks;
  for (const int rank : global_ranks_) {
    ranks += str(ranks.empty() ? "" : ", ", rank);
  }
  return str("the sum of bucket ", header.item, " over replicas (ranks ", ranks, ") in backward pass ", header.number);
}

void HybridCommunicator::allocate(const runtime::MemoryLayout& layout) {
  guarded([&] { inner_->allocate(layout); });
  layout_ = layout;
  TT_CHECK(layout_.staging.size() == layout_.bucket_params.size(), "the arena was laid out for one replica");
  staging_memory_ = at::empty({static_cast<std::int64_t>(layout_.staging_bytes)},
                              at::TensorOptions().dtype(at::kByte).device(place_.where));
  reductions_.resize(layout_.bucket_params.size());
  queue_ = std::make_unique<CollectiveQueue>(between_, most_reported_words(layout_));
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
      Phase::kInner, contribution.round, contribution.shard_numel, contribution.wire, {}, nullptr};
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
    if (!travel->job->has_come(on_host())) {
      ++travel;
      continue;
    }
    const Travel arrived = std::move(*travel);
    travel = travels_.erase(travel);
    arrive(arrived);
  }
}

void HybridCommunicator::stage(std::uint32_t bucket) {
  const runtime::LaneGuard lane(*place_.device, runtime::Lane::kReduce);
  auto& r = reductions_[bucket];
  const auto& staging = layout_.staging[bucket];
  std::byte* where = static_cast<std::byte*>(staging_memory_.mutable_data_ptr()) + staging.offset;
  const DType sum = runtime::sum_dtype(r.wire);
  const std::size_t bytes = r.shard_numel * size_of(sum);
  TT_CHECK(bytes <= staging.bytes, "bucket ", bucket, " has no room");
  r.reported = inner_->reported_anywhere(bucket, r.round);
  if (any(r.reported)) {
    const auto segments = inner_->my_segment_everywhere(bucket, r.round);
    place_.device->sum(where, segments, r.shard_numel, {inner_->segment_dtype(r.wire), sum, sum});
  } else {
    place_.device->zero(where, bytes);
  }
  inner_->finish_reduce(bucket, r.round);
  in_staging_.push_back(bucket);
  // A view, which keeps the memory alive as long as the all-reduce runs, also when this communicator is gone.
  auto data = staging_memory_.narrow(0, static_cast<std::int64_t>(staging.offset), static_cast<std::int64_t>(bytes))
                  .view(to_torch(sum));
  const auto launch = [transport = transport_, data = std::move(data), words = r.reported.size()](const Job& job) {
    if (!any(job.extra_of_any(words))) return std::vector<Work>{};  // no replica has a gradient
    return std::vector<Work>{transport->all_reduce(data)};
  };
  const Header header{Header::What::kReduction, bucket, static_cast<std::int64_t>(r.round)};
  travels_.push_back({queue_->add(header, r.reported, launches_.after_current(launch)), true, true});
  r.phase = Phase::kBetween;
}

void HybridCommunicator::send_void(std::uint32_t bucket, std::uint64_t round) {
  const Header header{Header::What::kVoidReduction, bucket, static_cast<std::int64_t>(round)};
  travels_.push_back({queue_->add(header, {}, nullptr), false, false});
}

void HybridCommunicator::wait_for_data(const Job& job) {
  try {
    for (const auto& work : job.works()) work->wait();  // on an accelerator: lets the current lane wait
  } catch (const std::exception&) {
    throw_error_of(job, std::current_exception());
  }
}

void HybridCommunicator::arrive(const Travel& travel) {
  ++arrived_;
  const Job& job = *travel.job;
  if (job.error()) {
    throw_error_of(job, job.error());
  }
  check_in_step(job);
  const auto bucket = static_cast<std::uint32_t>(job.mine().item);
  if (on_host() || !travel.wanted) {
    const runtime::LaneGuard lane(*place_.device, runtime::Lane::kReduce);
    wait_for_data(job);
  }
  if (!travel.wanted) {
    if (travel.staged) {
      leave_staging(bucket);
    }
    return;
  }
  auto& r = reduction(bucket, static_cast<std::uint64_t>(job.mine().number));
  r.phase = job.agreed() ? Phase::kReady : Phase::kVoid;
  r.reported = job.extra_of_any(r.reported.size());
  r.job = travel.job;
}

void HybridCommunicator::check_in_step(const Job& job) {
  for (std::size_t index = 0; index < global_ranks_.size(); ++index) {
    const Header theirs = job.header(static_cast<int>(index));
    if (!same_but_void(theirs, job.mine())) {
      const auto is_at = [](const Header& header) {
        return str("bucket ", header.item, " of backward pass ", header.number);
      };
      give_up(str("replicas have come apart: ", replica(replica_), " sums ", is_at(job.mine()), ", ", replica(index),
                  " ", is_at(theirs),
                  ". All ranks must run the same number of backward passes, and an exception on one must stop all"));
    }
  }
}

void HybridCommunicator::throw_error_of(const Job& job, const std::exception_ptr& error) {
  const std::string me = str("rank ", global_ranks_[replica_]);
  if (job.failed_in_launch()) {
    const auto message = str(me, " could not launch ", describe(job.mine()), ": ", said(error));
    failure_ = message;
    fail(message);
    throw Error(message);
  }
  give_up(str(me, ": ", describe(job.mine()), " failed: a peer died, failed, or did not arrive in time (", said(error),
              ")"));
}

void HybridCommunicator::abort_round(std::uint64_t round, std::span<const runtime::Contribution> not_launched) {
  inner_->abort_round(round, not_launched);
  for (auto& travel : travels_) {
    travel.wanted = false;
  }
  {
    const runtime::LaneGuard lane(*place_.device, runtime::Lane::kReduce);
    for (std::uint32_t bucket = 0; bucket < reductions_.size(); ++bucket) {
      auto& r = reductions_[bucket];
      if (r.phase == Phase::kReady || r.phase == Phase::kVoid) {
        try {
          wait_for_data(*r.job);  // before anything is written there
        } catch (const Error&) {
          // failure_ has it: whatever comes next says so.
        }
        leave_staging(bucket);
      }
      r = Reduction{};
    }
  }
  // Replicas that give up at the same place may have sent different numbers of sums, and one that goes on reads in
  // these that this one did not.
  if (failure_.empty()) {
    for (const std::uint32_t bucket : to_stage_) send_void(bucket, round);
    for (const auto& c : not_launched) send_void(c.bucket, round);
  }
  to_stage_.clear();
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
  const auto& r = reduction(bucket, round);
  TT_CHECK(r.phase == Phase::kReady, "bucket ", bucket, " has not arrived");
  wait_for_data(*r.job);
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
