// Collectives through torch process groups: for ranks that do not share memory, and for accelerators.
//
// Reductions travel as an all-to-all in the wire dtype; each rank adds what it received in the sum dtype itself. Where
// the transport adds in that dtype anyway, it does. Gathers and reductions use groups of their own, since ranks may
// interleave the two differently.
//
// Ranks that have come apart are found by what they announce (CollectiveQueue). A rank that does not come at all can
// only say so through the store of the process group (PeerBoard).
//
// What the hosts announce are CPU tensors, also where the parameters are on an accelerator, so that no host waits for
// its device. Data go through the same groups, which then have a backend for each device ("cpu:gloo,cuda:nccl"), or
// through transports of their own.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "host/wait.h"
#include "runtime/communicator.h"
#include "torch/buffer_pool.h"
#include "torch/collective_queue.h"
#include "torch/data_transport.h"
#include "torch/launch_stream.h"
#include "torch/peer_board.h"

namespace tt {

class C10dCommunicator final : public runtime::Communicator {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
  // `global_ranks`: names of the ranks in messages; empty: 0 .. size-1.
  struct Transports {
    std::shared_ptr<DataTransport> gathers;  // none: the group's own
    std::shared_ptr<DataTransport> reductions;
  };
  // `device`: where gathered parameters and gradients live.
  C10dCommunicator(Group gathers, Group reductions, c10::Device device, double timeout_seconds,
                   std::vector<int> global_ranks, Transports transports = {});
  ~C10dCommunicator() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const char* name() const override { return transports_.gathers->name(); }

  void allocate(const runtime::MemoryLayout& layout) override;
  std::byte* gather_memory(std::size_t offset) override { return gather_memory_.at(offset); }
  std::byte* reduce_memory(std::size_t offset) override { return reduce_memory_.at(offset); }
  std::size_t buffer_bytes() const override { return received_buffers_->bytes(); }

  bool place_is_free(std::uint32_t place) override;
  void wait_place_free(std::uint32_t place) override;
  void launch_gather(std::uint32_t place, const runtime::Tag& tag, std::span<const runtime::Segments> buckets) override;
  void wait_gather(std::uint32_t place, const runtime::Tag& tag) override;
  void release(std::uint32_t place) override;

  bool needs_fixed_order() const override { return true; }
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

  void set_progress(std::function<void()> progress) override { progress_ = std::move(progress); }
  void fail(const std::string& why) noexcept override;

 private:
  using Clock = std::chrono::steady_clock;
  using Job = CollectiveQueue::Job;
  using JobPtr = CollectiveQueue::JobPtr;
  using Work = CollectiveQueue::Work;

  // Planned bytes, and what lies beyond them as it is needed.
  class Memory {
   public:
    void allocate(std::size_t planned, std::size_t reserved, std::vector<runtime::Region> overflow, c10::Device device);
    std::byte* at(std::size_t offset) { return static_cast<std::byte*>(part(offset, 1).mutable_data_ptr()); }
    // A view, so that a collective under way keeps the memory, whatever becomes of the communicator.
    at::Tensor part(std::size_t offset, std::size_t bytes);

   private:
    at::Tensor planned_;
    std::vector<runtime::Region> overflow_;  // empty where reserved memory costs nothing
    std::vector<at::Tensor> taken_;          // per region of overflow_, undefined until it is asked for
  };

  struct Reduction {
    std::uint64_t round = 0;
    bool launched = false;
    JobPtr job;                            // announces which parameters have a gradient here
    std::shared_ptr<at::Tensor> received;  // (parts * shard bytes,) uint8; undefined if no rank has a gradient
    std::size_t shard_bytes = 0;
    int parts = 0;  // one per rank, or one where the transport has added them
  };

  // Until the job's data have come; PeerError where they will not.
  void wait(const Job& job, bool of_reductions);
  // Until done(); looks after progress, notes of peers and the deadline. `of`: what it is in, for messages.
  template <typename Done>
  void wait_until(const Done& done, const std::string& of, std::uint64_t number, bool of_reductions);
  bool on_host() const { return device_.is_cpu(); }
  void wait_for_data(const Job& job);
  void check_agreement(const Job& job);
  void check_notes(const std::string& of, std::uint64_t number, bool of_reductions);
  [[noreturn]] void throw_error_of(const Job& job);
  // Why a collective ended with an error: a peer's own words, or which peer is dead.
  std::string explain(const std::string& of, const std::exception_ptr& error);
  void check_not_failed() const;
  [[noreturn]] void throw_failure(const std::string& message);

  void start(const runtime::Contribution& contribution);
  // Whether nothing of it is under way any more, for the host.
  bool has_come(const Reduction& aborted) const;
  void drop_aborted_that_have_ended();
  // Back to the pool, once nothing writes there.
  void give_back(Reduction& r);
  Reduction& reduction(std::uint32_t bucket, std::uint64_t round);
  std::string describe(const Header& header) const;
  std::string name(int rank) const;

  Group gathers_;
  Group reductions_;
  Transports transports_;
  int rank_;
  int size_;
  double timeout_seconds_;
  std::vector<int> global_ranks_;
  PeerBoard board_;
  runtime::MemoryLayout layout_;
  c10::Device device_;
  LaunchStream gather_launches_;
  LaunchStream reduction_launches_;
  Memory gather_memory_;
  Memory reduce_memory_;
  std::vector<std::optional<host::ProcessWatch>> watches_;  // of the ranks on this machine
  std::uint64_t ended_round_ = 0;                           // last backward pass that this rank closed or gave up
  std::string failed_;                                      // why this rank takes part in nothing more
  std::map<std::uint32_t, JobPtr> pending_gathers_;         // by place
  std::map<std::uint32_t, JobPtr> leftovers_;               // by place: released before they had arrived
  std::vector<Reduction> reduction_of_;                     // by bucket
  // By bucket and round: launched in backward passes that this rank gave up, and perhaps still under way.
  std::map<std::pair<std::uint32_t, std::uint64_t>, Reduction> aborted_;
  std::shared_ptr<BufferPool> received_buffers_;
  std::function<void()> progress_;
  std::unique_ptr<CollectiveQueue> gather_queue_;  // gathers, and the ends of backward passes
  std::unique_ptr<CollectiveQueue> reduction_queue_;
};

}  // namespace tt
