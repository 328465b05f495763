#include "hccl/socket.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <system_error>

namespace sim::hccl {
namespace {

constexpr std::size_t kMostBytes = 64 * 1024;

[[noreturn]] void fail(const char* call) { throw std::system_error(errno, std::generic_category(), call); }

socklen_t fill_address(const std::string& name, sockaddr_un& address) {
  std::memset(&address, 0, sizeof(address));
  address.sun_family = AF_UNIX;
  const std::size_t bytes = std::min(name.size(), sizeof(address.sun_path) - 1);
  std::memcpy(address.sun_path + 1, name.data(), bytes);  // a leading zero byte: an abstract name
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + bytes);
}

FileDescriptor make_socket() {
  FileDescriptor made(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!made) fail("socket");
  return made;
}

ucred peer_of(int connection) {
  ucred peer{};
  socklen_t bytes = sizeof(peer);
  if (getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) fail("getsockopt(SO_PEERCRED)");
  return peer;
}

bool peer_is_same_user(int connection) { return peer_of(connection).uid == geteuid(); }

}  // namespace

std::string random_name() {
  std::uint8_t random[16];
  if (getrandom(random, sizeof(random), 0) != static_cast<ssize_t>(sizeof(random))) fail("getrandom");
  std::string name;
  for (std::uint8_t byte : random) {
    name += "0123456789abcdef"[byte >> 4];
    name += "0123456789abcdef"[byte & 15];
  }
  return name;
}

FileDescriptor listen_at(const std::string& name) {
  FileDescriptor listener = make_socket();
  sockaddr_un address;
  const socklen_t bytes = fill_address(name, address);
  if (bind(listener.get(), reinterpret_cast<sockaddr*>(&address), bytes) != 0) fail("bind");
  if (listen(listener.get(), SOMAXCONN) != 0) fail("listen");
  return listener;
}

FileDescriptor connect_to(const std::string& name) {
  FileDescriptor connection = make_socket();
  sockaddr_un address;
  const socklen_t bytes = fill_address(name, address);
  int result;
  do {
    result = connect(connection.get(), reinterpret_cast<sockaddr*>(&address), bytes);
  } while (result != 0 && errno == EINTR);
  if (result != 0) {
    if (errno == ECONNREFUSED) return FileDescriptor();
    fail("connect");
  }
  if (!peer_is_same_user(connection.get())) {
    errno = EPERM;
    fail("connect: the listener belongs to another user");
  }
  return connection;
}

FileDescriptor accept_peer(int listener) {
  FileDescriptor connection(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
  if (!connection && errno != EINTR && errno != ECONNABORTED) fail("accept4");
  if (connection && !peer_is_same_user(connection.get())) return FileDescriptor();
  return connection;
}

pid_t process_of_peer(int connection) { return peer_of(connection).pid; }

void send_message(int socket, const std::string& bytes, const std::vector<int>& descriptors) {
  iovec data{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  std::vector<char> control(CMSG_SPACE(descriptors.size() * sizeof(int)));
  if (!descriptors.empty()) {
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
    std::memcpy(CMSG_DATA(rights), descriptors.data(), descriptors.size() * sizeof(int));
  }
  ssize_t sent;
  do {
    sent = sendmsg(socket, &header, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0) fail("sendmsg");
}

bool receive_message(int socket, Clock::time_point deadline, Message& message) {
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd ready{socket, POLLIN, 0};
    const int count = poll(&ready, 1, static_cast<int>(std::clamp<long long>(left, 0, 60'000)));
    if (count > 0) break;
    if (count < 0 && errno != EINTR) fail("poll");
    if (Clock::now() >= deadline) return false;
  }
  message.bytes.resize(kMostBytes);
  message.descriptors.clear();
  iovec data{message.bytes.data(), message.bytes.size()};
  std::vector<char> control(CMSG_SPACE(kMostDescriptors * sizeof(int)));
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control.data();
  header.msg_controllen = control.size();
  ssize_t received;
  do {
    received = recvmsg(socket, &header, MSG_CMSG_CLOEXEC);
  } while (received < 0 && errno == EINTR);
  if (received < 0 && errno != ECONNRESET) fail("recvmsg");
  message.bytes.resize(static_cast<std::size_t>(std::max<ssize_t>(received, 0)));
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); received > 0 && part != nullptr; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    std::vector<int> numbers((part->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    std::memcpy(numbers.data(), CMSG_DATA(part), numbers.size() * sizeof(int));
    for (int fd : numbers) message.descriptors.emplace_back(fd);
  }
  return true;
}

}  // namespace sim::hccl
