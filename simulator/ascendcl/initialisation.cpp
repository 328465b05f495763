// aclInit, aclFinalize, and what happens when the process ends.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "ascendcl/entry.h"
#include "runtime/checks.h"
#include "runtime/counters.h"
#include "runtime/scheduler.h"
#include "runtime/settings.h"

namespace {

using sim::entry;

std::atomic<bool> initialised = false;
pid_t initialised_in = 0;

void announce() {
  const char* rank = std::getenv("RANK");
  if (rank != nullptr && std::strcmp(rank, "0") != 0) return;
  std::fprintf(stderr,
               "simulated Ascend: %d cards of %zu MiB, computed on the CPU; nothing here says anything about a real "
               "card\n",
               sim::settings().cards, sim::settings().memory_bytes >> 20);
}

// Runs before the libraries that were loaded earlier are torn down, while tasks may still call into them. A forked
// child has none of the threads.
void at_exit() {
  if (getpid() != initialised_in) return;
  try {
    sim::scheduler().stop_all(std::chrono::seconds(5));
    sim::write_statistics();
  } catch (const std::exception& exception) {
    std::fprintf(stderr, "simulated Ascend: at exit: %s\n", exception.what());
  }
}

}  // namespace

extern "C" {

aclError aclInit(const char*) {
  return entry("aclInit", [] {
    sim::settings();  // a wrong setting is an error here and not later
    sim::fault_is_due("", "");
    if (initialised.exchange(true)) {
      return sim::error(ACL_ERROR_REPEAT_INITIALIZE, "aclInit: AscendCL is initialised already");
    }
    if (initialised_in != getpid()) {
      initialised_in = getpid();
      announce();
      std::atexit(at_exit);
    }
    return ACL_SUCCESS;
  });
}

aclError aclFinalize() {
  return entry("aclFinalize", [] {
    if (!initialised.exchange(false)) {
      return sim::error(ACL_ERROR_REPEAT_FINALIZE, "aclFinalize: AscendCL is not initialised");
    }
    if (getpid() != initialised_in) return ACL_SUCCESS;
    sim::scheduler().synchronize_card(-1, 5000);  // an error of a task was reported to whoever asked
    sim::write_statistics();
    return ACL_SUCCESS;
  });
}

// For tests and benchmarks, which call them through ctypes.
void sim_write_statistics() {
  entry("sim_write_statistics", [] {
    sim::write_statistics();
    return ACL_SUCCESS;
  });
}

void sim_reset_statistics() {
  entry("sim_reset_statistics", [] {
    sim::reset_statistics();
    return ACL_SUCCESS;
  });
}

// The bytes that the text needs with its final zero; as much of it as there is room for.
size_t sim_statistics_json(char* text, size_t size) {
  size_t needed = 0;
  entry("sim_statistics_json", [&] {
    const std::string json = sim::statistics_json();
    needed = json.size() + 1;
    if (text != nullptr && size > 0) {
      const size_t copied = std::min(size - 1, json.size());
      std::memcpy(text, json.data(), copied);
      text[copied] = '\0';
    }
    return ACL_SUCCESS;
  });
  return needed;
}
}
