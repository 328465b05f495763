#include "runtime/card_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <system_error>
#include <vector>

#include "runtime/fault_handler.h"
#include "runtime/settings.h"

namespace sim {
namespace {

char* reserve(std::size_t bytes) {
  void* address = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "address space of the cards");
  return static_cast<char*>(address);
}

// The addresses of all cards lie in one range, and those of their second mappings in another one: translating an
// address is an addition, and needs no lock.
class Cards {
 public:
  Cards()
      : bytes_(settings().memory_bytes),
        count_(static_cast<std::size_t>(settings().cards)),
        device_(reserve(bytes_ * count_)),
        kernel_(reserve(bytes_ * count_)),
        cards_(count_) {
    install_fault_handler();
  }

  const CardMemory& card(int number) {
    std::scoped_lock lock(mutex_);
    CardMemory& card = cards_.at(static_cast<std::size_t>(number));
    if (card.fd < 0) make(card, static_cast<std::size_t>(number));
    return card;
  }

  char* kernel_address(char* address) const { return holds(address) ? kernel_ + (address - device_) : address; }

  int card_of(const char* address) const {
    return holds(address) ? static_cast<int>(static_cast<std::size_t>(address - device_) / bytes_) : -1;
  }

 private:
  bool holds(const char* address) const { return address >= device_ && address < device_ + bytes_ * count_; }

  void make(CardMemory& card, std::size_t number) {
    int fd = memfd_create("simulated card", MFD_CLOEXEC);
    if (fd < 0) throw std::system_error(errno, std::generic_category(), "memory of a simulated card");
    char* kernel = kernel_ + number * bytes_;
    if (ftruncate(fd, static_cast<off_t>(bytes_)) != 0 ||
        mmap(kernel, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd, 0) == MAP_FAILED) {
      int error = errno;
      close(fd);
      throw std::system_error(error, std::generic_category(), "memory of a simulated card");
    }
    card.device_base = device_ + number * bytes_;
    card.kernel_base = kernel;
    card.bytes = bytes_;
    card.fd = fd;
  }

  std::mutex mutex_;
  const std::size_t bytes_;
  const std::size_t count_;
  char* const device_;
  char* const kernel_;
  std::vector<CardMemory> cards_;
};

}  // namespace

const CardMemory& card_memory(int card) { return immortal<Cards>().card(card); }

char* kernel_address(const void* address) {
  // Tasks keep what they write to as a constant address in their accesses, hence the cast.
  return immortal<Cards>().kernel_address(static_cast<char*>(const_cast<void*>(address)));
}

int card_of_address(const void* address) { return immortal<Cards>().card_of(static_cast<const char*>(address)); }

}  // namespace sim
