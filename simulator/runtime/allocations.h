// What is allocated on the cards of this process.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "abi/acl.h"

namespace sim {

struct Allocation {
  char* begin = nullptr;
  std::size_t bytes = 0;
};

struct CardUsage {
  std::size_t current = 0;
  std::size_t peak = 0;
  std::size_t capacity = 0;
};

// New bytes are poisoned: NaN as floating point of any width, -1 as an integer.
aclError allocate(int card, std::size_t bytes, void** result);

// False if `address` is not what allocate() returned, or was freed.
bool release(void* address);

// The allocation that `address` lies in.
std::optional<Allocation> allocation_of(const void* address);

// What is to be said about card memory that is not allocated: who had it last, if that is still known.
std::string describe_unallocated(const void* address);

// For the fault handler: gives up when another thread is at it.
std::optional<Allocation> try_allocation_of(const void* address);

CardUsage card_usage(int card);
CardUsage card_usage_if_used(int card);  // zeros for a card that this process never used
void reset_peaks();

}  // namespace sim
