#include "ascendcl/entry.h"
#include "runtime/scheduler.h"

namespace {

using sim::entry;
using sim::scheduler;

aclError create(const char* name, aclrtEvent* event, bool timed, bool extended) {
  return entry(name, [&] {
    if (event == nullptr) return sim::null_argument(name);
    *event = scheduler().create_event(timed, extended);
    return ACL_SUCCESS;
  });
}

}  // namespace

extern "C" {

aclError aclrtCreateEvent(aclrtEvent* event) { return create("aclrtCreateEvent", event, true, false); }

aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) {
  return create("aclrtCreateEventWithFlag", event, (flag & ACL_EVENT_TIME_LINE) != 0, false);
}

aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flag) {
  return create("aclrtCreateEventExWithFlag", event, (flag & ACL_EVENT_TIME_LINE) != 0, true);
}

aclError aclrtDestroyEvent(aclrtEvent event) {
  return entry("aclrtDestroyEvent", [&] { return scheduler().destroy_event(event); });
}

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  return entry("aclrtRecordEvent", [&] { return scheduler().record_event(event, stream); });
}

aclError aclrtResetEvent(aclrtEvent event, aclrtStream) {
  return entry("aclrtResetEvent", [&] { return scheduler().reset_event(event); });
}

aclError aclrtSynchronizeEvent(aclrtEvent event) {
  return entry("aclrtSynchronizeEvent", [&] { return scheduler().synchronize_event(event); });
}

aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  return entry("aclrtQueryEventStatus", [&] {
    if (status == nullptr) return sim::null_argument("aclrtQueryEventStatus");
    bool complete = false;
    bool pending = false;
    const aclError result = scheduler().query_event(event, &complete, &pending);
    *status = complete ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    return result;
  });
}

aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus* status) {
  return entry("aclrtQueryEventWaitStatus", [&] {
    if (status == nullptr) return sim::null_argument("aclrtQueryEventWaitStatus");
    bool complete = false;
    bool pending = false;
    const aclError result = scheduler().query_event(event, &complete, &pending);
    *status = pending ? ACL_EVENT_WAIT_STATUS_NOT_READY : ACL_EVENT_WAIT_STATUS_COMPLETE;
    return result;
  });
}

aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start, aclrtEvent end) {
  return entry("aclrtEventElapsedTime", [&] {
    if (milliseconds == nullptr) return sim::null_argument("aclrtEventElapsedTime");
    return scheduler().elapsed_milliseconds(start, end, milliseconds);
  });
}

aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t* timestamp) {
  return entry("aclrtEventGetTimestamp", [&] {
    if (timestamp == nullptr) return sim::null_argument("aclrtEventGetTimestamp");
    return scheduler().event_timestamp(event, timestamp);
  });
}
}
