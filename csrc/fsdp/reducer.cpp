#include "fsdp/reducer.h"

#include <algorithm>

#include "base/error.h"
#include "base/span.h"

namespace tt::fsdp {
namespace {

bool test(const std::vector<std::uint64_t>& bits, std::size_t i) { return (bits[i / 64] >> (i % 64) & 1U) != 0; }
void set(std::vector<std::uint64_t>& bits, std::size_t i) { bits[i / 64] |= std::uint64_t{1} << (i % 64); }
void unset(std::vector<std::uint64_t>& bits, std::size_t i) { bits[i / 64] &= ~(std::uint64_t{1} << (i % 64)); }
bool any(const std::vector<std::uint64_t>& bits) {
  return std::any_of(bits.begin(), bits.end(), [](std::uint64_t word) { return word != 0; });
}
void clear(std::vector<std::uint64_t>& bits) { std::fill(bits.begin(), bits.end(), 0); }

}  // namespace

Reducer::Reducer(const ShardPlan& plan, const Arena& arena, const Schedule& schedule, runtime::Communicator& comm,
                 runtime::Device& device, EngineClient& client)
    : plan_(plan),
      arena_(arena),
      schedule_(schedule),
      comm_(comm),
      device_(device),
      client_(client),
      buckets_(plan.buckets().size()),
      summed_(device),
      index_in_bucket_(plan.params().size(), 0),
      expected_(plan.units().size(), 0),
      launch_order_(arena.reduce_order()) {
  for (std::size_t slot = 0; slot < arena.slots().size(); ++slot) {
    slots_.emplace_back(device);
  }
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    const auto& params = plan.buckets()[b].params;
    buckets_[b].reported.assign((params.size() + 63) / 64, 0);
    buckets_[b].unreduced_reported = buckets_[b].reported;
    buckets_[b].absent = buckets_[b].reported;
    filled_.emplace_back(device);
    buckets_[b].frozen = buckets_[b].reported;
    for (std::size_t i = 0; i < params.size(); ++i) {
      index_in_bucket_[static_cast<std::size_t>(params[i])] = i;
    }
  }
}

std::byte* Reducer::slot_memory(std::int32_t slot) const {
  return comm_.reduce_memory(arena_.slots()[static_cast<std::size_t>(slot)].offset);
}

DType Reducer::accumulate_dtype(std::int32_t bucket) const { return runtime::sum_dtype(arena_.wire_dtype(bucket)); }

void Reducer::begin_round(bool reduce) {
  TT_CHECK(!active_, "round ", round_, " is still in progress");
  ++round_;
  active_ = true;
  reduce_ = reduce;
  next_launch_ = 0;
}

bool Reducer::slot_is_free(std::int32_t slot) {
  const auto& s = slots_[static_cast<std::size_t>(slot)];
  return !s.taken && (s.bucket < 0 || comm_.contribution_is_free(static_cast<std::uint32_t>(s.bucket), s.round));
}

void Reducer::take_slot(std::int32_t bucket) {
  const auto assign = [&](std::int32_t slot) {
    auto& s = slots_[static_cast<std::size_t>(slot)];
    if (s.bucket >= 0) {
      comm_.wait_contribution_free(static_cast<std::uint32_t>(s.bucket), s.round);
    }
    s.taken = true;
    s.bucket = bucket;
    s.round = round_;
    s.read.wait();
    state(bucket).slot = slot;
  };
  const std::int32_t own = arena_.own_slot(bucket);
  if (own >= 0) {
    assign(own);  // its last use was in an earlier round
    return;
  }
  for (;;) {
    progress();
    std::int32_t oldest = -1;
    for (std::int32_t slot = arena_.rotating_slot_begin(); slot < arena_.rotating_slot_end(); ++slot) {
      if (slot_is_free(slot)) {
        assign(slot);
        return;
      }
      const auto& s = slots_[static_cast<std::size_t>(slot)];
      if (!s.taken && (oldest < 0 || s.round < slots_[static_cast<std::size_t>(oldest)].round)) {
        oldest = slot;
      }
    }
    if (oldest >= 0) {  // summed here; all ranks have launched it and will read it at their next step into the engine
      const auto& s = slots_[static_cast<std::size_t>(oldest)];
      const Span span("wait for the reduction of", unit_name(s.bucket));
      comm_.wait_contribution_free(static_cast<std::uint32_t>(s.bucket), s.round);
      continue;
    }
    if (!launched_.empty() && comm_.wait_reduce_ready_or_stuck(static_cast<std::uint32_t>(launched_.front()), round_)) {
      continue;
    }
    // All slots fill, or a rank that is blocked itself has not launched the oldest: waiting could be a deadlock.
    if (!overflow_logged_) {
      overflow_logged_ = true;
      client_.log(str("gradients of more buckets than foreseen are alive at once in the backward of unit '",
                      unit_name(bucket), "'; extra reduce memory is used from now on (said once)"));
    }
    assign(arena_.overflow_slot(bucket));
    return;
  }
}

