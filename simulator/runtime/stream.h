// Submission of work to simulated streams. Every stream is a thread that runs its tasks in order; a task says what it
// reads and writes, so that lifetimes and ordering are checked without any help from the code under test.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "abi/acl.h"

namespace sim {

// Bytes that a task touches, as addresses that the program knows. Host memory is taken too: only its order is checked.
struct Access {
  const void* begin = nullptr;
  std::size_t bytes = 0;
  bool writes = false;
};

enum class TaskKind { kOperator, kCopy, kMemset, kCollective, kHostFunction };

struct Task {
  TaskKind kind = TaskKind::kOperator;
  std::string name;  // "aclnnAdd", "aclrtMemcpyAsync", "HcclAllGather": for messages and statistics
  std::vector<Access> accesses;
  std::function<aclError()> run;  // on the stream's thread; an error poisons the stream and the process, as on a card
  std::size_t bytes_moved = 0;    // for the statistics: what a copy moves or a collective sends
};

// Checks the accesses (allocated? ordered against other streams?), counts the task, and queues it. `stream` null is the
// default stream of the current context. ACL_ERROR_RT_PARAM_INVALID for something that is no stream; an error of an
// earlier task on the stream is returned here or by the next synchronisation, as AscendCL does.
aclError submit(aclrtStream stream, Task task);

// The card a stream belongs to; -1 for what is no stream.
int card_of_stream(aclrtStream stream);

// The message that aclGetRecentErrMsg returns next on this thread.
void set_error_message(std::string message);

}  // namespace sim
