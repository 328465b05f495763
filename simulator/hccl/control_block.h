// The memory that all ranks of a communicator share: who is where in which call. Zero when new. Every field is written
// by one rank only, except the two words that waiting goes by.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "hccl/file_descriptor.h"

namespace sim::hccl {

enum class Operation : std::uint32_t {
  kNone,
  kAllReduce,
  kBroadcast,
  kReduce,
  kReduceScatter,
  kReduceScatterV,
  kScatter,
  kAllGather,
  kAllGatherV,
  kBarrier,
  kAlltoAll,
  kAlltoAllV,
  kAlltoAllVC,
  kSend,
  kRecv,
  kBatchSendRecv,
};

constexpr std::uint32_t kUnused = 0xffffffff;

// What a rank says of its call. All but the offsets must be the same on all ranks.
struct Call {
  Operation operation = Operation::kNone;
  std::uint32_t data_type = kUnused;
  std::uint32_t reduce_op = kUnused;
  std::uint32_t root = kUnused;
  std::uint64_t count = 0;
  std::uint64_t counts_hash = 0;  // of the lists that must be the same
  std::uint64_t send_offset = 0;  // in the memory of the rank's card
  std::uint64_t recv_offset = 0;
};

enum Presence : std::uint32_t { kAbsent, kPresent, kLeft };

struct alignas(64) RankBlock {
  std::atomic<std::uint32_t> presence;
  std::atomic<std::uint32_t> failure;  // an HcclResult; failure_text is complete once it is not 0
  char failure_text[1016];
  // How many collectives this rank has come to, half done (all-reduce), finished.
  std::atomic<std::uint64_t> arrived;
  std::atomic<std::uint64_t> halfway;
  std::atomic<std::uint64_t> finished;
  std::atomic<std::uint64_t> partner;  // while in HcclSend or HcclRecv: see pack_partner
  Call call;                           // valid from `arrived` on until all ranks have finished the call
};

// One direction between two ranks. Both sides post what they call; the receiver copies.
struct alignas(64) Channel {
  std::atomic<std::uint64_t> offered;  // by the sender: number of sends so far
  std::atomic<std::uint64_t> wanted;   // by the receiver
  std::atomic<std::uint64_t> taken;    // by the receiver: copied
  std::atomic<std::uint64_t> offered_count;
  std::atomic<std::uint64_t> offered_offset;
  std::atomic<std::uint64_t> wanted_count;
  std::atomic<std::uint32_t> offered_type;
  std::atomic<std::uint32_t> wanted_type;
};

inline std::uint64_t pack_partner(Operation operation, std::uint32_t rank, std::uint64_t number) {
  return static_cast<std::uint64_t>(operation) << 56 | static_cast<std::uint64_t>(rank) << 40 | number;
}

// A mapping of the block.
class ControlBlock {
 public:
  static std::size_t bytes_for(std::uint32_t ranks);

  ControlBlock(FileDescriptor file, std::uint32_t ranks);
  ~ControlBlock();
  ControlBlock(const ControlBlock&) = delete;
  ControlBlock& operator=(const ControlBlock&) = delete;

  RankBlock& rank(std::uint32_t rank) const { return ranks_begin()[rank]; }
  Channel& channel(std::uint32_t from, std::uint32_t to) const;
  // Four lists of `ranks` numbers: send counts, send displacements, receive counts, receive displacements.
  std::uint64_t* lists(std::uint32_t rank) const;

  // A waiter takes version() before it looks, and sleeps only while nothing was announced since.
  std::uint32_t version() const;
  void announce() const;
  void sleep(std::uint32_t version, int milliseconds) const;

 private:
  struct Header {
    alignas(64) std::atomic<std::uint32_t> version;
    std::atomic<std::uint32_t> sleepers;
  };
  Header& header() const { return *reinterpret_cast<Header*>(memory_); }
  RankBlock* ranks_begin() const { return reinterpret_cast<RankBlock*>(memory_ + sizeof(Header)); }

  char* memory_ = nullptr;
  std::uint32_t ranks_ = 0;
};

}  // namespace sim::hccl
