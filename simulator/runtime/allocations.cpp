#include "runtime/allocations.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include "runtime/card_memory.h"
#include "runtime/settings.h"

namespace sim {
namespace {

constexpr std::size_t kAlignment = 512;
// More than this is not poisoned, and stays free of host memory until it is touched: a test that fills a card of
// 16 GiB must not fill the host.
constexpr std::size_t kPoisonedBytes = std::size_t{64} << 20;
constexpr std::size_t kRemembered = 256;

std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

struct CardHeap {
  std::map<std::size_t, std::size_t> free;                // offset -> bytes; neighbours are joined
  std::map<std::size_t, std::size_t> allocated;           // offset -> bytes as asked for
  std::deque<std::pair<std::size_t, std::size_t>> freed;  // the last ones
  CardUsage usage;
};

void poison(char* kernel, std::size_t bytes) { std::memset(kernel, 0xFF, std::min(bytes, kPoisonedBytes)); }

// Gives the host's memory back where whole pages are free.
void discard(const CardMemory& memory, std::size_t offset, std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  std::size_t begin = (offset + page - 1) / page * page;
  std::size_t end = (offset + bytes) / page * page;
  poison(memory.kernel_base + offset, std::min(begin - offset, bytes));
  if (begin >= end) return;
  poison(memory.kernel_base + end, offset + bytes - end);
  if (fallocate(memory.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin),
                static_cast<off_t>(end - begin)) != 0) {
    poison(memory.kernel_base + begin, end - begin);
  }
}

class Allocations {
 public:
  aclError allocate(int card, std::size_t bytes, void** result) {
    const CardMemory& memory = card_memory(card);
    std::scoped_lock lock(mutex_);
    CardHeap& heap = heap_of(card, memory);
    const std::size_t taken = aligned(bytes);
    auto best = heap.free.end();
    for (auto hole = heap.free.begin(); hole != heap.free.end(); ++hole) {
      if (hole->second >= taken && (best == heap.free.end() || hole->second < best->second)) best = hole;
    }
    if (best == heap.free.end()) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    const auto [offset, hole_bytes] = *best;
    heap.free.erase(best);
    if (hole_bytes > taken) heap.free.emplace(offset + taken, hole_bytes - taken);
    heap.allocated.emplace(offset, bytes);
    heap.usage.current += taken;
    heap.usage.peak = std::max(heap.usage.peak, heap.usage.current);
    poison(memory.kernel_base + offset, taken);
    *result = memory.device_base + offset;
    return ACL_SUCCESS;
  }

  bool release(void* address) {
    const int card = card_of_address(address);
    if (card < 0) return false;
    const CardMemory& memory = card_memory(card);
    std::scoped_lock lock(mutex_);
    CardHeap& heap = heap_of(card, memory);
    auto found = heap.allocated.find(static_cast<std::size_t>(static_cast<char*>(address) - memory.device_base));
    if (found == heap.allocated.end()) return false;
    auto [offset, bytes] = *found;
    heap.allocated.erase(found);
    heap.freed.emplace_front(offset, bytes);
    if (heap.freed.size() > kRemembered) heap.freed.pop_back();
    bytes = aligned(bytes);
    heap.usage.current -= bytes;
    discard(memory, offset, bytes);
    auto hole = heap.free.emplace(offset, bytes).first;
    if (auto next = std::next(hole); next != heap.free.end() && hole->first + hole->second == next->first) {
      hole->second += next->second;
      heap.free.erase(next);
    }
    if (hole != heap.free.begin()) {
      auto previous = std::prev(hole);
      if (previous->first + previous->second == hole->first) {
        previous->second += hole->second;
        heap.free.erase(hole);
      }
    }
    return true;
  }

  std::optional<Allocation> find(const void* address) {
    const int card = card_of_address(address);
    if (card < 0 || static_cast<std::size_t>(card) >= heaps_.size()) return {};
    const CardHeap& heap = heaps_[static_cast<std::size_t>(card)];
    if (heap.usage.capacity == 0) return {};
    char* base = card_memory(card).device_base;
    const auto offset = static_cast<std::size_t>(static_cast<const char*>(address) - base);
    auto next = heap.allocated.upper_bound(offset);
    if (next == heap.allocated.begin()) return {};
    auto [begin, bytes] = *std::prev(next);
    if (offset >= begin + bytes) return {};
    return Allocation{base + begin, bytes};
  }

  std::string describe(const void* address) {
    const int card = card_of_address(address);
    std::string text = "is not allocated on card " + std::to_string(card);
    std::scoped_lock lock(mutex_);
    if (static_cast<std::size_t>(card) >= heaps_.size()) return text;
    const auto offset = static_cast<std::size_t>(static_cast<const char*>(address) - card_memory(card).device_base);
    for (auto [begin, bytes] : heaps_[static_cast<std::size_t>(card)].freed) {
      if (offset >= begin && offset < begin + bytes) {
        return text + " (it lay in an allocation of " + std::to_string(bytes) + " bytes that was freed)";
      }
    }
    return text;
  }

  CardUsage usage(int card) {
    const CardMemory& memory = card_memory(card);
    std::scoped_lock lock(mutex_);
    return heap_of(card, memory).usage;
  }

  CardUsage usage_if_used(int card) {
    std::scoped_lock lock(mutex_);
    return heaps_.at(static_cast<std::size_t>(card)).usage;
  }

  void reset_peaks() {
    std::scoped_lock lock(mutex_);
    for (CardHeap& heap : heaps_) heap.usage.peak = heap.usage.current;
  }

  std::mutex& mutex() { return mutex_; }

 private:
  CardHeap& heap_of(int card, const CardMemory& memory) {
    const auto index = static_cast<std::size_t>(card);
    CardHeap& heap = heaps_.at(index);
    if (heap.usage.capacity == 0) {
      heap.usage.capacity = memory.bytes;
      heap.free.emplace(0, memory.bytes);
    }
    return heap;
  }

  std::mutex mutex_;
  std::vector<CardHeap> heaps_ = std::vector<CardHeap>(static_cast<std::size_t>(settings().cards));
};

}  // namespace

aclError allocate(int card, std::size_t bytes, void** result) {
  return immortal<Allocations>().allocate(card, bytes, result);
}

bool release(void* address) { return immortal<Allocations>().release(address); }

std::optional<Allocation> allocation_of(const void* address) {
  auto& all = immortal<Allocations>();
  std::scoped_lock lock(all.mutex());
  return all.find(address);
}

std::optional<Allocation> try_allocation_of(const void* address) {
  auto& all = immortal<Allocations>();
  std::unique_lock lock(all.mutex(), std::try_to_lock);
  return lock.owns_lock() ? all.find(address) : std::nullopt;
}

std::string describe_unallocated(const void* address) { return immortal<Allocations>().describe(address); }

CardUsage card_usage(int card) { return immortal<Allocations>().usage(card); }

CardUsage card_usage_if_used(int card) { return immortal<Allocations>().usage_if_used(card); }

void reset_peaks() { immortal<Allocations>().reset_peaks(); }

}  // namespace sim
