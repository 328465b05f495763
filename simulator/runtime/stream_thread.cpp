#include "runtime/stream_thread.h"

#include <exception>
#include <thread>
#include <utility>

#include "runtime/delay.h"
#include "runtime/error_message.h"

namespace sim {

void Record::complete(aclError error) {
  error_ = error;
  completed_at_ = std::chrono::steady_clock::now();
  completed_.store(true, std::memory_order_release);
  completed_.notify_all();
}

aclError Record::wait() const {
  completed_.wait(false, std::memory_order_acquire);
  return error_;
}

void StreamThread::start() {
  std::thread([self = shared_from_this()] { self->loop(); }).detach();
}

void StreamThread::push(QueuedTask task) {
  bool wake = false;
  {
    std::scoped_lock lock(mutex_);
    queue_.push_back(std::move(task));
    ++submitted_;
    wake = std::exchange(sleeping_, false);
  }
  if (wake) work_.notify_one();
}

bool StreamThread::drain(Deadline deadline) {
  std::unique_lock lock(mutex_);
  const std::uint64_t target = submitted_;
  auto reached = [&] { return completed_ >= target; };
  ++watchers_;
  bool result = true;
  if (deadline) {
    result = progress_.wait_until(lock, *deadline, reached);
  } else {
    progress_.wait(lock, reached);
  }
  --watchers_;
  return result;
}

bool StreamThread::idle() {
  std::scoped_lock lock(mutex_);
  return completed_ == submitted_;
}

aclError StreamThread::error(std::string* message) {
  std::scoped_lock lock(mutex_);
  if (message != nullptr && error_ != ACL_SUCCESS) *message = error_message_;
  return error_;
}

void StreamThread::stop() {
  {
    std::scoped_lock lock(mutex_);
    stopping_ = true;
    sleeping_ = false;
  }
  work_.notify_one();
}

bool StreamThread::wait_until_stopped(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  ++watchers_;
  const bool result = progress_.wait_until(lock, deadline, [&] { return stopped_; });
  --watchers_;
  return result;
}

void StreamThread::fail(aclError error, const std::string& name) {
  std::scoped_lock lock(mutex_);
  if (error_ != ACL_SUCCESS) return;
  error_ = error;
  error_message_ = name + " failed on stream " + std::to_string(id) + " of simulated card " + std::to_string(card) +
                   " with error " + std::to_string(error);
  // The operator may have said more, on this thread.
  if (std::string more = take_error_message(); !more.empty()) error_message_ += ": " + more;
}

void StreamThread::execute(QueuedTask& task) {
  if (task.wait_for) {
    if (aclError error = task.wait_for->wait(); error != ACL_SUCCESS) fail(error, "what " + task.name + " waited for");
  }
  if (task.run && error_ == ACL_SUCCESS) {
    aclError result = ACL_SUCCESS;
    try {
      result = task.run();
    } catch (const std::exception& exception) {
      set_error_message(exception.what());
      result = ACL_ERROR_RT_AICORE_EXCEPTION;
    } catch (...) {
      result = ACL_ERROR_RT_AICORE_EXCEPTION;
    }
    if (result != ACL_SUCCESS) fail(result, task.name);
    task.run = nullptr;  // what it holds goes before anybody hears that it is done
  }
  if (task.record) task.record->complete(error_);
}

void StreamThread::loop() {
  Delay delay(id);
  std::unique_lock lock(mutex_);
  while (true) {
    if (queue_.empty()) {
      if (stopping_) break;
      sleeping_ = true;
      work_.wait(lock, [&] { return !queue_.empty() || stopping_; });
      sleeping_ = false;
      continue;
    }
    QueuedTask task = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    delay.before_a_task();
    execute(task);
    lock.lock();
    ++completed_;
    if (watchers_ > 0) progress_.notify_all();
  }
  stopped_ = true;
  progress_.notify_all();
}

}  // namespace sim
