// Every libtorch call that is not stable API, in one place. Written for torch 2.13.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <typeinfo>
#include <unordered_set>
#include <utility>

namespace tt::torch_compat {

using GradientNode = c10::intrusive_ptr<torch::autograd::Node>;

// Points a storage at memory that it does not own.
inline void seat(c10::StorageImpl& storage, void* where) {
  storage.set_data_ptr_noswap(c10::DataPtr(where, storage.device()));
  storage.clear_data_ptr_access_error_msg_();
}

// Leaves a storage without memory; any access raises RuntimeError(message).
inline void unseat(c10::StorageImpl& storage, const std::string& message) {
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, storage.device()));
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

// A contiguous tensor at memory that it does not own. Not at::from_blob: its storage is a plain one, and torch_npu
// reads fields of its own kind behind it.
inline at::Tensor tensor_at(void* where, at::IntArrayRef sizes, c10::ScalarType dtype, c10::Device device) {
  auto tensor = at::empty({0}, at::TensorOptions().dtype(dtype).device(device));
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  auto& storage = *tensor.storage().unsafeGetStorageImpl();
  storage.set_data_ptr_noswap(c10::DataPtr(where, tensor.device()));
  storage.set_nbytes(static_cast<std::size_t>(impl->numel()) * impl->itemsize());
  return tensor;
}

// Makes `node` the gradient accumulator of a leaf. The leaf keeps a weak reference only.
inline void set_gradient_accumulator(const at::Tensor& leaf, const GradientNode& node) {
  torch::autograd::impl::set_grad_accumulator(leaf, c10::weak_intrusive_ptr<torch::autograd::Node>(node));
}

// The hook that register_post_accumulate_grad_hook installed, if any.
inline void run_post_accumulate_hooks(const at::Tensor& leaf) {
  const auto& hook = torch::autograd::impl::post_acc_grad_hooks(leaf);
  if (hook != nullptr) {
    (*hook)(leaf);
  }
}

inline bool has_hooks(const at::Tensor& leaf) { return !torch::autograd::impl::hooks(leaf).empty(); }

// The gradient that the leaf's register_hook functions make of `gradient`.
inline at::Tensor run_hooks(const at::Tensor& leaf, const at::Tensor& gradient) {
  torch::autograd::variable_list gradients{gradient};
  for (const auto& hook : torch::autograd::impl::hooks(leaf)) {
    gradients = (*hook)(gradients);
  }
  return gradients.at(0);
}

// Gives the tensor a count of in-place changes of its own, starting from 0.
inline void reset_version(const at::Tensor& tensor) {
  torch::autograd::impl::set_version_counter(tensor, c10::VariableVersion(/*version=*/0));
}

inline void add_pre_hook(torch::autograd::Node& node, std::unique_ptr<torch::autograd::FunctionPreHook> hook) {
  node.add_pre_hook(std::move(hook));
}

// Nodes of the backward pass in progress, or null if that is not known.
inline const std::unordered_set<torch::autograd::Node*>* nodes_of_backward() {
  return torch::autograd::get_current_graph_task_nodes_in_graph();
}

// Number of the backward pass in progress.
inline int backward_id() { return torch::autograd::get_current_graph_task_id(); }

// Whether the node is a re-entrant checkpoint, which runs another backward pass inside of the one in progress.
inline bool is_reentrant_checkpoint(const torch::autograd::Node& node) {
  // By the class's name: torch does not export PyNode, the class behind Python's autograd functions.
  return std::string_view(typeid(node).name()).find("PyNode") != std::string_view::npos &&
         node.name().find("Checkpoint") != std::string::npos;
}

// Runs `callback` when the backward pass in progress is through.
inline void at_end_of_backward(std::function<void()> callback) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(callback));
}

// A range of torch's profiler on the calling thread, named by make_name(); null while it does not record.
template <typename MakeName>
void* begin_range(const MakeName& make_name) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks.has_value()) {
    return nullptr;
  }
  auto range = std::make_unique<at::RecordFunction>(std::move(*callbacks));
  range->before(make_name());
  return range.release();
}

// Of begin_range, on the same thread.
inline void end_range(void* range) { std::unique_ptr<at::RecordFunction>(static_cast<at::RecordFunction*>(range)); }

}  // namespace tt::torch_compat
