// Counters of one process, written as JSON at exit to TT_SIM_STATS ("%r" in it is the rank): launches per operator,
// bytes copied device to device, collectives with calls and bytes sent, peak and current memory in use per card,
// violations found.
#pragma once

#include <cstddef>
#include <string>

namespace sim {

void count_launch(const std::string& operator_name);
void count_copy(const char* direction, std::size_t bytes);  // "h2d", "d2h", "d2d", "h2h"
// What communicators take of the memory in use, more (or less) than before.
void count_communicator_buffers(int card, std::ptrdiff_t bytes);
void count_collective(const std::string& name, std::size_t bytes_sent);  // to other ranks, by this one

}  // namespace sim
