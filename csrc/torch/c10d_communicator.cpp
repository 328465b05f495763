#include "torch/c10d_communicator.h"

#include <ATen/ATen.h>

#include <chrono>
#include <thread>
#include <utility>

#include "base/error.h"

namespace tt {

void C10dCommunicator::Memory::allocate(std::size_t planned, std::size_t reserved,
                                        std::vector<runtime::Region> overflow, c10::Device device) {
  const auto options = at::TensorOptions().dtype(at::kByte).device(device);
  if (device
          .is_cpu()) {  // pages are backed when they are first written: what is reserved beyond the plan costs nothing
    planned_ = at::empty({static_cast<std::int64_t>(reserved)}, options);
    return;
  }
  planned_ = at::empty({static_cast<std::int64_t>(planned)}, options);
  taken_.resize(overflow.size());
  overflow_ = std::move(overflow);
}

std::byte* C10dCommunicator::Memory::at(std::size_t offset) {
  for (std::size_t i = 0; i < overflow_.size(); ++i) {
    const auto& region = overflow_[i];
    if (offset >= region.offset && offset < region.offset + region.bytes) {
      if (!taken_[i].defined()) {
        taken_[i] = at::empty({static_cast<std::int64_t>(region.bytes)}, planned_.options());
      }
      return static_cast<std::byte*>(taken_[i].mutable_data_ptr()) + (offset - region.offset);
    }
  }
  return static_cast<std::byte*>(planned_.mutable_data_ptr()) + offset;
}

C10dCommunicator::C10dCommunicator(Group gathers, Group reductions, c10::Device device)
    : gathers_(std::move(gathers)),
      reductions_(std::move(reductions)),
      rank_(gathers_->getRank()),
      size_(gathers_->getSize()),
      device_(device) {
  if (reductions_->getSize() != size_ || reductions_->getRank() != rank_) {
    throw ValueError("the two process groups must have the same ranks in the same order");
  }
}

void C10dCommunicator::allocate(const runtime::MemoryLayout& layout) {
  layout_ = layout;
  gather_memory_.allocate(layout.gather_bytes, layout.gather_reserved_bytes, layout.gather_overflow, device_);
  reduce_memory_.allocate(layout.reduce_bytes, layout.reduce_reserved_bytes, layout.reduce_overflow, device_);
  reduction_of_.resize(layout.bucket_params.size());
}

at::Tensor C10dCommunicator::bytes_at(std::byte* where, std::size_t bytes) const {
  return at::from_blob(
      where, {static_cast<std::int64_t>(bytes)}, [](void*) {}, at::TensorOptions().dtype(at::kByte).device(device_),
      device_);
}

std::string C10dCommunicator::describe(const runtime::Tag& tag) const {
  return str("gather ", tag.sequence, " of unit '",
             tag.unit < layout_.unit_names.size() ? layout_.unit_names[tag.unit] : str("number ", tag.unit), "'");
}

void C10dCommunicator::wait(Work& work, const std::string& what) {
  auto pause = std::chrono::microseconds(10);
  auto slept = std::chrono::microseconds(0);
  while (!work->isCompleted()) {
    std::this_thread::sleep_for(pause);
    slept += pause;
    pause = std::min(pause * 2, std::chrono::microseconds(500));
    if (slept > std::chrono::milliseconds(50)) {
      slept = std::chrono::microseconds(0);
      if (progress_) {
        progress_();
      }
    }
  }
  finish(work, what);
}

void C10dCommunicator::wait_data(Work& work, const std::string& what) {
  if (on_host()) {
    wait(work, what);
  } else {
    finish(work, what);
  }
}

void C10dCommunicator::finish(Work& work, const std::string& what) {
  try {
    work->wait();
  } catch (const std::exception& error) {
    throw PeerError(str("rank ", rank_, ": ", what, " failed: a peer died, failed, or did not arrive in time (",
                        error.what(), ")"));
  }
}

bool C10dCommunicator::place_is_free(std::uint32_t place) {
  static_cast<void>(place);  // private memory: whoever released it may write it
  return true;
}

void C10dCommunicator::wait_place_free(std::uint32_t place) { static_cast<void>(place); }

void C10dCommunicator::launch_gather(std::uint32_t place, const runtime::Tag& tag,
                                     std::span<const runtime::Segments> buckets) {
  Gather gather;
  auto mine = at::empty({2}, at::TensorOptions().dtype(at::kLong));
  auto* values = mine.mutable_data_ptr<std::int64_t>();
  values[0] = tag.unit;
  values[1] = static_cast<std::int64_t>(tag.sequence);
  gather.tags = at::empty({2 * size_}, at::TensorOptions().dtype(at::kLong));
  gather.tags_work = gathers_->all_gather_single(gather.tags, mine);
  for (const auto& bucket : buckets) {
    std::byte* base = gather_memory_.at(bucket.offset);
    auto all = bytes_at(base, bucket.shard_bytes * static_cast<std::size_t>(size_));
    auto part = bytes_at(base + static_cast<std::size_t>(rank_) * bucket.shard_bytes, bucket.shard_bytes);
    gather.works.push_back(gathers_->all_gather_single(all, part));
  }
  pending_gathers_[place] = std::move(gather);
}

void C10dCommunicator::wait_gather(std::uint32_t place, const runtime::Tag& tag) {
  const auto found = pending_gathers_.find(place);
  TT_CHECK(found != pending_gathers_.end(), "no gather at place ", place);
  auto& gather = found->second;
  wait(gather.tags_work, describe(tag));  // tags first: sizes may differ if ranks have come apart
  const auto* tags = gather.tags.const_data_ptr<std::int64_t>();
  for (int r = 0; r < size_; ++r) {
    const runtime::Tag theirs{static_cast<std::uint32_t>(tags[2 * r]), static_cast<std::uint64_t>(tags[2 * r + 1])};
    if (theirs.unit != tag.unit || theirs.sequence != tag.sequence) {
      throw PeerError(str("ranks have come apart: rank ", rank_, " is at ", describe(tag), ", rank ", r, " at ",
                          describe(theirs), ". All ranks must call the same modules in the same order"));
    }
  }
  for (auto& work : gather.works) {
    wait_data(work, describe(tag));
  }
  pending_gathers_.erase(found);
}

void C10dCommunicator::release(std::uint32_t place) {
  const auto found = pending_gathers_.find(place);
  if (found == pending_gathers_.end()) {
    return;
  }
  wait(found->second.tags_work, "an unused gather");  // gathered ahead of a use that did not come
  for (auto& work : found->second.works) {
    wait_data(work, "an unused gather");
  }
  pending_gathers_.erase(found);
}

at::Tensor C10dCommunicator::take_buffer(std::int64_t bytes) {
  const auto found = free_buffers_.find(bytes);
  if (found == free_buffers_.end()) {
    buffer_bytes_ += static_cast<std::size_t>(bytes);
    return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device_));
  }
  auto buffer = std::move(found->second);
  free_buffers_.erase(found);
  return buffer;
}

