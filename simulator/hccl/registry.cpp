// Which handles are communicators, and what an exception becomes at a C entry point.
#include <exception>
#include <mutex>
#include <unordered_map>

#include "hccl/communicator.h"

namespace sim::hccl {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_map<HcclComm, std::shared_ptr<Communicator>> communicators;
};

// Never destroyed: threads of streams may still use it while the process exits.
Registry& registry() {
  static Registry& instance = *std::make_unique<Registry>().release();
  return instance;
}

// A process that exits without destroying its communicators has left; one that is killed has died.
struct LeaveAtExit {
  ~LeaveAtExit() {
    const std::lock_guard lock(registry().mutex);
    for (const auto& [handle, communicator] : registry().communicators) communicator->mark_left();
  }
} leave_at_exit;

[[noreturn]] void unknown(HcclComm handle) {
  throw Error(handle == nullptr ? HCCL_E_PTR : HCCL_E_PARA,
              handle == nullptr ? "the communicator is null" : "the handle is no communicator, or was destroyed");
}

}  // namespace

HcclComm register_communicator(std::shared_ptr<Communicator> communicator) {
  const std::lock_guard lock(registry().mutex);
  HcclComm handle = communicator.get();
  registry().communicators.emplace(handle, std::move(communicator));
  return handle;
}

std::shared_ptr<Communicator> find_communicator(HcclComm handle) {
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().communicators.find(handle);
  if (found == registry().communicators.end()) unknown(handle);
  return found->second;
}

std::shared_ptr<Communicator> forget_communicator(HcclComm handle) {
  const std::lock_guard lock(registry().mutex);
  auto node = registry().communicators.extract(handle);
  if (node.empty()) unknown(handle);
  return std::move(node.mapped());
}

HcclResult guarded(const char* function, const std::function<void()>& body) {
  try {
    body();
    return HCCL_SUCCESS;
  } catch (const Error& error) {
    sim::set_error_message(std::string("simulated Ascend: ") + function + ": " + error.what());
    return error.code;
  } catch (const std::exception& error) {
    sim::set_error_message(std::string("simulated Ascend: ") + function + ": " + error.what());
    return HCCL_E_INTERNAL;
  }
}

}  // namespace sim::hccl

extern "C" const char* HcclGetErrorString(HcclResult code) {
  static constexpr const char* kTexts[] = {"no error",
                                           "parameter error",
                                           "null pointer",
                                           "memory error",
                                           "internal error",
                                           "not supported",
                                           "not found",
                                           "unavailable",
                                           "system call failed",
                                           "timeout",
                                           "file could not be opened",
                                           "connection failed",
                                           "RoCE connection failed",
                                           "transfer failed",
                                           "RoCE transfer failed",
                                           "runtime error",
                                           "driver error",
                                           "profiling error",
                                           "cce error",
                                           "network error",
                                           "try again",
                                           "remote error",
                                           "suspended",
                                           "retry failed",
                                           "out of card memory"};
  return code >= 0 && code < HCCL_E_RESERVED ? kTexts[code] : "unknown error";
}
