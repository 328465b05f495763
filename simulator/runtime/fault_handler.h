// Says what happened when a program dereferences card memory on the host.
#pragma once

namespace sim {

// Once per process. What was installed before is in force again when a fault has been reported.
void install_fault_handler();

}  // namespace sim
