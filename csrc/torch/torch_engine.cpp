#include "torch/torch_engine.h"

#include <ATen/ATen.h>
#include <ATen/SequenceNumber.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "torch/autograd_hooks.h"
#include "torch/dtypes.h"
#include "torch/error_bridge.h"

namespace tt {

TorchEngine::TorchEngine(std::shared_ptr<const fsdp::ShardPlan> plan, const fsdp::Schedule& schedule,
                         std::shared_ptr<runtime::Communicator> comm, std::shared_ptr<runtime::Device> device,
                         c10::Device where, EngineCallbacks callbacks)
    : plan_(std::move(plan)),
      comm_(std::move(comm)),
      device_(std::move(device)),
      where_(where),
      callbacks_(std::move(callbacks)),
      gradients_(plan_->buckets().size()),
      params_(plan_->params().size()),
      checked_round_(plan_->units().size(), 0),
      began_(plan_->units().size()) {
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
        where_,
        str("unit '", unit,
            "' is sharded: its parameters can be read only while its forward or backward runs. Call the module itself "
            "(not one of its methods or a submodule's weight), let the method gather it with "
            "register_forward_method(module, name), or read whole values inside full_params(model)"));
    masters_.push_back(
        at::zeros({bucket.shard_numel}, at::TensorOptions().dtype(to_torch(bucket.master_dtype)).device(where_)));
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
  p.piece = sharded.detach();
  p.trainable = gathered.requires_grad();
  // The piece's own count of changes, not one that it shares with its bucket's others.
  torch_compat::reset_version(sharded);
  if (gathered.is_floating_point()) {
    p.sink = make_gradient_sink(gathered, param, weak_from_this());
    torch_compat::set_gradient_accumulator(gathered, p.sink);
  }
}

void TorchEngine::begin_forward() {
  drop_unused_gradients();
  engine_->begin_forward();
}

void TorchEngine::drop_unused_gradients() {
  if (where_.is_cpu() || engine_->in_forward() || engine_->in_backward()) {
    return;
  }
  for (std::size_t b = 0; b < gradients_.size(); ++b) {
    const auto& params = plan_->buckets()[b].params;
    const auto is_held = [&](std::int32_t param) {
      return params_[static_cast<std::size_t>(param)].sharded.grad().defined();
    };
    if (!gradients_[b].defined() || std::any_of(params.begin(), params.end(), is_held)) {
      continue;
    }
    for (const std::int32_t param : params) {
      params_[static_cast<std::size_t>(param)].gradient_view.reset();
    }
    gradients_[b].reset();
  }
}

void TorchEngine::before_forward(std::int32_t unit) {
  if (!engine_->in_forward() && !engine_->in_backward()) {
    callbacks_.prepare(unit);
  }
  began_[static_cast<std::size_t>(unit)].push_back(at::sequence_number::peek());
  engine_->before_forward(unit);
}

void TorchEngine::after_forward(std::int32_t unit, bool backward_follows, bool last_module) {
  auto& began = began_[static_cast<std::size_t>(unit)];
  if (!began.empty()) {
    began.pop_back();
  }
  engine_->after_forward(unit, backward_follows, last_module);
}

void TorchEngine::refresh(std::int32_t unit) {
  for (std::size_t b = 0; b < plan_->buckets().size(); ++b) {
    const auto& bucket = plan_->buckets()[b];
    if (unit != fsdp::kAllUnits && bucket.unit != unit) {
      continue;
    }
    for (const std::int32_t param : bucket.params) {
      refresh_trainable(param);
      refresh_memory(param);
    }
  }
}

