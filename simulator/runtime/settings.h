// What the environment says about the simulated machine. Read once, at the first use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace sim {

struct Settings {
  int cards = 8;                            // TT_SIM_NPUS
  std::vector<int> visible;                 // ASCEND_RT_VISIBLE_DEVICES: the card behind each device number
  std::size_t memory_bytes = 0;             // TT_SIM_MEMORY_MB, per card
  std::string soc_name;                     // TT_SIM_SOC
  std::optional<std::uint64_t> delay_seed;  // TT_SIM_DELAY
  std::string statistics_path;              // TT_SIM_STATS
  std::string faults;                       // TT_SIM_FAULT
  bool report_only = false;                 // TT_SIM_CHECKS=report
};

// Throws std::invalid_argument that names the variable for a value that cannot be meant.
const Settings& settings();

// The rank that the launcher gave this process. Looked up at each call: some programs set it after loading us.
int rank();

// An object that is made at the first use and never destroyed: threads of streams use it while the process exits.
template <typename T>
T& immortal() {
  static T* instance = std::make_unique<T>().release();
  return *instance;
}

}  // namespace sim