C10dCommunicator::Reduction& C10dCommunicator::reduction(std::uint32_t bucket, std::uint64_t round) {
  auto& r = reduction_of_.at(bucket);
  TT_CHECK(r.round == round, "bucket ", bucket, " is in round ", r.round, ", not ", round);
  return r;
}

void C10dCommunicator::start(const runtime::Contribution& c) {
  auto& r = reduction_of_.at(c.bucket);
  r.shard_bytes = c.shard_numel * size_of(c.wire);
  const std::size_t bytes = r.shard_bytes * static_cast<std::size_t>(size_);
  at::Tensor mine;
  if (c.offset == runtime::kNoGradient) {
    mine = at::zeros({static_cast<std::int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).device(device_));
  } else {
    mine = bytes_at(reduce_memory_.at(c.offset), bytes);
  }
  r.received = take_buffer(static_cast<std::int64_t>(bytes));
  std::vector<std::int64_t> even;
  r.works.push_back(reductions_->all_to_all_single(r.received, mine, even, even));
  const auto params = static_cast<std::int64_t>(layout_.bucket_params[c.bucket]);
  r.reported = at::zeros({params}, at::TensorOptions().dtype(at::kByte));
  for (std::int64_t i = 0; i < params; ++i) {
    const auto word = c.reported[static_cast<std::size_t>(i / 64)];
    r.reported.mutable_data_ptr<std::uint8_t>()[i] = static_cast<std::uint8_t>(word >> (i % 64) & 1U);
  }
  std::vector<at::Tensor> masks{r.reported};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  r.reported_work = reductions_->allreduce(masks, options);
  r.launched = true;
}

void C10dCommunicator::launch_reduce(const runtime::Contribution& contribution) {
  auto& r = reduction_of_.at(contribution.bucket);
  r = Reduction{};
  r.round = contribution.round;
  if (contribution.offset == runtime::kNoGradient || !held_back_.empty()) {
    held_back_.push_back(contribution);
  } else {
    start(contribution);
  }
}

