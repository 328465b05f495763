#include "torch/c10d_communicator.h"

#include <ATen/ATen.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "base/error.h"
#include "host/rendezvous.h"
#include "torch/group_transport.h"

namespace tt {
namespace {

// How often a wait looks after this rank's own progress, and for notes of peers (a message to the store).
constexpr std::chrono::milliseconds kProgressEvery{50};
constexpr std::chrono::milliseconds kNotesEvery{250};
// A process whose sockets have closed is not yet known to be dead.
constexpr std::chrono::milliseconds kDeathGrace{1000};

at::Tensor part_of(const at::Tensor& memory, std::size_t offset, std::size_t bytes) {
  return memory.narrow(0, static_cast<std::int64_t>(offset), static_cast<std::int64_t>(bytes));
}

bool any(const std::vector<std::uint64_t>& bits) {
  return std::any_of(bits.begin(), bits.end(), [](std::uint64_t word) { return word != 0; });
}

std::uint64_t hash_of(const std::string& text) {  // FNV-1a
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

}  // namespace

void C10dCommunicator::Memory::allocate(std::size_t planned, std::size_t reserved,
                                        std::vector<runtime::Region> overflow, c10::Device device) {
  // On the host, pages are backed when they are first written: what is reserved beyond the plan costs nothing.
  const std::size_t bytes = device.is_cpu() ? reserved : planned;
  planned_ = at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).device(device));
  if (!device.is_cpu()) {
    taken_.resize(overflow.size());
    overflow_ = std::move(overflow);
  }
}

at::Tensor C10dCommunicator::Memory::part(std::size_t offset, std::size_t bytes) {
  for (std::size_t i = 0; i < overflow_.size(); ++i) {
    const auto& region = overflow_[i];
    if (offset >= region.offset && offset < region.offset + region.bytes) {
      if (!taken_[i].defined()) {
        taken_[i] = at::empty({static_cast<std::int64_t>(region.bytes)}, planned_.options());
      }
      return part_of(taken_[i], offset - region.offset, bytes);
    }
  }
  return part_of(planned_, offset, bytes);
}

C10dCommunicator::C10dCommunicator(Group gathers, Group reductions, c10::Device device, double timeout_seconds,
                                   std::vector<int> global_ranks, Transports transports)
    : gathers_(std::move(gathers)),
      reductions_(std::move(reductions)),
      transports_(std::move(transports)),
      rank_(gathers_->getRank()),
      size_(gathers_->getSize()),
      timeout_seconds_(timeout_seconds),
      global_ranks_(std::move(global_ranks)),
      board_(gathers_->getStore(), rank_, size_),
      device_(device),
      gather_launches_(device),
      reduction_launches_(device),
      received_buffers_(std::make_shared<BufferPool>(device)) {
  if (reductions_->getSize() != size_ || reductions_->getRank() != rank_) {
    throw ValueError("the two process groups must have the same ranks in the same order");
  }
  if (!(timeout_seconds_ > 0)) {
    throw ValueError(str("a timeout of ", timeout_seconds_, " seconds: it must be positive"));
  }
  if (!global_ranks_.empty() && global_ranks_.size() != static_cast<std::size_t>(size_)) {
    throw ValueError(str(global_ranks_.size(), " global ranks for ", size_, " ranks"));
  }
  if (!transports_.gathers) transports_.gathers = std::make_shared<GroupTransport>(gathers_);
  if (!transports_.reductions) transports_.reductions = std::make_shared<GroupTransport>(reductions_);
}

C10dCommunicator::~C10dCommunicator() {
  if (!gather_queue_) return;
  if (!gather_queue_->belongs_to_this_process()) {
    static_cast<void>(gather_queue_.release());
    static_cast<void>(reduction_queue_.release());
    return;
  }
  const std::uint64_t gathers = gather_queue_->stop(), reductions = reduction_queue_->stop();
  board_.post({NoteKind::kLeft, 0, gathers, reductions, ""});
}

std::string C10dCommunicator::name(int rank) const {
  return str("rank ", global_ranks_.empty() ? rank : global_ranks_[static_cast<std::size_t>(rank)]);
}

