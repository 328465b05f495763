// What the runtime itself counts and writes, beside statistics.h.
#pragma once

#include <cstddef>
#include <string>

namespace sim {

void count_violation(const std::string& kind);
void count_bytes_written(const std::string& operator_name, std::size_t bytes);

std::string statistics_json();

// To TT_SIM_STATS, if that is set. Nothing is reported when it cannot be written but a line on stderr.
void write_statistics();
void reset_statistics();

}  // namespace sim
