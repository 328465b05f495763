// One rank's end of a communicator: what it knows of its peers, and how it waits for them.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "abi/hccl.h"
#include "hccl/control_block.h"
#include "hccl/peer_memory.h"
#include "hccl/rendezvous.h"
#include "hccl/turns.h"
#include "runtime/stream.h"

namespace sim::hccl {

// An operation, checked and ready to be queued.
struct Request {
  std::string name;                                     // "HcclAllReduce"
  std::string call;                                     // "HcclAllReduce(count 4, fp32, sum)"
  std::vector<sim::Access> accesses;                    // of this rank's memory
  std::size_t bytes_sent = 0;                           // to other ranks, by the minimal direct algorithm
  std::function<void(Clock::time_point deadline)> run;  // on the stream's thread; throws Error
};

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  // Waits for all ranks. Throws Error.
  static std::shared_ptr<Communicator> join(const std::string& socket_name, Introduction self,
                                            const HcclCommConfig* config, bool may_be_early);
  ~Communicator();

  std::uint32_t ranks() const { return ranks_; }
  std::uint32_t rank() const { return rank_; }
  int card() const { return card_; }
  const std::string& name() const { return name_; }
  const ControlBlock& control() const { return control_; }

  // Queues it on `stream`. Throws Error.
  void submit(aclrtStream stream, Request request);

  // Where `offset` in the memory of a rank's card can be read.
  const char* memory(std::uint32_t rank, std::uint64_t offset) const;
  std::uint64_t offset_of(const void* address) const;

  // Sleeps until has_come(rank) for all ranks. Throws Error at the deadline, when one of those that are waited for is
  // gone, and when any rank has reported a failure.
  void wait_for_ranks(const std::string& call, Clock::time_point deadline,
                      const std::function<bool(std::uint32_t)>& has_come);

  // A mistake of the program: an error on this rank and its peers, and a violation. Throws Error.
  [[noreturn]] void report_mismatch(const std::string& message);

  // The first failure of this rank or a peer; HCCL_SUCCESS while there is none. Notices processes that have ended.
  HcclResult async_error();

  // For the names of sub-communicators: how often it was called with this key.
  std::uint32_t next_subgroup(std::uint64_t key);
  const std::string& secret() const { return secret_; }

  // The rank takes no further part. Waits for its pending operations first; they fail if they do not end.
  void leave();
  // At the orderly end of the process, without waiting.
  void mark_left();

  // With TT_SIM_DELAY, sleeps for a random time now and then.
  void delay();

 private:
  Communicator(Group group, const std::string& socket_name, const Introduction& self, int card);

  aclError execute(const Request& request, Turns::Turn& turn, bool never_arrives);
  void await_turn(const Request& request, Turns::Turn& turn, Clock::time_point deadline);
  void raise_reported_failure();
  void raise_if_gone(const std::string& call, const std::function<bool(std::uint32_t)>& has_come);
  bool process_ended(std::uint32_t rank) const;
  // Returns the code that stays: that of the first failure.
  HcclResult record_failure(HcclResult code, const std::string& text, bool tell_peers);
  std::string whereabouts(std::uint32_t rank) const;
  void reserve_buffers(const HcclCommConfig* config);

  std::string name_;
  std::string secret_;
  std::uint32_t ranks_;
  std::uint32_t rank_;
  int card_;
  long execution_seconds_ = 0;  // 0: no limit
  ControlBlock control_;
  std::vector<std::shared_ptr<const PeerMemory>> memories_;
  std::vector<FileDescriptor> processes_;
  std::shared_ptr<Turns> turns_ = std::make_shared<Turns>();
  std::mutex submitting_;
  char order_token_ = 0;  // every operation "writes" it: the race detector then sees operations without an order
  std::vector<void*> buffers_;
  std::size_t buffer_bytes_ = 0;  // of each

  std::mutex failing_;
  std::atomic<HcclResult> failure_{HCCL_SUCCESS};
  std::string failure_text_;
  std::atomic<bool> leaving_{false};
  std::map<std::uint64_t, std::uint32_t> subgroups_;
  bool delays_ = false;
  std::minstd_rand random_;
};

// Handles. find_communicator throws Error for what is none.
HcclComm register_communicator(std::shared_ptr<Communicator> communicator);
std::shared_ptr<Communicator> find_communicator(HcclComm handle);
std::shared_ptr<Communicator> forget_communicator(HcclComm handle);

// Runs the body of a C entry point: what it throws becomes a code and the recent error message.
HcclResult guarded(const char* function, const std::function<void()>& body);

}  // namespace sim::hccl
