#include "torch/npu_queue.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <string_view>
#include <utility>

#include "ascend/codes.h"
#include "ascend/libraries.h"
#include "base/error.h"

namespace tt {
namespace {

// The mangled name says the types of the arguments: another signature would be another name.
constexpr const char* kRunOpApi =
    "_ZN6at_npu6native9OpCommand10RunOpApiV2ERKNSt7__cxx1112basic_stringIcSt11char_"
    "traitsIcESaIcEEERKSt8functionIFivEEb";

void* find_in_torch_npu(const char* symbol) {
  // torch_npu is in the process already, but its symbols are not global.
  void* library = ::dlopen("libtorch_npu.so", RTLD_LAZY | RTLD_NOLOAD);
  void* found = ::dlsym(library == nullptr ? RTLD_DEFAULT : library, symbol);
  if (library != nullptr) {
    ::dlclose(library);
  }
  return found;
}

std::string describe(const char* name, int status) {
  const bool is_hccl = std::string_view(name).starts_with("Hccl");
  const char* more = ascend::ascendcl().aclGetRecentErrMsg();  // of this thread
  return str(name, " failed: ", ascend::explain(is_hccl ? ascend::Source::kHccl : ascend::Source::kAcl, status),
             more == nullptr ? "" : str(". CANN says: ", more));
}

}  // namespace

NpuQueue::NpuQueue(c10::Device device, const std::string& ordering) : device_(device) {
  if (ordering != "auto" && ordering != "queue" && ordering != "drain") {
    throw ValueError(str("ordering '", ordering, "': it is 'auto', 'queue' or 'drain'"));
  }
  if (ordering != "drain") {
    run_ = reinterpret_cast<Run>(find_in_torch_npu(kRunOpApi));
    if (run_ == nullptr && ordering == "queue") {
      throw ValueError("ordering 'queue': this torch_npu does not export OpCommand::RunOpApiV2; use 'auto' or 'drain'");
    }
  }
}

c10::Stream NpuQueue::current() const { return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_); }

// torch_npu waits for its queue whenever it is asked for a handle. A stream's never changes, so it is asked once,
// unless the waiting is what is wanted.
ascend::AclStream NpuQueue::handle(c10::Stream stream) {
  if (run_ == nullptr) {
    return stream.native_handle();
  }
  const std::lock_guard lock(mutex_);
  const auto [entry, is_new] = handles_.try_emplace(stream.id(), nullptr);
  if (is_new) {
    entry->second = stream.native_handle();
  }
  return entry->second;
}

void NpuQueue::raise_failure() {
  const std::lock_guard lock(failure_->mutex);
  if (!failure_->message.empty()) {
    throw Error(failure_->message);
  }
}

void NpuQueue::submit(const char* name, std::function<int(ascend::AclStream)> call) {
  raise_failure();
  const auto stream = handle(current());
  auto run = [call = std::move(call), stream, name, failure = failure_] {
    const int status = call(stream);
    if (status != 0) {
      const std::lock_guard lock(failure->mutex);
      if (failure->message.empty()) {
        failure->message = describe(name, status);
      }
    }
    return status;
  };
  if (run_ != nullptr) {
    run_(name, run, /*sync=*/false);
  } else {
    run();
  }
  raise_failure();
}

std::shared_ptr<void> NpuQueue::workspace(std::size_t bytes) {
  auto memory = at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).device(device_));
  void* where = memory.mutable_data_ptr();
  return {where, [memory = std::move(memory)](void*) {}};
}

}  // namespace tt
