#include "host/shm_communicator.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/stress.h"

namespace tt::host {
namespace {

using runtime::Contribution;
using runtime::kNoGradient;
using runtime::MemoryLayout;
using runtime::Segments;
using runtime::Tag;

// FNV-1a over everything that Agreement does not spell out.
std::uint64_t digest_of(const MemoryLayout& memory) {
  std::uint64_t hash = 0xcbf29ce484222325;
  const auto add = [&hash](const void* data, std::size_t bytes) {
    for (std::size_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3;
  };
  const auto add_number = [&add](std::uint64_t number) { add(&number, sizeof(number)); };
  add_number(memory.gather_reserved_bytes);
  add_number(memory.reduce_reserved_bytes);
  add_number(memory.places);
  for (std::uint32_t params : memory.bucket_params) add_number(params);
  for (const std::string& name : memory.unit_names) {
    add_number(name.size());
    add(name.data(), name.size());
  }
  return hash;
}

}  // namespace

ShmCommunicator::ShmCommunicator(ShmOptions options, SegmentSource source)
    : options_(std::move(options)), source_(std::move(source)), owner_pid_(::getpid()) {
  if (options_.size < 1 || options_.rank < 0 || options_.rank >= options_.size) {
    throw ValueError(str("rank ", options_.rank, " of ", options_.size, ": rank must be 0 .. size-1"));
  }
  if (!(options_.timeout_seconds > 0) || !(options_.connect_timeout_seconds > 0)) {
    throw ValueError(str("timeouts of ", options_.timeout_seconds, " and ", options_.connect_timeout_seconds,
                         " seconds: both must be positive"));
  }
  if (!options_.global_ranks.empty() && options_.global_ranks.size() != static_cast<std::size_t>(options_.size)) {
    throw ValueError(str(options_.global_ranks.size(), " global ranks for ", options_.size, " ranks"));
  }
  // A year stands for "no limit"; more would overflow the clock.
  constexpr double kYear = 365.0 * 24 * 3600;
  options_.timeout_seconds = std::min(options_.timeout_seconds, kYear);
  options_.connect_timeout_seconds = std::min(options_.connect_timeout_seconds, kYear);
  for (int rank = 0; rank < options_.size; ++rank) {
    names_.push_back(
        str("rank ", options_.global_ranks.empty() ? rank : options_.global_ranks[static_cast<std::size_t>(rank)]));
  }
}

ShmCommunicator::~ShmCommunicator() {
  if (wait_ == nullptr || ::getpid() != owner_pid_) return;
  // A failed rank stays failed.
  auto attached = static_cast<std::uint32_t>(RankPhase::kAttached);
  control_->rank(rank()).phase.compare_exchange_strong(attached, static_cast<std::uint32_t>(RankPhase::kLeft));
  control_->header().bell.ring();
}

// ---- memory
// -----------------------------------------------------------------------------------------------------------

void ShmCommunicator::allocate(const MemoryLayout& memory) {
  TT_CHECK(!wait_, "allocate() is called once");
  memory_ = memory;
  layout_.emplace(size(), memory);
  const Rendezvous rendezvous{rank(), size(), options_.socket_name, options_.connect_timeout_seconds, names_};
  if (source_) {
    segment_ = source_(*layout_);
  } else {
    const Agreement agreement{memory.gather_bytes, memory.reduce_bytes, layout_->total_bytes, digest_of(memory)};
    segment_ = std::make_shared<ShmSegment>(share_memory_file(rendezvous, agreement), layout_->total_bytes);
  }
  control_.emplace(segment_->data(), *layout_);
  wait_ = std::make_unique<PeerWait>(*control_, rank(), names_, memory, options_.timeout_seconds);
  wait_->set_progress(progress_);
  launched_at_.assign(memory.places, 0);
  launches_.assign(memory.bucket_params.size(), 0);

  RankState& me = control_->rank(rank());
  me.pid.store(::getpid(), std::memory_order_release);
  try {
    back_my_part(memory);
  } catch (const Error& error) {
    wait_->fail(error.what());
    throw;
  }
  me.phase.store(static_cast<std::uint32_t>(RankPhase::kAttached), std::memory_order_release);
  control_->header().bell.ring();
  wait_->wait_attached(options_.connect_timeout_seconds, [this](int peer) {
    const auto phase = control_->rank(peer).phase.load(std::memory_order_acquire);
    return phase != static_cast<std::uint32_t>(RankPhase::kAbsent) &&
           phase != static_cast<std::uint32_t>(RankPhase::kFailed);
  });
  wait_->watch_peers();
  segment_->prefault(layout_->gather, memory.gather_bytes);
  for (int peer = 0; peer < size(); ++peer) {
    segment_->prefault(layout_->reduce + static_cast<std::size_t>(peer) * layout_->reduce_stride, memory.reduce_bytes);
  }
  if (!source_) segment_->close_file();
}

void ShmCommunicator::back_my_part(const MemoryLayout& memory) {
  const std::size_t planned = memory.gather_bytes + static_cast<std::size_t>(size()) * memory.reduce_bytes;
  // Every rank takes its share of the gather memory and its own reduce memory: in parallel, and near its processor.
  const std::size_t ranks = static_cast<std::size_t>(size()), mine = static_cast<std::size_t>(rank());
  constexpr std::size_t kHugePage = std::size_t{2} << 20;
  const std::size_t share = (memory.gather_bytes / ranks + kHugePage) / kHugePage * kHugePage;
  const std::size_t begin = std::min(memory.gather_bytes, mine * share);
  const std::size_t end = std::min(memory.gather_bytes, begin + share);
  try {
    segment_->back(layout_->gather + begin, end - begin);
    segment_->back(layout_->reduce + mine * layout_->reduce_stride, memory.reduce_bytes);
  } catch (const Error& error) {
    throw Error(str(names_[mine], " cannot take its part of ", format_bytes(planned),
                    " of shared memory (gathered parameters ", format_bytes(memory.gather_bytes), ", gradients ",
                    size(), " ranks x ", format_bytes(memory.reduce_bytes), "): ", error.what(),
                    ". Lower bucket_cap_mb, use fewer ranks on this machine, or free memory"));
  }
}

ControlBlock& ShmCommunicator::control() {
  TT_CHECK(wait_ != nullptr, "allocate() comes first");
  return *control_;
}

std::byte* ShmCommunicator::gather_memory(std::size_t offset) {
  control();
  return segment_->data() + layout_->gather + offset;
}

std::byte* ShmCommunicator::reduce_memory(std::size_t offset) {
  control();
  return segment_->data() + layout_->reduce + static_cast<std::size_t>(rank()) * layout_->reduce_stride + offset;
}

// ---- gather
// -----------------------------------------------------------------------------------------------------------

bool ShmCommunicator::has_released(int peer, std::uint32_t place) {
  // Can be ahead of my own launch, but never behind it once the peer has let go.
  return control_->released(peer, place).load(std::memory_order_acquire) >= launched_at_[place];
}

bool ShmCommunicator::place_is_free(std::uint32_t place) {
  control();
  TT_CHECK(place < launched_at_.size(), "place ", place, " of ", launched_at_.size());
  return wait_->all([&](int peer) { return has_released(peer, place); });
}

void ShmCommunicator::wait_place_free(std::uint32_t place) {
  if (place_is_free(place)) return;
  TT_CHECK(has_released(rank(), place), "place ", place, " waits for this rank itself");
  wait_->wait({WaitKind::kPlace, place, launched_at_[place]}, [&](int peer) { return has_released(peer, place); });
}

void ShmCommunicator::launch_gather(std::uint32_t place, const Tag& tag, std::span<const Segments> buckets) {
  control();
  wait_->check_not_failed();
  TT_CHECK(place_is_free(place), "gather ", tag.sequence, " into place ", place, ", which is still in use");
  RankState& me = control_->rank(rank());
  TT_CHECK(tag.sequence > me.gathered.load(std::memory_order_relaxed), "gather ", tag.sequence, " is not a new one");
  for (const Segments& bucket : buckets) {
    const std::size_t end = bucket.offset + static_cast<std::size_t>(size()) * bucket.shard_bytes;
    TT_CHECK(end <= layout_->reduce - layout_->gather, "bucket ends at ", end, " in gather memory");
  }
  launched_at_[place] = tag.sequence;
  GatherEntry& entry = control_->entry(rank(), tag.sequence);
  entry.place.store(place, std::memory_order_relaxed);
  entry.unit.store(tag.unit, std::memory_order_relaxed);
  stress_delay();
  entry.sequence.store(tag.sequence, std::memory_order_release);
  stress_delay();
  me.gathered.store(tag.sequence, std::memory_order_release);
  control_->header().bell.ring();
}

bool ShmCommunicator::has_gathered(int peer, std::uint32_t place, const Tag& tag) {
  if (peer == rank()) return true;
  const std::uint64_t last = control_->rank(peer).gathered.load(std::memory_order_acquire);
  if (last < tag.sequence) return false;
  GatherEntry& entry = control_->entry(peer, tag.sequence);
  const std::uint64_t sequence = entry.sequence.load(std::memory_order_acquire);
  const std::uint32_t its_place = entry.place.load(std::memory_order_relaxed);
  const std::uint32_t its_unit = entry.unit.load(std::memory_order_relaxed);
  if (sequence == tag.sequence && its_place == place && its_unit == tag.unit) return true;
  if (sequence != tag.sequence) {
    wait_->throw_apart(str(wait_->my_name(), " is at gather ", tag.sequence, " (", wait_->unit(tag.unit), "), ",
                           wait_->name(peer), " is already at gather ", last));
  }
  const std::string places = its_unit == tag.unit ? str(", place ", place) : "";
  const std::string its_places = its_unit == tag.unit ? str(", place ", its_place) : "";
  wait_->throw_apart(str(wait_->my_name(), " gathers ", wait_->unit(tag.unit), " (gather ", tag.sequence, places, "), ",
                         wait_->name(peer), " gathers ", wait_->unit(its_unit), " (gather ", tag.sequence, its_places,
                         ")"));
}

void ShmCommunicator::wait_gather(std::uint32_t place, const Tag& tag) {
  control();
  TT_CHECK(place < launched_at_.size() && launched_at_[place] == tag.sequence, "gather ", tag.sequence, " at place ",
           place, " was not launched here");
  wait_->wait({WaitKind::kGather, tag.unit, tag.sequence}, [&](int peer) { return has_gathered(peer, place, tag); });
}

void ShmCommunicator::release(std::uint32_t place) {
  control();
  TT_CHECK(place < launched_at_.size(), "place ", place, " of ", launched_at_.size());
  stress_delay();
  control_->released(rank(), place).store(launched_at_[place], std::memory_order_release);
  control_->header().bell.ring();
}

// ---- reduce
// -----------------------------------------------------------------------------------------------------------

void ShmCommunicator::check_bucket(std::uint32_t bucket) {
  control();
  TT_CHECK(bucket < launches_.size(), "bucket ", bucket, " of ", launches_.size());
}

std::optional<std::size_t> ShmCommunicator::find_slot(int peer, std::uint32_t bucket, std::uint64_t round) {
  const BucketState& state = control_->bucket(peer, bucket);
  for (std::size_t slot = 0; slot < 2; ++slot) {
    if (state.slots[slot].round.load(std::memory_order_acquire) == round) return slot;
  }
  return std::nullopt;
}

void ShmCommunicator::launch_reduce(const Contribution& contribution) {
  const std::uint32_t bucket = contribution.bucket;
  check_bucket(bucket);
  wait_->check_not_failed();
  const std::size_t slot = launches_[bucket] % 2;
  ContributionSlot& mine = control_->bucket(rank(), bucket).slots[slot];
  const std::uint64_t old_round = mine.round.load(std::memory_order_relaxed);
  const std::uint64_t last_round =
      control_->bucket(rank(), bucket).slots[1 - slot].round.load(std::memory_order_relaxed);
  TT_CHECK(contribution.round > last_round, "bucket ", bucket, " was launched in round ", last_round, " already");
  TT_CHECK(is_floating(contribution.wire), "gradients of ", name_of(contribution.wire));
  const std::span<std::uint64_t> mask = control_->mask(rank(), bucket, slot);
  TT_CHECK(contribution.reported.size() <= mask.size(), contribution.reported.size(), " words for ", mask.size());
  if (contribution.offset != kNoGradient) {
    const std::size_t end =
        contribution.offset + static_cast<std::size_t>(size()) * contribution.shard_numel * size_of(contribution.wire);
    TT_CHECK(end <= layout_->reduce_stride, "gradients end at ", end, " in ", layout_->reduce_stride, " bytes");
  }
  // Ranks that end each backward pass with all reductions finished are never two rounds apart, so this does not block.
  if (old_round != 0) wait_contribution_free(bucket, old_round);

  mine.offset = contribution.offset;
  mine.shard_numel = contribution.shard_numel;
  mine.wire = static_cast<std::uint32_t>(contribution.wire);
  std::fill(mask.begin(), mask.end(), 0);
  std::copy(contribution.reported.begin(), contribution.reported.end(), mask.begin());
  stress_delay();
  mine.round.store(contribution.round, std::memory_order_release);
  ++launches_[bucket];
  control_->header().bell.ring();
}

void ShmCommunicator::close_round(std::uint64_t round) {
  stress_delay();
  control().rank(rank()).closed_round.store(round, std::memory_order_release);
}

void ShmCommunicator::abort_round(std::uint64_t round, std::span<const Contribution> not_launched) {
  static_cast<void>(not_launched);  // contributions are found by bucket and round, not by their order
  control();
  for (std::uint32_t bucket = 0; bucket < launches_.size(); ++bucket) {
    control_->bucket(rank(), bucket).finished.store(round, std::memory_order_release);
  }
  control_->rank(rank()).aborted_round.store(round, std::memory_order_release);
  close_round(round);
  control_->header().bell.ring();
}

bool ShmCommunicator::has_launched(int peer, std::uint32_t bucket, std::uint64_t round) {
  // Read first: a round that is closed has all its launches before it.
  const std::uint64_t closed = control_->rank(peer).closed_round.load(std::memory_order_acquire);
  if (find_slot(peer, bucket, round)) return true;
  if (closed >= round) {
    wait_->throw_skipped(peer, closed, bucket, round, rank());
  }
  return false;
}

bool ShmCommunicator::reduce_is_ready(std::uint32_t bucket, std::uint64_t round) {
  check_bucket(bucket);
  return wait_->all([&](int peer) { return find_slot(peer, bucket, round).has_value(); });
}

void ShmCommunicator::wait_reduce_ready(std::uint32_t bucket, std::uint64_t round) {
  check_bucket(bucket);
  wait_->wait({WaitKind::kReduce, bucket, round}, [&](int peer) { return has_launched(peer, bucket, round); });
}

bool ShmCommunicator::wait_reduce_ready_or_stuck(std::uint32_t bucket, std::uint64_t round) {
  check_bucket(bucket);
  return wait_->wait_or_stuck({WaitKind::kReduceUnlessStuck, bucket, round},
                              [&](int peer) { return find_slot(peer, bucket, round).has_value(); });
}

std::size_t ShmCommunicator::ready_slot(int peer, std::uint32_t bucket, std::uint64_t round) {
  const std::optional<std::size_t> slot = find_slot(peer, bucket, round);
  TT_CHECK(slot.has_value(), "bucket ", bucket, " of round ", round, " is not ready on ", wait_->name(peer));
  return *slot;
}

std::vector<std::uint64_t> ShmCommunicator::reported_anywhere(std::uint32_t bucket, std::uint64_t round) {
  check_bucket(bucket);
  std::vector<std::uint64_t> reported((memory_.bucket_params[bucket] + std::size_t{63}) / 64, 0);
  for (int peer = 0; peer < size(); ++peer) {
    const std::span<const std::uint64_t> mask = control_->mask(peer, bucket, ready_slot(peer, bucket, round));
    for (std::size_t word = 0; word < reported.size(); ++word) reported[word] |= mask[word];
  }
  return reported;
}

std::vector<const std::byte*> ShmCommunicator::my_segment_everywhere(std::uint32_t bucket, std::uint64_t round) {
  check_bucket(bucket);
  std::vector<const std::byte*> segments(static_cast<std::size_t>(size()), nullptr);
  const ContributionSlot* first = nullptr;
  for (int peer = 0; peer < size(); ++peer) {
    const ContributionSlot& slot = control_->bucket(peer, bucket).slots[ready_slot(peer, bucket, round)];
    if (slot.offset == kNoGradient) continue;
    if (first == nullptr) first = &slot;
    TT_CHECK(slot.shard_numel == first->shard_numel && slot.wire == first->wire, wait_->name(peer), " reduces bucket ",
             bucket, " with ", slot.shard_numel, " elements of ", name_of(static_cast<DType>(slot.wire)),
             ", others with ", first->shard_numel, " of ", name_of(static_cast<DType>(first->wire)));
    const std::size_t index = static_cast<std::size_t>(peer);
    segments[index] = segment_->data() + layout_->reduce + index * layout_->reduce_stride + slot.offset +
                      static_cast<std::size_t>(rank()) * slot.shard_numel * size_of(static_cast<DType>(slot.wire));
  }
  return segments;
}

void ShmCommunicator::finish_reduce(std::uint32_t bucket, std::uint64_t round) {
  check_bucket(bucket);
  stress_delay();
  control_->bucket(rank(), bucket).finished.store(round, std::memory_order_release);
  control_->header().bell.ring();
}

bool ShmCommunicator::has_finished(int peer, std::uint32_t bucket, std::uint64_t round) {
  return control_->bucket(peer, bucket).finished.load(std::memory_order_acquire) >= round;
}

bool ShmCommunicator::contribution_is_free(std::uint32_t bucket, std::uint64_t round) {
  check_bucket(bucket);
  return wait_->all([&](int peer) { return has_finished(peer, bucket, round); });
}

void ShmCommunicator::wait_contribution_free(std::uint32_t bucket, std::uint64_t round) {
  check_bucket(bucket);
  wait_->wait({WaitKind::kContribution, bucket, round}, [&](int peer) { return has_finished(peer, bucket, round); });
}

// ---- small things
// -----------------------------------------------------------------------------------------------------

void ShmCommunicator::set_progress(std::function<void()> progress) {
  progress_ = std::move(progress);
  if (wait_) wait_->set_progress(progress_);
}

void ShmCommunicator::fail(const std::string& why) noexcept {
  if (wait_) wait_->fail(why);
}

}  // namespace tt::host