void C10dCommunicator::allocate(const runtime::MemoryLayout& layout) {
  layout_ = layout;
  gather_memory_.allocate(layout.gather_bytes, layout.gather_reserved_bytes, layout.gather_overflow, device_);
  reduce_memory_.allocate(layout.reduce_bytes, layout.reduce_reserved_bytes, layout.reduce_overflow, device_);
  reduction_of_.resize(layout.bucket_params.size());

  // Which processes are on this machine, to tell which one died.
  auto mine = at::empty({2}, at::TensorOptions().dtype(at::kLong));
  auto* words = mine.mutable_data_ptr<std::int64_t>();
  words[0] = static_cast<std::int64_t>(hash_of(host::shm_identity()));
  words[1] = ::getpid();
  auto everyone = at::empty({2 * size_}, at::TensorOptions().dtype(at::kLong));
  const auto work = gathers_->all_gather_single(everyone, mine);
  const std::string what = "the first exchange";
  wait_until([&] { return work->isCompleted(); }, what, 0, false);
  try {
    work->wait();
  } catch (const std::exception&) {
    throw_failure(explain(what, std::current_exception()));
  }
  const auto* all = everyone.const_data_ptr<std::int64_t>();
  watches_.resize(static_cast<std::size_t>(size_));
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_ && all[2 * peer] == words[0]) {
      watches_[static_cast<std::size_t>(peer)].emplace(static_cast<pid_t>(all[2 * peer + 1]));
    }
  }

  gather_queue_ = std::make_unique<CollectiveQueue>(gathers_, 0);
  reduction_queue_ = std::make_unique<CollectiveQueue>(reductions_, most_reported_words(layout));
}

std::string C10dCommunicator::describe(const Header& header) const {
  const auto unit = [&](std::size_t index) {
    return index < layout_.unit_names.size() ? str("unit '", layout_.unit_names[index], "'") : str("unit ", index);
  };
  const auto item = static_cast<std::size_t>(header.item);
  using What = Header::What;
  if (header.what == What::kRoundEnd) return str("the end of backward pass ", header.number);
  if (header.what == What::kGather) return str("gather ", header.number, " of ", unit(item));
  const std::string of = item < layout_.bucket_units.size() ? str(" of ", unit(layout_.bucket_units[item])) : "";
  return str("the reduction of bucket ", item, of, " in backward pass ", header.number);
}

// ---- waiting --------------------------------------------------------------------------------------------------------

template <typename Done>
void C10dCommunicator::wait_until(const Done& done, const std::string& of, std::uint64_t number, bool of_reductions) {
  const auto start = Clock::now();
  auto pause = std::chrono::microseconds(10);
  auto next_progress = start + kProgressEvery;
  auto next_notes = start + kNotesEvery;
  while (!done()) {
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(500));
    const auto now = Clock::now();
    if (now >= next_progress) {
      next_progress = now + kProgressEvery;
      if (progress_) progress_();
    }
    if (now < next_notes) continue;
    next_notes = now + kNotesEvery;
    check_notes(of, number, of_reductions);
    for (const auto& transport : {transports_.gathers, transports_.reductions}) {
      if (const auto error = transport->error(); !error.empty()) {
        throw_failure(str(name(rank_), " waited in ", of, ", and an earlier collective has failed: ", error));
      }
    }
    if (std::chrono::duration<double>(now - start).count() > timeout_seconds_) {
      throw_failure(str(name(rank_), " waited ", timeout_seconds_, " seconds in ", of,
                        " for a rank that did not come to it. See the logs and stacks of all ranks (`py-spy dump "
                        "--pid`). If the others are only slow (first compilation, slow storage), raise "
                        "HCCL_EXEC_TIMEOUT"));
    }
  }
}

void C10dCommunicator::wait(const Job& job, bool of_reductions) {
  check_not_failed();
  if (!job.has_come(on_host())) {
    const auto& queue = of_reductions ? *reduction_queue_ : *gather_queue_;
    wait_until([&] { return job.has_come(on_host()) || queue.broken(); }, describe(job.mine()), job.number(),
               of_reductions);
    if (const auto before = queue.broken(); before != nullptr && !job.has_come(on_host())) {
      if (before->error()) throw_error_of(*before);
      check_agreement(*before);
    }
  }
  if (job.error()) throw_error_of(job);
  check_agreement(job);
  if (on_host()) wait_for_data(job);
}

void C10dCommunicator::wait_for_data(const Job& job) {
  try {
    for (const auto& work : job.works()) work->wait();  // on an accelerator: lets the current lane wait
  } catch (const std::exception&) {
    throw_failure(explain(describe(job.mine()), std::current_exception()));
  }
}

