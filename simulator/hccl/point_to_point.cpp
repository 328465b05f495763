// Send and receive, alone, in batches and in groups. The receiver copies; a send ends when that is done.
#include <algorithm>
#include <cstring>

#include "hccl/operations.h"
#include "runtime/card_memory.h"

namespace sim::hccl {
namespace {

std::string describe_transfer(bool sends, std::uint64_t count, HcclDataType type, std::uint32_t rank,
                              std::uint32_t peer) {
  return "rank " + std::to_string(rank) + (sends ? " sends " : " receives ") + std::to_string(count) + " " +
         type_name(type) + (sends ? " to rank " : " from rank ") + std::to_string(peer);
}

// The transfers of one call, on the stream's thread. Looking at them is what moves them on: each pair of ranks has its
// own order, and a batch serves whichever peer is ready.
class Exchange {
 public:
  Exchange(Communicator& communicator, const std::vector<Transfer>& transfers, Operation operation)
      : communicator_(communicator), operation_(operation) {
    for (const Transfer& transfer : transfers) pending_.push_back({transfer});
  }

  bool done_with(std::uint32_t rank) {
    for (Pending& transfer : pending_) move(transfer);
    return std::all_of(pending_.begin(), pending_.end(),
                       [rank](const Pending& transfer) { return transfer.done || transfer.what.peer != rank; });
  }

 private:
  struct Pending {
    Transfer what;
    std::uint64_t number = 0;  // in its channel; 0: not posted yet
    bool done = false;
  };

  void move(Pending& transfer) {
    if (transfer.done || (transfer.number == 0 && !post(transfer))) return;
    const Transfer& what = transfer.what;
    Channel& channel = channel_of(what);
    if (what.sends) {
      // The receiver's numbers belong to this transfer as long as it has not taken it.
      const bool comes = channel.wanted.load() >= transfer.number;
      const std::uint64_t count = channel.wanted_count;
      const std::uint32_t type = channel.wanted_type;
      transfer.done = channel.taken.load() >= transfer.number;
      if (comes && !transfer.done) compare(what, count, type);
      return check_for_deadlock(transfer, channel);
    }
    if (channel.offered.load() < transfer.number) return check_for_deadlock(transfer, channel);
    compare(what, channel.offered_count, channel.offered_type);
    const std::uint64_t bytes = what.count * element_bytes(what.type);
    communicator_.delay();
    if (bytes != 0) {
      std::memcpy(sim::kernel_address(what.address), communicator_.memory(what.peer, channel.offered_offset), bytes);
    }
    channel.taken = transfer.number;
    communicator_.control().announce();
    transfer.done = true;
  }

  // False while an earlier transfer of this batch is in the way.
  bool post(Pending& transfer) {
    const Transfer& what = transfer.what;
    for (const Pending& earlier : pending_) {
      if (&earlier == &transfer) break;
      if (!earlier.done && earlier.what.sends == what.sends && earlier.what.peer == what.peer) return false;
    }
    communicator_.delay();
    Channel& channel = channel_of(what);
    std::atomic<std::uint64_t>& posted = what.sends ? channel.offered : channel.wanted;
    transfer.number = posted.load() + 1;
    (what.sends ? channel.offered_count : channel.wanted_count) = what.count;
    (what.sends ? channel.offered_type : channel.wanted_type) = static_cast<std::uint32_t>(what.type);
    if (what.sends) channel.offered_offset = communicator_.offset_of(what.address);
    posted = transfer.number;
    if (operation_ != Operation::kBatchSendRecv) {
      communicator_.control().rank(communicator_.rank()).partner = pack_partner(operation_, what.peer, transfer.number);
    }
    communicator_.control().announce();
    return true;
  }

  Channel& channel_of(const Transfer& what) const {
    const std::uint32_t self = communicator_.rank();
    return what.sends ? communicator_.control().channel(self, what.peer)
                      : communicator_.control().channel(what.peer, self);
  }

  void compare(const Transfer& what, std::uint64_t count, std::uint32_t type) {
    if (count == what.count && type == static_cast<std::uint32_t>(what.type)) return;
    const std::string own = describe_transfer(what.sends, what.count, what.type, communicator_.rank(), what.peer);
    const std::string other =
        describe_transfer(!what.sends, count, static_cast<HcclDataType>(type), what.peer, communicator_.rank());
    communicator_.report_mismatch(what.sends ? own + ", " + other : other + ", " + own);
  }

  // The peer waits for this rank in a call that cannot go on before this one has ended.
  void check_for_deadlock(const Pending& transfer, const Channel& channel) {
    if (transfer.done || transfer.what.peer == communicator_.rank()) return;
    const Transfer& what = transfer.what;
    const RankBlock& own = communicator_.control().rank(communicator_.rank());
    const RankBlock& peer = communicator_.control().rank(what.peer);
    const auto unanswered = [&] { return (what.sends ? channel.wanted : channel.offered).load() < transfer.number; };
    const std::string self_text = describe_transfer(what.sends, what.count, what.type, communicator_.rank(), what.peer);
    if (peer.arrived.load() > own.arrived.load() && unanswered()) {
      communicator_.report_mismatch(self_text + ", while rank " + std::to_string(what.peer) + " calls " +
                                    describe(peer.call));
    }
    const std::uint64_t partner = peer.partner.load();
    if (operation_ == Operation::kBatchSendRecv || (partner >> 40) != (pack_partner(operation_, own_rank(), 0) >> 40)) {
      return;
    }
    const std::uint64_t number = partner & ((std::uint64_t{1} << 40) - 1);
    const Channel& theirs = what.sends ? communicator_.control().channel(what.peer, own_rank())
                                       : communicator_.control().channel(own_rank(), what.peer);
    if ((what.sends ? theirs.wanted : theirs.offered).load() < number && unanswered()) {
      communicator_.report_mismatch(self_text + ", while rank " + std::to_string(what.peer) +
                                    (what.sends ? " sends to it" : " receives from it") + ": both wait for ever");
    }
  }