void TorchEngine::refresh_trainable(std::int32_t param) {
  auto& p = params_[static_cast<std::size_t>(param)];
  // The gathered leaf differs from what it was if requires_grad_() was called inside forward, where the module holds
  // it.
  const bool inside = p.gathered.requires_grad() != p.trainable;
  const bool wanted = inside ? p.gathered.requires_grad() : p.sharded.requires_grad();
  if (wanted == p.trainable && !inside) {
    return;
  }
  const auto& bucket = plan_->buckets()[static_cast<std::size_t>(plan_->placement(param).bucket)];
  if (!fsdp::is_reduced(bucket)) {
    if (!wanted) {
      return;
    }
    throw Error(str("not supported: parameter '", name_of(param),
                    "' was frozen when FSDP(...) wrapped the model, so it has no memory for gradients, and requires a "
                    "gradient now. Wrap the model with it trainable and call requires_grad_(False) afterwards: then it "
                    "can be unfrozen between steps"));
  }
  p.gathered.set_requires_grad(wanted);
  p.sharded.set_requires_grad(wanted);
  p.trainable = wanted;
  engine_->set_trainable(param, wanted);
}

void TorchEngine::refresh_memory(std::int32_t param) {
  auto& p = params_[static_cast<std::size_t>(param)];
  if (p.sharded.is_alias_of(p.piece) && p.sharded.storage_offset() == p.piece.storage_offset() &&
      p.sharded.scalar_type() == p.piece.scalar_type() && p.sharded.sizes() == p.piece.sizes()) {
    return;
  }
  if (p.sharded.scalar_type() != p.piece.scalar_type() || p.sharded.sizes() != p.piece.sizes() ||
      p.sharded.device() != p.piece.device()) {
    throw Error(tt::str("the .data of parameter '", name_of(param), "' was replaced: it is ", p.sharded.scalar_type(),
                        " ", p.sharded.sizes(), " on ", p.sharded.device(), " now, but this rank's piece is ",
                        p.piece.scalar_type(), " ", p.piece.sizes(), " on ", p.piece.device(),
                        ". Parts of an FSDP model cannot be cast or moved (.to(), .half()): use MixedPrecisionPolicy; "
                        "whole values are written inside full_params(model, writeback=True)"));
  }
  const at::NoGradGuard no_grad;
  p.piece.copy_(p.sharded);
  p.sharded.set_data(p.piece);
}

std::vector<std::uint32_t> TorchEngine::versions_of(std::int32_t unit) const {
  std::vector<std::uint32_t> versions;
  for (const std::int32_t b : plan_->unit_buckets()[static_cast<std::size_t>(unit)]) {
    for (const std::int32_t param : plan_->buckets()[static_cast<std::size_t>(b)].params) {
      versions.push_back(params_[static_cast<std::size_t>(param)].sharded._version());
    }
  }
  return versions;
}

void TorchEngine::before_backward(std::int32_t unit, const UnitCall& call) {
  // Once in a pass: an optimizer that runs inside backward changes parameters later on.
  const std::uint64_t round = engine_->counters().rounds + (engine_->in_backward() ? 0 : 1);
  if (std::exchange(checked_round_[static_cast<std::size_t>(unit)], round) != round) {
    std::size_t i = 0;
    for (const std::int32_t b : plan_->unit_buckets()[static_cast<std::size_t>(unit)]) {
      for (const std::int32_t param : plan_->buckets()[static_cast<std::size_t>(b)].params) {
        if (params_[static_cast<std::size_t>(param)].sharded._version() != call.versions[i++]) {
          throw Error(
              str("parameter '", name_of(param), "' of unit '", plan_->units()[static_cast<std::size_t>(unit)].name,
                  "' was modified between the forward and this backward, which needs the values of the forward: "
                  "run backward before optimizer.step() and before writing to parameters"));
        }
      }
    }
  }
  engine_->before_backward(unit, call.node, call.began);
}

