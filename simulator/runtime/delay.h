// TT_SIM_DELAY: streams progress at random speeds, which the seed decides. Most tasks start at once, some wait for
// microseconds, a few for milliseconds: long enough for the host, or for another stream, to overtake.
#pragma once

#include <cstdint>

namespace sim {

class Delay {
 public:
  explicit Delay(int stream_id);

  void before_a_task();

 private:
  std::uint64_t next();

  bool enabled_ = false;
  std::uint64_t state_ = 0;
};

}  // namespace sim
