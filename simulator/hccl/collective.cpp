#include <algorithm>
#include <cstring>
#include <thread>

#include "hccl/operations.h"
#include "runtime/card_memory.h"

namespace sim::hccl {
namespace {

constexpr std::size_t kChunkBytes = 64 * 1024;

bool same_call(const Call& a, const Call& b) {
  return a.operation == b.operation && a.data_type == b.data_type && a.reduce_op == b.reduce_op && a.root == b.root &&
         a.count == b.count && a.counts_hash == b.counts_hash;
}

std::string rank_calls(std::uint32_t rank, const Call& call) {
  return "rank " + std::to_string(rank) + " calls " + describe(call);
}

}  // namespace

const char* operation_name(Operation operation) {
  constexpr const char* kNames[] = {"nothing",           "HcclAllReduce",      "HcclBroadcast", "HcclReduce",
                                    "HcclReduceScatter", "HcclReduceScatterV", "HcclScatter",   "HcclAllGather",
                                    "HcclAllGatherV",    "HcclBarrier",        "HcclAlltoAll",  "HcclAlltoAllV",
                                    "HcclAlltoAllVC",    "HcclSend",           "HcclRecv",      "HcclBatchSendRecv"};
  return kNames[static_cast<std::uint32_t>(operation)];
}

std::string describe(const Call& call) {
  std::string text;
  const auto add = [&text](const std::string& part) { text += (text.empty() ? "" : ", ") + part; };
  if (call.data_type != kUnused) {
    if (call.counts_hash == 0 && call.operation != Operation::kAlltoAllV) add("count " + std::to_string(call.count));
    add(type_name(static_cast<HcclDataType>(call.data_type)));
  }
  if (call.reduce_op != kUnused) add(op_name(static_cast<HcclReduceOp>(call.reduce_op)));
  if (call.root != kUnused) add("root " + std::to_string(call.root));
  if (call.counts_hash != 0) add("counts with checksum " + std::to_string(call.counts_hash % 1'000'000));
  return std::string(operation_name(call.operation)) + "(" + text + ")";
}

Buffer::Buffer(const Communicator& communicator, const char* what, const void* where, std::uint64_t count,
               HcclDataType type)
    : address(where), bytes(count * element_bytes(type)) {
  if (bytes == 0) return;
  if (bytes / element_bytes(type) != count) {
    throw Error(HCCL_E_PARA, std::string(what) + ": a count of " + std::to_string(count) + " is too large");
  }
  if (address == nullptr) throw Error(HCCL_E_PTR, std::string(what) + " is null, but the count is not 0");
  const int card = sim::card_of_address(address);
  if (card != communicator.card()) {
    throw Error(HCCL_E_PARA, std::string(what) +
                                 (card < 0 ? " is no card memory" : " lies on card " + std::to_string(card)) +
                                 "; the communicator belongs to card " + std::to_string(communicator.card()));
  }
  if (reinterpret_cast<std::uintptr_t>(address) % element_bytes(type) != 0) {
    throw Error(HCCL_E_PARA, std::string(what) + " is not aligned to the " + std::to_string(element_bytes(type)) +
                                 " bytes of an element of " + type_name(type));
  }
  const sim::CardMemory& memory = sim::card_memory(card);
  if (communicator.offset_of(address) + bytes > memory.bytes) {
    throw Error(HCCL_E_PARA,
                std::string(what) + " of " + std::to_string(bytes) + " bytes goes beyond the card's memory");
  }
}

bool Buffer::overlaps(const Buffer& other) const {
  const auto* begin = static_cast<const char*>(address);
  const auto* other_begin = static_cast<const char*>(other.address);
  return bytes != 0 && other.bytes != 0 && begin < other_begin + other.bytes && other_begin < begin + bytes;
}

void check_type(HcclDataType type) {
  if (element_bytes(type) == 0) throw Error(HCCL_E_PARA, "data type " + std::to_string(type) + " is none");
}

void check_reduction(HcclDataType type, HcclReduceOp op) {
  check_type(type);
  if (!can_reduce(type, op)) {
    throw Error(HCCL_E_NOT_SUPPORT, std::string("there is no reduction ") + op_name(op) + " (" + std::to_string(op) +
                                        ") of " + type_name(type) +
                                        ": sum, prod, max and min of int8, int16, int32, int64, fp16, fp32 and bf16, "
                                        "without prod of int16 and bf16");
  }
}

void check_rank(const Communicator& communicator, const char* what, std::uint32_t rank) {
  if (rank >= communicator.ranks()) {
    throw Error(HCCL_E_PARA, std::string(what) + " = " + std::to_string(rank) + " in a communicator of " +
                                 std::to_string(communicator.ranks()) + " ranks");
  }
}

void check_distinct(const Buffer& send, const Buffer& recv) {
  if (send.overlaps(recv)) {
    throw Error(HCCL_E_PARA,
                "what is sent and what is received overlap, and the operation has no in-place form for that");
  }
}

void check_in_place(const Buffer& whole, const Buffer& part, std::uint64_t bytes) {
  if (!whole.overlaps(part) || static_cast<const char*>(whole.address) + bytes == part.address) return;
  throw Error(HCCL_E_PARA, "the send and the receive buffer overlap; the in-place form has the smaller one " +
                               std::to_string(bytes) + " bytes after the start of the larger one on this rank");
}

Collective::Collective(Communicator& communicator, const Call& call, const std::vector<std::uint64_t>& lists,
                       Clock::time_point deadline)
    : communicator_(communicator), text_(describe(call)), deadline_(deadline) {
  communicator_.delay();
  RankBlock& own = communicator_.control().rank(communicator_.rank());
  own.call = call;
  std::copy(lists.begin(), lists.end(), communicator_.control().lists(communicator_.rank()));
  number_ = own.arrived.load() + 1;
  own.arrived = number_;
  communicator_.control().announce();
  communicator_.wait_for_ranks(text_, deadline_, [this](std::uint32_t rank) {
    return communicator_.control().rank(rank).arrived.load() >= number_;
  });
  compare();
}

void Collective::meet() {
  communicator_.delay();
  communicator_.control().rank(communicator_.rank()).halfway = number_;
  communicator_.control().announce();
  communicator_.wait_for_ranks(text_, deadline_, [this](std::uint32_t rank) {
    return communicator_.control().rank(rank).halfway.load() >= number_;
  });
}

void Collective::finish() {
  communicator_.delay();
  communicator_.control().rank(communicator_.rank()).finished = number_;
  communicator_.control().announce();
  communicator_.wait_for_ranks(text_, deadline_, [this](std::uint32_t rank) {
    return communicator_.control().rank(rank).finished.load() >= number_;
  });
}

void Collective::compare() {
  for (std::uint32_t rank = 1; rank < communicator_.ranks(); ++rank) {
    if (!same_call(call_of(0), call_of(rank))) {
      communicator_.report_mismatch("collective " + std::to_string(number_) + ": " + rank_calls(0, call_of(0)) + ", " +
                                    rank_calls(rank, call_of(rank)));
    }
  }
  if (call_of(0).operation == Operation::kAlltoAllV) compare_all_to_all();
}

void Collective::compare_all_to_all() {
  const std::uint32_t n = communicator_.ranks();
  for (std::uint32_t from = 0; from < n; ++from) {
    for (std::uint32_t to = 0; to < n; ++to) {
      const std::uint64_t sent = communicator_.control().lists(from)[to];
      const std::uint64_t expected = communicator_.control().lists(to)[2 * n + from];
      if (sent == expected) continue;
      communicator_.report_mismatch("collective " + std::to_string(number_) + ": in HcclAlltoAllV rank " +
                                    std::to_string(from) + " sends " + std::to_string(sent) + " elements to rank " +
                                    std::to_string(to) + ", which expects " + std::to_string(expected));
    }
  }
}

void reduce_ranks(const Communicator& communicator, const Collective& collective,
                  const std::function<std::uint64_t(std::uint32_t)>& first, std::uint64_t count, HcclDataType type,
                  HcclReduceOp op, char* to) {
  const std::size_t size = element_bytes(type);
  const std::uint64_t chunk = kChunkBytes / size;
  std::vector<std::uint64_t> partial(kChunkBytes / sizeof(std::uint64_t));
  for (std::uint64_t begin = 0; begin < count; begin += chunk) {
    const std::uint64_t elements = std::min(chunk, count - begin);
    std::memcpy(partial.data(), collective.sent_by(0) + (first(0) + begin) * size, elements * size);
    for (std::uint32_t rank = 1; rank < communicator.ranks(); ++rank) {
      reduce_into(partial.data(), collective.sent_by(rank) + (first(rank) + begin) * size, elements, type, op);
    }
    std::memcpy(to + begin * size, partial.data(), elements * size);
  }
}

void submit(const std::shared_ptr<Communicator>& communicator, aclrtStream stream, const Call& call,
            std::vector<sim::Access> accesses, std::uint64_t bytes_sent, Move move, Lists lists) {
  Request request;
  request.name = operation_name(call.operation);
  request.call = describe(call);
  request.accesses = std::move(accesses);
  request.bytes_sent = bytes_sent;
  request.run = [self = communicator, call, move = std::move(move), lists = std::move(lists)](auto deadline) {
    Collective collective(*self, call, lists, deadline);
    if (move) move(*self, collective);
    collective.finish();
  };
  communicator->submit(stream, std::move(request));
}

void copy(char* to, const char* from, std::uint64_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);
}

char* at(const void* address, std::uint64_t offset) { return sim::kernel_address(address) + offset; }

Lists list_of(const char* what, const void* numbers, std::size_t count) {
  if (numbers == nullptr) throw Error(HCCL_E_PTR, std::string(what) + " is null");
  Lists list(count);
  std::memcpy(list.data(), numbers, count * sizeof(std::uint64_t));
  return list;
}

std::uint64_t hash_of(const Lists& list) {
  std::uint64_t hash = 14695981039346656037u;
  for (std::uint64_t number : list) hash = (hash ^ number) * 1099511628211u;
  return hash | 1;
}

}  // namespace sim::hccl
