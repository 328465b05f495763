// Launches operators that only touch memory, so that the runtime can be tested without libopapi.
#include <unistd.h>

#include <cstring>

#include "runtime/card_memory.h"
#include "runtime/stream.h"

// Reads `read_bytes` and fills `write_bytes` with `value`, after some microseconds; then returns `result`.
extern "C" aclError launch(aclrtStream stream, const char* name, const void* read, std::size_t read_bytes, void* write,
                           std::size_t write_bytes, int value, int microseconds, aclError result) {
  sim::Task task;
  task.name = name;
  task.accesses = {{read, read_bytes, false}, {write, write_bytes, true}};
  task.run = [=] {
    if (microseconds > 0) usleep(static_cast<useconds_t>(microseconds));
    if (write != nullptr) std::memset(sim::kernel_address(write), value, write_bytes);
    return result;
  };
  return sim::submit(stream, std::move(task));
}
