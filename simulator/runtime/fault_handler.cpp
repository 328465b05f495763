#include "runtime/fault_handler.h"

#include <signal.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>

#include "runtime/allocations.h"
#include "runtime/card_memory.h"

namespace sim {
namespace {

struct sigaction previous_segv;
struct sigaction previous_bus;

void report(const void* address) {
  const int card = card_of_address(address);
  if (card < 0) return;
  char text[256];
  int length;
  if (auto allocation = try_allocation_of(address)) {
    length = std::snprintf(text, sizeof text,
                           "simulated Ascend: host dereference of simulated card address %p (card %d, allocation of "
                           "%zu bytes)\n",
                           address, card, allocation->bytes);
  } else {
    length = std::snprintf(text, sizeof text,
                           "simulated Ascend: host dereference of simulated card address %p (card %d, not allocated)\n",
                           address, card);
  }
  if (write(STDERR_FILENO, text, static_cast<std::size_t>(length)) < 0) return;
}

// The instruction is run again when this returns, and faults again: under whatever handler there was before.
void on_fault(int signal, siginfo_t* info, void*) {
  if (info->si_code > 0) report(info->si_addr);
  sigaction(signal, signal == SIGSEGV ? &previous_segv : &previous_bus, nullptr);
  if (info->si_code <= 0) raise(signal);  // sent by somebody, not a fault: nothing would run again
}

}  // namespace

void install_fault_handler() {
  struct sigaction action{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGSEGV, &action, &previous_segv);
  sigaction(SIGBUS, &action, &previous_bus);
}

}  // namespace sim
