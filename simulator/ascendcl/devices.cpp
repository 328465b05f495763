#include <unistd.h>

#include <cstdio>

#include "ascendcl/entry.h"
#include "runtime/context.h"
#include "runtime/counters.h"
#include "runtime/scheduler.h"
#include "runtime/settings.h"

namespace {

using sim::entry;

aclError no_context(const char* name) {
  return sim::error(ACL_ERROR_RT_CONTEXT_NULL, std::string(name) + ": this thread has set no device");
}

}  // namespace

extern "C" {

aclError aclrtGetDeviceCount(uint32_t* count) {
  return entry("aclrtGetDeviceCount", [&] {
    if (count == nullptr) return sim::null_argument("aclrtGetDeviceCount");
    *count = static_cast<uint32_t>(sim::settings().visible.size());
    return ACL_SUCCESS;
  });
}

aclError aclrtSetDevice(int32_t device) {
  return entry("aclrtSetDevice", [&] {
    sim::set_current_context(sim::use_primary_context(device));
    return ACL_SUCCESS;
  });
}

aclError aclrtResetDevice(int32_t device) {
  return entry("aclrtResetDevice", [&] {
    const int card = sim::card_of_device(device);
    sim::scheduler().synchronize_card(card, 5000);
    sim::release_primary_context(device);
    if (sim::Context* context = sim::current_context(); context != nullptr && context->card == card) {
      sim::set_current_context(nullptr);
    }
    sim::write_statistics();
    return ACL_SUCCESS;
  });
}

aclError aclrtGetDevice(int32_t* device) {
  return entry("aclrtGetDevice", [&] {
    if (device == nullptr) return sim::null_argument("aclrtGetDevice");
    sim::Context* context = sim::current_context();
    if (context == nullptr) return no_context("aclrtGetDevice");
    *device = context->device;
    return ACL_SUCCESS;
  });
}

aclError aclrtGetRunMode(aclrtRunMode* mode) {
  return entry("aclrtGetRunMode", [&] {
    if (mode == nullptr) return sim::null_argument("aclrtGetRunMode");
    *mode = ACL_HOST;
    return ACL_SUCCESS;
  });
}

aclError aclrtCreateContext(aclrtContext* context, int32_t device) {
  return entry("aclrtCreateContext", [&] {
    if (context == nullptr) return sim::null_argument("aclrtCreateContext");
    sim::Context* made = sim::create_context(device);
    sim::set_current_context(made);
    *context = made;
    return ACL_SUCCESS;
  });
}

aclError aclrtDestroyContext(aclrtContext context) {
  return entry("aclrtDestroyContext", [&] { return sim::destroy_context(context); });
}

aclError aclrtSetCurrentContext(aclrtContext context) {
  return entry("aclrtSetCurrentContext", [&] {
    sim::Context* found = sim::find_context(context);
    if (found == nullptr) return sim::error(ACL_ERROR_RT_CONTEXT_NULL, "aclrtSetCurrentContext: not a context");
    sim::set_current_context(found);
    return ACL_SUCCESS;
  });
}

aclError aclrtGetCurrentContext(aclrtContext* context) {
  return entry("aclrtGetCurrentContext", [&] {
    if (context == nullptr) return sim::null_argument("aclrtGetCurrentContext");
    sim::Context* current = sim::current_context();
    if (current == nullptr) return no_context("aclrtGetCurrentContext");
    *context = current;
    return ACL_SUCCESS;
  });
}

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* active) {
  return entry("aclrtGetPrimaryCtxState", [&] {
    sim::card_of_device(device);
    if (active == nullptr) return sim::null_argument("aclrtGetPrimaryCtxState");
    if (flags != nullptr) *flags = 0;
    *active = sim::primary_context_is_active(device) ? 1 : 0;
    return ACL_SUCCESS;
  });
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout) {
  return entry("aclrtSynchronizeDevice", [&] {
    sim::Context* context = sim::current_context();
    if (context == nullptr) return no_context("aclrtSynchronizeDevice");
    return sim::scheduler().synchronize_card(context->card, timeout);
  });
}

aclError aclrtSynchronizeDevice(void) { return aclrtSynchronizeDeviceWithTimeout(-1); }

aclError aclrtDeviceCanAccessPeer(int32_t* can_access, int32_t device, int32_t peer) {
  return entry("aclrtDeviceCanAccessPeer", [&] {
    if (can_access == nullptr) return sim::null_argument("aclrtDeviceCanAccessPeer");
    *can_access = sim::card_of_device(device) == sim::card_of_device(peer) ? 0 : 1;
    return ACL_SUCCESS;
  });
}

aclError aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t) {
  return entry("aclrtDeviceEnablePeerAccess", [&] {
    sim::card_of_device(peer);
    return ACL_SUCCESS;
  });
}

aclError aclrtDeviceGetBareTgid(int32_t* pid) {
  return entry("aclrtDeviceGetBareTgid", [&] {
    if (pid == nullptr) return sim::null_argument("aclrtDeviceGetBareTgid");
    *pid = getpid();
    return ACL_SUCCESS;
  });
}

aclError aclrtDeviceGetUuid(int32_t device, aclrtUuid* uuid) {
  return entry("aclrtDeviceGetUuid", [&] {
    if (uuid == nullptr) return sim::null_argument("aclrtDeviceGetUuid");
    *uuid = {};
    std::snprintf(uuid->bytes, sizeof uuid->bytes, "simulated %d", sim::card_of_device(device));
    return ACL_SUCCESS;
  });
}

aclError aclrtGetLogicDevIdByUserDevId(const int32_t user_device, int32_t* const device) {
  return entry("aclrtGetLogicDevIdByUserDevId", [&] {
    if (device == nullptr) return sim::null_argument("aclrtGetLogicDevIdByUserDevId");
    *device = sim::card_of_device(user_device);
    return ACL_SUCCESS;
  });
}
}
