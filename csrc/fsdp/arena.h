// Where gathered buckets and reduce buffers may lie: the arena. Its sizes follow from the plan before any step.
//
// Gather memory is cut into places, each for one unit at a time:
//   own places       one for each unit that stays gathered from forward to backward (the root, as a rule)
//   rotating places  `nesting + prefetch` of them, each as large as the largest unit that is freed after its forward
//   overflow places  one per rotating unit, address space only: used when more units are alive at once than foreseen
// Reduce memory of a rank is cut into slots, each for one bucket at a time:
//   own slots        for buckets of units with an own place, which fill up all through the backward
//   rotating slots   a few, each as large as the largest other bucket
//   overflow slots   one per other bucket, address space only
// Staging memory holds the sums of a replica while they are added to those of the others. It is a ring: buckets are
// staged in one order, each always at the same offset, and a bucket waits until those before it have left its bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/shard_plan.h"
#include "runtime/communicator.h"

namespace tt::fsdp {

// How units are used over time; the part of the memory plan that shapes alone do not give.
struct Schedule {
  std::vector<bool> reshard_after_forward;  // per unit
  std::int32_t nesting = 1;                 // most units that reshard and contain one another
  std::int32_t prefetch = 1;                // units gathered ahead of use
  DType reduce_dtype = DType::kFloat32;     // sum dtype asked for; the wire is the narrower of it and param_dtype
  bool has_reduce_dtype = false;            // false: each bucket's param_dtype
  std::int32_t replicas = 1;                // copies of the sharded model; their gradients are averaged, too
};

struct Slot {
  std::size_t offset = 0;
  std::size_t bytes = 0;
};

class Arena {
 public:
  Arena(const ShardPlan& plan, const Schedule& schedule);

  // ---- gather memory
  const std::vector<Slot>& places() const { return places_; }
  // The unit's own place, or -1 if it takes a rotating one.
  std::int32_t own_place(std::int32_t unit) const { return own_place_[static_cast<std::size_t>(unit)]; }
  std::int32_t overflow_place(std::int32_t unit) const { return overflow_place_[static_cast<std::size_t>(unit)]; }
  std::int32_t rotating_begin() const { return rotating_begin_; }
  std::int32_t rotating_end() const { return rotating_end_; }
  // Bytes from the start of its unit's place.
  std::size_t bucket_offset(std::int32_t bucket) const { return bucket_offset_[static_cast<std::size_t>(bucket)]; }
  std::size_t gather_bytes() const { return gather_bytes_; }
  std::size_t gather_reserved_bytes() const { return gather_reserved_bytes_; }

  // ---- reduce memory
  const std::vector<Slot>& slots() const { return slots_; }
  std::int32_t own_slot(std::int32_t bucket) const { return own_slot_[static_cast<std::size_t>(bucket)]; }
  std::int32_t overflow_slot(std::int32_t bucket) const { return overflow_slot_[static_cast<std::size_t>(bucket)]; }
  std::int32_t rotating_slot_begin() const { return rotating_slot_begin_; }
  std::int32_t rotating_slot_end() const { return rotating_slot_end_; }
  DType wire_dtype(std::int32_t bucket) const { return wire_dtype_[static_cast<std::size_t>(bucket)]; }
  std::size_t reduce_bytes() const { return reduce_bytes_; }
  std::size_t reduce_reserved_bytes() const { return reduce_reserved_bytes_; }
  // Reduced buckets in the order in which a chain of units finishes them: units last to first, those with slots of
  // their own at the end.
  const std::vector<std::int32_t>& reduce_order() const { return reduce_order_; }

  // ---- staging memory: empty with one replica
  const std::vector<runtime::Region>& staging() const { return staging_; }
  std::size_t staging_bytes() const { return staging_bytes_; }

 private:
  void lay_out_staging(const ShardPlan& plan);

  std::vector<Slot> places_;
  std::vector<std::int32_t> own_place_;
  std::vector<std::int32_t> overflow_place_;
  std::int32_t rotating_begin_ = 0;
  std::int32_t rotating_end_ = 0;
  std::vector<std::size_t> bucket_offset_;
  std::size_t gather_bytes_ = 0;
  std::size_t gather_reserved_bytes_ = 0;

  std::vector<Slot> slots_;
  std::vector<std::int32_t> own_slot_;
  std::vector<std::int32_t> overflow_slot_;
  std::int32_t rotating_slot_begin_ = 0;
  std::int32_t rotating_slot_end_ = 0;
  std::vector<DType> wire_dtype_;
  std::size_t reduce_bytes_ = 0;
  std::size_t reduce_reserved_bytes_ = 0;
  std::vector<std::int32_t> reduce_order_;
  std::vector<runtime::Region> staging_;
  std::size_t staging_bytes_ = 0;
};

// Whether a bucket takes part in reductions.
bool is_reduced(const Bucket& bucket);

}  // namespace tt::fsdp
