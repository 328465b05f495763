// The memory of a simulated card, as one process sees it: a memfd that is mapped twice. What the program holds are
// addresses of the first mapping, which nobody may read or write (a host dereference ends in a fault that says so);
// simulated kernels work on the second one. Peers of a communicator map the memfd to read a rank's buffers.
#pragma once

#include <cstddef>

namespace sim {

struct CardMemory {
  int fd = -1;
  char* device_base = nullptr;  // mapped without any access: what aclrtMalloc hands out lies here
  char* kernel_base = nullptr;  // the same pages, readable and writable
  std::size_t bytes = 0;        // TT_SIM_MEMORY_MB, the same on all cards
};

// Of the card `card` in this process; made at the first call.
const CardMemory& card_memory(int card);

// Where a simulated kernel finds what the program calls `address`: card memory at its second mapping, host memory as it
// is. Does not check that anything is allocated there; submit() does, for what a task says it accesses.
char* kernel_address(const void* address);

// The card whose memory `address` lies in, or -1.
int card_of_address(const void* address);

}  // namespace sim
