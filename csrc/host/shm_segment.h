// Memory that processes share: a memfd, so that nothing is in the file system and the kernel frees it with its last
// user.
#pragma once

#include <cstddef>
#include <string>

#include "host/file_descriptor.h"

namespace tt::host {

// A new memfd of `bytes`, sparse, whose size can no longer be changed. Throws Error.
FileDescriptor create_memory_file(std::size_t bytes);

// Bytes that this process can still take before the machine or its control group runs out. Unknown: the largest value.
std::size_t available_memory();

// "12.50 GiB"
std::string format_bytes(std::size_t bytes);

class ShmSegment {
 public:
  // Maps all `bytes` of `file`. Throws Error.
  ShmSegment(FileDescriptor file, std::size_t bytes);
  ~ShmSegment();
  ShmSegment(const ShmSegment&) = delete;
  ShmSegment& operator=(const ShmSegment&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

  // Takes memory for [offset, offset + bytes) now, zeroed, and maps it here. Throws Error where there is not enough.
  void back(std::size_t offset, std::size_t bytes);
  // Maps pages that others have backed, so that the first step does not fault for each. A hint.
  void prefault(std::size_t offset, std::size_t bytes) noexcept;
  // The mapping stays; without the file, no more can be backed than by touching it.
  void close_file() { file_.reset(); }

 private:
  FileDescriptor file_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace tt::host
