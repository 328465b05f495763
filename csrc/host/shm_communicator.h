// Collectives among processes of one machine that share their gather and reduce memory: nothing is copied, ranks only
// tell each other how far they are. control_block.h describes the protocol.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "host/control_block.h"
#include "host/peer_wait.h"
#include "host/rendezvous.h"
#include "host/shm_segment.h"
#include "runtime/communicator.h"

namespace tt::host {

struct ShmOptions {
  int rank = 0;
  int size = 1;
  std::string socket_name;               // random, the same on all ranks; not used with size 1
  double timeout_seconds = 1800;         // of every wait
  double connect_timeout_seconds = 120;  // of allocate()
  std::vector<int> global_ranks;         // names of the ranks in messages; empty: 0 .. size-1
};

// One thread at a time; fail() from any.
class ShmCommunicator final : public runtime::Communicator {
 public:
  // Gives the memory of `total_bytes`, mapped. The default shares a memory file over the socket.
  using SegmentSource = std::function<std::shared_ptr<ShmSegment>(const SegmentLayout& layout)>;

  explicit ShmCommunicator(ShmOptions options, SegmentSource source = nullptr);
  ~ShmCommunicator() override;

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  const char* name() const override { return "shared memory"; }

  void allocate(const runtime::MemoryLayout& layout) override;
  std::byte* gather_memory(std::size_t offset) override;
  std::byte* reduce_memory(std::size_t offset) override;
  std::size_t gather_reserved_bytes() const { return memory_.gather_reserved_bytes; }
  std::size_t reduce_reserved_bytes() const { return memory_.reduce_reserved_bytes; }
  // The mapping, to keep alive for whoever looks at the memory.
  std::shared_ptr<ShmSegment> segment() const { return segment_; }

  bool place_is_free(std::uint32_t place) override;
  void wait_place_free(std::uint32_t place) override;
  void launch_gather(std::uint32_t place, const runtime::Tag& tag, std::span<const runtime::Segments> buckets) override;
  void wait_gather(std::uint32_t place, const runtime::Tag& tag) override;
  void release(std::uint32_t place) override;

  bool needs_fixed_order() const override { return false; }
  void launch_reduce(const runtime::Contribution& contribution) override;
  void close_round(std::uint64_t round) override;
  void abort_round(std::uint64_t round, std::span<const runtime::Contribution> not_launched) override;
  bool reduce_is_ready(std::uint32_t bucket, std::uint64_t round) override;
  void wait_reduce_ready(std::uint32_t bucket, std::uint64_t round) override;
  bool wait_reduce_ready_or_stuck(std::uint32_t bucket, std::uint64_t round) override;
  std::vector<std::uint64_t> reported_anywhere(std::uint32_t bucket, std::uint64_t round) override;
  std::vector<const std::byte*> my_segment_everywhere(std::uint32_t bucket, std::uint64_t round) override;
  void finish_reduce(std::uint32_t bucket, std::uint64_t round) override;
  bool contribution_is_free(std::uint32_t bucket, std::uint64_t round) override;
  void wait_contribution_free(std::uint32_t bucket, std::uint64_t round) override;

  void set_progress(std::function<void()> progress) override;
  void fail(const std::string& why) noexcept override;

 private:
  void back_my_part(const runtime::MemoryLayout& memory);
  ControlBlock& control();
  void check_bucket(std::uint32_t bucket);
  bool has_gathered(int rank, std::uint32_t place, const runtime::Tag& tag);
  bool has_released(int rank, std::uint32_t place);
  bool has_launched(int rank, std::uint32_t bucket, std::uint64_t round);
  bool has_finished(int rank, std::uint32_t bucket, std::uint64_t round);
  std::optional<std::size_t> find_slot(int rank, std::uint32_t bucket, std::uint64_t round);
  std::size_t ready_slot(int rank, std::uint32_t bucket, std::uint64_t round);

  ShmOptions options_;
  SegmentSource source_;
  int owner_pid_;  // a forked child must not take leave in this rank's name
  std::vector<std::string> names_;
  runtime::MemoryLayout memory_;
  std::optional<SegmentLayout> layout_;
  std::shared_ptr<ShmSegment> segment_;
  std::optional<ControlBlock> control_;
  std::unique_ptr<PeerWait> wait_;
  std::function<void()> progress_;
  std::vector<std::uint64_t> launched_at_;  // per place: sequence number of my last gather there
  std::vector<std::size_t> launches_;       // per bucket: contributions so far; its parity is the next slot
};

}  // namespace tt::host
