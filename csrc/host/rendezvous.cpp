#include "host/rendezvous.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <optional>
#include <random>
#include <thread>

#include "base/error.h"
#include "host/shm_segment.h"

namespace tt::host {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::uint64_t kMagic = 0x7474'6e70'755f'3031;  // "ttnpu_01"
// The others wait a little longer than rank 0, whose message knows more.
constexpr std::chrono::seconds kGrace{5};

struct Hello {
  std::uint64_t magic;
  std::uint32_t rank;
  std::uint32_t size;
  Agreement agreement;
};

struct Reply {
  std::uint64_t magic;
  std::uint32_t has_file;  // otherwise `why` says why not
  char why[512];
};

std::string reason(int error) { return std::strerror(error); }

Clock::time_point after_seconds(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

int milliseconds_until(Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(
      std::clamp<long long>(left, 0, 100));  // short, so that a clock jump or lost event does no harm
}

// Messages keep their boundaries (SEQPACKET), so none arrives in parts.
FileDescriptor open_socket(int flags) {
  FileDescriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0));
  if (!socket.is_open()) throw Error(str("cannot open a Unix socket: ", reason(errno)));
  return socket;
}

socklen_t abstract_address(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  if (name.empty() || name.size() + 1 > sizeof(address.sun_path)) {
    throw ValueError(str("socket_name '", name, "' has ", name.size(), " characters; it must have 1 to ",
                         sizeof(address.sun_path) - 1));
  }
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // a leading 0 makes it abstract
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

bool is_same_user(int socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == ::geteuid();
}

void send_reply(int socket, const Reply& reply, int file) {
  iovec data{const_cast<Reply*>(&reply), sizeof(reply)};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (file >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &file, sizeof(file));
  }
  // A peer that is gone by now is noticed by the first wait for it.
  static_cast<void>(::sendmsg(socket, &message, MSG_NOSIGNAL));
}

std::string compare(const Rendezvous& rendezvous, const Agreement& mine, const Hello& hello) {
  const Agreement& theirs = hello.agreement;
  if (static_cast<int>(hello.size) == rendezvous.size && std::memcmp(&mine, &theirs, sizeof(mine)) == 0) return "";
  return str(rendezvous.names[hello.rank], " asks for other memory than ", rendezvous.names[0], ": ", hello.size,
             " ranks, ", theirs.gather_bytes, " gather bytes, ", theirs.reduce_bytes, " reduce bytes, plan ",
             theirs.digest, " against ", rendezvous.size, ", ", mine.gather_bytes, ", ", mine.reduce_bytes, ", plan ",
             mine.digest, ". Build the same model with the same settings on all ranks");
}

// Taking more than there is would not fail but wake the kernel's out-of-memory killer.
FileDescriptor create_file_that_fits(const Rendezvous& rendezvous, const Agreement& agreement) {
  const std::size_t planned =
      agreement.gather_bytes + static_cast<std::size_t>(rendezvous.size) * agreement.reduce_bytes;
  if (const std::size_t available = available_memory(); planned > available) {
    throw Error(str("no memory for ", format_bytes(planned),
                    " that the ranks of this machine share (gathered parameters ", format_bytes(agreement.gather_bytes),
                    ", gradients ", rendezvous.size, " ranks x ", format_bytes(agreement.reduce_bytes),
                    "): ", format_bytes(available),
                    " are free. Lower bucket_cap_mb, use fewer ranks on this machine, or free memory"));
  }
  return create_memory_file(agreement.total_bytes);
}

// Rank 0's side.
class Host {
 public:
  Host(const Rendezvous& rendezvous, const Agreement& agreement)
      : rendezvous_(rendezvous), agreement_(agreement), listener_(open_socket(SOCK_NONBLOCK)) {
    sockaddr_un address;
    const socklen_t length = abstract_address(rendezvous.socket_name, address);
    if (::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
        ::listen(listener_.get(), rendezvous.size + 8) != 0) {
      throw Error(str("cannot listen on the Unix socket '@", rendezvous.socket_name, "': ", reason(errno)));
    }
    ranks_.resize(static_cast<std::size_t>(rendezvous.size));
  }

  void wait_for_all() {
    const Clock::time_point deadline = after_seconds(rendezvous_.timeout_seconds);
    while (connected_ + 1 < rendezvous_.size) {
      if (Clock::now() >= deadline) throw PeerError(late_message());
      std::vector<pollfd> polled{{listener_.get(), POLLIN, 0}};
      for (const FileDescriptor& socket : unnamed_) polled.push_back({socket.get(), POLLIN, 0});
      for (const FileDescriptor& socket : ranks_) polled.push_back({socket.get(), POLLIN, 0});  // -1 is skipped
      if (::poll(polled.data(), polled.size(), milliseconds_until(deadline)) <= 0) continue;
      for (std::size_t rank = 1; rank < ranks_.size(); ++rank) {
        // Nothing more is said after the hello: what can be read is the end.
        if (polled[1 + unnamed_.size() + rank].revents != 0) {
          throw PeerError(str(rendezvous_.names[rank], " died while the ranks were connecting"));
        }
      }
      for (std::size_t i = unnamed_.size(); i-- > 0;) {
        if (polled[1 + i].revents != 0) read_hello(i);
      }
      accept_new();
    }
  }

  void reply_to_all(const Reply& reply, int file) const {
    for (const FileDescriptor& socket : ranks_) {
      if (socket.is_open()) send_reply(socket.get(), reply, file);
    }
  }

