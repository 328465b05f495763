// The entry points of the all-to-alls: all are one with counts and displacements.
#include "hccl/operations.h"

namespace sim::hccl {
namespace {

// What an all-to-all with counts moves: block `to` of mine lies at send_at[to], block `from` of theirs comes to
// recv_at[from].
void submit_all_to_all(const std::shared_ptr<Communicator>& communicator, aclrtStream stream, Call call,
                       HcclDataType type, const void* send, const void* recv, const Lists& send_counts,
                       const Lists& send_at, const Lists& recv_counts, const Lists& recv_at) {
  const std::uint32_t n = communicator->ranks(), self = communicator->rank();
  const std::size_t size = element_bytes(type);
  const auto part = [size](const void* base, std::uint64_t element) -> const void* {
    return base == nullptr ? nullptr : static_cast<const char*>(base) + element * size;
  };
  std::vector<Buffer> sent, received;
  std::vector<sim::Access> accesses;
  std::uint64_t bytes = 0;
  for (std::uint32_t rank = 0; rank < n; ++rank) {
    sent.emplace_back(*communicator, "sendBuf", part(send, send_at[rank]), send_counts[rank], type);
    received.emplace_back(*communicator, "recvBuf", part(recv, recv_at[rank]), recv_counts[rank], type);
    accesses.push_back(sent.back().read());
    accesses.push_back(received.back().written());
    if (rank != self) bytes += sent.back().bytes;
  }
  for (std::uint32_t i = 0; i < n; ++i) {
    for (std::uint32_t j = 0; j < n; ++j) {
      check_distinct(sent[i], received[j]);
      if (i < j) check_distinct(received[i], received[j]);
    }
  }
  if (send_counts[self] != recv_counts[self]) {
    throw Error(HCCL_E_PARA, "this rank sends " + std::to_string(send_counts[self]) +
                                 " elements to itself and expects " + std::to_string(recv_counts[self]));
  }
  Lists lists = send_counts;
  for (const Lists* more : {&send_at, &recv_counts, &recv_at}) lists.insert(lists.end(), more->begin(), more->end());
  call.send_offset = send == nullptr ? 0 : communicator->offset_of(send);
  submit(
      communicator, stream, call, accesses, bytes,
      [=](Communicator& c, Collective& collective) {
        for (std::uint32_t rank = 0; rank < n; ++rank) {
          if (recv_counts[rank] == 0) continue;
          const std::uint64_t begin = c.control().lists(rank)[n + self];
          copy(at(recv, recv_at[rank] * size), collective.sent_by(rank) + begin * size, recv_counts[rank] * size);
        }
      },
      lists);
}

void check_same_types(HcclDataType send, HcclDataType recv) {
  check_type(send);
  check_type(recv);
  if (send != recv) {
    throw Error(HCCL_E_PARA,
                std::string("sendType ") + type_name(send) + " and recvType " + type_name(recv) + " differ");
  }
}

}  // namespace
}  // namespace sim::hccl

using namespace sim::hccl;

extern "C" {

HcclResult HcclAlltoAll(const void* sendBuf, uint64_t sendCount, HcclDataType sendType, const void* recvBuf,
                        uint64_t recvCount, HcclDataType recvType, HcclComm comm, aclrtStream stream) {
  return guarded("HcclAlltoAll", [&] {
    const auto communicator = find_communicator(comm);
    check_same_types(sendType, recvType);
    if (sendCount != recvCount) {
      throw Error(HCCL_E_PARA, "sendCount = " + std::to_string(sendCount) +
                                   " and recvCount = " + std::to_string(recvCount) + " differ");
    }
    const Lists counts(communicator->ranks(), sendCount);
    Lists begins;
    for (std::uint32_t rank = 0; rank < communicator->ranks(); ++rank) begins.push_back(rank * sendCount);
    submit_all_to_all(communicator, stream,
                      Call{.operation = Operation::kAlltoAll, .data_type = sendType, .count = sendCount}, sendType,
                      sendBuf, recvBuf, counts, begins, counts, begins);
  });
}

HcclResult HcclAlltoAllV(const void* sendBuf, const void* sendCounts, const void* sdispls, HcclDataType sendType,
                         const void* recvBuf, const void* recvCounts, const void* rdispls, HcclDataType recvType,
                         HcclComm comm, aclrtStream stream) {
  return guarded("HcclAlltoAllV", [&] {
    const auto communicator = find_communicator(comm);
    check_same_types(sendType, recvType);
    const std::uint32_t n = communicator->ranks();
    submit_all_to_all(communicator, stream, Call{.operation = Operation::kAlltoAllV, .data_type = sendType}, sendType,
                      sendBuf, recvBuf, list_of("sendCounts", sendCounts, n), list_of("sdispls", sdispls, n),
                      list_of("recvCounts", recvCounts, n), list_of("rdispls", rdispls, n));
  });
}

HcclResult HcclAlltoAllVC(const void* sendBuf, const void* sendCountMatrix, HcclDataType sendType, const void* recvBuf,
                          HcclDataType recvType, HcclComm comm, aclrtStream stream) {
  return guarded("HcclAlltoAllVC", [&] {
    const auto communicator = find_communicator(comm);
    check_same_types(sendType, recvType);
    const std::uint32_t n = communicator->ranks(), self = communicator->rank();
    // Row: who sends. The blocks lie one after the other in both buffers.
    const Lists matrix = list_of("sendCountMatrix", sendCountMatrix, std::size_t{n} * n);
    Lists send_counts, send_at, recv_counts, recv_at;
    std::uint64_t sent = 0, received = 0;
    for (std::uint32_t rank = 0; rank < n; ++rank) {
      send_counts.push_back(matrix[std::size_t{self} * n + rank]);
      recv_counts.push_back(matrix[std::size_t{rank} * n + self]);
      send_at.push_back(sent);
      recv_at.push_back(received);
      sent += send_counts.back();
      received += recv_counts.back();
    }
    submit_all_to_all(communicator, stream,
                      Call{.operation = Operation::kAlltoAllVC, .data_type = sendType, .counts_hash = hash_of(matrix)},
                      sendType, sendBuf, recvBuf, send_counts, send_at, recv_counts, recv_at);
  });
}

}  // extern "C"
