// Hybrid sharding: the model is sharded over the ranks of a replica, and several replicas train together.
//
// Gathers stay inside the replica: they go to the inner communicator. A reduction takes two steps. Each rank adds up
// its segment over the ranks of its replica (in the sum dtype, not divided, not rounded) and gives their memory back;
// the sum then travels through an all-reduce with the ranks that hold the same shard in the other replicas.
//
// These all-reduces go through a CollectiveQueue, which announces each before its data. Every reduced bucket has
// exactly one in each round, in the fixed order; a replica without a gradient sends zeros, unless no replica has one,
// and one that gives the round up announces void ones for the rest.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "runtime/communicator.h"
#include "runtime/device.h"
#include "torch/collective_queue.h"
#include "torch/data_transport.h"
#include "torch/failure_board.h"
#include "torch/launch_stream.h"

namespace tt {

// One thread at a time; fail() from any.
class HybridCommunicator final : public runtime::Communicator {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  // Where gradients live, and what computes there; the engine's own device, as the two share lanes.
  struct Place {
    c10::Device where;
    std::shared_ptr<runtime::Device> device;
  };

  // `between`: the ranks that hold this rank's shard, one per replica; `global_ranks`: their names in messages;
  // `transport`: how sums travel between them, none: through `between`. `board`: seen by all ranks of all replicas and
  // used for nothing else. `timeout_seconds`: of a wait for another replica, once this rank's part of the backward is
  // done.
  HybridCommunicator(std::shared_ptr<runtime::Communicator> inner, Group between, std::vector<int> global_ranks,
                     c10::intrusive_ptr<c10d::Store> board, Place place, double timeout_seconds,
                     std::shared_ptr<DataTransport> transport = nullptr);
  ~HybridCommunicator() override;

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  int replicas() const override { return static_cast<int>(global_ranks_.size()); }
  const char* name() const override { return name_.c_str(); }

  void allocate(const runtime::MemoryLayout& layout) override;
  std::byte* gather_memory(std::size_t offset) override { return inner_->gather_memory(offset); }
  std::byte* reduce_memory(std::size_t offset) override { return inner_->reduce_memory(offset); }
  std::size_t buffer_bytes() const override { return inner_->buffer_bytes(); }

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
  DType segment_dtype(DType wire) const override { return runtime::sum_dtype(wire); }
  void finish_reduce(std::uint32_t bucket, std::uint64_t round) override;
  bool contribution_is_free(std::uint32_t bucket, std::uint64_t round) override;
  void wait_contribution_free(std::uint32_t bucket, std::uint64_t round) override;

  void set_progress(std::function<void()> progress) override;
  void fail(const std::string& why) noexcept override;

 private:
  using Job = CollectiveQueue::Job;
  using JobPtr = CollectiveQueue::JobPtr;
  using Work = CollectiveQueue::Work;

  enum class Phase : std::uint8_t {
    kIdle,
    kInner,    // launched inside the replica
    kBetween,  // its sum travels between the replicas
    kReady,    // the sum of all ranks is in staging memory
    kVoid,     // another replica has given the round up, which is right only if this one does, too
    kFinished,
  };

  struct Reduction {
    Phase phase = Phase::kIdle;
    std::uint64_t round = 0;
    std::size_t shard_numel = 0;
    DType wire = DType::kFloat32;
    std::vector<std::uint64_t> reported;  // in my replica; once ready: in any
    JobPtr job;                           // once it is ready
  };

  // One all-reduce under way.
  struct Travel {
    JobPtr job;
    bool wanted = true;   // false: its round was given up
    bool staged = false;  // in staging memory
  };

  bool on_host() const { return place_.where.is_cpu(); }
  // Takes every step that needs no waiting.
  void advance();
  void stage(std::uint32_t bucket);
  // Says that this replica gives the round up.
  void send_void(std::uint32_t bucket, std::uint64_t round);
  void arrive(const Travel& travel);
  void wait_for_data(const Job& job);
  // Throws if a replica has announced anything else, except that it gives the round up.
  void check_in_step(const Job& job);
  [[noreturn]] void throw_error_of(const Job& job, const std::exception_ptr& error);
  // Throws if another replica has given up the round that this rank has run to its end.
  void check_not_void(std::uint64_t round);
  bool staging_is_free(std::uint32_t bucket) const;
  void leave_staging(std::uint32_t bucket);
  Reduction& reduction(std::uint32_t bucket, std::uint64_t round);
  bool has_arrived(std::uint32_t bucket, std::uint64_t round);
  // What a failure of the peers inside or between replicas means for everybody else.
  template <typename Body>
  auto guarded(const Body& body);
  [[noreturn]] void give_up(const std::string& message);
  std::string replica(std::size_t index) const;
  std::string describe(const Header& header) const;

  class Patience;

  std::shared_ptr<runtime::Communicator> inner_;
  Group between_;
  std::vector<int> global_ranks_;
  std::size_t replica_;  // this rank's
  Place place_;
  std::shared_ptr<DataTransport> transport_;
  LaunchStream launches_;
  double timeout_seconds_;
  std::string name_;
  int owner_pid_;  // a forked child must not take leave in this rank's name
  FailureBoard board_;
  runtime::MemoryLayout layout_;
  at::Tensor staging_memory_;
  std::vector<Reduction> reductions_;      // per bucket
  std::deque<std::uint32_t> to_stage_;     // launched, in order
  std::deque<Travel> travels_;             // in order
  std::vector<std::uint32_t> in_staging_;  // buckets whose bytes there are in use
  std::uint64_t arrived_ = 0;
  std::string failure_;
  std::function<void()> progress_;
  std::unique_ptr<CollectiveQueue> queue_;
};

}  // namespace tt
