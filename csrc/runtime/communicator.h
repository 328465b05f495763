// What the FSDP core asks of a group of ranks. Two kinds of collectives, both without copies of our own:
//
//   gather  every rank has written its shard into its segment of a *place* in gather memory; afterwards all segments
//           are readable at that place. Where ranks share gather memory, nothing moves.
//   reduce  every rank has written its gradients of a bucket (all N segments) somewhere into its reduce memory;
//           afterwards each rank can sum its own segment over all ranks.
//
// On a device with lanes, wait_place_free, launch_gather and release are called in the gather lane, launch_reduce,
// close_round, my_segment_everywhere and finish_reduce in the reduce lane, wait_gather in the compute lane; "written"
// and "readable" then mean: for work that the calling thread submits to that lane afterwards.
//
// Both are split into launch and wait, so that publishing early hides stragglers. Ranks run the same program: gathers
// are launched in the same order everywhere, and each carries a tag that all ranks compare. Reductions are matched by
// (bucket, round). All waits have a deadline, notice a dead or failed peer, and end in PeerError that names it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"

namespace tt::runtime {

// What a gather is about. Compared by all ranks; a difference means that they have come apart.
struct Tag {
  std::uint32_t unit = 0;
  std::uint64_t sequence = 0;  // running number of gathers, from 1
};

// One bucket in gather memory: N segments of `shard_bytes`, rank-major, from `offset` on.
struct Segments {
  std::size_t offset = 0;
  std::size_t shard_bytes = 0;
};

// Part of gather, reduce or staging memory.
struct Region {
  std::size_t offset = 0;
  std::size_t bytes = 0;
};

// Sizes agreed before any collective, the same on all ranks.
struct MemoryLayout {
  std::size_t gather_bytes = 0;              // planned: backed by memory at once
  std::size_t gather_reserved_bytes = 0;     // address space, >= gather_bytes; backed on first touch
  std::size_t reduce_bytes = 0;              // per rank, planned
  std::size_t reduce_reserved_bytes = 0;     // per rank, address space
  std::uint32_t places = 0;                  // gather places are numbered 0 .. places-1
  std::vector<std::uint32_t> bucket_params;  // parameters in each bucket that is reduced (0: never reduced)
  std::vector<std::string> unit_names;       // for messages
  // What lies between the planned bytes and the reserved ones. Memory that cannot be reserved without being taken (that
  // of an accelerator) is taken for a region when it is first asked for.
  std::vector<Region> gather_overflow = {};
  std::vector<Region> reduce_overflow = {};
  std::vector<std::uint32_t> bucket_units = {};  // for messages: unit of each bucket, or empty
  std::size_t staging_bytes = 0;                 // private memory of each rank; 0 with one replica
  // Per bucket, in that memory: where its sum travels between replicas. Buckets may overlap; 0 bytes: never reduced.
  std::vector<Region> staging = {};
};

// Words of Contribution::reported for a bucket of `params` parameters.
constexpr std::size_t reported_words(std::uint32_t params) { return (params + std::size_t{63}) / 64; }

// What gradients of `wire` are added up in.
constexpr DType sum_dtype(DType wire) { return size_of(wire) < 4 ? DType::kFloat32 : wire; }

inline constexpr std::size_t kNoGradient = ~std::size_t{0};

// One rank's contribution to one reduction.
struct Contribution {
  std::uint32_t bucket = 0;
  std::uint64_t round = 0;           // number of the backward pass, from 1
  std::size_t offset = kNoGradient;  // where in my reduce memory the bucket starts; kNoGradient: I have none
  std::size_t shard_numel = 0;       // elements per segment
  DType wire = DType::kFloat32;
  std::vector<std::uint64_t> reported;  // bit i: parameter i of the bucket has a gradient here (others are zeros)
};

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const char* name() const = 0;  // "shared memory", "c10d": for logs
  // Copies of the sharded model; one reduction adds up the gradients of size() * replicas() ranks.
  virtual int replicas() const { return 1; }

