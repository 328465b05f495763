// The FSDP engine under torch: owns shards and gradients as tensors, seats gathered parameters, hooks into autograd.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/engine.h"
#include "runtime/communicator.h"
#include "runtime/device.h"
#include "torch/autograd_hooks.h"
#include "torch/bucket_storage.h"
#include "torch/compat.h"

namespace tt {

// What the engine tells the Python module tree. May be called from autograd's thread, without the GIL.
struct EngineCallbacks {
  std::function<void(std::int32_t unit, bool gathered)> expose;
  std::function<void(std::int32_t unit)> prepare;  // before a forward of the unit by itself
  std::function<void(const std::string& message)> log;
  // What users see as .grad of a piece.
  std::function<at::Tensor(std::int32_t param, const at::Tensor& gradient)> wrap_gradient;
  std::function<void()> check_signals;  // throws on Ctrl-C
};

class TorchEngine : public fsdp::EngineClient, public std::enable_shared_from_this<TorchEngine> {
 public:
  // `where`: the torch device of all tensors; `device` computes there.
  TorchEngine(std::shared_ptr<const fsdp::ShardPlan> plan, const fsdp::Schedule& schedule,
              std::shared_ptr<runtime::Communicator> comm, std::shared_ptr<runtime::Device> device, c10::Device where,
              EngineCallbacks callbacks);
  ~TorchEngine() override;
  TorchEngine(const TorchEngine&) = delete;
  TorchEngine& operator=(const TorchEngine&) = delete;

  // My shard of a bucket in its master dtype, shape (S,); the optimizer's pieces are views of it.
  at::Tensor master(std::int32_t bucket) const { return masters_[static_cast<std::size_t>(bucket)]; }
  // The full parameter, a view of the arena while its unit is gathered.
  at::Tensor gathered_view(std::int32_t param, const std::vector<std::int64_t>& sizes, c10::ScalarType dtype) const;
  // Connects the leaf that stands in the module during forward with the leaf that the optimizer sees.
  void bind(std::int32_t param, const at::Tensor& gathered, const at::Tensor& sharded);

  fsdp::Engine& engine() { return *engine_; }
  // Gradients that are accumulated without reduction (no_sync); kept from the first one on.
  std::size_t accumulation_bytes() const;
  const fsdp::ShardPlan& plan() const { return *plan_; }
  const runtime::Communicator& communicator() const { return *comm_; }

  void begin_forward();
  // A forward of the unit begins: by itself (then `prepare` is called), inside the root's, or recomputed in backward.
  void before_forward(std::int32_t unit);
  void after_forward(std::int32_t unit, bool backward_follows, bool last_module);
  // What users may have done to the parameters of `unit` (or of all) since the last forward: requires_grad_() is taken
  // over, `p.data = values` becomes a copy into the shard. Throws Error for what cannot be.
  void refresh(std::int32_t unit);

  // In between: calls before_backward(unit) when a backward pass reaches any of these outputs of the call.
  void hook_outputs(std::int32_t unit, const std::vector<at::Tensor>& outputs);
  // Before the unit's backward; throws Error if its parameters are not those of that forward any more.
  void before_backward(std::int32_t unit, const UnitCall& call);
  // A gradient arrived for a gathered leaf.
  void accumulate(std::int32_t param, const at::Tensor& gradient);
  // After an exception; frees everything.
  void abort();

  // EngineClient
  void seat(std::int32_t bucket, std::byte* where) override;
  void unseat(std::int32_t bucket) override;
  void expose(std::int32_t unit, bool gathered) override { callbacks_.expose(unit, gathered); }
  const std::byte* master_shard(std::int32_t bucket) override;
  std::byte* gradient_shard(std::int32_t bucket) override;
  bool has_gradient(std::int32_t param) override;
  bool will_report(std::int32_t param) override;
  void gradient_written(std::int32_t param) override;
  std::byte* allocate(std::size_t bytes) override;
  void backward_began() override;
  void log(const std::string& message) override { callbacks_.log(message); }

 private:
  struct Param {
    at::Tensor gathered;       // (*shape), param_dtype, leaf
    at::Tensor sharded;        // (rows, *shape[1:]), master dtype, leaf
    at::Tensor piece;          // what sharded was when it was bound: where it must lie in the bucket's master
    at::Tensor gradient_view;  // sharded's shape, in the bucket's gradient shard
    at::Tensor held_gradient;  // what a hook on sharded must not see while it changes the new gradient
    torch_compat::GradientNode sink;
    std::uint32_t seated_version = 0;
    bool trainable = false;  // requires_grad of both leaves at the last forward
  };

  // On an accelerator, gives gradient shards back that no parameter holds: its caching allocator takes them for
  // activations, and has them again for the next backward.
  void drop_unused_gradients();
  void refresh_trainable(std::int32_t param);
  void refresh_memory(std::int32_t param);
  std::vector<std::uint32_t> versions_of(std::int32_t unit) const;
  const std::string& name_of(std::int32_t param) const { return plan_->params()[static_cast<std::size_t>(param)].name; }

  std::shared_ptr<const fsdp::ShardPlan> plan_;
  std::shared_ptr<runtime::Communicator> comm_;
  std::shared_ptr<runtime::Device> device_;
  c10::Device where_;
  EngineCallbacks callbacks_;
  std::vector<BucketStorage> storages_;
  std::vector<at::Tensor> masters_;    // per bucket, (S,)
  std::vector<at::Tensor> gradients_;  // per bucket, (S,), made when it is reduced
  std::vector<at::Tensor> extra_;
  std::vector<Param> params_;
  int examined_backward_ = -1;
  bool backward_is_whole_ = true;             // all of its nodes are known: no other pass runs inside
  std::vector<std::uint64_t> checked_round_;  // per unit: the last backward pass whose parameter versions were compared
  std::vector<std::vector<std::uint64_t>> began_;  // per unit: torch's sequence number at each call in progress
  std::unique_ptr<fsdp::Engine> engine_;
};

}  // namespace tt
