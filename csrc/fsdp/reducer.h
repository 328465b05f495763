// Gradients: collects them per bucket in the wire dtype, publishes complete buckets, sums my shard over all ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "fsdp/arena.h"
#include "fsdp/engine_client.h"
#include "fsdp/shard_plan.h"
#include "runtime/communicator.h"
#include "runtime/device.h"

namespace tt::fsdp {

// Where the gradient of one parameter goes.
struct GradientDestination {
  std::byte* where = nullptr;
  DType dtype = DType::kFloat32;
  bool add = false;  // add to what is there instead of replacing it
};

class Reducer {
 public:
  // All references must outlive the reducer.
  Reducer(const ShardPlan& plan, const Arena& arena, const Schedule& schedule, runtime::Communicator& comm,
          runtime::Device& device, EngineClient& client);

  void begin_round(bool reduce);
  // Between the two calls the caller writes the gradient.
  GradientDestination destination(std::int32_t param);
  void gradient_ready(std::int32_t param);
  // The unit's backward begins: finds out which of its parameters will report in this round.
  void expect(std::int32_t unit);
  // A frozen parameter (false) of a reduced bucket is not waited for. The same on all ranks.
  void set_trainable(std::int32_t param, bool trainable);
  // Publishes what is left (zeros for parameters that did not report), waits for all ranks, sums everything.
  void end_round();
  // Forgets a round that an exception cut short.
  void abort_round();
  // Sums whatever all ranks have published by now. Never blocks.
  void progress();

 private:
  enum class State : std::uint8_t { kIdle, kFilling, kComplete, kLaunched, kSummed };

  struct BucketState {
    State state = State::kIdle;
    std::int32_t slot = -1;
    std::vector<std::uint64_t> reported;  // this round
    std::vector<std::uint64_t> absent;    // will not report in this round, as far as is known
    std::vector<std::uint64_t> frozen;    // after planning: absent in every round
    std::size_t num_reported = 0;
    std::size_t num_absent = 0;
    std::size_t num_frozen = 0;
    std::byte* unreduced = nullptr;                 // gradients of rounds that were not reduced, sum dtype, or null
    std::vector<std::uint64_t> unreduced_reported;  // whose
  };

  // Who used a slot last; it may be written again when all ranks have finished reading that.
  struct SlotState {
    bool taken = false;
    std::int32_t bucket = -1;
    std::uint64_t round = 0;
    runtime::Mark read;  // the last work that read it

    explicit SlotState(runtime::Device& device) : read(device) {}
  };

  void take_slot(std::int32_t bucket);
  bool slot_is_free(std::int32_t slot);
  static void mark_reported(BucketState& b, std::size_t i);
  void fill_gaps(std::int32_t bucket);
  runtime::Contribution contribution_of(std::int32_t bucket) const;
  void launch(std::int32_t bucket);
  void launch_complete(std::int32_t bucket);
  void launch_in_order();
  void sum(std::int32_t bucket);
  void leave_slot(BucketState& bucket);
  void reset_round();
  std::byte* slot_memory(std::int32_t slot) const;
  DType accumulate_dtype(std::int32_t bucket) const;
  bool is_complete(std::int32_t bucket) const {
    const auto& b = state(bucket);
    return b.num_reported + b.num_absent == spec(bucket).params.size();
  }
  std::size_t index_in_bucket(std::int32_t param) const { return index_in_bucket_[static_cast<std::size_t>(param)]; }
  BucketState& state(std::int32_t bucket) { return buckets_[static_cast<std::size_t>(bucket)]; }
  const BucketState& state(std::int32_t bucket) const { return buckets_[static_cast<std::size_t>(bucket)]; }
  const Bucket& spec(std::int32_t bucket) const { return plan_.buckets()[static_cast<std::size_t>(bucket)]; }
  const std::string& unit_name(std::int32_t bucket) const {
    return plan_.units()[static_cast<std::size_t>(spec(bucket).unit)].name;
  }

  const ShardPlan& plan_;
  const Arena& arena_;
  const Schedule schedule_;
  runtime::Communicator& comm_;
  runtime::Device& device_;
  EngineClient& client_;

  std::vector<BucketState> buckets_;
  std::vector<SlotState> slots_;
  std::vector<runtime::Mark> filled_;         // per bucket: the last work that wrote a gradient
  runtime::Mark summed_;                      // the last sum of a round
  std::vector<std::size_t> index_in_bucket_;  // per parameter
  std::vector<std::uint64_t> expected_;       // per unit: the last round that expect() was called in
  std::vector<std::int32_t> launch_order_;    // Arena::reduce_order()
  std::size_t next_launch_ = 0;
  std::deque<std::int32_t> launched_;  // not yet summed, in launch order
  std::uint64_t round_ = 0;
  bool active_ = false;
  bool reduce_ = true;
  bool overflow_logged_ = false;
};

}  // namespace tt::fsdp
