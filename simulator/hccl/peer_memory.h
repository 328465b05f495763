// The memory of another rank's card, mapped for reading. Communicators of the same ranks share one mapping.
#pragma once

#include <cstddef>
#include <memory>

namespace sim::hccl {

class PeerMemory {
 public:
  // `memory`: the memfd of a card, of this process or of another. Throws std::system_error.
  static std::shared_ptr<const PeerMemory> map(int memory);

  PeerMemory(int memory, std::size_t bytes);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  const char* at(std::size_t offset) const { return base_ + offset; }
  std::size_t bytes() const { return bytes_; }

 private:
  const char* base_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace sim::hccl
