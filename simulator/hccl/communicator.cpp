#include "hccl/communicator.h"

#include <fcntl.h>
#include <poll.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <thread>

#include "hccl/settings.h"
#include "runtime/card_memory.h"
#include "runtime/checks.h"
#include "runtime/statistics.h"

namespace sim::hccl {
namespace {

using std::chrono::milliseconds;

// What a stream reports when communication failed on it: a time-out of the card's communication task.
constexpr aclError kStreamError = 507048;
constexpr milliseconds kLookAround{50};

int current_card() {
  int32_t card = -1;
  if (aclrtGetDevice(&card) != ACL_SUCCESS) {
    throw Error(HCCL_E_RUNTIME, "no card is set on this thread: call aclrtSetDevice before a communicator is made");
  }
  return card;
}

std::string seconds_text(long seconds) { return std::to_string(seconds) + " s"; }

}  // namespace

std::shared_ptr<Communicator> Communicator::join(const std::string& socket_name, Introduction self,
                                                 const HcclCommConfig* config, bool may_be_early) {
  if (config != nullptr) {
    std::uint32_t magic;
    std::memcpy(&magic, config->reserved + 8, sizeof(magic));
    if (magic != 0xf0f0f0f0) {
      throw Error(HCCL_E_PARA, "the HcclCommConfig was not prepared with HcclCommConfigInit: wrong magic word");
    }
    std::memcpy(self.name, config->hcclCommName, sizeof(self.name));
    self.name[sizeof(self.name) - 1] = '\0';
  }
  const int card = current_card();
  Group group = join_group(socket_name, self, sim::card_memory(card).fd, may_be_early);
  std::shared_ptr<Communicator> made(new Communicator(std::move(group), socket_name, self, card));
  long limit = seconds_setting("HCCL_EXEC_TIMEOUT", 1836);
  if (config != nullptr && config->hcclExecTimeOut >= 0) limit = config->hcclExecTimeOut;
  made->execution_seconds_ = limit;
  made->reserve_buffers(config);
  RankBlock& block = made->control_.rank(made->rank_);
  block.presence = kPresent;
  made->control_.announce();
  made->wait_for_ranks("the set-up of the communicator", Clock::now() + connect_timeout(),
                       [&](std::uint32_t rank) { return made->control_.rank(rank).presence.load() != kAbsent; });
  return made;
}

Communicator::Communicator(Group group, const std::string& socket_name, const Introduction& self, int card)
    : name_(std::move(group.name)),
      secret_(socket_name),
      ranks_(self.ranks),
      rank_(self.rank),
      card_(card),
      control_(std::move(group.control), self.ranks),
      processes_(std::move(group.processes)) {
  for (const FileDescriptor& memory : group.memories) memories_.push_back(PeerMemory::map(memory.get()));
  if (const char* seed = std::getenv("TT_SIM_DELAY")) {
    delays_ = true;
    random_.seed(static_cast<unsigned>(std::strtoul(seed, nullptr, 10) * 1009 + rank_ + 1));
  }
}

Communicator::~Communicator() {
  for (void* buffer : buffers_) {
    aclrtFree(buffer);
    sim::count_communicator_buffers(card_, -static_cast<std::ptrdiff_t>(buffer_bytes_));
  }
}

// A real communicator has two buffers on the card. Here they only count: their pages are given back at once.
void Communicator::reserve_buffers(const HcclCommConfig* config) {
  std::size_t megabytes = static_cast<std::size_t>(seconds_setting("HCCL_BUFFSIZE", 200));
  if (config != nullptr && config->hcclBufferSize != 0xffffffff) megabytes = config->hcclBufferSize;
  const std::size_t bytes = megabytes << 20;
  for (int i = 0; i < 2 && bytes != 0; ++i) {
    void* buffer = nullptr;
    if (aclrtMalloc(&buffer, bytes, ACL_MEM_MALLOC_HUGE_FIRST) != ACL_SUCCESS) {
      throw Error(HCCL_E_OOM, "no room on card " + std::to_string(card_) + " for the communicator's two buffers of " +
                                  std::to_string(megabytes) + " MB (HCCL_BUFFSIZE, hcclBufferSize)");
    }
    buffers_.push_back(buffer);
    buffer_bytes_ = bytes;
    sim::count_communicator_buffers(card_, static_cast<std::ptrdiff_t>(bytes));
    fallocate(sim::card_memory(card_).fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
              static_cast<off_t>(offset_of(buffer)), static_cast<off_t>(bytes));
  }
}

std::uint64_t Communicator::offset_of(const void* address) const {
  return static_cast<std::uint64_t>(static_cast<const char*>(address) - sim::card_memory(card_).device_base);
}

const char* Communicator::memory(std::uint32_t rank, std::uint64_t offset) const { return memories_[rank]->at(offset); }

std::uint32_t Communicator::next_subgroup(std::uint64_t key) {
  const std::lock_guard lock(submitting_);
  return subgroups_[key]++;
}

void Communicator::submit(aclrtStream stream, Request request) {
  if (failure_.load() != HCCL_SUCCESS) {
    const std::lock_guard lock(failing_);
    throw Error(failure_, "the communicator has failed before: " + failure_text_);
  }
  const int card = stream == nullptr ? current_card() : sim::card_of_stream(stream);
  if (card != card_) {
    throw Error(HCCL_E_PARA, card < 0 ? "the stream is none"
                                      : "the stream belongs to card " + std::to_string(card) +
                                            ", the communicator to card " + std::to_string(card_));
  }
  const bool never_arrives = sim::fault_is_due("hccl_timeout", request.name);
  sim::Task task;
  task.kind = sim::TaskKind::kCollective;
  task.name = request.name;
  task.accesses = request.accesses;
  task.accesses.push_back({&order_token_, 1, true});
  task.bytes_moved = request.bytes_sent;
  const std::lock_guard lock(submitting_);
  task.run = [self = shared_from_this(), request = std::move(request), turn = turns_->take(), never_arrives] {
    return self->execute(request, *turn, never_arrives);
  };
  if (const aclError error = sim::submit(stream, std::move(task)); error != ACL_SUCCESS) {
    // The message says more where the runtime left one.
    const char* reason = aclGetRecentErrMsg();
    throw Error(HCCL_E_RUNTIME, reason != nullptr && *reason != '\0'
                                    ? std::string(reason)
                                    : "the stream reports error " + std::to_string(error));
  }
}

aclError Communicator::execute(const Request& request, Turns::Turn& turn, bool never_arrives) {
  const Clock::time_point deadline =
      execution_seconds_ == 0 ? Clock::time_point::max() : Clock::now() + std::chrono::seconds(execution_seconds_);
  std::string text;
  HcclResult code = HCCL_SUCCESS;
  try {
    await_turn(request, turn, deadline);
    if (never_arrives) {
      wait_for_ranks(request.call + ", to which TT_SIM_FAULT=hccl_timeout keeps this rank from coming", deadline,
                     [this](std::uint32_t rank) { return rank != rank_; });
    }
    request.run(deadline);
  } catch (const Error& error) {
    code = error.code;
    text = error.what();
  } catch (const std::exception& error) {
    code = HCCL_E_INTERNAL;
    text = error.what();
  }
  if (code != HCCL_SUCCESS) {
    record_failure(code, text, true);
    sim::set_error_message(text);
  }
  turn.finish();
  return code == HCCL_SUCCESS ? ACL_SUCCESS : kStreamError;
}

void Communicator::await_turn(const Request& request, Turns::Turn& turn, Clock::time_point deadline) {
  while (!turn.wait_for(kLookAround)) {
    if (failure_.load() != HCCL_SUCCESS) break;
    if (Clock::now() >= deadline) {
      throw Error(HCCL_E_TIMEOUT, request.call + ": an operation of communicator " + name_ +
                                      " that was submitted before it on another stream did not end within " +
                                      seconds_text(execution_seconds_));
    }
  }
  raise_reported_failure();
}

void Communicator::raise_reported_failure() {
  if (failure_.load() != HCCL_SUCCESS) {
    const std::lock_guard lock(failing_);
    throw Error(failure_, failure_text_);
  }
  if (leaving_.load()) throw Error(HCCL_E_UNAVAIL, "the communicator was destroyed while an operation was pending");
  for (std::uint32_t rank = 0; rank < ranks_; ++rank) {
    const RankBlock& block = control_.rank(rank);
    if (const std::uint32_t code = block.failure.load(); code != 0 && rank != rank_) {
      const std::string text = "rank " + std::to_string(rank) + " reports: " + block.failure_text;
      throw Error(record_failure(static_cast<HcclResult>(code), text, false), text);
    }
  }
}

bool Communicator::process_ended(std::uint32_t rank) const {
  pollfd process{processes_[rank].get(), POLLIN, 0};
  return poll(&process, 1, 0) > 0;
}

void Communicator::raise_if_gone(const std::string& call, const std::function<bool(std::uint32_t)>& has_come) {
  for (std::uint32_t rank = 0; rank < ranks_; ++rank) {
    if (has_come(rank)) continue;
    const bool left = control_.rank(rank).presence.load() == kLeft;
    // It may have come just before it went.
    if ((!left && !process_ended(rank)) || has_come(rank)) continue;
    throw Error(HCCL_E_REMOTE, call + ": rank " + std::to_string(rank_) + " waits for rank " + std::to_string(rank) +
                                   ", which " +
                                   (left ? "destroyed its communicator or ended" : "died (its process is gone)"));
  }
}

std::string Communicator::whereabouts(std::uint32_t rank) const {
  const RankBlock& block = control_.rank(rank);
  const std::uint64_t arrived = block.arrived.load(), finished = block.finished.load();
  std::string text = "rank " + std::to_string(rank) + " (came to " + std::to_string(arrived) +
                     " collectives, finished " + std::to_string(finished);
  if (const std::uint64_t partner = block.partner.load(); partner != 0) {
    text += static_cast<Operation>(partner >> 56) == Operation::kSend ? ", now sends to rank "
                                                                      : ", now receives from rank ";
    text += std::to_string(partner >> 40 & 0xffff);
  }
  return text + ")";
}

void Communicator::wait_for_ranks(const std::string& call, Clock::time_point deadline,
                                  const std::function<bool(std::uint32_t)>& has_come) {
  std::uint32_t next = 0;  // all before it have come
  const auto all_have_come = [&] {
    while (next < ranks_ && has_come(next)) ++next;
    return next == ranks_;
  };
  // Ranks share few cores: give the processor away a few times, then sleep.
  for (int i = 0; i < 20; ++i) {
    if (all_have_come()) return;
    std::this_thread::yield();
  }
  Clock::time_point look_around = Clock::now() + kLookAround;
  for (;;) {
    const std::uint32_t version = control_.version();
    if (all_have_come()) return;
    if (const auto now = Clock::now(); now >= look_around) {
      look_around = now + kLookAround;
      raise_reported_failure();
      raise_if_gone(call, has_come);
      if (now >= deadline) {
        std::string missing;
        for (std::uint32_t rank = 0; rank < ranks_; ++rank) {
          if (!has_come(rank)) missing += (missing.empty() ? "" : ", ") + whereabouts(rank);
        }
        if (missing.empty()) return;
        throw Error(HCCL_E_TIMEOUT, call + ": rank " + std::to_string(rank_) + " waited for " +
                                        seconds_text(execution_seconds_) + " (HCCL_EXEC_TIMEOUT) for " + missing);
      }
    }
    control_.sleep(version, static_cast<int>(kLookAround.count()));
  }
}

void Communicator::report_mismatch(const std::string& message) {
  const std::string text = message + " (communicator " + name_ + ")";
  record_failure(HCCL_E_PARA, text, true);
  sim::violation("mismatched collectives", text);
  throw Error(HCCL_E_PARA, text);
}

HcclResult Communicator::record_failure(HcclResult code, const std::string& text, bool tell_peers) {
  const std::lock_guard lock(failing_);
  if (failure_.load() != HCCL_SUCCESS) return failure_;
  failure_text_ = text;
  failure_ = code;
  std::fprintf(stderr, "simulated Ascend: HCCL rank %u of communicator %s failed: %s: %s\n", rank_, name_.c_str(),
               HcclGetErrorString(code), text.c_str());
  if (tell_peers) {
    RankBlock& block = control_.rank(rank_);
    std::snprintf(block.failure_text, sizeof(block.failure_text), "%s", text.c_str());
    block.failure = static_cast<std::uint32_t>(code);
    control_.announce();
  }
  return code;
}

HcclResult Communicator::async_error() {
  try {
    raise_reported_failure();
    for (std::uint32_t rank = 0; rank < ranks_; ++rank) {
      // Who ended in an orderly way may have been done.
      if (control_.rank(rank).presence.load() == kPresent && process_ended(rank) &&
          control_.rank(rank).presence.load() == kPresent) {
        const std::string text = "rank " + std::to_string(rank) + " died (its process is gone)";
        return record_failure(HCCL_E_REMOTE, text, false);
      }
    }
  } catch (const Error& error) {
    return error.code;
  }
  return HCCL_SUCCESS;
}

void Communicator::leave() {
  // Work that was queued is done first, if it can be: peers count on it.
  if (!turns_->wait_until_idle(milliseconds(failure_.load() == HCCL_SUCCESS ? 10'000 : 1'000))) {
    leaving_ = true;
    turns_->wait_until_idle(milliseconds(1'000));
  }
  leaving_ = true;
  mark_left();
}

void Communicator::mark_left() {
  control_.rank(rank_).presence = kLeft;
  control_.announce();
}

void Communicator::delay() {
  if (!delays_) return;
  const unsigned dice = random_();
  if (dice % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(dice / 3 % 1000));
}

}  // namespace sim::hccl