GradientDestination Reducer::destination(std::int32_t param) {
  TT_CHECK(active_, "gradient of '", plan_.params()[static_cast<std::size_t>(param)].name, "' outside a backward pass");
  const auto& placement = plan_.placement(param);
  const std::int32_t bucket = placement.bucket;
  auto& b = state(bucket);
  const std::size_t i = index_in_bucket(param);
  const auto offset = static_cast<std::size_t>(placement.offset);
  if (!reduce_) {
    const DType dtype = accumulate_dtype(bucket);
    if (b.unreduced == nullptr) {
      b.unreduced = client_.allocate(static_cast<std::size_t>(plan_.bucket_numel(bucket)) * size_of(dtype));
    }
    return {b.unreduced + offset * size_of(dtype), dtype, test(b.unreduced_reported, i)};
  }
  if (b.state != State::kIdle && b.state != State::kFilling && b.state != State::kComplete) {
    throw Error(
        str("not supported: parameter '", plan_.params()[static_cast<std::size_t>(param)].name,
            "' received another gradient after its bucket was reduced in the same backward pass. A module that is "
            "used twice under re-entrant activation checkpointing does this: pass use_reentrant=False"));
  }
  if (b.slot < 0) {
    take_slot(bucket);
    b.state = State::kFilling;
  }
  const DType wire = arena_.wire_dtype(bucket);
  return {slot_memory(b.slot) + offset * size_of(wire), wire, test(b.reported, i)};
}

void Reducer::mark_reported(BucketState& b, std::size_t i) {
  if (!test(b.reported, i)) {
    set(b.reported, i);
    ++b.num_reported;
  }
  if (test(b.absent, i)) {
    unset(b.absent, i);
    --b.num_absent;
  }
}

void Reducer::gradient_ready(std::int32_t param) {
  const std::int32_t bucket = plan_.placement(param).bucket;
  auto& b = state(bucket);
  const std::size_t i = index_in_bucket(param);
  if (!reduce_) {
    set(b.unreduced_reported, i);
  }
  mark_reported(b, i);
  if (reduce_ && is_complete(bucket) && b.state == State::kFilling) {
    launch_complete(bucket);
  }
}

void Reducer::expect(std::int32_t unit) {
  auto& last = expected_[static_cast<std::size_t>(unit)];
  if (last == round_) {
    return;
  }
  last = round_;
  for (const std::int32_t bucket : plan_.unit_buckets()[static_cast<std::size_t>(unit)]) {
    if (!is_reduced(spec(bucket))) {
      continue;
    }
    auto& b = state(bucket);
    const auto& params = spec(bucket).params;
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (!test(b.reported, i) && !test(b.absent, i) && !client_.will_report(params[i])) {
        set(b.absent, i);
        ++b.num_absent;
      }
    }
    if (reduce_ && b.state == State::kIdle && is_complete(bucket)) {  // peers may wait for it
      launch_complete(bucket);
    }
  }
}

void Reducer::launch_complete(std::int32_t bucket) {
  state(bucket).state = State::kComplete;
  if (comm_.needs_fixed_order()) {
    launch_in_order();
  } else {
    launch(bucket);
  }
  progress();
}

void Reducer::launch_in_order() {
  // A bucket that gets no gradient at all is complete, too: it holds nobody up.
  const auto may_launch = [&](std::int32_t bucket) {
    const State s = state(bucket).state;
    return s == State::kComplete || (s == State::kIdle && is_complete(bucket));
  };
  while (next_launch_ < launch_order_.size() && may_launch(launch_order_[next_launch_])) {
    launch(launch_order_[next_launch_]);
    ++next_launch_;
  }
}

