#include "torch/torch_engine.h"

#include <ATen/ATen.h>

#include <utility>

#include "base/error.h"
#include "torch/autograd_hooks.h"
#include "torch/dtypes.h"
#include "torch/error_bridge.h"

namespace tt {

TorchEngine::TorchEngine(std::shared_ptr<const fsdp::ShardPlan> plan, const fsdp::Schedule& schedule,
                         std::shared_ptr<runtime::Communicator> comm, std::shared_ptr<runtime::Device> device,
                         EngineCallbacks callbacks)
    : plan_(std::move(plan)),
      comm_(std::move(comm)),
      device_(std::move(device)),
      callbacks_(std::move(callbacks)),
      gradients_(plan_->buckets().size()),
      params_(plan_->params().size()) {
  if (comm_->size() != plan_->world_size()) {
    throw ValueError(str("the plan is for ", plan_->world_size(), " ranks, the communicator has ", comm_->size()));
  }
  if (comm_->replicas() != schedule.replicas) {
    throw ValueError(
        str("the schedule is for ", schedule.replicas, " replicas, the communicator has ", comm_->replicas()));
  }
  for (std::size_t b = 0; b < plan_->buckets().size(); ++b) {
    const auto& bucket = plan_->buckets()[b];
    const auto& unit = plan_->units()[static_cast<std::size_t>(bucket.unit)].name;
    storages_.emplace_back(
        plan_->bucket_numel(static_cast<std::int32_t>(b)) * static_cast<std::int64_t>(size_of(bucket.param_dtype)),
        c10::kCPU,
        str("unit '", unit,
            "' is sharded: its parameters can be read only while its forward or backward runs. Call the module itself "
            "(not one of its methods or a submodule's weight), or move what needs the weight into its forward"));
    masters_.push_back(at::zeros({bucket.shard_numel}, at::TensorOptions().dtype(to_torch(bucket.master_dtype))));
  }
  engine_ = std::make_unique<fsdp::Engine>(*plan_, schedule, *comm_, *device_, *this);
  comm_->set_progress([this] {
    engine_->progress();
    callbacks_.check_signals();
  });
}

TorchEngine::~TorchEngine() { comm_->set_progress({}); }

at::Tensor TorchEngine::gathered_view(std::int32_t param, const std::vector<std::int64_t>& sizes,
                                      c10::ScalarType dtype) const {
  const auto& placement = plan_->placement(param);
  const auto bucket = static_cast<std::size_t>(placement.bucket);
  const auto item = static_cast<std::int64_t>(size_of(plan_->buckets()[bucket].param_dtype));
  return storages_[bucket].view(placement.offset * item, sizes, dtype);
}

void TorchEngine::bind(std::int32_t param, const at::Tensor& gathered, const at::Tensor& sharded) {
  auto& p = params_[static_cast<std::size_t>(param)];
  p.gathered = gathered;
  p.sharded = sharded;
  if (gathered.requires_grad()) {
    p.sink = make_gradient_sink(gathered, param, weak_from_this());
    torch_compat::set_gradient_accumulator(gathered, p.sink);
  }
}

void TorchEngine::hook_outputs(std::int32_t unit, const std::vector<at::Tensor>& outputs) {
  const auto hook = [&](const at::Tensor& tensor) {
    if (const auto node = tensor.grad_fn()) {
      torch_compat::add_pre_hook(*node, make_before_backward(unit, weak_from_this()));
    }
  };
  for (const auto& output : outputs) {
    hook(output);
    if (output.is_view()) {
      hook(at::Tensor(output._base()));
    }
  }
}

void TorchEngine::accumulate(std::int32_t param, const at::Tensor& gradient) {
  const auto destination = engine_->gradient_destination(param);
  const auto numel = static_cast<std::size_t>(gradient.numel());
  if (gradient.layout() != at::kStrided) {
    throw Error(str("not supported: sparse gradient of parameter '",
                    plan_->params()[static_cast<std::size_t>(param)].name, "'; build the embedding with sparse=False"));
  }
  if (gradient.is_contiguous()) {
    const auto* from = static_cast<const std::byte*>(gradient.const_data_ptr());
    const DType dtype = from_torch(gradient.scalar_type());
    if (destination.add) {
      device_->add(destination.where, destination.dtype, from, dtype, numel);
    } else {
      device_->cast(destination.where, destination.dtype, from, dtype, numel);
    }
  } else {
    const at::NoGradGuard no_grad;
    auto to =
        at::from_blob(destination.where, gradient.sizes(), at::TensorOptions().dtype(to_torch(destination.dtype)));
    if (destination.add) {
      to.add_(gradient);
    } else {
      to.copy_(gradient);
    }
  }
  engine_->gradient_ready(param);
}

void TorchEngine::abort() { engine_->abort(); }

void TorchEngine::seat(std::int32_t bucket, std::byte* where) {
  storages_[static_cast<std::size_t>(bucket)].seat(where);
  for (const std::int32_t param : plan_->buckets()[static_cast<std::size_t>(bucket)].params) {
    auto& p = params_[static_cast<std::size_t>(param)];
    if (p.gathered.defined()) {
      p.seated_version = p.gathered._version();
    }
  }
}

void TorchEngine::unseat(std::int32_t bucket) {
  storages_[static_cast<std::size_t>(bucket)].unseat();
  for (const std::int32_t param : plan_->buckets()[static_cast<std::size_t>(bucket)].params) {
    auto& p = params_[static_cast<std::size_t>(param)];
    if (p.gathered.defined() && p.gathered._version() != p.seated_version) {
      p.seated_version = p.gathered._version();
      callbacks_.log(str(
          "parameter '", plan_->params()[static_cast<std::size_t>(param)].name,
          "' was modified in place while it was gathered. The change is lost, and other ranks of this machine may "
          "have computed with it: change parameters outside forward, where model.parameters() are this rank's pieces"));
    }
  }
}

const std::byte* TorchEngine::master_shard(std::int32_t bucket) {
  return static_cast<const std::byte*>(masters_[static_cast<std::size_t>(bucket)].const_data_ptr());
}

std::byte* TorchEngine::gradient_shard(std::int32_t bucket) {
  auto& gradient = gradients_[static_cast<std::size_t>(bucket)];
  if (!gradient.defined()) {
    gradient = at::zeros_like(masters_[static_cast<std::size_t>(bucket)]);
    for (const std::int32_t param : plan_->buckets()[static_cast<std::size_t>(bucket)].params) {
      auto& p = params_[static_cast<std::size_t>(param)];
      const auto piece = plan_->piece(param, comm_->rank());
      p.gradient_view = gradient.narrow(0, piece.shard_offset, piece.numel).view(p.sharded.sizes());
    }
  }
  return static_cast<std::byte*>(gradient.mutable_data_ptr());
}

bool TorchEngine::has_gradient(std::int32_t param) {
  auto& p = params_[static_cast<std::size_t>(param)];
  const auto& held = p.sharded.grad();
  if (!held.defined()) {
    return false;
  }
  if (!held.is_same(p.gradient_view)) {  // the user put another tensor there
    const at::NoGradGuard no_grad;
    p.gradient_view.copy_(held);
  }
  return true;
}

void TorchEngine::gradient_written(std::int32_t param) {
  auto& p = params_[static_cast<std::size_t>(param)];
  if (!p.sharded.grad().is_same(p.gradient_view)) {
    p.sharded.mutable_grad() = p.gradient_view;
  }
  torch_compat::run_post_accumulate_hooks(p.sharded);
}

std::byte* TorchEngine::allocate(std::size_t bytes) {
  extra_.push_back(at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte)));
  return static_cast<std::byte*>(extra_.back().mutable_data_ptr());
}

void TorchEngine::backward_began() {
  torch_compat::at_end_of_backward([weak = weak_from_this()] {
    if (const auto locked = weak.lock()) {
      in_autograd([&] { locked->engine().end_backward(); });
    }
  });
}

}  // namespace tt
