// Collectives through a torch process group: for ranks that do not share memory, and for accelerators.
//
// Reductions travel as an all-to-all in the wire dtype; each rank adds what it received in the sum dtype itself.
// Gathers and reductions use groups of their own, since ranks may interleave the two differently.
//
// What the hosts tell each other (tags, which parameters have gradients) are CPU tensors, also where the parameters are
// on an accelerator: the groups then have a backend for each ("cpu:gloo,cuda:nccl"), and no host waits for its device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "runtime/communicator.h"

namespace tt {

class C10dCommunicator final : public runtime::Communicator {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
  // `device`: where gathered parameters and gradients live.
  C10dCommunicator(Group gathers, Group reductions, c10::Device device);

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const char* name() const override { return "c10d"; }

  void allocate(const runtime::MemoryLayout& layout) override;
  std::byte* gather_memory(std::size_t offset) override { return gather_memory_.at(offset); }
  std::byte* reduce_memory(std::size_t offset) override { return reduce_memory_.at(offset); }
  std::size_t buffer_bytes() const override { return buffer_bytes_; }

  bool place_is_free(std::uint32_t place) override;
  void wait_place_free(std::uint32_t place) override;
  void launch_gather(std::uint32_t place, const runtime::Tag& tag, std::span<const runtime::Segments> buckets) override;
  void wait_gather(std::uint32_t place, const runtime::Tag& tag) override;
  void release(std::uint32_t place) override;

  bool needs_fixed_order() const override { return true; }
  void launch_reduce(const runtime::Contribution& contribution) override;
  void close_round(std::uint64_t round) override;
  void abort_round(std::uint64_t round) override;
  bool reduce_is_ready(std::uint32_t bucket, std::uint64_t round) override;
  void wait_reduce_ready(std::uint32_t bucket, std::uint64_t round) override;
  bool wait_reduce_ready_or_stuck(std::uint32_t bucket, std::uint64_t round) override;
  std::vector<std::uint64_t> reported_anywhere(std::uint32_t bucket, std::uint64_t round) override;
  std::vector<const std::byte*> my_segment_everywhere(std::uint32_t bucket, std::uint64_t round) override;
  void finish_reduce(std::uint32_t bucket, std::uint64_t round) override;
  bool contribution_is_free(std::uint32_t bucket, std::uint64_t round) override;
  void wait_contribution_free(std::uint32_t bucket, std::uint64_t round) override;

  void set_progress(std::function<void()> progress) override { progress_ = std::move(progress); }
  // Peers see this rank's sockets close when it exits; there is no other channel to tell them.
  void fail(const std::string& why) noexcept override { static_cast<void>(why); }

 private:
  using Work = c10::intrusive_ptr<c10d::Work>;

  // Planned bytes, and what lies beyond them as it is needed.
  class Memory {
   public:
    void allocate(std::size_t planned, std::size_t reserved, std::vector<runtime::Region> overflow, c10::Device device);
    std::byte* at(std::size_t offset);

   private:
    at::Tensor planned_;
    std::vector<runtime::Region> overflow_;  // empty where reserved memory costs nothing
    std::vector<at::Tensor> taken_;          // per region of overflow_, undefined until it is asked for
  };

  struct Gather {
    Work tags_work;
    std::vector<Work> works;
    at::Tensor tags;  // (2 * N,) int64: unit, sequence
  };

  struct Reduction {
    std::uint64_t round = 0;
    bool launched = false;  // or known to be empty
    Work reported_work;
    std::vector<Work> works;
    at::Tensor received;  // (N * shard bytes,) uint8; undefined if no rank has a gradient
    at::Tensor reported;  // (parameters,) uint8
    std::size_t shard_bytes = 0;
  };

  // For the hosts' own messages, and for data in host memory: blocks until it is there.
  void wait(Work& work, const std::string& what);
  // For data: as above, or, on an accelerator, lets the current lane wait.
  void wait_data(Work& work, const std::string& what);
  void finish(Work& work, const std::string& what);
  bool has_arrived(const Work& data) const { return !on_host() || data->isCompleted(); }
  bool on_host() const { return device_.is_cpu(); }
  at::Tensor bytes_at(std::byte* where, std::size_t bytes) const;
  void start(const runtime::Contribution& contribution);
  at::Tensor take_buffer(std::int64_t bytes);
  Reduction& reduction(std::uint32_t bucket, std::uint64_t round);
  std::string describe(const runtime::Tag& tag) const;

  Group gathers_;
  Group reductions_;
  int rank_;
  int size_;
  c10::Device device_;
  runtime::MemoryLayout layout_;
  Memory gather_memory_;
  Memory reduce_memory_;
  std::map<std::uint32_t, Gather> pending_gathers_;  // by place
  std::vector<Reduction> reduction_of_;              // by bucket
  std::vector<runtime::Contribution> held_back_;     // from the first one without a gradient here until close_round
  std::multimap<std::int64_t, at::Tensor> free_buffers_;
  std::size_t buffer_bytes_ = 0;  // of all receive buffers, free or in use
  std::function<void()> progress_;
};

}  // namespace tt
