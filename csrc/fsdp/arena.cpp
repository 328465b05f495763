#include "fsdp/arena.h"

#include <algorithm>

#include "base/error.h"

namespace tt::fsdp {
namespace {

// Alignment of buckets and slots: enough for any SIMD unit and for NPU cubes, small against any bucket that matters.
constexpr std::size_t kAlignment = 512;

constexpr std::size_t align_up(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

DType narrower(DType a, DType b) { return size_of(b) < size_of(a) ? b : a; }

}  // namespace

bool is_reduced(const Bucket& bucket) { return bucket.requires_grad && is_floating(bucket.param_dtype); }

Arena::Arena(const ShardPlan& plan, const Schedule& schedule) {
  const auto& units = plan.units();
  const auto& buckets = plan.buckets();
  if (schedule.reshard_after_forward.size() != units.size()) {
    throw ValueError(str("reshard_after_forward has ", schedule.reshard_after_forward.size(), " entries for ",
                         units.size(), " units"));
  }
  if (schedule.replicas < 1) {
    throw ValueError(str("replicas must be >= 1, got ", schedule.replicas));
  }
  if (schedule.prefetch < 0 || schedule.nesting < 1) {
    throw ValueError(str("prefetch must be >= 0 and nesting >= 1, got ", schedule.prefetch, " and ", schedule.nesting));
  }

  // Gather memory.
  bucket_offset_.resize(buckets.size());
  std::vector<std::size_t> unit_bytes(units.size(), 0);
  for (std::size_t u = 0; u < units.size(); ++u) {
    for (const std::int32_t b : plan.unit_buckets()[u]) {
      bucket_offset_[static_cast<std::size_t>(b)] = unit_bytes[u];
      const auto numel = static_cast<std::size_t>(plan.bucket_numel(b));
      unit_bytes[u] += align_up(numel * size_of(buckets[static_cast<std::size_t>(b)].param_dtype));
    }
  }
  std::size_t cursor = 0;
  const auto add_place = [&](std::size_t bytes) {
    places_.push_back({cursor, bytes});
    cursor += bytes;
    return static_cast<std::int32_t>(places_.size()) - 1;
  };
  own_place_.assign(units.size(), -1);
  overflow_place_.assign(units.size(), -1);
  std::size_t largest = 0;
  std::int32_t rotating_units = 0;
  for (std::size_t u = 0; u < units.size(); ++u) {
    if (schedule.reshard_after_forward[u]) {
      largest = std::max(largest, unit_bytes[u]);
      ++rotating_units;
    } else {
      own_place_[u] = add_place(unit_bytes[u]);
    }
  }
  rotating_begin_ = static_cast<std::int32_t>(places_.size());
  const std::int32_t rotating = std::min(rotating_units, schedule.nesting + schedule.prefetch);
  for (std::int32_t i = 0; i < rotating; ++i) {
    add_place(largest);
  }
  rotating_end_ = static_cast<std::int32_t>(places_.size());
  gather_bytes_ = cursor;
  for (std::size_t u = 0; u < units.size(); ++u) {
    if (schedule.reshard_after_forward[u]) {
      overflow_place_[u] = add_place(unit_bytes[u]);
    }
  }
  gather_reserved_bytes_ = cursor;

  // Reduce memory.
  own_slot_.assign(buckets.size(), -1);
  overflow_slot_.assign(buckets.size(), -1);
  wire_dtype_.resize(buckets.size());
  std::vector<std::size_t> bucket_bytes(buckets.size(), 0);
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    wire_dtype_[b] = buckets[b].param_dtype;
    if (!is_reduced(buckets[b])) {
      continue;
    }
    if (schedule.has_reduce_dtype) {
      wire_dtype_[b] = narrower(buckets[b].param_dtype, schedule.reduce_dtype);
    }
    bucket_bytes[b] =
        align_up(static_cast<std::size_t>(plan.bucket_numel(static_cast<std::int32_t>(b))) * size_of(wire_dtype_[b]));
  }
  cursor = 0;
  const auto add_slot = [&](std::size_t bytes) {
    slots_.push_back({cursor, bytes});
    cursor += bytes;
    return static_cast<std::int32_t>(slots_.size()) - 1;
  };
  std::size_t largest_bucket = 0;
  std::int32_t rotating_buckets = 0;
  std::int32_t most_per_unit = 0;
  for (std::size_t u = 0; u < units.size(); ++u) {
    std::int32_t in_unit = 0;
    for (const std::int32_t b : plan.unit_buckets()[u]) {
      const auto index = static_cast<std::size_t>(b);
      if (!is_reduced(buckets[index])) {
        continue;
      }
      if (schedule.reshard_after_forward[u]) {
        largest_bucket = std::max(largest_bucket, bucket_bytes[index]);
        ++rotating_buckets;
        ++in_unit;
      } else {
        own_slot_[index] = add_slot(bucket_bytes[index]);
      }
    }
    most_per_unit = std::max(most_per_unit, in_unit);
  }
  rotating_slot_begin_ = static_cast<std::int32_t>(slots_.size());
  // One fills while another travels; with several buckets per unit, gradients fill up to three at a time.
  const std::int32_t rotating_slots = std::min({rotating_buckets, 1 + most_per_unit, 4});
  for (std::int32_t i = 0; i < rotating_slots; ++i) {
    add_slot(largest_bucket);
  }
  rotating_slot_end_ = static_cast<std::int32_t>(slots_.size());
  reduce_bytes_ = cursor;
  for (std::size_t u = 0; u < units.size(); ++u) {
    if (!schedule.reshard_after_forward[u]) {
      continue;
    }
    for (const std::int32_t b : plan.unit_buckets()[u]) {
      const auto index = static_cast<std::size_t>(b);
      if (is_reduced(buckets[index])) {
        overflow_slot_[index] = add_slot(bucket_bytes[index]);
      }
    }
  }
  reduce_reserved_bytes_ = cursor;

  for (const bool own_slots : {false, true}) {
    for (std::size_t u = units.size(); u-- > 0;) {
      const auto& of_unit = plan.unit_buckets()[u];
      for (auto b = of_unit.rbegin(); b != of_unit.rend(); ++b) {
        if (is_reduced(buckets[static_cast<std::size_t>(*b)]) && (own_slot(*b) >= 0) == own_slots) {
          reduce_order_.push_back(*b);
        }
      }
    }
  }
  if (schedule.replicas > 1) {
    lay_out_staging(plan);
  }
}

void Arena::lay_out_staging(const ShardPlan& plan) {
  staging_.resize(plan.buckets().size());
  std::size_t largest = 0;
  std::size_t total = 0;
  for (const std::int32_t b : reduce_order_) {
    const auto& bucket = plan.buckets()[static_cast<std::size_t>(b)];
    const auto numel = static_cast<std::size_t>(bucket.shard_numel);
    const std::size_t bytes = align_up(numel * size_of(runtime::sum_dtype(wire_dtype(b))));
    staging_[static_cast<std::size_t>(b)].bytes = bytes;
    largest = std::max(largest, bytes);
    total += bytes;
  }
  // One travels while the next is summed.
  staging_bytes_ = std::min(total, 2 * largest);
  std::size_t cursor = 0;
  for (const std::int32_t b : reduce_order_) {
    auto& staging = staging_[static_cast<std::size_t>(b)];
    if (cursor + staging.bytes > staging_bytes_) {
      cursor = 0;
    }
    staging.offset = cursor;
    cursor += staging.bytes;
  }
}

}  // namespace tt::fsdp