  // Collective; called once, before anything below.
  virtual void allocate(const MemoryLayout& layout) = 0;
  // The place or slot that contains `offset`, from there on. Valid after allocate(), and for good.
  virtual std::byte* gather_memory(std::size_t offset) = 0;
  virtual std::byte* reduce_memory(std::size_t offset) = 0;  // this rank's
  // What this rank holds for messages beyond the layout; it grows to what the steps need and stays.
  virtual std::size_t buffer_bytes() const { return 0; }

  // ---- gather -------------------------------------------------------------------------------------------------------
  // Whether every rank has released what the place held before: then wait_place_free() returns at once.
  virtual bool place_is_free(std::uint32_t place) = 0;
  // Its segments may be written from here on.
  virtual void wait_place_free(std::uint32_t place) = 0;
  // My segments at `place` are written. Valid until release(place).
  virtual void launch_gather(std::uint32_t place, const Tag& tag, std::span<const Segments> buckets) = 0;
  // Blocks until all ranks' segments are readable here; compares tags.
  virtual void wait_gather(std::uint32_t place, const Tag& tag) = 0;
  // I shall not read the place again.
  virtual void release(std::uint32_t place) = 0;

  // ---- reduce -------------------------------------------------------------------------------------------------------
  // Whether contributions must be launched in the same order on all ranks (then the engine holds complete ones back).
  virtual bool needs_fixed_order() const = 0;
  virtual void launch_reduce(const Contribution& contribution) = 0;
  // Every reducible bucket of this round has been launched.
  virtual void close_round(std::uint64_t round) = 0;
  // This rank gives the round up: it launches nothing more in it and reads no contribution to it any more; those that
  // it has launched become free as ever. Peers that give it up at the same place go on in step; one that waits for what
  // does not come gets PeerError. `not_launched`: what was left, in the fixed order, where there is one; its data are
  // void.
  virtual void abort_round(std::uint64_t round, std::span<const Contribution> not_launched) = 0;
  // Whether all ranks have launched (bucket, round).
  virtual bool reduce_is_ready(std::uint32_t bucket, std::uint64_t round) = 0;
  virtual void wait_reduce_ready(std::uint32_t bucket, std::uint64_t round) = 0;
  // Waits until ready, or until a rank that has not launched it is itself blocked in a wait: then returns false, and
  // waiting on could be a deadlock.
  virtual bool wait_reduce_ready_or_stuck(std::uint32_t bucket, std::uint64_t round) = 0;
  // Once ready: the union over ranks of `reported`.
  virtual std::vector<std::uint64_t> reported_anywhere(std::uint32_t bucket, std::uint64_t round) = 0;
  // Once ready: pointers to my segment in each rank's contribution, in rank order; null where a rank has none.
  virtual std::vector<const std::byte*> my_segment_everywhere(std::uint32_t bucket, std::uint64_t round) = 0;
  // Element type of these segments, for contributions of `wire`; wider where they are sums already.
  virtual DType segment_dtype(DType wire) const { return wire; }
  // I have read all that I need of (bucket, round).
  virtual void finish_reduce(std::uint32_t bucket, std::uint64_t round) = 0;
  // Whether all ranks have finished with my contribution: then wait_contribution_free() returns at once.
  virtual bool contribution_is_free(std::uint32_t bucket, std::uint64_t round) = 0;
  // Its memory may be written from here on, in the current lane.
  virtual void wait_contribution_free(std::uint32_t bucket, std::uint64_t round) = 0;

  // ---- small things -------------------------------------------------------------------------------------------------
  // Called from inside waits now and then, so that this rank finishes reductions that others wait for, and sees Ctrl-C.
  // May throw; must not call back into waits.
  virtual void set_progress(std::function<void()> progress) = 0;
  // Tells the peers that this rank gives up; their waits end with PeerError that quotes `why`.
  virtual void fail(const std::string& why) noexcept = 0;
};

}  // namespace tt::runtime
