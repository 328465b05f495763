#include "hccl/control_block.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>

#include <cerrno>
#include <climits>
#include <system_error>

namespace sim::hccl {

static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

std::size_t ControlBlock::bytes_for(std::uint32_t ranks) {
  const std::size_t n = ranks;
  return sizeof(Header) + n * sizeof(RankBlock) + n * n * sizeof(Channel) + n * n * 4 * sizeof(std::uint64_t);
}

ControlBlock::ControlBlock(FileDescriptor file, std::uint32_t ranks) : ranks_(ranks) {
  void* memory = mmap(nullptr, bytes_for(ranks), PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of the control block");
  memory_ = static_cast<char*>(memory);
}

ControlBlock::~ControlBlock() { munmap(memory_, bytes_for(ranks_)); }

Channel& ControlBlock::channel(std::uint32_t from, std::uint32_t to) const {
  auto* channels = reinterpret_cast<Channel*>(ranks_begin() + ranks_);
  return channels[static_cast<std::size_t>(from) * ranks_ + to];
}

std::uint64_t* ControlBlock::lists(std::uint32_t rank) const {
  const std::size_t n = ranks_;
  auto* channels = reinterpret_cast<Channel*>(ranks_begin() + n);
  return reinterpret_cast<std::uint64_t*>(channels + n * n) + 4 * n * rank;
}

std::uint32_t ControlBlock::version() const { return header().version.load(); }

void ControlBlock::announce() const {
  header().version.fetch_add(1);
  if (header().sleepers.load() != 0) syscall(SYS_futex, &header().version, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void ControlBlock::sleep(std::uint32_t version, int milliseconds) const {
  const timespec limit{milliseconds / 1000, milliseconds % 1000 * 1'000'000L};
  header().sleepers.fetch_add(1);
  syscall(SYS_futex, &header().version, FUTEX_WAIT, version, &limit, nullptr, 0);
  header().sleepers.fetch_sub(1);
}

}  // namespace sim::hccl
