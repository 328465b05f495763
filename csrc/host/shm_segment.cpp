#include "host/shm_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include "base/error.h"

// Newer than some C libraries that we build with.
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace tt::host {
namespace {

constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();

std::string reason(int error) { return std::strerror(error); }

// The value of "key: 123 kB" or "key 123" in a file of such lines; kUnlimited if it is not there.
std::size_t value_in_file(const char* path, const std::string& key, std::size_t scale) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    std::size_t value = 0;
    if (word == key && file >> value) return value * scale;
  }
  return kUnlimited;
}

std::size_t number_in_file(const char* path) {
  std::ifstream file(path);
  std::size_t value = 0;
  return file >> value ? value : kUnlimited;  // "max" is no number
}

}  // namespace

FileDescriptor create_memory_file(std::size_t bytes) {
  constexpr const char* kName = "torchtitan_npu";
  int fd = ::memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
  if (fd < 0 && errno == EINVAL) fd = ::memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING);  // before Linux 6.3
  if (fd < 0) throw Error(str("cannot create shared memory (memfd_create): ", reason(errno)));
  FileDescriptor file(fd);
  if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    throw Error(str("cannot reserve ", bytes, " bytes of shared memory (ftruncate): ", reason(errno)));
  }
  // A file that shrinks would kill its readers by SIGBUS.
  if (::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw Error(str("cannot fix the size of shared memory (F_ADD_SEALS): ", reason(errno)));
  }
  return file;
}

std::size_t available_memory() {
  std::size_t available = value_in_file("/proc/meminfo", "MemAvailable:", 1024);
  const std::size_t limit = number_in_file("/sys/fs/cgroup/memory.max");
  const std::size_t used = number_in_file("/sys/fs/cgroup/memory.current");
  if (limit != kUnlimited && used != kUnlimited) {
    std::size_t cache = 0;  // clean pages of files go when memory is needed
    for (const char* key : {"active_file", "inactive_file"}) {
      const std::size_t value = value_in_file("/sys/fs/cgroup/memory.stat", key, 1);
      if (value != kUnlimited) cache += value;
    }
    const std::size_t held = used > cache ? used - cache : 0;
    available = std::min(available, limit > held ? limit - held : 0);
  }
  return available;
}

std::string format_bytes(std::size_t bytes) {
  char text[32];
  constexpr double kKiB = 1024, kMiB = kKiB * 1024, kGiB = kMiB * 1024;
  const double value = static_cast<double>(bytes);
  if (value >= kGiB) {
    std::snprintf(text, sizeof(text), "%.2f GiB", value / kGiB);
  } else if (value >= kMiB) {
    std::snprintf(text, sizeof(text), "%.2f MiB", value / kMiB);
  } else {
    std::snprintf(text, sizeof(text), "%zu bytes", bytes);
  }
  return text;
}

ShmSegment::ShmSegment(FileDescriptor file, std::size_t bytes) : file_(std::move(file)), bytes_(bytes) {
  struct stat status{};
  if (::fstat(file_.get(), &status) != 0 || static_cast<std::size_t>(status.st_size) != bytes) {
    throw Error(str("shared memory has ", status.st_size, " bytes, expected ", bytes));
  }
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_.get(), 0);
  if (address == MAP_FAILED) {
    throw Error(str("cannot map ", bytes, " bytes of shared memory: ", reason(errno),
                    " (a limit on address space? see `ulimit -v`)"));
  }
  data_ = static_cast<std::byte*>(address);
  static_cast<void>(::madvise(data_, bytes_, MADV_HUGEPAGE));  // a hint; small pages work, too
}

ShmSegment::~ShmSegment() { ::munmap(data_, bytes_); }

void ShmSegment::back(std::size_t offset, std::size_t bytes) {
  TT_CHECK(offset + bytes <= bytes_, offset, " + ", bytes, " of ", bytes_);
  if (bytes == 0) return;
  // Through the mapping, not by fallocate: only this way the hint for huge pages holds.
  int error = 0;
  do {
    error = ::madvise(data_ + offset, bytes, MADV_POPULATE_WRITE) == 0 ? 0 : errno;
  } while (error == EINTR || error == EAGAIN);
  if (error == EINVAL) {  // before Linux 5.14
    do {
      error = ::fallocate(file_.get(), 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) == 0 ? 0 : errno;
    } while (error == EINTR);
  }
  if (error != 0) throw Error(reason(error));
}

void ShmSegment::prefault(std::size_t offset, std::size_t bytes) noexcept {
  if (bytes != 0) static_cast<void>(::madvise(data_ + offset, bytes, MADV_POPULATE_READ));
}

}  // namespace tt::host
