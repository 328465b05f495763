// Allocation, on cards and on the host.
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "ascendcl/entry.h"
#include "runtime/allocations.h"
#include "runtime/card_memory.h"
#include "runtime/checks.h"
#include "runtime/context.h"
#include "runtime/scheduler.h"
#include "runtime/settings.h"

namespace {

using sim::entry;

constexpr std::size_t kPageBytes = 4096;

// Pinned host memory: what aclrtMallocHost returned, and what was registered.
struct HostMemory {
  struct Range {
    std::size_t bytes = 0;
    bool ours = false;
  };
  std::mutex mutex;
  std::map<const char*, Range> ranges;
};

HostMemory& host_memory() { return sim::immortal<HostMemory>(); }

aclError allocate(const char* name, void** result, std::size_t bytes) {
  return entry(name, [&] {
    if (result == nullptr) return sim::null_argument(name);
    if (bytes == 0) return sim::error(ACL_ERROR_INVALID_PARAM, std::string(name) + ": no bytes are asked for");
    sim::Context* context = sim::current_context();
    if (context == nullptr) {
      return sim::error(ACL_ERROR_RT_CONTEXT_NULL, std::string(name) + ": this thread has set no device");
    }
    const bool injected = sim::fault_is_due("oom", "");
    if (!injected && sim::allocate(context->card, bytes, result) == ACL_SUCCESS) return ACL_SUCCESS;
    const sim::CardUsage usage = sim::card_usage(context->card);
    return sim::error(ACL_ERROR_RT_MEMORY_ALLOCATION,
                      std::string(name) + ": simulated card " + std::to_string(context->card) + " has no " +
                          std::to_string(bytes) + " bytes in one piece left; " + std::to_string(usage.current) +
                          " of " + std::to_string(usage.capacity) + " bytes are in use" +
                          (injected ? " (TT_SIM_FAULT made it fail)" : ""));
  });
}

}  // namespace

extern "C" {

aclError aclrtMalloc(void** result, size_t size, aclrtMemMallocPolicy) { return allocate("aclrtMalloc", result, size); }

aclError aclrtMallocAlign32(void** result, size_t size, aclrtMemMallocPolicy) {
  return allocate("aclrtMallocAlign32", result, size);
}

aclError aclrtFree(void* address) {
  return entry("aclrtFree", [&] {
    auto allocation = sim::allocation_of(address);
    if (!allocation || allocation->begin != address) {
      return sim::error(ACL_ERROR_RT_PARAM_INVALID, "aclrtFree: not an address that aclrtMalloc returned");
    }
    sim::scheduler().check_free(address, allocation->bytes);
    sim::release(address);
    return ACL_SUCCESS;
  });
}

aclError aclrtMallocHost(void** result, size_t size) {
  return entry("aclrtMallocHost", [&] {
    if (result == nullptr) return sim::null_argument("aclrtMallocHost");
    if (size == 0) return sim::error(ACL_ERROR_INVALID_PARAM, "aclrtMallocHost: no bytes are asked for");
    void* memory = std::aligned_alloc(kPageBytes, (size + kPageBytes - 1) / kPageBytes * kPageBytes);
    if (memory == nullptr) throw std::bad_alloc();
    std::scoped_lock lock(host_memory().mutex);
    host_memory().ranges[static_cast<const char*>(memory)] = {size, true};
    *result = memory;
    return ACL_SUCCESS;
  });
}

aclError aclrtFreeHost(void* address) {
  return entry("aclrtFreeHost", [&] {
    std::size_t bytes = 0;
    {
      std::scoped_lock lock(host_memory().mutex);
      auto found = host_memory().ranges.find(static_cast<const char*>(address));
      if (found == host_memory().ranges.end() || !found->second.ours) {
        return sim::error(ACL_ERROR_RT_PARAM_INVALID, "aclrtFreeHost: not an address that aclrtMallocHost returned");
      }
      bytes = found->second.bytes;
      host_memory().ranges.erase(found);
    }
    sim::scheduler().check_free(address, bytes);
    std::free(address);
    return ACL_SUCCESS;
  });
}

aclError aclrtHostRegisterV2(void* address, uint64_t size, uint32_t) {
  return entry("aclrtHostRegisterV2", [&] {
    if (address == nullptr || size == 0) return sim::null_argument("aclrtHostRegisterV2");
    std::scoped_lock lock(host_memory().mutex);
    if (!host_memory().ranges.emplace(static_cast<const char*>(address), HostMemory::Range{size, false}).second) {
      return sim::error(ACL_ERROR_RT_PARAM_INVALID, "aclrtHostRegisterV2: the address is registered already");
    }
    return ACL_SUCCESS;
  });
}

aclError aclrtHostUnregister(void* address) {
  return entry("aclrtHostUnregister", [&] {
    std::scoped_lock lock(host_memory().mutex);
    auto found = host_memory().ranges.find(static_cast<const char*>(address));
    if (found == host_memory().ranges.end() || found->second.ours) {
      return sim::error(ACL_ERROR_RT_PARAM_INVALID, "aclrtHostUnregister: the address was not registered");
    }
    host_memory().ranges.erase(found);
    return ACL_SUCCESS;
  });
}

aclError aclrtPointerGetAttributes(const void* address, aclrtPtrAttributes* attributes) {
  return entry("aclrtPointerGetAttributes", [&] {
    if (attributes == nullptr) return sim::null_argument("aclrtPointerGetAttributes");
    *attributes = {};
    attributes->pageSize = kPageBytes;
    if (const int card = sim::card_of_address(address); card >= 0) {
      attributes->location = {static_cast<uint32_t>(card), ACL_MEM_LOCATION_TYPE_DEVICE};
      return ACL_SUCCESS;
    }
    const char* byte = static_cast<const char*>(address);
    std::scoped_lock lock(host_memory().mutex);
    auto next = host_memory().ranges.upper_bound(byte);
    const bool pinned =
        next != host_memory().ranges.begin() && byte < std::prev(next)->first + std::prev(next)->second.bytes;
    attributes->location = {0, pinned ? ACL_MEM_LOCATION_TYPE_HOST : ACL_MEM_LOCATION_TYPE_UNREGISTERED};
    return ACL_SUCCESS;
  });
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
  return entry("aclrtGetMemInfo", [&] {
    if (free == nullptr || total == nullptr) return sim::null_argument("aclrtGetMemInfo");
    sim::Context* context = sim::current_context();
    if (context == nullptr) {
      return sim::error(ACL_ERROR_RT_CONTEXT_NULL, "aclrtGetMemInfo: this thread has set no device");
    }
    const sim::CardUsage usage = sim::card_usage(context->card);
    *free = usage.capacity - usage.current;
    *total = usage.capacity;
    return ACL_SUCCESS;
  });
}

aclError aclrtGetMemUsageInfo(int32_t device, aclrtMemUsageInfo* info, size_t count, size_t* written) {
  return entry("aclrtGetMemUsageInfo", [&] {
    if (info == nullptr || written == nullptr) return sim::null_argument("aclrtGetMemUsageInfo");
    const sim::CardUsage usage = sim::card_usage(sim::card_of_device(device));
    *written = count == 0 ? 0 : 1;
    if (count == 0) return ACL_SUCCESS;
    *info = {};
    std::strncpy(info->name, "APP", sizeof info->name - 1);
    info->curMemSize = usage.current;
    info->memPeakSize = usage.peak;
    return ACL_SUCCESS;
  });
}
}
