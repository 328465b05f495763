// Messages with file descriptors between processes of one user, over Unix sockets with abstract names: nothing of them
// lies in the file system, and nothing is left when a process is killed.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

#include "hccl/file_descriptor.h"

namespace sim::hccl {

using Clock = std::chrono::steady_clock;

struct Message {
  std::string bytes;
  std::vector<FileDescriptor> descriptors;
};

// A name that nobody guesses: 128 bits from the system, in hexadecimal digits.
std::string random_name();

// These throw std::system_error. Names are without the leading zero byte.
FileDescriptor listen_at(const std::string& name);
// Null when nobody listens there. Refuses a listener of another user.
FileDescriptor connect_to(const std::string& name);
// Null for a peer of another user, which is dropped.
FileDescriptor accept_peer(int listener);
pid_t process_of_peer(int connection);
void send_message(int socket, const std::string& bytes, const std::vector<int>& descriptors);
// False at the deadline. A closed connection is an empty message.
bool receive_message(int socket, Clock::time_point deadline, Message& message);

// At most this many descriptors fit in a message.
constexpr std::size_t kMostDescriptors = 253;

}  // namespace sim::hccl
