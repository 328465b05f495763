// Threads as the ranks of one shared-memory communicator.
#pragma once

#include <cstdio>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "host/shm_communicator.h"

namespace tt::test {

// One mapping for all threads, so that the thread sanitizer sees that their addresses are the same.
class SharedSource {
 public:
  host::ShmCommunicator::SegmentSource source() {
    return [this](const host::SegmentLayout& layout) {
      const std::lock_guard lock(mutex_);
      if (!segment_) {
        segment_ = std::make_shared<host::ShmSegment>(host::create_memory_file(layout.total_bytes), layout.total_bytes);
      }
      return segment_;
    };
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<host::ShmSegment> segment_;
};

inline void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("wrong: " + what);
}

// Runs body(rank) in one thread per rank; false if any throws.
template <typename Body>
bool in_threads(int ranks, const Body& body) {
  std::vector<std::thread> threads;
  std::vector<std::string> errors(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  bool all_right = true;
  for (const std::string& error : errors) {
    if (error.empty()) continue;
    std::fprintf(stderr, "%s\n", error.c_str());
    all_right = false;
  }
  return all_right;
}

}  // namespace tt::test
