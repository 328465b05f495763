#include "torch/collective_queue.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/error.h"

namespace tt {
namespace {

constexpr std::size_t kHeaderWords = 3;

at::Tensor new_words(std::size_t count) {
  return at::zeros({static_cast<std::int64_t>(count)}, at::TensorOptions().dtype(at::kLong));
}

}  // namespace

std::string said(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an unknown error";
  }
}

std::size_t most_reported_words(const runtime::MemoryLayout& layout) {
  std::size_t words = 0;
  for (const std::uint32_t params : layout.bucket_params) words = std::max(words, runtime::reported_words(params));
  return words;
}

bool same_but_void(const Header& a, const Header& b) {
  using What = Header::What;
  const auto kind = [](const Header& h) { return h.what == What::kVoidReduction ? What::kReduction : h.what; };
  return kind(a) == kind(b) && a.item == b.item && a.number == b.number;
}

bool CollectiveQueue::Job::has_come(bool on_host) const {
  const auto ended = [](const Work& work) { return work->isCompleted(); };
  return announced() && (!on_host || std::all_of(works_.begin(), works_.end(), ended));
}

Header CollectiveQueue::Job::header(int rank) const {
  const std::int64_t* record = everyone_.data() + static_cast<std::size_t>(rank) * words_;
  return {static_cast<Header::What>(record[0]), record[1], record[2]};
}

const std::uint64_t* CollectiveQueue::Job::extra(int rank) const {
  return reinterpret_cast<const std::uint64_t*>(everyone_.data()) + static_cast<std::size_t>(rank) * words_ +
         kHeaderWords;
}

std::vector<std::uint64_t> CollectiveQueue::Job::extra_of_any(std::size_t words) const {
  std::vector<std::uint64_t> bits(words, 0);
  for (std::size_t rank = 0; rank < everyone_.size() / words_; ++rank) {
    const auto* theirs = extra(static_cast<int>(rank));
    for (std::size_t word = 0; word < words; ++word) bits[word] |= theirs[word];
  }
  return bits;
}

CollectiveQueue::CollectiveQueue(Group group, std::size_t extra_words)
    : group_(std::move(group)),
      words_(kHeaderWords + extra_words),
      owner_pid_(::getpid()),
      thread_([this] { run(); }) {}

CollectiveQueue::~CollectiveQueue() { stop(); }

bool CollectiveQueue::belongs_to_this_process() const { return ::getpid() == owner_pid_; }

std::uint64_t CollectiveQueue::stop() {
  stop_ = true;
  {
    const std::lock_guard lock(mutex_);  // so that the thread is not between its look at stop_ and its sleep
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  return carried_out_;
}

CollectiveQueue::JobPtr CollectiveQueue::add(const Header& header, std::vector<std::uint64_t> extra, Launch launch) {
  TT_CHECK(kHeaderWords + extra.size() <= words_, extra.size(), " words for ", words_ - kHeaderWords);
  auto job = std::make_shared<Job>();
  job->mine_ = header;
  job->number_ = ++added_;
  job->extra_ = std::move(extra);
  job->launch_ = std::move(launch);
  job->words_ = words_;
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(job);
  }
  changed_.notify_all();
  return job;
}

void CollectiveQueue::run() {
  for (;;) {
    std::shared_ptr<Job> job;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
      if (stop_) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    bool in_step = false;
    try {
      in_step = carry_out(*job);
    } catch (...) {
      job->error_ = std::current_exception();
    }
    if (stop_ && !in_step) return;
    ++carried_out_;
    job->launch_ = nullptr;
    job->announced_.store(true, std::memory_order_release);
    if (!in_step) {
      broken_job_ = job;
      broken_.store(true, std::memory_order_release);
      return;
    }
  }
}

bool CollectiveQueue::carry_out(Job& job) {
  const int size = group_->getSize();
  auto mine = new_words(words_);
  auto* record = mine.mutable_data_ptr<std::int64_t>();
  record[0] = static_cast<std::int64_t>(job.mine_.what);
  record[1] = job.mine_.item;
  record[2] = job.mine_.number;
  std::copy(job.extra_.begin(), job.extra_.end(), record + kHeaderWords);
  auto everyone = new_words(static_cast<std::size_t>(size) * words_);
  const auto work = group_->all_gather_single(everyone, mine);
  auto pause = std::chrono::microseconds(5);
  while (!work->isCompleted()) {
    if (stop_) return false;
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(200));
  }
  work->wait();
  const auto* words = everyone.const_data_ptr<std::int64_t>();
  job.everyone_.assign(words, words + everyone.numel());
  bool in_step = true;
  job.agreed_ = true;
  for (int rank = 0; rank < size; ++rank) {
    job.agreed_ = job.agreed_ && job.header(rank) == job.mine_ && job.mine_.what != Header::What::kVoidReduction;
    in_step = in_step && same_but_void(job.header(rank), job.mine_);
  }
  if (job.agreed_ && job.launch_) {
    job.in_launch_ = true;
    job.works_ = job.launch_(job);
    job.in_launch_ = false;
  }
  return in_step;
}

}  // namespace tt
