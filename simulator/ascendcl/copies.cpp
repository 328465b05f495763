// Copies and fills. The synchronous ones are done by the host, in no stream's order: as on a card, what a stream still
// does with the bytes must have been waited for.
#include <cstring>
#include <utility>
#include <vector>

#include "ascendcl/entry.h"
#include "runtime/card_memory.h"
#include "runtime/scheduler.h"
#include "runtime/statistics.h"

namespace {

using sim::Access;
using sim::entry;
using sim::Task;

struct Copy {
  void* to = nullptr;
  std::size_t to_pitch = 0;
  const void* from = nullptr;
  std::size_t from_pitch = 0;
  std::size_t width = 0;
  std::size_t height = 1;

  void operator()() const {
    char* to_kernel = sim::kernel_address(to);
    const char* from_kernel = sim::kernel_address(from);
    for (std::size_t row = 0; row < height; ++row) {
      std::memmove(to_kernel + row * to_pitch, from_kernel + row * from_pitch, width);
    }
  }
};

bool on_card(const void* address) { return sim::card_of_address(address) >= 0; }

const char* direction(const Copy& copy) {
  return on_card(copy.from) ? (on_card(copy.to) ? "d2d" : "d2h") : (on_card(copy.to) ? "h2d" : "h2h");
}

// The kind must agree with the addresses, except where it says that they decide.
aclError check_kind(const char* name, const Copy& copy, aclrtMemcpyKind kind) {
  bool from_card = false;
  bool to_card = false;
  switch (kind) {
    case ACL_MEMCPY_DEFAULT:
      return ACL_SUCCESS;
    case ACL_MEMCPY_HOST_TO_HOST:
      break;
    case ACL_MEMCPY_HOST_TO_DEVICE:
    case ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE:
      to_card = true;
      break;
    case ACL_MEMCPY_DEVICE_TO_HOST:
      from_card = true;
      break;
    case ACL_MEMCPY_DEVICE_TO_DEVICE:
    case ACL_MEMCPY_INNER_DEVICE_TO_DEVICE:
    case ACL_MEMCPY_INTER_DEVICE_TO_DEVICE:
      from_card = to_card = true;
      break;
    default:
      return sim::error(ACL_ERROR_INVALID_PARAM, std::string(name) + ": no such kind of copy");
  }
  if (on_card(copy.from) == from_card && on_card(copy.to) == to_card) return ACL_SUCCESS;
  return sim::error(ACL_ERROR_INVALID_PARAM, std::string(name) + ": kind " + std::to_string(kind) +
                                                 " does not fit the addresses, which say " + direction(copy));
}

aclError check_copy(const char* name, const Copy& copy, std::size_t room, aclrtMemcpyKind kind) {
  if (copy.to == nullptr || copy.from == nullptr) return sim::null_argument(name);
  if (room < copy.width) {
    return sim::error(ACL_ERROR_INVALID_PARAM, std::string(name) + ": " + std::to_string(copy.width) +
                                                   " bytes into room for " + std::to_string(room));
  }
  return check_kind(name, copy, kind);
}

std::vector<Access> accesses_of(const Copy& copy) {
  std::vector<Access> accesses;
  const bool dense = copy.height == 1 || (copy.to_pitch == copy.width && copy.from_pitch == copy.width);
  const std::size_t rows = dense ? 1 : copy.height;
  const std::size_t bytes = dense ? copy.width * copy.height : copy.width;
  for (std::size_t row = 0; row < rows; ++row) {
    accesses.push_back({static_cast<const char*>(copy.from) + row * copy.from_pitch, bytes, false});
    accesses.push_back({static_cast<const char*>(copy.to) + row * copy.to_pitch, bytes, true});
  }
  return accesses;
}

aclError copy_now(const char* name, const Copy& copy, std::size_t room, aclrtMemcpyKind kind) {
  return entry(name, [&] {
    if (aclError wrong = check_copy(name, copy, room, kind); wrong != ACL_SUCCESS) return wrong;
    sim::scheduler().host_access(name, accesses_of(copy));
    sim::count_copy(direction(copy), copy.width * copy.height);
    copy();
    return ACL_SUCCESS;
  });
}

aclError copy_later(const char* name, const Copy& copy, std::size_t room, aclrtMemcpyKind kind, aclrtStream stream) {
  return entry(name, [&] {
    if (aclError wrong = check_copy(name, copy, room, kind); wrong != ACL_SUCCESS) return wrong;
    Task task;
    task.kind = sim::TaskKind::kCopy;
    task.name = name;
    task.accesses = accesses_of(copy);
    task.bytes_moved = copy.width * copy.height;
    task.run = [copy] {
      copy();
      return ACL_SUCCESS;
    };
    return sim::submit(stream, std::move(task));
  });
}

aclError check_fill(const char* name, const void* address, std::size_t room, std::size_t count) {
  if (address == nullptr) return sim::null_argument(name);
  if (room >= count) return ACL_SUCCESS;
  return sim::error(ACL_ERROR_INVALID_PARAM,
                    std::string(name) + ": " + std::to_string(count) + " bytes into room for " + std::to_string(room));
}

}  // namespace

extern "C" {

aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t count, aclrtMemcpyKind kind) {
  return copy_now("aclrtMemcpy", {to, count, from, count, count, 1}, room, kind);
}

aclError aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t count, aclrtMemcpyKind kind,
                          aclrtStream stream) {
  return copy_later("aclrtMemcpyAsync", {to, count, from, count, count, 1}, room, kind, stream);
}

aclError aclrtMemcpy2d(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                       aclrtMemcpyKind kind) {
  return copy_now("aclrtMemcpy2d", {to, to_pitch, from, from_pitch, width, height}, std::min(to_pitch, from_pitch),
                  kind);
}

aclError aclrtMemcpy2dAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                            aclrtMemcpyKind kind, aclrtStream stream) {
  return copy_later("aclrtMemcpy2dAsync", {to, to_pitch, from, from_pitch, width, height},
                    std::min(to_pitch, from_pitch), kind, stream);
}

aclError aclrtMemset(void* address, size_t room, int32_t value, size_t count) {
  return entry("aclrtMemset", [&] {
    if (aclError wrong = check_fill("aclrtMemset", address, room, count); wrong != ACL_SUCCESS) return wrong;
    sim::scheduler().host_access("aclrtMemset", {{address, count, true}});
    sim::count_copy("memset", count);
    std::memset(sim::kernel_address(address), value, count);
    return ACL_SUCCESS;
  });
}

aclError aclrtMemsetAsync(void* address, size_t room, int32_t value, size_t count, aclrtStream stream) {
  return entry("aclrtMemsetAsync", [&] {
    if (aclError wrong = check_fill("aclrtMemsetAsync", address, room, count); wrong != ACL_SUCCESS) return wrong;
    Task task;
    task.kind = sim::TaskKind::kMemset;
    task.name = "aclrtMemsetAsync";
    task.accesses = {{address, count, true}};
    task.bytes_moved = count;
    task.run = [=] {
      std::memset(sim::kernel_address(address), value, count);
      return ACL_SUCCESS;
    };
    return sim::submit(stream, std::move(task));
  });
}
}
