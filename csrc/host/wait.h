// Sleeping and waking across processes, and whether a process still lives.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>

namespace tt::host {

// Tells the processor that this is a spin loop.
inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// Processors that this process may run on.
int usable_processors();

// A futex in shared memory that publishers ring and waiters sleep on. Ringing costs no system call while nobody sleeps.
//
// No wake-up is lost. A waiter adds itself to `sleepers` and then looks at the data; a publisher stores its data and
// then reads `sleepers`. Both are read-modify-writes of one word and so ordered: either the waiter's comes second, then
// it sees the data, or the publisher's does, then it sees the sleeper and changes `word`. If it does so after the
// waiter read `word`, the futex call returns at once; if before, reading `word` made the data visible.
struct Bell {
  std::atomic<std::uint32_t> word;
  std::atomic<std::uint32_t> sleepers;

  void ring();

  // Sleeps until rung or for `slice`, unless done() holds already. Returns early on signals.
  template <typename Done>
  void sleep_unless(Done&& done, std::chrono::microseconds slice) {
    sleepers.fetch_add(1, std::memory_order_acq_rel);
    const std::uint32_t seen = word.load(std::memory_order_acquire);
    bool is_done = true;
    try {
      is_done = done();
    } catch (...) {
      sleepers.fetch_sub(1, std::memory_order_acq_rel);
      throw;
    }
    if (!is_done) sleep(seen, slice);
    sleepers.fetch_sub(1, std::memory_order_acq_rel);
  }

 private:
  void sleep(std::uint32_t seen, std::chrono::microseconds slice);
};

// Watches one process of this machine. Zombies count as dead.
class ProcessWatch {
 public:
  explicit ProcessWatch(pid_t pid);
  ~ProcessWatch();
  ProcessWatch(ProcessWatch&& other) noexcept;
  ProcessWatch& operator=(ProcessWatch&& other) = delete;

  bool is_dead() const;

 private:
  pid_t pid_;
  int pidfd_ = -1;  // -1 where the kernel has none (before 5.3) or forbids it
};

}  // namespace tt::host
