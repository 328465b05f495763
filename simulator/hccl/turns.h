// The operations of a communicator run in the order in which they were submitted, on whatever streams.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>

namespace sim::hccl {

class Turns : public std::enable_shared_from_this<Turns> {
 public:
  // Ends at destruction at the latest: a stream that failed drops its tasks without running them.
  class Turn {
   public:
    Turn(std::shared_ptr<Turns> turns, std::uint64_t number) : turns_(std::move(turns)), number_(number) {}
    ~Turn() { finish(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    // False when `limit` passes first.
    bool wait_for(std::chrono::milliseconds limit);
    void finish();

   private:
    std::shared_ptr<Turns> turns_;
    std::uint64_t number_;
    bool finished_ = false;
  };

  std::shared_ptr<Turn> take() {
    const std::lock_guard lock(mutex_);
    return std::make_shared<Turn>(shared_from_this(), taken_++);
  }

  // False when operations are still pending after `limit`.
  bool wait_until_idle(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, limit, [this] { return current_ == taken_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t taken_ = 0;
  std::uint64_t current_ = 0;
  std::set<std::uint64_t> finished_early_;
};

inline bool Turns::Turn::wait_for(std::chrono::milliseconds limit) {
  std::unique_lock lock(turns_->mutex_);
  return turns_->changed_.wait_for(lock, limit, [this] { return turns_->current_ == number_; });
}

inline void Turns::Turn::finish() {
  if (std::exchange(finished_, true)) return;
  const std::lock_guard lock(turns_->mutex_);
  turns_->finished_early_.insert(number_);
  while (turns_->finished_early_.erase(turns_->current_) != 0) ++turns_->current_;
  turns_->changed_.notify_all();
}

}  // namespace sim::hccl
