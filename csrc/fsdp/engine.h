// When units are gathered, freed and reduced. One engine per wrapped model; knows neither torch nor a backend.
//
// Ranks run the same program, so they call the engine in the same order; every gather gets the next sequence number and
// the ranks compare (unit, sequence). Nothing here depends on timing except *when* a queued gather is launched, never
// which or in what order.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fsdp/arena.h"
#include "fsdp/engine_client.h"
#include "fsdp/reducer.h"
#include "fsdp/shard_plan.h"
#include "runtime/communicator.h"
#include "runtime/device.h"

namespace tt::fsdp {

// What the engine did since it was made; for logs, benchmarks and tests.
struct EngineCounters {
  std::uint64_t gathers = 0;
  std::uint64_t prefetches = 0;       // gathers launched ahead of use
  std::uint64_t order_misses = 0;     // units used in another order than in the step before
  std::uint64_t overflow_places = 0;  // gathers that did not fit the planned places
  std::uint64_t rounds = 0;           // backward passes
  std::uint64_t bytes_written = 0;    // gathered bytes this rank wrote for all
  double wait_seconds = 0;            // time blocked on other ranks in gathers and reductions
};

class Engine {
 public:
  static constexpr std::uint64_t kNowhere = ~std::uint64_t{0};

  // All references must outlive the engine.
  Engine(const ShardPlan& plan, Schedule schedule, runtime::Communicator& comm, runtime::Device& device,
         EngineClient& client);

  // Takes the arena's memory, through the communicator. Collective; once, before all that follows.
  void allocate();

  // ---- forward: begin/end around the root module's call, before/after around each unit's
  void begin_forward();
  void end_forward(bool backward_follows);
  void before_forward(std::int32_t unit);
  // `last_module`: no other module of the unit is expected to run after this one.
  void after_forward(std::int32_t unit, bool backward_follows, bool last_module = true);

  // ---- backward
  // A call of the unit is about to be run backward. Stamps count what the forward did: `reached`, the operation that
  // backward has come to, and `began`, the first one of that call. Backward goes through them downwards, so a unit
  // whose calls began after `reached` is done; that, and not which gradients have come, is the same on all ranks. Where
  // a call is not known, kNowhere and 0.
  void before_backward(std::int32_t unit, std::uint64_t reached = kNowhere, std::uint64_t began = 0);
  GradientDestination gradient_destination(std::int32_t param);
  void gradient_ready(std::int32_t param) { reducer_.gradient_ready(param); }
  void end_backward();
  // Whether the next backward passes reduce gradients (true) or keep them unreduced on each rank.
  void set_reduce(bool reduce) { reduce_ = reduce; }

  // Whether the parameter takes part in backward passes from now on; false for one that was frozen after planning.
  void set_trainable(std::int32_t param, bool trainable) { reducer_.set_trainable(param, trainable); }

  // After an exception in forward or backward: frees everything, so that the next step starts clean.
  void abort();
  // Called from inside waits.
  void progress() { reducer_.progress(); }

  bool in_forward() const { return forward_depth_ > 0; }  // of the root module
  bool in_backward() const { return backward_active_; }
  bool is_gathered(std::int32_t unit) const { return unit_state(unit).state == State::kGathered; }
  const Arena& arena() const { return arena_; }
  EngineCounters counters() const { return counters_; }

 private:
  enum class State : std::uint8_t { kSharded, kQueued, kLaunched, kGathered };

  struct Unit {
    State state = State::kSharded;
    std::int32_t place = -1;
    runtime::Tag tag;
    std::int32_t forward_uses = 0;  // calls in progress
    bool in_backward = false;
    std::uint64_t began = 0;  // in backward: stamp of the earliest call that is run backward, 0: unknown
  };

  // A gather whose turn or place has not come. Once queued it is launched, as the other ranks do: also when nobody
  // needs it any more (abandoned), but then nobody waits for that.
  struct Queued {
    std::int32_t unit = 0;
    std::int32_t place = -1;
    runtime::Tag tag;
    bool abandoned = false;
  };

  // The order in which units were used, recorded in one pass and expected in the next.
  struct Order {
    std::vector<std::int32_t> expected;
    std::vector<std::int32_t> current;
    bool miss_logged = false;
  };

  void gather(std::int32_t unit);
  void queue_gather(std::int32_t unit);
  void launch_queued(bool wait_for_first);
  void launch_gather(const Queued& queued);
  void record_and_prefetch(Order& order, std::int32_t unit, const char* pass);
  void release(std::int32_t unit);
  void release_all();
  void begin_backward_of(std::int32_t unit, std::uint64_t began);
  void finish_backward_of(std::int32_t unit);
  bool is_last_of_forward(std::int32_t unit) const;
  std::int32_t choose_place(std::int32_t unit);
  std::int32_t free_place() const;
  bool rotates(std::int32_t unit) const { return arena_.own_place(unit) < 0; }
  bool in_use(const Unit& unit) const { return unit.forward_uses > 0 || unit.in_backward; }
  const std::string& unit_name(std::int32_t unit) const { return plan_.units()[static_cast<std::size_t>(unit)].name; }
  Unit& unit_state(std::int32_t unit) { return units_[static_cast<std::size_t>(unit)]; }
  const Unit& unit_state(std::int32_t unit) const { return units_[static_cast<std::size_t>(unit)]; }
  const std::string& name(std::int32_t unit) const { return plan_.units()[static_cast<std::size_t>(unit)].name; }

  const ShardPlan& plan_;
  const Schedule schedule_;
  const Arena arena_;
  runtime::Communicator& comm_;
  runtime::Device& device_;
  EngineClient& client_;
  Reducer reducer_;

  std::vector<Unit> units_;
  std::vector<std::int32_t> place_owner_;  // unit in each place, or -1
  std::vector<runtime::Mark> place_left_;  // per place: the last work that read it
  runtime::Mark masters_ready_;            // the last work that changed masters
  runtime::Mark gathered_in_vain_;         // the last gather that nobody waited for: it has read masters, too
  std::deque<Queued> queue_;               // gathers not launched yet, in sequence order
  Order forward_order_;
  Order backward_order_;
  std::uint64_t sequence_ = 0;
  std::int32_t forward_depth_ = 0;
  bool backward_active_ = false;
  bool reduce_ = true;
  bool overflow_logged_ = false;
  EngineCounters counters_;
};

}  // namespace tt::fsdp