  std::uint32_t own_rank() const { return communicator_.rank(); }

  Communicator& communicator_;
  const Operation operation_;
  std::vector<Pending> pending_;
};

// What HcclGroupStart collects on a thread.
struct CollectedCall {
  HcclComm comm;
  aclrtStream stream;
  std::vector<Transfer> transfers;
};
thread_local int group_depth = 0;
thread_local std::vector<CollectedCall> collected;

void submit_transfers(HcclComm comm, aclrtStream stream, std::vector<Transfer> transfers, Operation operation) {
  const auto communicator = find_communicator(comm);
  if (group_depth > 0) {
    for (CollectedCall& call : collected) {
      if (call.comm != comm || call.stream != stream) continue;
      call.transfers.insert(call.transfers.end(), transfers.begin(), transfers.end());
      return;
    }
    collected.push_back({comm, stream, std::move(transfers)});
    return;
  }
  Request request;
  request.name = operation_name(operation);
  std::vector<Buffer> received;
  for (const Transfer& transfer : transfers) {
    check_type(transfer.type);
    check_rank(*communicator, transfer.sends ? "destRank" : "srcRank", transfer.peer);
    if (transfer.peer == communicator->rank() && operation != Operation::kBatchSendRecv) {
      throw Error(HCCL_E_PARA, "rank " + std::to_string(transfer.peer) + " cannot send to or receive from itself");
    }
    const Buffer buffer(*communicator, transfer.sends ? "sendBuf" : "recvBuf", transfer.address, transfer.count,
                        transfer.type);
    request.accesses.push_back(transfer.sends ? buffer.read() : buffer.written());
    if (transfer.sends && transfer.peer != communicator->rank()) request.bytes_sent += buffer.bytes;
    request.call +=
        (request.call.empty() ? request.name + ": " : "; ") +
        describe_transfer(transfer.sends, transfer.count, transfer.type, communicator->rank(), transfer.peer);
  }
  request.run = [communicator, transfers = std::move(transfers), operation, call = request.call](auto deadline) {
    exchange(*communicator, call, transfers, operation, deadline);
  };
  communicator->submit(stream, std::move(request));
}

}  // namespace

void exchange(Communicator& communicator, const std::string& call, const std::vector<Transfer>& transfers,
              Operation operation, Clock::time_point deadline) {
  Exchange pending(communicator, transfers, operation);
  communicator.wait_for_ranks(call, deadline, [&pending](std::uint32_t rank) { return pending.done_with(rank); });
  communicator.control().rank(communicator.rank()).partner = 0;
}

}  // namespace sim::hccl

using namespace sim::hccl;

extern "C" {

HcclResult HcclSend(void* sendBuf, uint64_t count, HcclDataType dataType, uint32_t destRank, HcclComm comm,
                    aclrtStream stream) {
  return guarded("HcclSend", [&] {
    submit_transfers(comm, stream, {{true, sendBuf, count, dataType, destRank}}, Operation::kSend);
  });
}

HcclResult HcclRecv(void* recvBuf, uint64_t count, HcclDataType dataType, uint32_t srcRank, HcclComm comm,
                    aclrtStream stream) {
  return guarded("HcclRecv", [&] {
    submit_transfers(comm, stream, {{false, recvBuf, count, dataType, srcRank}}, Operation::kRecv);
  });
}

HcclResult HcclBatchSendRecv(HcclSendRecvItem* sendRecvInfo, uint32_t itemNum, HcclComm comm, aclrtStream stream) {
  return guarded("HcclBatchSendRecv", [&] {
    if (itemNum == 0 || sendRecvInfo == nullptr) throw Error(HCCL_E_PARA, "there are no items");
    std::vector<Transfer> transfers;
    for (uint32_t i = 0; i < itemNum; ++i) {
      const HcclSendRecvItem& item = sendRecvInfo[i];
      if (item.sendRecvType != HCCL_SEND && item.sendRecvType != HCCL_RECV) {
        throw Error(HCCL_E_PARA, "item " + std::to_string(i) + " neither sends nor receives");
      }
      transfers.push_back({item.sendRecvType == HCCL_SEND, item.buf, item.count, item.dataType, item.remoteRank});
    }
    submit_transfers(comm, stream, std::move(transfers), Operation::kBatchSendRecv);
  });
}

// Sends and receives in a group become one batch for each communicator and stream; collectives are queued at once.
HcclResult HcclGroupStart() {
  ++group_depth;
  return HCCL_SUCCESS;
}

HcclResult HcclGroupEnd() {
  return guarded("HcclGroupEnd", [] {
    if (group_depth == 0) throw Error(HCCL_E_PARA, "no group was started on this thread");
    if (--group_depth > 0) return;
    for (CollectedCall& call : std::exchange(collected, {})) {
      submit_transfers(call.comm, call.stream, std::move(call.transfers), Operation::kBatchSendRecv);
    }
  });
}

}  // extern "C"