void TorchEngine::hook_outputs(std::int32_t unit, const std::vector<at::Tensor>& outputs) {
  if (!engine_->in_backward()) {
    for (const std::int32_t b : plan_->unit_buckets()[static_cast<std::size_t>(unit)]) {
      for (const std::int32_t param : plan_->buckets()[static_cast<std::size_t>(b)].params) {
        refresh_trainable(param);  // requires_grad_() in the forward itself
      }
    }
  }
  const auto versions = versions_of(unit);
  const auto& calls = began_[static_cast<std::size_t>(unit)];
  const std::uint64_t began = calls.empty() ? 0 : calls.back();
  const auto hook = [&](const at::Tensor& tensor) {
    if (const auto node = tensor.grad_fn()) {
      torch_compat::add_pre_hook(*node,
                                 make_before_backward(unit, {node->sequence_nr(), began, versions}, weak_from_this()));
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
  if (!fsdp::is_reduced(plan_->buckets()[static_cast<std::size_t>(plan_->placement(param).bucket)])) {
    throw Error(str("not supported: a gradient arrived for parameter '", name_of(param),
                    "', which was frozen when FSDP(...) wrapped the model. Wrap the model with it trainable and call "
                    "requires_grad_(False) afterwards: then it can be unfrozen"));
  }
  const auto destination = engine_->gradient_destination(param);
  const auto numel = static_cast<std::size_t>(gradient.numel());
  if (gradient.layout() != at::kStrided) {
    throw Error(str("not supported: sparse gradient of parameter '", name_of(param),
                    "'; build the embedding with sparse=False"));
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
    auto to = torch_compat::tensor_at(destination.where, gradient.sizes(), to_torch(destination.dtype), where_);
    if (destination.add) {
      to.add_(gradient);
    } else {
      to.copy_(gradient);
    }
  }
  engine_->gradient_ready(param);
}

void TorchEngine::abort() {
  for (auto& calls : began_) {
    calls.clear();
  }
  engine_->abort();
}

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
    gradient = at::empty_like(masters_[static_cast<std::size_t>(bucket)]);
    for (const std::int32_t param : plan_->buckets()[static_cast<std::size_t>(bucket)].params) {
      auto& p = params_[static_cast<std::size_t>(param)];
      const auto piece = plan_->piece(param, comm_->rank());
      p.gradient_view =
          callbacks_.wrap_gradient(param, gradient.narrow(0, piece.shard_offset, piece.numel).view(p.sharded.sizes()));
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
  if (torch_compat::has_hooks(p.sharded)) {  // they see what this backward adds, as in torch, not the sum
    p.held_gradient = held.clone();
    return false;
  }
  if (!held.is_same(p.gradient_view)) {  // the user put another tensor there
    const at::NoGradGuard no_grad;
    p.gradient_view.copy_(held);
  }
  return true;
}

bool TorchEngine::will_report(std::int32_t param) {
  const auto& sink = params_[static_cast<std::size_t>(param)].sink;
  const auto* nodes = torch_compat::nodes_of_backward();
  if (!sink || nodes == nullptr || nodes->contains(sink.get())) {
    return true;
  }
  if (const int id = torch_compat::backward_id(); id != examined_backward_) {
    examined_backward_ = id;
    backward_is_whole_ = std::none_of(nodes->begin(), nodes->end(), [](const torch::autograd::Node* node) {
      return torch_compat::is_reentrant_checkpoint(*node);
    });
  }
  return !backward_is_whole_;
}

void TorchEngine::gradient_written(std::int32_t param) {
  auto& p = params_[static_cast<std::size_t>(param)];
  if (torch_compat::has_hooks(p.sharded)) {
    const at::NoGradGuard no_grad;
    const auto changed = torch_compat::run_hooks(p.sharded, p.gradient_view);
    if (!changed.is_same(p.gradient_view)) {
      p.gradient_view.copy_(changed);
    }
    if (p.held_gradient.defined()) {
      p.gradient_view.add_(p.held_gradient);
      p.held_gradient.reset();
    }
  }
  if (!p.sharded.grad().is_same(p.gradient_view)) {
    p.sharded.mutable_grad() = p.gradient_view;
  }
  torch_compat::run_post_accumulate_hooks(p.sharded);
}

std::size_t TorchEngine::accumulation_bytes() const {
  std::size_t bytes = 0;
  for (const auto& tensor : extra_) {
    bytes += tensor.nbytes();
  }
  return bytes;
}

std::byte* TorchEngine::allocate(std::size_t bytes) {
  extra_.push_back(at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).device(where_)));
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
