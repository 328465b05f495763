#include "ascendcl/entry.h"
#include "runtime/context.h"
#include "runtime/scheduler.h"

namespace {

using sim::entry;
using sim::scheduler;

aclError known(const char* name, aclrtStream stream) {
  if (scheduler().stream_id(stream) >= 0) return ACL_SUCCESS;
  return sim::error(ACL_ERROR_RT_PARAM_INVALID, std::string(name) + ": not a stream");
}

}  // namespace

extern "C" {

aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t priority, uint32_t) {
  return entry("aclrtCreateStreamWithConfig", [&] {
    if (stream == nullptr) return sim::null_argument("aclrtCreateStreamWithConfig");
    if (priority > 7) {
      return sim::error(ACL_ERROR_RT_PARAM_INVALID,
                        "aclrtCreateStreamWithConfig: priority " + std::to_string(priority) + " is not within 0 and 7");
    }
    sim::Context* context = sim::current_context();
    if (context == nullptr) {
      return sim::error(ACL_ERROR_RT_CONTEXT_NULL, "aclrtCreateStream: this thread has set no device");
    }
    *stream = scheduler().create_stream(context->card);
    return ACL_SUCCESS;
  });
}

aclError aclrtCreateStream(aclrtStream* stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }

aclError aclrtDestroyStream(aclrtStream stream) {
  return entry("aclrtDestroyStream", [&] { return scheduler().destroy_stream(stream, false); });
}

aclError aclrtDestroyStreamForce(aclrtStream stream) {
  return entry("aclrtDestroyStreamForce", [&] { return scheduler().destroy_stream(stream, true); });
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout) {
  return entry("aclrtSynchronizeStreamWithTimeout", [&] { return scheduler().synchronize_stream(stream, timeout); });
}

aclError aclrtSynchronizeStream(aclrtStream stream) {
  return entry("aclrtSynchronizeStream", [&] { return scheduler().synchronize_stream(stream, sim::kForever); });
}

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
  return entry("aclrtStreamQuery", [&] {
    if (status == nullptr) return sim::null_argument("aclrtStreamQuery");
    bool complete = false;
    const aclError result = scheduler().query_stream(stream, &complete);
    *status = complete ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
    return result;
  });
}

aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  return entry("aclrtStreamGetId", [&] {
    if (id == nullptr) return sim::null_argument("aclrtStreamGetId");
    const int found = scheduler().stream_id(stream);
    if (found < 0) return sim::error(ACL_ERROR_RT_PARAM_INVALID, "aclrtStreamGetId: not a stream");
    *id = found;
    return ACL_SUCCESS;
  });
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  return entry("aclrtStreamWaitEvent", [&] { return scheduler().wait_for_event(stream, event); });
}

aclError aclrtStreamWaitEventWithTimeout(aclrtStream stream, aclrtEvent event, int32_t) {
  return aclrtStreamWaitEvent(stream, event);
}

// A simulated stream stops at its first failure in either mode: what comes after would compute with garbage.
aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t mode) {
  return entry("aclrtSetStreamFailureMode", [&] {
    if (mode > 1) return sim::error(ACL_ERROR_RT_PARAM_INVALID, "aclrtSetStreamFailureMode: no such mode");
    return known("aclrtSetStreamFailureMode", stream);
  });
}

aclError aclrtSetStreamOverflowSwitch(aclrtStream stream, uint32_t flag) {
  return entry("aclrtSetStreamOverflowSwitch", [&] {
    if (flag == 0) return known("aclrtSetStreamOverflowSwitch", stream);
    return sim::unsupported("detection of overflows (aclrtSetStreamOverflowSwitch)");
  });
}

aclError aclrtGetStreamOverflowSwitch(aclrtStream stream, uint32_t* flag) {
  return entry("aclrtGetStreamOverflowSwitch", [&] {
    if (flag == nullptr) return sim::null_argument("aclrtGetStreamOverflowSwitch");
    *flag = 0;
    return known("aclrtGetStreamOverflowSwitch", stream);
  });
}

aclError aclrtDeviceGetStreamPriorityRange(int32_t* least, int32_t* greatest) {
  return entry("aclrtDeviceGetStreamPriorityRange", [&] {
    if (least == nullptr || greatest == nullptr) return sim::null_argument("aclrtDeviceGetStreamPriorityRange");
    *least = 7;
    *greatest = 0;
    return ACL_SUCCESS;
  });
}
}
