// How the ranks of one machine come to share one memory file: rank 0 creates it and passes it over a socket whose name
// is abstract (not in the file system). Only processes of the same user are let in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "host/file_descriptor.h"

namespace tt::host {

struct Rendezvous {
  int rank = 0;
  int size = 1;
  std::string socket_name;         // random, agreed by the ranks beforehand; at most 100 characters
  double timeout_seconds = 60;     // for all ranks to come
  std::vector<std::string> names;  // of the ranks, for messages: "rank 5"
};

// What the ranks must agree in before they share memory.
struct Agreement {
  std::uint64_t gather_bytes = 0;
  std::uint64_t reduce_bytes = 0;  // per rank
  std::uint64_t total_bytes = 0;   // of the memory file, mostly address space
  std::uint64_t digest = 0;        // of everything else
};

// Rank 0 calls create_memory_file() and sends the file to all others; size 1 needs no socket. Returns each rank's own
// descriptor of the same file. Throws PeerError that names the ranks that did not come, or what rank 0 ran into.
FileDescriptor share_memory_file(const Rendezvous& rendezvous, const Agreement& agreement);

// Equal strings in two processes mean that they can share memory this way: same boot, user, and namespaces.
std::string shm_identity();

}  // namespace tt::host
