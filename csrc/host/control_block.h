// What the ranks write for each other at the start of the shared memory.
//
// Every word has one writer: the rank it belongs to. A writer stores what it has to say first and then one counter with
// release; readers load the counter with acquire, so they see all that came before, plain writes to gather and reduce
// memory included. A gathered segment, for example, is safe to read once the owner's `gathered` has reached its
// sequence number, and the place is safe to overwrite once all ranks' `released` has reached it: the reader's loads are
// before its release store, and that is before the owner's acquire load and so before the owner's next writes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "host/wait.h"
#include "runtime/communicator.h"

namespace tt::host {

static_assert(std::atomic<std::uint32_t>::is_always_lock_free && std::atomic<std::uint64_t>::is_always_lock_free,
              "atomics between processes must not need a lock");

inline constexpr std::size_t kCacheLine = 64;

enum class RankPhase : std::uint32_t { kAbsent, kAttached, kFailed, kLeft };

// kReduceUnlessStuck: for a reduction, but the rank goes on by itself where waiting could be a deadlock.
enum class WaitKind : std::uint32_t { kNone, kAttach, kGather, kPlace, kReduce, kReduceUnlessStuck, kContribution };

// What a rank waits for: gather `number` of unit `item`, place `item` (after gather `number`), or bucket `item` of
// backward pass `number`.
struct WaitReason {
  WaitKind kind = WaitKind::kNone;
  std::uint32_t item = 0;
  std::uint64_t number = 0;
};

struct Header {
  alignas(kCacheLine) Bell bell;
  // Ranks in wait_reduce_ready_or_stuck: whoever begins to wait rings for them.
  alignas(kCacheLine) std::atomic<std::uint32_t> stuck_watchers;
};

struct RankState {
  alignas(kCacheLine) std::atomic<std::uint64_t> gathered;  // sequence number of the last gather launched
  std::atomic<std::uint64_t> closed_round;                  // last backward pass that it ended or gave up
  std::atomic<std::uint64_t> aborted_round;                 // last one that it gave up
  alignas(kCacheLine) std::atomic<std::uint32_t> phase;     // RankPhase; stored after `pid` and `failure`
  std::atomic<std::int32_t> pid;
  // Where it is blocked now. For messages, and to tell a slow rank from a deadlock; not for correctness.
  std::atomic<std::uint32_t> waiting;  // WaitKind
  std::atomic<std::uint32_t> waiting_item;
  std::atomic<std::uint64_t> waiting_number;
  char failure[512];
};

inline RankPhase phase_of(const RankState& state) {
  return static_cast<RankPhase>(state.phase.load(std::memory_order_acquire));
}

// One of the last gathers of a rank: which unit it put into which place.
struct GatherEntry {
  std::atomic<std::uint64_t> sequence;  // stored last
  std::atomic<std::uint32_t> place;
  std::atomic<std::uint32_t> unit;
};

// One rank's contribution to one bucket. Two of them are kept: a rank may launch the next round while peers still read
// the last one. A slot is written again only when all ranks have finished its old round.
struct ContributionSlot {
  std::atomic<std::uint64_t> round;  // stored last
  std::uint64_t offset;
  std::uint64_t shard_numel;
  std::uint32_t wire;
};

struct BucketState {
  alignas(kCacheLine) std::atomic<std::uint64_t> finished;  // last round of which this rank has read all
  alignas(kCacheLine) ContributionSlot slots[2];
};

// Where everything is in the memory file, from the sizes that all ranks agree in.
struct SegmentLayout {
  SegmentLayout(int size, const runtime::MemoryLayout& memory);

  std::size_t ranks, entries, released, buckets, masks;  // offsets of tables
  std::size_t control_bytes;
  std::size_t gather;  // offset of gather memory
  std::size_t reduce;  // offset of rank 0's reduce memory
  std::size_t reduce_stride;
  std::size_t total_bytes;
  std::size_t num_ranks, num_places, num_buckets;
  std::size_t ring;  // gathers remembered per rank; a power of two
  std::size_t places_stride;
  std::vector<std::size_t> mask_offset;  // of each bucket, in words, within one rank's masks
  std::vector<std::size_t> mask_words;   // per slot
  std::size_t masks_stride;              // words per rank
};

class ControlBlock {
 public:
  // `memory` is the start of the mapped file, zeros at first: all atomics begin at 0.
  ControlBlock(std::byte* memory, const SegmentLayout& layout) : memory_(memory), layout_(layout) {}

  Header& header() { return *at<Header>(0); }
  RankState& rank(int rank) { return at<RankState>(layout_.ranks)[rank]; }
  GatherEntry& entry(int rank, std::uint64_t sequence) {
    return at<GatherEntry>(layout_.entries)[index(rank) * layout_.ring + (sequence & (layout_.ring - 1))];
  }
  // Sequence number of the last gather that this rank has released at `place`.
  std::atomic<std::uint64_t>& released(int rank, std::uint32_t place) {
    return at<std::atomic<std::uint64_t>>(layout_.released)[index(rank) * layout_.places_stride + place];
  }
  BucketState& bucket(int rank, std::uint32_t bucket) {
    return at<BucketState>(layout_.buckets)[index(rank) * layout_.num_buckets + bucket];
  }
  std::span<std::uint64_t> mask(int rank, std::uint32_t bucket, std::size_t slot) {
    const std::size_t words = layout_.mask_words[bucket];
    return {at<std::uint64_t>(layout_.masks) + index(rank) * layout_.masks_stride + layout_.mask_offset[bucket] +
                slot * words,
            words};
  }

  int num_ranks() const { return static_cast<int>(layout_.num_ranks); }
  std::size_t num_places() const { return layout_.num_places; }
  std::size_t num_buckets() const { return layout_.num_buckets; }

 private:
  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  template <typename T>
  T* at(std::size_t offset) {
    return reinterpret_cast<T*>(memory_ + offset);
  }

  std::byte* memory_;
  const SegmentLayout& layout_;
};

}  // namespace tt::host
