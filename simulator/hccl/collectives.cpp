// The entry points of the collectives. Each rank reads what it needs from its peers' memory; nobody writes to
// another's.
#include <cstring>

#include "hccl/operations.h"
#include "runtime/card_memory.h"

using namespace sim::hccl;

extern "C" {

HcclResult HcclAllReduce(void* sendBuf, void* recvBuf, uint64_t count, HcclDataType dataType, HcclReduceOp op,
                         HcclComm comm, aclrtStream stream) {
  return guarded("HcclAllReduce", [&] {
    const auto communicator = find_communicator(comm);
    check_reduction(dataType, op);
    const Buffer send(*communicator, "sendBuf", sendBuf, count, dataType);
    const Buffer recv(*communicator, "recvBuf", recvBuf, count, dataType);
    check_in_place(send, recv, 0);
    const std::uint32_t n = communicator->ranks(), self = communicator->rank();
    const Call call{.operation = Operation::kAllReduce,
                    .data_type = dataType,
                    .reduce_op = op,
                    .count = count,
                    .send_offset = communicator->offset_of(sendBuf),
                    .recv_offset = communicator->offset_of(recvBuf)};
    submit(communicator, stream, call, {send.read(), recv.written()}, 2 * (n - 1) * send.bytes / n,
           [=](Communicator& c, Collective& collective) {
             // Everyone reduces a slice, then fetches the others' slices.
             const std::size_t size = element_bytes(dataType);
             const auto begin_of = [=](std::uint32_t rank) { return count * rank / n; };
             const std::uint64_t begin = begin_of(self);
             const auto first = [=](std::uint32_t) { return begin; };
             if (count != 0) {
               reduce_ranks(c, collective, first, begin_of(self + 1) - begin, dataType, op, at(recvBuf, begin * size));
             }
             collective.meet();
             for (std::uint32_t rank = 0; rank < n && count != 0; ++rank) {
               const std::uint64_t offset = begin_of(rank) * size;
               if (rank == self) continue;
               copy(at(recvBuf, offset), collective.received_by(rank) + offset, begin_of(rank + 1) * size - offset);
             }
           });
  });
}

HcclResult HcclBroadcast(void* buf, uint64_t count, HcclDataType dataType, uint32_t root, HcclComm comm,
                         aclrtStream stream) {
  return guarded("HcclBroadcast", [&] {
    const auto communicator = find_communicator(comm);
    check_type(dataType);
    check_rank(*communicator, "root", root);
    const Buffer buffer(*communicator, "buf", buf, count, dataType);
    const bool is_root = communicator->rank() == root;
    const Call call{.operation = Operation::kBroadcast,
                    .data_type = dataType,
                    .root = root,
                    .count = count,
                    .send_offset = communicator->offset_of(buf)};
    submit(communicator, stream, call, {is_root ? buffer.read() : buffer.written()},
           is_root ? buffer.bytes * (communicator->ranks() - 1) : 0, [=](Communicator&, Collective& collective) {
             if (!is_root) copy(at(buf), collective.sent_by(root), buffer.bytes);
           });
  });
}

HcclResult HcclReduce(void* sendBuf, void* recvBuf, uint64_t count, HcclDataType dataType, HcclReduceOp op,
                      uint32_t root, HcclComm comm, aclrtStream stream) {
  return guarded("HcclReduce", [&] {
    const auto communicator = find_communicator(comm);
    check_reduction(dataType, op);
    check_rank(*communicator, "root", root);
    const bool is_root = communicator->rank() == root;
    const Buffer send(*communicator, "sendBuf", sendBuf, count, dataType);
    // Only the root receives; what the others pass is not looked at.
    const Buffer recv(*communicator, "recvBuf", recvBuf, is_root ? count : 0, dataType);
    check_in_place(send, recv, 0);
    const Call call{.operation = Operation::kReduce,
                    .data_type = dataType,
                    .reduce_op = op,
                    .root = root,
                    .count = count,
                    .send_offset = communicator->offset_of(sendBuf)};
    submit(communicator, stream, call, {send.read(), recv.written()}, is_root ? 0 : send.bytes,
           [=](Communicator& c, Collective& collective) {
             const auto first = [](std::uint32_t) { return std::uint64_t{0}; };
             if (is_root && count != 0) reduce_ranks(c, collective, first, count, dataType, op, at(recvBuf));
           });
  });
}

HcclResult HcclReduceScatter(void* sendBuf, void* recvBuf, uint64_t recvCount, HcclDataType dataType, HcclReduceOp op,
                             HcclComm comm, aclrtStream stream) {
  return guarded("HcclReduceScatter", [&] {
    const auto communicator = find_communicator(comm);
    check_reduction(dataType, op);
    const std::uint32_t n = communicator->ranks(), self = communicator->rank();
    const Buffer send(*communicator, "sendBuf", sendBuf, recvCount * n, dataType);
    const Buffer recv(*communicator, "recvBuf", recvBuf, recvCount, dataType);
    check_in_place(send, recv, self * recv.bytes);
    const Call call{.operation = Operation::kReduceScatter,
                    .data_type = dataType,
                    .reduce_op = op,
                    .count = recvCount,
                    .send_offset = communicator->offset_of(sendBuf)};
    submit(communicator, stream, call, {send.read(), recv.written()}, recv.bytes * (n - 1),
           [=](Communicator& c, Collective& collective) {
             const auto first = [=](std::uint32_t) { return recvCount * self; };
             if (recvCount != 0) reduce_ranks(c, collective, first, recvCount, dataType, op, at(recvBuf));
           });
  });
}

HcclResult HcclReduceScatterV(void* sendBuf, const void* sendCounts, const void* sendDispls, void* recvBuf,
                              uint64_t recvCount, HcclDataType dataType, HcclReduceOp op, HcclComm comm,
                              aclrtStream stream) {
  return guarded("HcclReduceScatterV", [&] {
    const auto communicator = find_communicator(comm);
    check_reduction(dataType, op);
    const std::uint32_t n = communicator->ranks(), self = communicator->rank();
    const std::size_t size = element_bytes(dataType);
    const Lists counts = list_of("sendCounts", sendCounts, n);
    const Lists begins = list_of("sendDispls", sendDispls, n);
    if (counts[self] != recvCount) {
      throw Error(HCCL_E_PARA, "recvCount = " + std::to_string(recvCount) + ", but sendCounts of this rank says " +
                                   std::to_string(counts[self]));
    }
    const Buffer recv(*communicator, "recvBuf", recvBuf, recvCount, dataType);
    std::vector<sim::Access> accesses{recv.written()};
    std::uint64_t bytes = 0;
    for (std::uint32_t rank = 0; rank < n; ++rank) {
      const Buffer send(*communicator, "sendBuf", static_cast<char*>(sendBuf) + begins[rank] * size, counts[rank],
                        dataType);
      if (rank == self) check_in_place(send, recv, 0);
      if (rank != self) check_distinct(send, recv);
      if (rank != self) bytes += send.bytes;
      accesses.push_back(send.read());
    }
    const Call call{.operation = Operation::kReduceScatterV,
                    .data_type = dataType,
                    .reduce_op = op,
                    .counts_hash = hash_of(counts),
                    .send_offset = communicator->offset_of(sendBuf)};
    Lists lists = counts;
    lists.insert(lists.end(), begins.begin(), begins.end());
    submit(
        communicator, stream, call, accesses, bytes,
        [=](Communicator& c, Collective& collective) {
          const auto first = [&](std::uint32_t rank) { return c.control().lists(rank)[n + self]; };
          if (recvCount != 0) reduce_ranks(c, collective, first, recvCount, dataType, op, at(recvBuf));
        },
        lists);
  });
}

HcclResult HcclScatter(void* sendBuf, void* recvBuf, uint64_t recvCount, HcclDataType dataType, uint32_t root,
                       HcclComm comm, aclrtStream stream) {
  return guarded("HcclScatter", [&] {
    const auto communicator = find_communicator(comm);
    check_type(dataType);
    check_rank(*communicator, "root", root);
    const std::uint32_t n = communicator->ranks(), self = communicator->rank();
    const bool is_root = self == root;
    const Buffer send(*communicator, "sendBuf", sendBuf, is_root ? recvCount * n : 0, dataType);
    const Buffer recv(*communicator, "recvBuf", recvBuf, recvCount, dataType);
    check_in_place(send, recv, self * recv.bytes);
    const Call call{.operation = Operation::kScatter,
                    .data_type = dataType,
                    .root = root,
                    .count = recvCount,
                    .send_offset = is_root ? communicator->offset_of(sendBuf) : 0};
    submit(communicator, stream, call, {send.read(), recv.written()}, is_root ? recv.bytes * (n - 1) : 0,
           [=](Communicator&, Collective& collective) {
             copy(at(recvBuf), collective.sent_by(root) + self * recv.bytes, recv.bytes);
           });
  });
}

HcclResult HcclAllGather(void* sendBuf, void* recvBuf, uint64_t sendCount, HcclDataType dataType, HcclComm comm,
                         aclrtStream stream) {
  return guarded("HcclAllGather", [&] {
    const auto communicator = find_communicator(comm);
    check_type(dataType);
    const std::uint32_t n = communicator->ranks(), self = communicator->rank();
    const Buffer send(*communicator, "sendBuf", sendBuf, sendCount, dataType);
    const Buffer recv(*communicator, "recvBuf", recvBuf, sendCount * n, dataType);
    check_in_place(recv, send, self * send.bytes);
    const bool in_place = recv.overlaps(send);
    const Call call{.operation = Operation::kAllGather,
                    .data_type = dataType,
                    .count = sendCount,
                    .send_offset = communicator->offset_of(sendBuf)};
    submit(communicator, stream, call, {send.read(), recv.written()}, send.bytes * (n - 1),
           [=](Communicator&, Collective& collective) {
             for (std::uint32_t rank = 0; rank < n; ++rank) {
               if (rank == self && in_place) continue;
               copy(at(recvBuf, rank * send.bytes), collective.sent_by(rank), send.bytes);
             }
           });
  });
}

HcclResult HcclAllGatherV(void* sendBuf, uint64_t sendCount, void* recvBuf, const void* recvCounts,
                          const void* recvDispls, HcclDataType dataType, HcclComm comm, aclrtStream stream) {
  return guarded("HcclAllGatherV", [&] {
    const auto communicator = find_communicator(comm);
    check_type(dataType);
    const std::uint32_t n = communicator->ranks(), self = communicator->rank();
    const std::size_t size = element_bytes(dataType);
    const Lists counts = list_of("recvCounts", recvCounts, n);
    const Lists begins = list_of("recvDispls", recvDispls, n);
    if (counts[self] != sendCount) {
      throw Error(HCCL_E_PARA, "sendCount = " + std::to_string(sendCount) + ", but recvCounts of this rank says " +
                                   std::to_string(counts[self]));
    }
    const Buffer send(*communicator, "sendBuf", sendBuf, sendCount, dataType);
    std::vector<sim::Access> accesses{send.read()};
    bool in_place = false;
    for (std::uint32_t rank = 0; rank < n; ++rank) {
      const Buffer recv(*communicator, "recvBuf", static_cast<char*>(recvBuf) + begins[rank] * size, counts[rank],
                        dataType);
      if (rank == self) check_in_place(recv, send, 0);
      if (rank != self) check_distinct(send, recv);
      in_place = in_place || send.overlaps(recv);
      accesses.push_back(recv.written());
    }
    const Call call{.operation = Operation::kAllGatherV,
                    .data_type = dataType,
                    .counts_hash = hash_of(counts),
                    .send_offset = communicator->offset_of(sendBuf)};
    submit(communicator, stream, call, accesses, send.bytes * (n - 1), [=](Communicator&, Collective& collective) {
      for (std::uint32_t rank = 0; rank < n; ++rank) {
        if ((rank == self && in_place) || counts[rank] == 0) continue;
        copy(at(recvBuf, begins[rank] * size), collective.sent_by(rank), counts[rank] * size);
      }
    });
  });
}

HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) {
  return guarded("HcclBarrier",
                 [&] { submit(find_communicator(comm), stream, Call{.operation = Operation::kBarrier}, {}, 0, {}); });
}

}  // extern "C"
