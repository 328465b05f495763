// Vector clocks: which tasks of which stream lie behind a point of the program, whatever the threads do.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace sim {

using Slot = std::uint32_t;  // of a stream; slot 0 is the host, all its threads together

class Clock {
 public:
  std::uint64_t at(Slot slot) const { return slot < times_.size() ? times_[slot] : 0; }

  // Task number `time` of `slot`, and all before it, lie behind.
  bool covers(Slot slot, std::uint64_t time) const { return at(slot) >= time; }

  void set(Slot slot, std::uint64_t time) {
    if (slot >= times_.size()) times_.resize(slot + 1, 0);
    times_[slot] = time;
  }

  void join(const Clock& other) {
    if (other.times_.size() > times_.size()) times_.resize(other.times_.size(), 0);
    for (std::size_t slot = 0; slot < other.times_.size(); ++slot) {
      times_[slot] = std::max(times_[slot], other.times_[slot]);
    }
  }

 private:
  std::vector<std::uint64_t> times_;
};

}  // namespace sim
