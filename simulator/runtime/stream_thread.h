// One simulated stream: a thread that runs what is queued, in order. Knows nothing of clocks and checks.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "abi/acl.h"
#include "runtime/clock.h"

namespace sim {

// One recording of an event on a stream. Events that are recorded again get another one.
class Record {
 public:
  Clock clock;    // what lies behind it
  Slot slot = 0;  // where it was recorded
  std::uint64_t time = 0;

  void complete(aclError error);
  bool completed() const { return completed_.load(std::memory_order_acquire); }
  aclError wait() const;  // the error of the stream it was recorded on
  aclError error() const { return error_; }
  std::chrono::steady_clock::time_point completed_at() const { return completed_at_; }

 private:
  aclError error_ = ACL_SUCCESS;
  std::chrono::steady_clock::time_point completed_at_;
  std::atomic<bool> completed_ = false;
};

struct QueuedTask {
  std::string name;
  std::shared_ptr<Record> wait_for;  // first
  std::function<aclError()> run;     // not called on a stream that has failed
  std::shared_ptr<Record> record;    // completed last, also on a stream that has failed: nobody waits for ever
};

class StreamThread : public std::enable_shared_from_this<StreamThread> {
 public:
  using Deadline = std::optional<std::chrono::steady_clock::time_point>;

  StreamThread(int card, int id) : card(card), id(id) {}

  const int card;
  const int id;

  void start();

  void push(QueuedTask task);

  // Until all that is queued now has run. False when the deadline passes first.
  bool drain(Deadline deadline);

  bool idle();

  // The error of the first task that failed, and what it was.
  aclError error(std::string* message = nullptr);

  // The thread ends when it has run what is queued.
  void stop();
  bool wait_until_stopped(std::chrono::steady_clock::time_point deadline);

 private:
  void loop();
  void execute(QueuedTask& task);
  void fail(aclError error, const std::string& name);

  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable progress_;
  std::deque<QueuedTask> queue_;
  std::uint64_t submitted_ = 0;
  std::uint64_t completed_ = 0;
  int watchers_ = 0;
  bool sleeping_ = false;
  bool stopping_ = false;
  bool stopped_ = false;
  aclError error_ = ACL_SUCCESS;
  std::string error_message_;
};

}  // namespace sim
