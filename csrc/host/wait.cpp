#include "host/wait.h"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <ctime>
#include <fstream>
#include <string>
#include <thread>
#include <utility>

namespace tt::host {
namespace {

// Not FUTEX_PRIVATE_FLAG: the word is shared by processes.
long futex(std::atomic<std::uint32_t>* word, int operation, std::uint32_t value, const timespec* timeout) {
  static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));
  return ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

int open_pidfd(pid_t pid) {
#ifdef SYS_pidfd_open
  return static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));  // close-on-exec always
#else
  static_cast<void>(pid);
  return -1;
#endif
}

// State letter of /proc/<pid>/stat: the one after the last ')', as the command's name may hold anything.
bool is_zombie(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return false;
  const std::size_t end_of_name = line.rfind(')');
  if (end_of_name == std::string::npos || end_of_name + 2 >= line.size()) return false;
  const char state = line[end_of_name + 2];
  return state == 'Z' || state == 'X';
}

}  // namespace

int usable_processors() {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  const unsigned count = std::thread::hardware_concurrency();
  return count == 0 ? 1 : static_cast<int>(count);
}

void Bell::ring() {
  if (sleepers.fetch_add(0, std::memory_order_acq_rel) == 0) return;
  word.fetch_add(1, std::memory_order_release);
  futex(&word, FUTEX_WAKE, INT_MAX, nullptr);
}

void Bell::sleep(std::uint32_t seen, std::chrono::microseconds slice) {
  const timespec timeout{static_cast<time_t>(slice.count() / 1'000'000),
                         static_cast<long>(slice.count() % 1'000'000 * 1'000)};
  futex(&word, FUTEX_WAIT, seen, &timeout);  // any return is fine: the caller looks again
}

ProcessWatch::ProcessWatch(pid_t pid) : pid_(pid), pidfd_(open_pidfd(pid)) {}

ProcessWatch::~ProcessWatch() {
  if (pidfd_ >= 0) ::close(pidfd_);
}

ProcessWatch::ProcessWatch(ProcessWatch&& other) noexcept : pid_(other.pid_), pidfd_(std::exchange(other.pidfd_, -1)) {}

bool ProcessWatch::is_dead() const {
  if (pidfd_ >= 0) {
    pollfd query{pidfd_, POLLIN, 0};
    return ::poll(&query, 1, 0) > 0 && (query.revents & POLLIN) != 0;
  }
  return (::kill(pid_, 0) != 0 && errno == ESRCH) || is_zombie(pid_);
}

}  // namespace tt::host