void C10dCommunicator::check_agreement(const Job& job) {
  if (job.agreed()) return;
  for (int r = 0; r < size_; ++r) {
    const Header theirs = job.header(r);
    if (theirs == job.mine()) continue;
    if (same_but_void(theirs, job.mine())) {
      throw_failure(str(name(r), " gave up backward pass ", theirs.number, " because of an exception there, while ",
                        name(rank_), " goes on with it. See its log; an exception on one rank must stop all"));
    }
    throw_failure(str("ranks have come apart: ", name(rank_), " is at ", describe(job.mine()), ", ", name(r), " at ",
                      describe(theirs),
                      ". All ranks must run the same modules in the same order, also where the data differ, and an "
                      "exception on one must stop all"));
  }
}

void C10dCommunicator::check_notes(const std::string& of, std::uint64_t number, bool of_reductions) {
  const auto& notes = board_.read();
  for (int r = 0; r < size_; ++r) {  // the most telling reason first
    const auto& note = notes[static_cast<std::size_t>(r)];
    if (r != rank_ && note && note->kind == NoteKind::kFailed) throw_failure(str(name(r), " failed: ", note->why));
  }
  for (int r = 0; r < size_; ++r) {
    const auto& note = notes[static_cast<std::size_t>(r)];
    if (r == rank_ || !note || note->kind == NoteKind::kFailed) continue;
    if (number <= (of_reductions ? note->reductions : note->gathers)) continue;  // it has done its part of this one
    if (note->kind == NoteKind::kLeft) {
      throw_failure(str(name(r), " has closed its communicator while ", name(rank_), " waited for it in ", of,
                        ". All ranks must run the same number of steps"));
    }
    // Ranks that give the same backward pass up at the same place do not wait in it for what comes after that place.
    if (note->round > ended_round_) {
      throw_failure(str(name(r), " gave up backward pass ", note->round, " because of an exception there, while ",
                        name(rank_), " waited for it in ", of,
                        ". See its log; an exception on one rank must stop all"));
    }
  }
}

void C10dCommunicator::throw_error_of(const Job& job) {
  const auto of = describe(job.mine());
  if (!job.failed_in_launch()) throw_failure(explain(of, job.error()));
  const auto message = str(name(rank_), " could not launch ", of, ": ", said(job.error()));
  fail(message);
  throw Error(message);
}