void Reducer::set_trainable(std::int32_t param, bool trainable) {
  TT_CHECK(!active_, "trainable parameters change in the middle of a backward pass");
  auto& b = state(plan_.placement(param).bucket);
  const std::size_t i = index_in_bucket(param);
  if (test(b.frozen, i) != trainable) {
    return;
  }
  if (trainable) {
    unset(b.frozen, i);
    unset(b.absent, i);
    --b.num_frozen;
    --b.num_absent;
  } else {
    set(b.frozen, i);
    set(b.absent, i);
    ++b.num_frozen;
    ++b.num_absent;
  }
}

// Adds what was accumulated without reduction; parameters without a gradient here count as zeros.
void Reducer::fill_gaps(std::int32_t bucket) {
  auto& b = state(bucket);
  const DType wire = arena_.wire_dtype(bucket);
  const bool unreduced = any(b.unreduced_reported);
  const auto& params = spec(bucket).params;
  if (b.slot < 0 && unreduced) {
    take_slot(bucket);
  }
  if (b.slot < 0) {
    return;
  }
  for (std::size_t i = 0; i < params.size(); ++i) {
    const auto& placement = plan_.placement(params[i]);
    const auto offset = static_cast<std::size_t>(placement.offset);
    const auto numel = static_cast<std::size_t>(placement.numel);
    std::byte* where = slot_memory(b.slot) + offset * size_of(wire);
    if (unreduced && test(b.unreduced_reported, i)) {
      const DType dtype = accumulate_dtype(bucket);
      const std::byte* held = b.unreduced + offset * size_of(dtype);
      if (test(b.reported, i)) {
        device_.add(where, wire, held, dtype, numel);
      } else {
        device_.cast(where, wire, held, dtype, numel);
        mark_reported(b, i);
      }
    } else if (!test(b.reported, i)) {
      device_.zero(where, numel * size_of(wire));
    }
  }
  clear(b.unreduced_reported);
}

runtime::Contribution Reducer::contribution_of(std::int32_t bucket) const {
  const auto& b = state(bucket);
  runtime::Contribution contribution;
  contribution.bucket = static_cast<std::uint32_t>(bucket);
  contribution.round = round_;
  contribution.offset = b.slot >= 0 ? arena_.slots()[static_cast<std::size_t>(b.slot)].offset : runtime::kNoGradient;
  contribution.shard_numel = static_cast<std::size_t>(spec(bucket).shard_numel);
  contribution.wire = arena_.wire_dtype(bucket);
  contribution.reported = b.reported;
  return contribution;
}

void Reducer::launch(std::int32_t bucket) {
  const Span span("launch reduction of", unit_name(bucket));
  client_.gradient_shard(bucket);  // where it is made, memory is taken in the order of the compute lane
  auto& filled = filled_[static_cast<std::size_t>(bucket)];
  filled.record();
  const runtime::LaneGuard lane(device_, runtime::Lane::kReduce);
  filled.wait();
  fill_gaps(bucket);
  auto& b = state(bucket);
  comm_.launch_reduce(contribution_of(bucket));
  b.state = State::kLaunched;
  launched_.push_back(bucket);
}

void Reducer::progress() {
  // Any that is ready, not just the oldest: ranks may differ in which parameters report.
  for (std::size_t i = 0; i < launched_.size();) {
    const std::int32_t bucket = launched_[i];
    if (comm_.reduce_is_ready(static_cast<std::uint32_t>(bucket), round_)) {
      launched_.erase(launched_.begin() + static_cast<std::ptrdiff_t>(i));
      sum(bucket);
    } else {
      // Read by all ranks that it is shared with, while its sum travels on.
      auto& b = state(bucket);
      if (b.slot >= 0 && comm_.contribution_is_free(static_cast<std::uint32_t>(bucket), round_)) {
        const runtime::LaneGuard lane(device_, runtime::Lane::kReduce);
        comm_.wait_contribution_free(static_cast<std::uint32_t>(bucket), round_);
        leave_slot(b);
      }
      ++i;
    }
  }
}

// In the reduce lane: what was submitted there before reads the slot.
void Reducer::leave_slot(BucketState& b) {
  if (b.slot >= 0) {
    auto& s = slots_[static_cast<std::size_t>(b.slot)];
    s.taken = false;
    s.read.record();
    b.slot = -1;
  }
}

