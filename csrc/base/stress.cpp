#include "base/stress.h"

#ifdef TT_STRESS_DELAYS

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <random>
#include <thread>

namespace tt {

void stress_delay() {
  static const unsigned seed = [] {
    const char* text = std::getenv("TT_DELAY_SEED");
    return text == nullptr ? 1U : static_cast<unsigned>(std::strtoul(text, nullptr, 10));
  }();
  static std::atomic<unsigned> threads{0};
  thread_local std::minstd_rand random(seed * 7919U + threads.fetch_add(1));
  const auto draw = random();
  if (draw % 512 == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  } else if (draw % 8 == 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(draw / 512 % 100));
  } else if (draw % 4 == 0) {
    std::this_thread::yield();
  }
}

}  // namespace tt

#endif
