// What the entry points share: names, checks of arguments, what is counted.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hccl/communicator.h"
#include "hccl/reduce.h"

namespace sim::hccl {

const char* operation_name(Operation operation);

// "HcclReduce(count 4, fp32, sum, root 1)".
std::string describe(const Call& call);

// A buffer of the caller, in elements. Throws Error unless it lies on the communicator's card and is aligned.
struct Buffer {
  Buffer(const Communicator& communicator, const char* what, const void* address, std::uint64_t count,
         HcclDataType type);

  const void* address;
  std::uint64_t bytes;
  bool overlaps(const Buffer& other) const;
  sim::Access read() const { return {address, bytes, false}; }
  sim::Access written() const { return {address, bytes, true}; }
};

void check_type(HcclDataType type);
void check_reduction(HcclDataType type, HcclReduceOp op);
void check_rank(const Communicator& communicator, const char* what, std::uint32_t rank);
void check_distinct(const Buffer& send, const Buffer& recv);
// Throws Error unless the buffers are apart or `part` lies `bytes` into `whole`: the in-place form.
void check_in_place(const Buffer& whole, const Buffer& part, std::uint64_t bytes);

// A collective on the stream's thread: every rank says what it calls, waits for the others, and stays until all are
// done.
class Collective {
 public:
  // Throws Error at a mismatch. `lists`: four lists of counts and displacements, for the forms that have them.
  Collective(Communicator& communicator, const Call& call, const std::vector<std::uint64_t>& lists,
             Clock::time_point deadline);

  // All ranks have come to the middle.
  void meet();
  // All ranks are done with everybody's buffers.
  void finish();

  const Call& call_of(std::uint32_t rank) const { return communicator_.control().rank(rank).call; }
  // Where a rank's send or receive buffer can be read.
  const char* sent_by(std::uint32_t rank) const { return communicator_.memory(rank, call_of(rank).send_offset); }
  const char* received_by(std::uint32_t rank) const { return communicator_.memory(rank, call_of(rank).recv_offset); }

 private:
  void compare();
  void compare_all_to_all();

  Communicator& communicator_;
  std::string text_;
  Clock::time_point deadline_;
  std::uint64_t number_;
};

// to[i] = op(rank 0's element first + i, rank 1's, ...) of what the ranks send. `to` may be where this rank's own
// elements lie, since every element is read before it is written.
void reduce_ranks(const Communicator& communicator, const Collective& collective,
                  const std::function<std::uint64_t(std::uint32_t)>& first, std::uint64_t count, HcclDataType type,
                  HcclReduceOp op, char* to);

using Lists = std::vector<std::uint64_t>;
using Move = std::function<void(Communicator&, Collective&)>;

// Queues a collective: `move` runs between the arrival of all ranks and the end, on the stream's thread.
void submit(const std::shared_ptr<Communicator>& communicator, aclrtStream stream, const Call& call,
            std::vector<sim::Access> accesses, std::uint64_t bytes_sent, Move move, Lists lists = {});

// Counts or displacements of the caller; read when the call is made, as HCCL does.
Lists list_of(const char* what, const void* numbers, std::size_t count);
// Never 0, which stands for no lists.
std::uint64_t hash_of(const Lists& list);

// For `move`: where this rank writes, and copies that may be empty.
char* at(const void* address, std::uint64_t offset = 0);
void copy(char* to, const char* from, std::uint64_t bytes);

// Point to point, on the stream's thread.
struct Transfer {
  bool sends;
  void* address;
  std::uint64_t count;
  HcclDataType type;
  std::uint32_t peer;
};
void exchange(Communicator& communicator, const std::string& call, const std::vector<Transfer>& transfers,
              Operation operation, Clock::time_point deadline);

}  // namespace sim::hccl
