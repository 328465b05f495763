// Host functions within a stream, run by the stream or by the thread that asked for the stream's reports.
#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "ascendcl/entry.h"
#include "runtime/scheduler.h"
#include "runtime/settings.h"

namespace {

using sim::entry;

struct Report {
  aclrtCallback function = nullptr;
  void* argument = nullptr;
  std::promise<void> done;
};

struct Mailbox {
  std::deque<std::shared_ptr<Report>> reports;
  int streams = 0;
};

struct Reports {
  std::mutex mutex;
  std::condition_variable arrived;
  std::map<uint64_t, Mailbox> mailboxes;  // by the thread that subscribed
  std::map<aclrtStream, uint64_t> subscribers;
};

Reports& reports() { return sim::immortal<Reports>(); }

}  // namespace

extern "C" {

aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void* argument) {
  return entry("aclrtLaunchHostFunc", [&] {
    if (function == nullptr) return sim::null_argument("aclrtLaunchHostFunc");
    return sim::scheduler().submit_host_function(stream, "aclrtLaunchHostFunc", [=] {
      function(argument);
      return ACL_SUCCESS;
    });
  });
}

aclError aclrtLaunchCallback(aclrtCallback function, void* argument, aclrtCallbackBlockType block, aclrtStream stream) {
  return entry("aclrtLaunchCallback", [&] {
    if (function == nullptr) return sim::null_argument("aclrtLaunchCallback");
    uint64_t thread = 0;
    {
      std::scoped_lock lock(reports().mutex);
      auto found = reports().subscribers.find(stream);
      if (found == reports().subscribers.end()) {
        return sim::error(ACL_ERROR_STREAM_NOT_SUBSCRIBE,
                          "aclrtLaunchCallback: no thread subscribed to the reports of the stream");
      }
      thread = found->second;
    }
    return sim::scheduler().submit_host_function(stream, "aclrtLaunchCallback", [=] {
      auto report = std::make_shared<Report>();
      report->function = function;
      report->argument = argument;
      {
        std::scoped_lock lock(reports().mutex);
        auto found = reports().mailboxes.find(thread);
        if (found == reports().mailboxes.end()) {
          return sim::error(ACL_ERROR_THREAD_NOT_SUBSCRIBE, "the thread that was to run the callback unsubscribed");
        }
        found->second.reports.push_back(report);
      }
      reports().arrived.notify_all();
      if (block == ACL_CALLBACK_BLOCK) report->done.get_future().wait();
      return ACL_SUCCESS;
    });
  });
}

aclError aclrtSubscribeReport(uint64_t thread, aclrtStream stream) {
  return entry("aclrtSubscribeReport", [&] {
    if (sim::scheduler().stream_id(stream) < 0) {
      return sim::error(ACL_ERROR_RT_PARAM_INVALID, "aclrtSubscribeReport: not a stream");
    }
    std::scoped_lock lock(reports().mutex);
    if (!reports().subscribers.emplace(stream, thread).second) {
      return sim::error(ACL_ERROR_REPEAT_SUBSCRIBE, "aclrtSubscribeReport: the stream has a subscriber already");
    }
    ++reports().mailboxes[thread].streams;
    return ACL_SUCCESS;
  });
}

aclError aclrtUnSubscribeReport(uint64_t thread, aclrtStream stream) {
  return entry("aclrtUnSubscribeReport", [&] {
    std::scoped_lock lock(reports().mutex);
    auto found = reports().subscribers.find(stream);
    if (found == reports().subscribers.end() || found->second != thread) {
      return sim::error(ACL_ERROR_STREAM_NOT_SUBSCRIBE, "aclrtUnSubscribeReport: the thread is no subscriber");
    }
    reports().subscribers.erase(found);
    if (--reports().mailboxes[thread].streams == 0) reports().mailboxes.erase(thread);
    return ACL_SUCCESS;
  });
}

// Runs what arrived for this thread within `timeout` milliseconds; -1 waits for ever.
aclError aclrtProcessReport(int32_t timeout) {
  return entry("aclrtProcessReport", [&] {
    const auto self = static_cast<uint64_t>(pthread_self());
    std::deque<std::shared_ptr<Report>> mine;
    {
      std::unique_lock lock(reports().mutex);
      if (!reports().mailboxes.contains(self)) {
        return sim::error(ACL_ERROR_THREAD_NOT_SUBSCRIBE, "aclrtProcessReport: this thread subscribed to no stream");
      }
      auto something = [&] {
        auto found = reports().mailboxes.find(self);
        return found == reports().mailboxes.end() || !found->second.reports.empty();
      };
      if (timeout < 0) {
        reports().arrived.wait(lock, something);
      } else {
        reports().arrived.wait_for(lock, std::chrono::milliseconds(timeout), something);
      }
      if (auto found = reports().mailboxes.find(self); found != reports().mailboxes.end()) {
        mine.swap(found->second.reports);
      }
    }
    if (mine.empty()) return ACL_ERROR_WAIT_CALLBACK_TIMEOUT;  // every time round the caller's loop: no message
    for (auto& report : mine) {
      report->function(report->argument);
      report->done.set_value();
    }
    return ACL_SUCCESS;
  });
}
}
