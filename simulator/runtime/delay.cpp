#include "runtime/delay.h"

#include <chrono>
#include <thread>

#include "runtime/settings.h"

namespace sim {

Delay::Delay(int stream_id) {
  if (!settings().delay_seed) return;
  enabled_ = true;
  state_ = *settings().delay_seed * 1000003 + static_cast<std::uint64_t>(rank()) * 1009 +
           static_cast<std::uint64_t>(stream_id);
}

// splitmix64
std::uint64_t Delay::next() {
  state_ += 0x9E3779B97F4A7C15;
  std::uint64_t mixed = state_;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB;
  return mixed ^ (mixed >> 31);
}

void Delay::before_a_task() {
  if (!enabled_) return;
  const std::uint64_t dice = next() % 1000;
  if (dice >= 100) return;
  const std::uint64_t microseconds = dice < 5 ? 1000 + next() % 4000 : dice < 20 ? next() % 300 : next() % 20;
  std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

}  // namespace sim