void C10dCommunicator::close_round(std::uint64_t round) {
  auto present = at::zeros({static_cast<std::int64_t>(reduction_of_.size())}, at::TensorOptions().dtype(at::kByte));
  auto* flags = present.mutable_data_ptr<std::uint8_t>();
  for (std::size_t b = 0; b < reduction_of_.size(); ++b) {
    flags[b] = reduction_of_[b].round == round && reduction_of_[b].launched ? 1 : 0;
  }
  for (const auto& c : held_back_) {
    flags[c.bucket] = c.offset == runtime::kNoGradient ? 0 : 1;
  }
  std::vector<at::Tensor> tensors{present};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  auto work = gathers_->allreduce(tensors, options);
  wait(work, str("the end of backward ", round));
  for (const auto& c : held_back_) {
    if (flags[c.bucket] != 0) {
      start(c);
    } else {
      reduction_of_[c.bucket].launched = true;  // no rank has a gradient
    }
  }
  held_back_.clear();
}

void C10dCommunicator::abort_round(std::uint64_t round) {
  held_back_.clear();
  for (auto& r : reduction_of_) {
    if (r.round == round) {
      r = Reduction{};  // what is under way keeps its buffers
    }
  }
}

bool C10dCommunicator::reduce_is_ready(std::uint32_t bucket, std::uint64_t round) {
  const auto& r = reduction(bucket, round);
  return r.launched && (!r.reported_work || r.reported_work->isCompleted()) &&
         std::all_of(r.works.begin(), r.works.end(), [&](const Work& w) { return has_arrived(w); });
}

void C10dCommunicator::wait_reduce_ready(std::uint32_t bucket, std::uint64_t round) {
  auto& r = reduction(bucket, round);
  TT_CHECK(r.launched, "bucket ", bucket, " is waited for before its launch");
  const std::string what = str("the reduction of bucket ", bucket, " in backward ", round);
  if (r.reported_work) {
    wait(r.reported_work, what);
  }
  for (auto& work : r.works) {
    if (on_host()) {
      wait(work, what);
    }
  }
}

bool C10dCommunicator::wait_reduce_ready_or_stuck(std::uint32_t bucket, std::uint64_t round) {
  // Peers' launches cannot be seen, so waiting longer than they usually take could be a deadlock.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(200);
  while (!reduce_is_ready(bucket, round)) {
    if (std::chrono::steady_clock::now() > deadline) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

std::vector<std::uint64_t> C10dCommunicator::reported_anywhere(std::uint32_t bucket, std::uint64_t round) {
  auto& r = reduction(bucket, round);
  wait_reduce_ready(bucket, round);  // completed; raises what went wrong
  std::vector<std::uint64_t> bits((layout_.bucket_params[bucket] + 63) / 64, 0);
  if (r.received.defined()) {
    const auto* flags = r.reported.const_data_ptr<std::uint8_t>();
    for (std::size_t i = 0; i < layout_.bucket_params[bucket]; ++i) {
      bits[i / 64] |= std::uint64_t{flags[i]} << (i % 64);
    }
  }
  return bits;
}

std::vector<const std::byte*> C10dCommunicator::my_segment_everywhere(std::uint32_t bucket, std::uint64_t round) {
  auto& r = reduction(bucket, round);
  for (auto& work : r.works) {
    wait_data(work, str("the reduction of bucket ", bucket, " in backward ", round));
  }
  std::vector<const std::byte*> segments;
  for (int peer = 0; peer < size_; ++peer) {
    segments.push_back(static_cast<const std::byte*>(r.received.const_data_ptr()) +
                       static_cast<std::size_t>(peer) * r.shard_bytes);
  }
  return segments;
}

void C10dCommunicator::finish_reduce(std::uint32_t bucket, std::uint64_t round) {
  auto& r = reduction(bucket, round);
  if (r.received.defined()) {
    free_buffers_.emplace(r.received.numel(), std::move(r.received));
    r.received.reset();
  }
}

bool C10dCommunicator::contribution_is_free(std::uint32_t bucket, std::uint64_t round) {
  const auto& r = reduction_of_.at(bucket);
  return r.round != round || reduce_is_ready(bucket, round);
}

void C10dCommunicator::wait_contribution_free(std::uint32_t bucket, std::uint64_t round) {
  if (reduction_of_.at(bucket).round == round) {
    wait_reduce_ready(bucket, round);
  }
}

}  // namespace tt