void Reducer::sum(std::int32_t bucket) {
  const Span span("reduce", unit_name(bucket));
  auto& b = state(bucket);
  const auto id = static_cast<std::uint32_t>(bucket);
  const auto anywhere = comm_.reported_anywhere(id, round_);
  const runtime::LaneGuard lane(device_, runtime::Lane::kReduce);
  if (any(anywhere)) {
    const auto segments = comm_.my_segment_everywhere(id, round_);
    std::vector<const std::byte*> sources(segments.size());
    const DType master = spec(bucket).master_dtype;
    runtime::SumSpec how;
    how.wire = comm_.segment_dtype(arena_.wire_dtype(bucket));
    how.result = master;
    how.round_to = schedule_.has_reduce_dtype ? schedule_.reduce_dtype : spec(bucket).param_dtype;
    if (size_of(how.round_to) >= size_of(master)) {
      how.round_to = master;
    }
    how.divisor = static_cast<double>(plan_.world_size()) * comm_.replicas();
    std::byte* shard = client_.gradient_shard(bucket);
    const auto& params = spec(bucket).params;
    // Neighbours that are summed alike are summed together: a device is asked once for a bucket, as a rule. What lies
    // between their pieces is padding.
    std::vector<bool> held(params.size());
    for (std::size_t i = 0; i < params.size(); ++i) {
      held[i] = test(anywhere, i) && client_.has_gradient(params[i]);
    }
    for (std::size_t i = 0; i < params.size();) {
      std::size_t next = i + 1;
      if (test(anywhere, i)) {
        std::int64_t start = 0, end = 0;
        for (next = i; next < params.size() && test(anywhere, next) && held[next] == held[i]; ++next) {
          const Piece piece = plan_.piece(params[next], comm_.rank());
          if (piece.numel > 0) {
            start = end == 0 ? piece.shard_offset : start;
            end = piece.shard_offset + piece.numel;
          }
        }
        how.accumulate = held[i];
        const auto offset = static_cast<std::size_t>(start);
        for (std::size_t r = 0; r < segments.size(); ++r) {
          sources[r] = segments[r] == nullptr ? nullptr : segments[r] + offset * size_of(how.wire);
        }
        if (end > start) {
          device_.sum(shard + offset * size_of(master), sources, static_cast<std::size_t>(end - start), how);
        }
      }
      i = next;
    }
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (test(anywhere, i)) {
        client_.gradient_written(params[i]);
      }
    }
  }
  comm_.finish_reduce(id, round_);
  leave_slot(b);
  b.state = State::kSummed;
}

void Reducer::reset_round() {
  for (auto& b : buckets_) {
    if (b.slot >= 0) {
      slots_[static_cast<std::size_t>(b.slot)].taken = false;
    }
    b.state = State::kIdle;
    b.slot = -1;
    b.num_reported = 0;
    b.num_absent = b.num_frozen;
    clear(b.reported);
    b.absent = b.frozen;
  }
  launched_.clear();
  active_ = false;
}

void Reducer::end_round() {
  if (reduce_) {
    for (const std::int32_t bucket : launch_order_) {
      const State s = state(bucket).state;
      if (s == State::kIdle || s == State::kFilling || s == State::kComplete) {
        launch(bucket);
      }
    }
    {
      const runtime::LaneGuard lane(device_, runtime::Lane::kReduce);
      comm_.close_round(round_);
    }
    progress();
    while (!launched_.empty()) {
      const Span span("wait for the reduction of", unit_name(launched_.front()));
      comm_.wait_reduce_ready(static_cast<std::uint32_t>(launched_.front()), round_);
      progress();
    }
    {
      const runtime::LaneGuard lane(device_, runtime::Lane::kReduce);
      summed_.record();
    }
    summed_.wait();
  }
  reset_round();
}

void Reducer::abort_round() {
  if (!active_) {
    return;
  }
  for (auto& s : slots_) {
    // What was filled in this round is void, and nobody reads it. What was published may still be on its way.
    if (s.taken && state(s.bucket).state != State::kLaunched) {
      s.bucket = -1;
    }
  }
  for (auto& b : buckets_) {
    clear(b.unreduced_reported);
  }
  std::vector<runtime::Contribution> not_launched;
  if (reduce_ && comm_.needs_fixed_order()) {
    for (const std::int32_t bucket : launch_order_) {
      const State s = state(bucket).state;
      if (s != State::kLaunched && s != State::kSummed) {
        not_launched.push_back(contribution_of(bucket));
      }
    }
  }
  comm_.abort_round(round_, not_launched);
  {
    const runtime::LaneGuard lane(device_, runtime::Lane::kReduce);
    summed_.record();
  }
  summed_.wait();
  reset_round();
}

}  // namespace tt::fsdp