 private:
  void accept_new() {
    FileDescriptor socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.is_open() && is_same_user(socket.get())) unnamed_.push_back(std::move(socket));
  }

  void read_hello(std::size_t index) {
    FileDescriptor socket = std::move(unnamed_[index]);
    unnamed_.erase(unnamed_.begin() + static_cast<std::ptrdiff_t>(index));
    Hello hello{};
    const bool is_ours = ::recv(socket.get(), &hello, sizeof(hello), 0) == sizeof(hello) && hello.magic == kMagic &&
                         hello.rank >= 1 && hello.rank < ranks_.size();
    if (!is_ours) return;  // not one of the ranks
    if (ranks_[hello.rank].is_open())
      throw PeerError(str("two processes say that they are ", rendezvous_.names[hello.rank]));
    ranks_[hello.rank] = std::move(socket);
    ++connected_;
    if (const std::string difference = compare(rendezvous_, agreement_, hello); !difference.empty()) {
      throw PeerError(difference);
    }
  }

  std::string late_message() const {
    std::string late;
    for (std::size_t rank = 1; rank < ranks_.size(); ++rank) {
      if (!ranks_[rank].is_open()) late += (late.empty() ? "" : ", ") + rendezvous_.names[rank];
    }
    return str("no shared memory with ", late, ": not connected within ", rendezvous_.timeout_seconds,
               " seconds. See the logs of these ranks, or raise HCCL_CONNECT_TIMEOUT");
  }

  const Rendezvous& rendezvous_;
  const Agreement& agreement_;
  FileDescriptor listener_;
  std::vector<FileDescriptor> unnamed_;  // connected, no hello yet
  std::vector<FileDescriptor> ranks_;
  int connected_ = 0;
};

FileDescriptor host_memory_file(const Rendezvous& rendezvous, const Agreement& agreement) {
  Host host(rendezvous, agreement);
  Reply reply{kMagic, 0, {}};
  try {
    host.wait_for_all();
    FileDescriptor file = create_file_that_fits(rendezvous, agreement);
    reply.has_file = 1;
    host.reply_to_all(reply, file.get());
    return file;
  } catch (const Error& error) {
    std::strncpy(reply.why, error.what(), sizeof(reply.why) - 1);
    host.reply_to_all(reply, -1);
    throw;
  }
}

FileDescriptor connect_to_host(const Rendezvous& rendezvous, Clock::time_point deadline) {
  sockaddr_un address;
  const socklen_t length = abstract_address(rendezvous.socket_name, address);
  while (true) {
    FileDescriptor socket = open_socket(0);
    if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), length) == 0) {
      if (!is_same_user(socket.get())) {
        throw PeerError(str("the Unix socket '@", rendezvous.socket_name, "' belongs to another user"));
      }
      return socket;
    }
    if (errno != ECONNREFUSED && errno != EAGAIN && errno != EINTR) {
      throw Error(str("cannot connect to the Unix socket '@", rendezvous.socket_name, "': ", reason(errno)));
    }
    if (Clock::now() >= deadline) {
      throw PeerError(str("no shared memory with ", rendezvous.names[0], ": it did not listen within ",
                          rendezvous.timeout_seconds, " seconds. See its log, or raise HCCL_CONNECT_TIMEOUT"));
    }
    std::this_thread::sleep_for(milliseconds(5));
  }
}

FileDescriptor receive_memory_file(const Rendezvous& rendezvous, const Agreement& agreement) {
  Clock::time_point deadline = after_seconds(rendezvous.timeout_seconds);
  const FileDescriptor socket = connect_to_host(rendezvous, deadline);
  const std::string& host = rendezvous.names[0];
  const PeerError gone(str(host, " died or gave up while the ranks were connecting; see its log"));

  const Hello hello{kMagic, static_cast<std::uint32_t>(rendezvous.rank), static_cast<std::uint32_t>(rendezvous.size),
                    agreement};
  if (::send(socket.get(), &hello, sizeof(hello), MSG_NOSIGNAL) != sizeof(hello)) throw gone;

  deadline += kGrace;
  pollfd polled{socket.get(), POLLIN, 0};
  while (::poll(&polled, 1, milliseconds_until(deadline)) <= 0) {
    if (Clock::now() >= deadline) {
      throw PeerError(str(host, " did not pass its shared memory within ", rendezvous.timeout_seconds, " seconds"));
    }
  }
  Reply reply{};
  iovec data{&reply, sizeof(reply)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t received = ::recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC);
  int fd = -1;
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
    std::memcpy(&fd, CMSG_DATA(header), sizeof(fd));
  }
  FileDescriptor file(fd);
  if (received != sizeof(reply) || reply.magic != kMagic) throw gone;
  if (reply.has_file == 0) throw PeerError(str(host, " could not share memory: ", reply.why));
  if (!file.is_open()) throw Error(str(host, " passed no memory file (too many open files? see `ulimit -n`)"));
  return file;
}

std::optional<std::string> first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  return line;
}

}  // namespace

FileDescriptor share_memory_file(const Rendezvous& rendezvous, const Agreement& agreement) {
  if (rendezvous.size == 1) return create_file_that_fits(rendezvous, agreement);
  return rendezvous.rank == 0 ? host_memory_file(rendezvous, agreement) : receive_memory_file(rendezvous, agreement);
}

std::string shm_identity() {
  const auto boot = first_line("/proc/sys/kernel/random/boot_id");
  struct stat pids{}, network{};
  if (!boot || ::stat("/proc/self/ns/pid", &pids) != 0 || ::stat("/proc/self/ns/net", &network) != 0) {
    std::random_device random;  // nothing known: equal to no other process's
    return str("unknown-", ::getpid(), "-", random(), random());
  }
  return str("boot ", *boot, " pid:", pids.st_ino, " net:", network.st_ino, " uid:", ::geteuid());
}

}  // namespace tt::host
