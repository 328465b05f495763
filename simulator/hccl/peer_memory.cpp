#include "hccl/peer_memory.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <map>
#include <mutex>
#include <system_error>
#include <utility>

namespace sim::hccl {

std::shared_ptr<const PeerMemory> PeerMemory::map(int memory) {
  static std::mutex mutex;
  static auto& mappings = *new std::map<std::pair<dev_t, ino_t>, std::weak_ptr<const PeerMemory>>;  // outlives threads
  struct stat file{};
  if (fstat(memory, &file) != 0) throw std::system_error(errno, std::generic_category(), "fstat of a card's memory");
  const std::lock_guard lock(mutex);
  std::weak_ptr<const PeerMemory>& known = mappings[{file.st_dev, file.st_ino}];
  std::shared_ptr<const PeerMemory> mapping = known.lock();
  if (!mapping) {
    mapping = std::make_shared<PeerMemory>(memory, static_cast<std::size_t>(file.st_size));
    known = mapping;
  }
  return mapping;
}

PeerMemory::PeerMemory(int memory, std::size_t bytes) : bytes_(bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, memory, 0);
  if (base == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of a peer's card memory");
  base_ = static_cast<const char*>(base);
}

PeerMemory::~PeerMemory() { munmap(const_cast<char*>(base_), bytes_); }

}  // namespace sim::hccl
