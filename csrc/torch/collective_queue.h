// Launches the collectives of one process group in order, each only after all ranks have said that they mean the same.
//
// A process group pairs collectives by their number alone. Where ranks have come apart, it would mix what does not
// belong together; Gloo even ends the process when the sizes differ. So each collective is announced by a small one of
// fixed size, and its data follow when the announcements agree. A thread does that, so that ranks that are busy
// computing still launch what they have queued.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "runtime/communicator.h"

namespace tt {

// What a rank does with its next collective.
struct Header {
  enum class What : std::int64_t { kGather, kRoundEnd, kReduction, kVoidReduction };
  What what;
  std::int64_t item;    // unit (kGather), 0 (kRoundEnd), or bucket
  std::int64_t number;  // sequence number (kGather) or backward pass
  bool operator==(const Header&) const = default;
};

// Words that announce which parameters of a bucket have a gradient, for any bucket.
std::size_t most_reported_words(const runtime::MemoryLayout& layout);

// What the exception says, without torch's backtrace.
std::string said(const std::exception_ptr& error);

// kVoidReduction stands for a reduction of the same bucket that has no data: that rank gave the backward pass up.
bool same_but_void(const Header& a, const Header& b);

class CollectiveQueue {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
  using Work = c10::intrusive_ptr<c10d::Work>;

  class Job;
  // Starts the data's collectives; none if what the ranks have announced says that there is nothing to send.
  using Launch = std::function<std::vector<Work>(const Job& announced)>;

  class Job {
   public:
    const Header& mine() const { return mine_; }
    // How many collectives of this queue were added, this one included.
    std::uint64_t number() const { return number_; }
    // Nothing more will happen in the background, unless agreed(): then its data are under way.
    bool announced() const { return announced_.load(std::memory_order_acquire); }

    // Announced, and its data are there; on an accelerator they are under way, and a lane waits for them.
    bool has_come(bool on_host) const;

    // Once announced():
    std::exception_ptr error() const { return error_; }   // of the announcement or the launch
    bool failed_in_launch() const { return in_launch_; }  // it is this rank's own failure, then
    bool agreed() const { return agreed_; }               // all ranks mean the same, and none is void
    const std::vector<Work>& works() const { return works_; }
    Header header(int rank) const;
    const std::uint64_t* extra(int rank) const;
    // The bits that any rank has set in the first `words` words that it announced.
    std::vector<std::uint64_t> extra_of_any(std::size_t words) const;

   private:
    friend class CollectiveQueue;
    Header mine_{};
    std::uint64_t number_ = 0;
    std::vector<std::uint64_t> extra_;
    Launch launch_;
    std::size_t words_ = 0;
    std::vector<std::int64_t> everyone_;
    std::vector<Work> works_;
    std::exception_ptr error_;
    bool in_launch_ = false;
    bool agreed_ = false;
    std::atomic<bool> announced_{false};
  };
  using JobPtr = std::shared_ptr<const Job>;

  // `extra_words`: how many words may be announced beside the header.
  CollectiveQueue(Group group, std::size_t extra_words);
  ~CollectiveQueue();
  CollectiveQueue(const CollectiveQueue&) = delete;
  CollectiveQueue& operator=(const CollectiveQueue&) = delete;

  // A forked child has no thread of it: it must leave the queue alone, and not destroy it.
  bool belongs_to_this_process() const;

  // `launch` runs on the queue's thread, if all ranks agree; what it captures stays alive until then.
  JobPtr add(const Header& header, std::vector<std::uint64_t> extra, Launch launch);
  std::uint64_t added() const { return added_; }
  // Ends the thread; what it has not carried out will never be. Returns how many it has, from the first on.
  std::uint64_t stop();
  // The job that failed or in which ranks differ, if there is one: those behind it will never be announced.
  JobPtr broken() const { return broken_.load(std::memory_order_acquire) ? broken_job_ : nullptr; }

 private:
  void run();
  // False: the ranks differ, and nothing after this job may be launched.
  bool carry_out(Job& job);

  Group group_;
  std::size_t words_;
  int owner_pid_;
  std::uint64_t added_ = 0;
  std::uint64_t carried_out_ = 0;  // the thread's own until it has ended
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> jobs_;
  std::atomic<bool> stop_{false};
  JobPtr broken_job_;  // written once, before broken_
  std::atomic<bool> broken_{false};
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace tt
