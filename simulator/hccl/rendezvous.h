// How the ranks of a communicator find each other. One of them serves a socket; every rank introduces itself there with
// descriptors of its card's memory and of its process, and gets everybody's, with one block of shared memory, in
// return.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "abi/hccl.h"
#include "hccl/file_descriptor.h"
#include "hccl/socket.h"

namespace sim::hccl {

// What a C entry point returns as a code and leaves as the recent error message.
struct Error : std::runtime_error {
  Error(HcclResult result, const std::string& message) : std::runtime_error(message), code(result) {}
  HcclResult code;
};

struct Introduction {
  std::uint32_t ranks = 0;
  std::uint32_t rank = 0;
  char name[128] = {};  // asked for in HcclCommConfig; must agree, may be empty
};

struct Group {
  std::string name;
  FileDescriptor control;
  std::vector<FileDescriptor> memories;   // per rank: the memfd of its card
  std::vector<FileDescriptor> processes;  // per rank: a pidfd, readable once the process is gone
};

// Listens at `socket_name` and serves one group on a thread of its own, then stops listening.
void serve_group(const std::string& socket_name);

// Throws Error. `may_be_early`: the listener may not be there yet.
Group join_group(const std::string& socket_name, const Introduction& self, int memory, bool may_be_early);

// HCCL_CONNECT_TIMEOUT, seconds.
std::chrono::seconds connect_timeout();

}  // namespace sim::hccl