std::string C10dCommunicator::explain(const std::string& of, const std::exception_ptr& error) {
  const auto deadline = Clock::now() + kDeathGrace;
  for (;;) {
    const auto& notes = board_.read();
    for (int r = 0; r < size_; ++r) {
      const auto& note = notes[static_cast<std::size_t>(r)];
      if (r != rank_ && note && note->kind == NoteKind::kFailed) return str(name(r), " failed: ", note->why);
    }
    for (int r = 0; r < size_; ++r) {
      const auto index = static_cast<std::size_t>(r);
      if (index < watches_.size() && watches_[index] && watches_[index]->is_dead()) {
        return str(name(r), " died while ", name(rank_), " waited for it in ", of,
                   ". See its log for the reason (out of memory? `dmesg`), then start again from the last checkpoint");
      }
    }
    if (Clock::now() >= deadline) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return str(name(rank_), ": ", of, " failed: a peer died, failed, or did not arrive in time (", said(error), ")");
}

void C10dCommunicator::check_not_failed() const {
  if (!failed_.empty()) throw PeerError(str(name(rank_), " gave up before: ", failed_));
}

void C10dCommunicator::throw_failure(const std::string& message) {
  fail(message);
  throw PeerError(message);
}

void C10dCommunicator::fail(const std::string& why) noexcept {
  if (!failed_.empty()) return;
  failed_ = why;
  board_.post({NoteKind::kFailed, 0, 0, 0, why});
}

// ---- gather ---------------------------------------------------------------------------------------------------------

bool C10dCommunicator::place_is_free(std::uint32_t place) {
  // The memory is this rank's own; but a gather that was not waited for may still write there.
  const auto found = leftovers_.find(place);
  if (found == leftovers_.end()) return true;
  return found->second->has_come(on_host());
}

void C10dCommunicator::wait_place_free(std::uint32_t place) {
  const auto found = leftovers_.find(place);
  if (found == leftovers_.end()) return;
  wait(*found->second, false);
  wait_for_data(*found->second);  // before anything is written there
  leftovers_.erase(found);
}

void C10dCommunicator::launch_gather(std::uint32_t place, const runtime::Tag& tag,
                                     std::span<const runtime::Segments> buckets) {
  check_not_failed();
  TT_CHECK(!leftovers_.contains(place), "place ", place, " is written before it is free");
  std::vector<std::pair<at::Tensor, at::Tensor>> moves;  // all, my part
  for (const auto& bucket : buckets) {
    const std::size_t mine = bucket.offset + static_cast<std::size_t>(rank_) * bucket.shard_bytes;
    moves.emplace_back(gather_memory_.part(bucket.offset, bucket.shard_bytes * static_cast<std::size_t>(size_)),
                       gather_memory_.part(mine, bucket.shard_bytes));
  }
  const Header header{Header::What::kGather, tag.unit, static_cast<std::int64_t>(tag.sequence)};
  const auto launch = [transport = transports_.gathers, moves = std::move(moves)](const Job&) {
    std::vector<Work> works;
    for (const auto& [all, part] : moves) works.push_back(transport->all_gather(all, part));
    return works;
  };
  pending_gathers_[place] = gather_queue_->add(header, {}, gather_launches_.after_current(launch));
}

void C10dCommunicator::wait_gather(std::uint32_t place, const runtime::Tag& tag) {
  const auto found = pending_gathers_.find(place);
  TT_CHECK(found != pending_gathers_.end(), "no gather at place ", place);
  TT_CHECK(found->second->mine().number == static_cast<std::int64_t>(tag.sequence), "gather ", tag.sequence,
           " at place ", place, " was not launched here");
  wait(*found->second, false);
  wait_for_data(*found->second);
  pending_gathers_.erase(found);
}

void C10dCommunicator::release(std::uint32_t place) {
  const auto found = pending_gathers_.find(place);
  if (found == pending_gathers_.end()) return;
  // Gathered ahead of a use that did not come, or given up. Where ranks differ in it, the next wait says so.
  leftovers_[place] = std::move(found->second);
  pending_gathers_.erase(found);
}

// ---- reduce ---------------------------------------------------------------------------------------------------------

C10dCommunicator::Reduction& C10dCommunicator::reduction(std::uint32_t bucket, std::uint64_t round) {
  auto& r = reduction_of_.at(bucket);
  TT_CHECK(r.round == round, "bucket ", bucket, " is in round ", r.round, ", not ", round);
  return r;
}

void C10dCommunicator::start(const runtime::Contribution& c) {
  auto& r = reduction_of_.at(c.bucket);
  r.launched = true;
  r.shard_bytes = c.shard_numel * size_of(c.wire);
  r.received = std::make_shared<at::Tensor>();
  const std::size_t bytes = r.shard_bytes * static_cast<std::size_t>(size_);
  const bool added = transports_.reductions->adds(c.wire);
  r.parts = added ? 1 : size_;
  at::Tensor mine;
  if (c.offset != runtime::kNoGradient) mine = reduce_memory_.part(c.offset, bytes);
  const auto launch = [transport = transports_.reductions, pool = received_buffers_, received = r.received, mine, bytes,
                       part = r.shard_bytes, added, wire = c.wire, words = c.reported.size()](const Job& job) {
    if (!any(job.extra_of_any(words))) return std::vector<Work>{};  // no rank has a gradient
    *received = pool->take(added ? part : bytes);
    auto sent = mine.defined() ? mine : at::zeros({static_cast<std::int64_t>(bytes)}, received->options());
    return std::vector<Work>{added ? transport->reduce_scatter(*received, std::move(sent), wire)
                                   : transport->all_to_all(*received, std::move(sent))};
  };
  const Header header{Header::What::kReduction, c.bucket, static_cast<std::int64_t>(c.round)};
  r.job = reduction_queue_->add(header, c.reported, reduction_launches_.after_current(launch));
}

void C10dCommunicator::launch_reduce(const runtime::Contribution& contribution) {
  check_not_failed();
  auto& r = reduction_of_.at(contribution.bucket);
  r = Reduction{};
  r.round = contribution.round;
  start(contribution);
}

// Gathers and reductions are two queues. Ranks that have come apart, one in a gather and one in a reduction, find that
// out here, where both meet.
void C10dCommunicator::close_round(std::uint64_t round) {
  check_not_failed();
  const Header header{Header::What::kRoundEnd, 0, static_cast<std::int64_t>(round)};
  wait(*gather_queue_->add(header, {}, nullptr), false);
  ended_round_ = round;
  drop_aborted_that_have_ended();
}

void C10dCommunicator::abort_round(std::uint64_t round, std::span<const runtime::Contribution> not_launched) {
  // Ranks that give up at the same place may have launched different numbers of reductions, as the order is fixed and a
  // bucket may be complete on one rank only. Void ones make them equal, so that the next backward pass is in step; and
  // a rank that goes on reads in them that this one did not.
  if (failed_.empty()) {
    for (const auto& c : not_launched) {
      const Header header{Header::What::kVoidReduction, c.bucket, static_cast<std::int64_t>(c.round)};
      reduction_queue_->add(header, c.reported, nullptr);
    }
  }
  for (std::uint32_t bucket = 0; bucket < reduction_of_.size(); ++bucket) {
    auto& r = reduction_of_[bucket];
    if (r.round != round) continue;
    if (r.job) aborted_[{bucket, round}] = std::move(r);
    r = Reduction{};
  }
  ended_round_ = round;
  board_.post({NoteKind::kAborted, round, gather_queue_->added(), reduction_queue_->added(), ""});
}

bool C10dCommunicator::reduce_is_ready(std::uint32_t bucket, std::uint64_t round) {
  const auto& r = reduction(bucket, round);
  // One that a peer has given up is never ready: this rank may be about to do the same. Else, its wait says so.
  return r.launched && r.job->has_come(on_host()) && (r.job->agreed() || r.job->error());
}

void C10dCommunicator::wait_reduce_ready(std::uint32_t bucket, std::uint64_t round) {
  auto& r = reduction(bucket, round);
  TT_CHECK(r.launched, "bucket ", bucket, " is waited for before its launch");
  wait(*r.job, true);
}

bool C10dCommunicator::wait_reduce_ready_or_stuck(std::uint32_t bucket, std::uint64_t round) {
  // Peers' launches cannot be seen, so waiting longer than they usually take could be a deadlock.
  const auto deadline = Clock::now() + std::chrono::milliseconds(200);
  while (!reduce_is_ready(bucket, round)) {
    if (Clock::now() > deadline) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

std::vector<std::uint64_t> C10dCommunicator::reported_anywhere(std::uint32_t bucket, std::uint64_t round) {
  auto& r = reduction(bucket, round);
  wait_reduce_ready(bucket, round);  // completed; raises what went wrong
  return r.job->extra_of_any(runtime::reported_words(layout_.bucket_params[bucket]));
}

std::vector<const std::byte*> C10dCommunicator::my_segment_everywhere(std::uint32_t bucket, std::uint64_t round) {
  auto& r = reduction(bucket, round);
  wait_for_data(*r.job);
  std::vector<const std::byte*> segments;
  for (int part = 0; part < r.parts; ++part) {
    segments.push_back(static_cast<const std::byte*>(r.received->const_data_ptr()) +
                       static_cast<std::size_t>(part) * r.shard_bytes);
  }
  return segments;
}

void C10dCommunicator::finish_reduce(std::uint32_t bucket, std::uint64_t round) { give_back(reduction(bucket, round)); }

void C10dCommunicator::give_back(Reduction& r) {
  if (r.received != nullptr && r.received->defined()) {
    received_buffers_->give_back(std::move(*r.received));
    r.received.reset();
  }
}

void C10dCommunicator::drop_aborted_that_have_ended() {
  for (auto it = aborted_.begin(); it != aborted_.end();) {
    auto& r = it->second;
    if (r.job->has_come(/*on_host=*/true)) {  // the device has ended, too
      give_back(r);
      it = aborted_.erase(it);
    } else {
      ++it;
    }
  }
}

bool C10dCommunicator::has_come(const Reduction& aborted) const {
  return aborted.job->has_come(on_host()) || reduction_queue_->broken();
}

bool C10dCommunicator::contribution_is_free(std::uint32_t bucket, std::uint64_t round) {
  if (const auto found = aborted_.find({bucket, round}); found != aborted_.end()) return has_come(found->second);
  const auto& r = reduction_of_.at(bucket);
  return r.round != round || reduce_is_ready(bucket, round);
}

void C10dCommunicator::wait_contribution_free(std::uint32_t bucket, std::uint64_t round) {
  if (const auto found = aborted_.find({bucket, round}); found != aborted_.end()) {
    auto& r = found->second;
    check_not_failed();
    wait_until([&] { return has_come(r); }, describe(r.job->mine()), r.job->number(), true);
    wait_for_data(*r.job);
    give_back(r);
    aborted_.erase(found);
    return;
  }
  const auto& r = reduction_of_.at(bucket);
  if (r.round == round) {
    wait_reduce_ready(bucket, round);
    wait_for_data(*r.job);
  }
}

}  // namespace tt
