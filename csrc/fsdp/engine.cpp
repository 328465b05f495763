#include "fsdp/engine.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/error.h"
#include "base/span.h"

namespace tt::fsdp {
namespace {

class Timer {
 public:
  explicit Timer(double& total) : total_(total), start_(std::chrono::steady_clock::now()) {}
  ~Timer() { total_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

 private:
  double& total_;
  std::chrono::steady_clock::time_point start_;
};

runtime::MemoryLayout layout_of(const ShardPlan& plan, const Arena& arena) {
  runtime::MemoryLayout layout;
  layout.gather_bytes = arena.gather_bytes();
  layout.gather_reserved_bytes = arena.gather_reserved_bytes();
  layout.reduce_bytes = arena.reduce_bytes();
  layout.reduce_reserved_bytes = arena.reduce_reserved_bytes();
  layout.places = static_cast<std::uint32_t>(arena.places().size());
  for (const auto& bucket : plan.buckets()) {
    layout.bucket_params.push_back(is_reduced(bucket) ? static_cast<std::uint32_t>(bucket.params.size()) : 0);
    layout.bucket_units.push_back(static_cast<std::uint32_t>(bucket.unit));
  }
  for (const auto& unit : plan.units()) {
    layout.unit_names.push_back(unit.name);
  }
  layout.staging_bytes = arena.staging_bytes();
  layout.staging = arena.staging();
  const auto beyond = [](const std::vector<Slot>& all, std::size_t planned) {
    std::vector<runtime::Region> regions;
    for (const auto& slot : all) {
      if (slot.offset >= planned) {
        regions.push_back({slot.offset, slot.bytes});
      }
    }
    return regions;
  };
  layout.gather_overflow = beyond(arena.places(), arena.gather_bytes());
  layout.reduce_overflow = beyond(arena.slots(), arena.reduce_bytes());
  return layout;
}

}  // namespace

Engine::Engine(const ShardPlan& plan, Schedule schedule, runtime::Communicator& comm, runtime::Device& device,
               EngineClient& client)
    : plan_(plan),
      schedule_(std::move(schedule)),
      arena_(plan, schedule_),
      comm_(comm),
      device_(device),
      client_(client),
      reducer_(plan, arena_, schedule_, comm, device, client),
      units_(plan.units().size()),
      place_owner_(arena_.places().size(), -1),
      masters_ready_(device),
      gathered_in_vain_(device) {
  for (std::size_t place = 0; place < arena_.places().size(); ++place) {
    place_left_.emplace_back(device);
  }
}

void Engine::allocate() { comm_.allocate(layout_of(plan_, arena_)); }

// ---- gathering
// --------------------------------------------------------------------------------------------------------

std::int32_t Engine::free_place() const {
  for (std::int32_t place = arena_.rotating_begin(); place < arena_.rotating_end(); ++place) {
    if (place_owner_[static_cast<std::size_t>(place)] < 0) {
      return place;
    }
  }
  return -1;
}

std::int32_t Engine::choose_place(std::int32_t unit) {
  if (!rotates(unit)) {
    return arena_.own_place(unit);
  }
  if (const std::int32_t place = free_place(); place >= 0) {
    return place;
  }
  // A unit that was gathered ahead of a use that did not come makes room.
  for (std::int32_t place = arena_.rotating_begin(); place < arena_.rotating_end(); ++place) {
    const std::int32_t owner = place_owner_[static_cast<std::size_t>(place)];
    const auto& u = unit_state(owner);
    if (u.state != State::kGathered && !in_use(u)) {
      release(owner);
      return place;
    }
  }
  ++counters_.overflow_places;
  if (!overflow_logged_) {
    overflow_logged_ = true;
    std::string owners;
    for (std::int32_t place = arena_.rotating_begin(); place < arena_.rotating_end(); ++place) {
      owners += str(owners.empty() ? "'" : "', '", name(place_owner_[static_cast<std::size_t>(place)]));
    }
    client_.log(
        str("unit '", name(unit), "' is needed while ", owners,
            "' are still gathered: more units are alive at once than foreseen, so extra memory is used (said once)"));
  }
  return arena_.overflow_place(unit);
}

void Engine::queue_gather(std::int32_t unit) {
  auto& u = unit_state(unit);
  u.place = choose_place(unit);
  u.tag = {static_cast<std::uint32_t>(unit), ++sequence_};
  u.state = State::kQueued;
  place_owner_[static_cast<std::size_t>(u.place)] = unit;
  queue_.push_back({unit, u.place, u.tag, false});
  ++counters_.gathers;
  launch_queued(false);
}

// Launches queued gathers in order, as far as all ranks have left the places they go to.
void Engine::launch_queued(bool wait_for_first) {
  while (!queue_.empty()) {
    const std::int32_t unit = queue_.front().unit;
    const auto place = static_cast<std::uint32_t>(queue_.front().place);
    if (!wait_for_first && !comm_.place_is_free(place)) {
      return;
    }
    wait_for_first = false;
    const Queued queued = queue_.front();
    {
      const runtime::LaneGuard lane(device_, runtime::Lane::kGather);
      {
        const Timer timer(counters_.wait_seconds);
        const Span span("wait for the place of", unit_name(unit));
        comm_.wait_place_free(place);
      }
      launch_gather(queued);
      if (queued.abandoned) {
        comm_.release(place);
        gathered_in_vain_.record();
      }
    }
    queue_.pop_front();
    if (queued.abandoned) {
      gathered_in_vain_.wait();
    } else {
      unit_state(unit).state = State::kLaunched;
    }
  }
}

// Writes this rank's shards, in the gather lane.
void Engine::launch_gather(const Queued& queued) {
  const Span span("gather", unit_name(queued.unit));
  const auto place = static_cast<std::size_t>(queued.place);
  masters_ready_.wait();
  place_left_[place].wait();
  const std::size_t base = arena_.places()[place].offset;
  std::vector<runtime::Segments> segments;
  for (const std::int32_t b : plan_.unit_buckets()[static_cast<std::size_t>(queued.unit)]) {
    const auto& bucket = plan_.buckets()[static_cast<std::size_t>(b)];
    const auto numel = static_cast<std::size_t>(bucket.shard_numel);
    const runtime::Segments s{base + arena_.bucket_offset(b), numel * size_of(bucket.param_dtype)};
    std::byte* mine = comm_.gather_memory(s.offset) + static_cast<std::size_t>(comm_.rank()) * s.shard_bytes;
    device_.cast(mine, bucket.param_dtype, client_.master_shard(b), bucket.master_dtype, numel);
    counters_.bytes_written += s.shard_bytes;
    segments.push_back(s);
  }
  comm_.launch_gather(static_cast<std::uint32_t>(place), queued.tag, segments);
}

void Engine::gather(std::int32_t unit) {
  auto& u = unit_state(unit);
  if (u.state == State::kGathered) {
    return;
  }
  if (u.state == State::kSharded) {
    queue_gather(unit);
  }
  while (u.state == State::kQueued) {
    launch_queued(true);
  }
  {
    const Timer timer(counters_.wait_seconds);
    const Span span("wait for", unit_name(unit));
    comm_.wait_gather(static_cast<std::uint32_t>(u.place), u.tag);
  }
  std::byte* base = comm_.gather_memory(arena_.places()[static_cast<std::size_t>(u.place)].offset);
  for (const std::int32_t b : plan_.unit_buckets()[static_cast<std::size_t>(unit)]) {
    client_.seat(b, base + arena_.bucket_offset(b));
  }
  u.state = State::kGathered;
}

void Engine::release(std::int32_t unit) {
  auto& u = unit_state(unit);
  if (u.state == State::kSharded) {
    return;
  }
  if (u.state == State::kQueued) {
    for (auto& queued : queue_) {
      queued.abandoned = queued.abandoned || queued.unit == unit;
    }
  }
  if (u.state == State::kGathered) {
    for (const std::int32_t b : plan_.unit_buckets()[static_cast<std::size_t>(unit)]) {
      client_.unseat(b);
    }
    place_left_[static_cast<std::size_t>(u.place)].record();
  }
  if (u.state != State::kQueued) {
    const runtime::LaneGuard lane(device_, runtime::Lane::kGather);
    comm_.release(static_cast<std::uint32_t>(u.place));
    gathered_in_vain_.record();
  }
  if (u.state == State::kLaunched) {
    gathered_in_vain_.wait();
  }
  place_owner_[static_cast<std::size_t>(u.place)] = -1;
  u.place = -1;
  u.state = State::kSharded;
  launch_queued(false);
}

void Engine::release_all() {
  // What is gathered first: ranks that end a pass together then find every place free.
  for (const bool gathered : {true, false}) {
    for (std::size_t u = 0; u < units_.size(); ++u) {
      // Not by state alone: the release of one that is queued launches others.
      if (units_[u].state != State::kSharded && (units_[u].state == State::kGathered || !gathered)) {
        release(static_cast<std::int32_t>(u));
      }
    }
  }
}

void Engine::record_and_prefetch(Order& order, std::int32_t unit, const char* pass) {
  if (!order.current.empty() && order.current.back() == unit) {
    return;  // another module of the same unit
  }
  const std::size_t position = order.current.size();
  order.current.push_back(unit);
  const auto& expected = order.expected;
  if (position >= expected.size() || expected[position] != unit) {
    if (!expected.empty()) {
      ++counters_.order_misses;
      if (!order.miss_logged) {
        order.miss_logged = true;
        client_.log(str("units run in another order than in the ", pass, " before (unit '", name(unit),
                        "' at position ", position, "): not gathered ahead; right, but slower (said once)"));
      }
    }
    return;
  }
  std::int32_t ahead = 0;
  for (std::size_t next = position + 1; next < expected.size() && ahead < schedule_.prefetch; ++next, ++ahead) {
    if (unit_state(expected[next]).state != State::kSharded) {
      continue;
    }
    if (rotates(expected[next]) && free_place() < 0) {
      return;  // what is in use or gathered ahead already comes first
    }
    ++counters_.prefetches;
    queue_gather(expected[next]);
  }
}

// ---- forward
// ----------------------------------------------------------------------------------------------------------

void Engine::begin_forward() {
  if (forward_depth_++ > 0) {
    return;
  }
  for (auto& u : units_) {
    u.forward_uses = 0;  // of a unit that was called by itself and failed
  }
  // Masters may have changed since anything was gathered. A backward that is still to come gathers again.
  release_all();
  masters_ready_.record();
  forward_order_.current.clear();
  client_.expose(kAllUnits, true);
}

void Engine::end_forward(bool backward_follows) {
  if (--forward_depth_ > 0) {
    return;
  }
  client_.expose(kAllUnits, false);
  forward_order_.expected = std::move(forward_order_.current);
  forward_order_.current.clear();
  if (!backward_follows) {
    release_all();
    return;
  }
  const std::int32_t last = forward_order_.expected.empty() ? -1 : forward_order_.expected.back();
  for (std::size_t u = 0; u < units_.size(); ++u) {
    const auto unit = static_cast<std::int32_t>(u);
    if (rotates(unit) && !in_use(units_[u]) && unit != last) {
      release(unit);  // its last module was not called, or it was gathered ahead in vain
    }
  }
}

void Engine::before_forward(std::int32_t unit) {
  auto& u = unit_state(unit);
  if (forward_depth_ == 0 && !backward_active_ && u.state != State::kSharded && u.forward_uses == 0) {
    release(unit);  // called by itself, outside the root: masters may have changed
  }
  if (forward_depth_ == 0 && !backward_active_) {
    masters_ready_.record();
  }
  gather(unit);
  if (forward_depth_ == 0 && backward_active_) {
    // Recomputed under activation checkpointing, which may stop before the unit's end: what frees it is its backward.
    begin_backward_of(unit, 0);
    return;
  }
  ++u.forward_uses;
  if (forward_depth_ > 0) {
    record_and_prefetch(forward_order_, unit, "forward");
  } else {
    client_.expose(unit, true);
  }
}

void Engine::after_forward(std::int32_t unit, bool backward_follows, bool last_module) {
  auto& u = unit_state(unit);
  if (u.forward_uses == 0) {
    return;  // recomputed, or its gather failed
  }
  if (--u.forward_uses > 0) {
    return;
  }
  if (forward_depth_ == 0) {
    client_.expose(unit, false);
  }
  // Kept: a unit whose next module follows, and the last unit of the forward, whose backward comes first.
  const bool keep = forward_depth_ > 0 && (!last_module || (backward_follows && is_last_of_forward(unit)));
  if (!keep && (rotates(unit) || (forward_depth_ == 0 && !backward_follows))) {
    release(unit);
  }
}

bool Engine::is_last_of_forward(std::int32_t unit) const {
  const auto& order = forward_order_;
  return !order.expected.empty() && order.expected.back() == unit && order.current.size() == order.expected.size();
}

// ---- backward
// ---------------------------------------------------------------------------------------------------------

void Engine::before_backward(std::int32_t unit, std::uint64_t reached, std::uint64_t began) {
  if (!backward_active_) {
    backward_active_ = true;
    ++counters_.rounds;
    backward_order_.current.clear();
    reducer_.begin_round(reduce_);
    client_.backward_began();
  }
  reducer_.expect(unit);
  for (std::size_t i = 0; i < units_.size(); ++i) {
    const auto other = static_cast<std::int32_t>(i);
    if (other != unit && units_[i].in_backward && reached < units_[i].began && rotates(other)) {
      finish_backward_of(other);
    }
  }
  auto& u = unit_state(unit);
  if (u.in_backward) {
    if (began != 0) {
      u.began = u.began == 0 ? began : std::min(u.began, began);
    }
    return;
  }
  gather(unit);
  begin_backward_of(unit, began);
  record_and_prefetch(backward_order_, unit, "backward");
}

void Engine::begin_backward_of(std::int32_t unit, std::uint64_t began) {
  auto& u = unit_state(unit);
  if (!u.in_backward) {
    u.in_backward = true;
    u.began = began;
    client_.expose(unit, true);
  }
}

void Engine::finish_backward_of(std::int32_t unit) {
  auto& u = unit_state(unit);
  u.in_backward = false;
  client_.expose(unit, false);
  if (u.forward_uses == 0) {
    release(unit);
  }
}

GradientDestination Engine::gradient_destination(std::int32_t param) {
  if (!backward_active_) {
    // The unit's outputs did not show that a backward had begun (opaque containers); the gradient itself does.
    const std::int32_t bucket = plan_.placement(param).bucket;
    before_backward(plan_.buckets()[static_cast<std::size_t>(bucket)].unit);
  }
  const Timer timer(counters_.wait_seconds);
  return reducer_.destination(param);
}

void Engine::end_backward() {
  // Where collectives have one order, the end of a round has its place among the gathers: it must not depend on when
  // places became free.
  while (comm_.needs_fixed_order() && !queue_.empty()) {
    launch_queued(true);
  }
  {
    const Timer timer(counters_.wait_seconds);
    const Span span("finish", "reductions");
    reducer_.end_round();
  }
  for (std::size_t u = 0; u < units_.size(); ++u) {
    if (units_[u].in_backward) {
      finish_backward_of(static_cast<std::int32_t>(u));
    }
  }
  backward_active_ = false;
  release_all();
  backward_order_.expected = std::move(backward_order_.current);
  backward_order_.current.clear();
}

void Engine::abort() {
  for (std::size_t u = 0; u < units_.size(); ++u) {
    units_[u].forward_uses = 0;
    units_[u].in_backward = false;
  }
  client_.expose(kAllUnits, false);
  forward_depth_ = 0;
  backward_active_ = false;
  forward_order_.current.clear();
  backward_order_.current.clear();
  try {
    release_all();
  } catch (...) {
    // The peers are gone: nobody will read what was queued, and every later collective will say so again.
    queue_.clear();
    for (auto& u : units_) {
      u = Unit{};
    }
    std::fill(place_owner_.begin(), place_owner_.end(), -1);
    reducer_.abort_round();
    throw;
  }
  // Last: peers that stop at the same place may still wait for the gathers that were queued.
  reducer_.abort_round();
}

}  // namespace tt::fsdp
