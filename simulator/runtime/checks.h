// What the simulator finds wrong, and what it is told to break.
#pragma once

#include <string>

namespace sim {

// A mistake of the program under test that a card would not report: a race, a use after free, mismatched collectives …
// Writes "simulated Ascend: rank R: <kind>: <message>" to stderr, counts it for the statistics, and, unless
// TT_SIM_CHECKS=report, ends the process with abort().
void violation(const std::string& kind, const std::string& message);

// TT_SIM_FAULT, a list with commas: "operator:aclnnMatmul:3" (the third call on this process fails), "hccl_timeout:5",
// "oom:2", "peer_death:7:rank1" … Returns true once, at call n of (kind, name); `name` counts only where it matches or
// the setting leaves it out.
bool fault_is_due(const std::string& kind, const std::string& name);

}  // namespace sim
