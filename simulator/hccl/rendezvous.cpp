#include "hccl/rendezvous.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <optional>
#include <system_error>
#include <thread>

#include "hccl/control_block.h"
#include "hccl/settings.h"

namespace sim::hccl {
namespace {

constexpr char kRefusal = 'E';
constexpr char kTable = 'T';

struct Member {
  FileDescriptor connection;
  Introduction introduction;
  FileDescriptor memory;
  FileDescriptor process;
};

// Collects the members of one group; runs on the serving thread.
class Server {
 public:
  explicit Server(FileDescriptor listener) : listener_(std::move(listener)) {}

  void run() {
    try {
      collect();
      answer();
    } catch (const Error& error) {
      refuse(error.code, error.what());
    } catch (const std::exception& error) {
      refuse(HCCL_E_INTERNAL, error.what());
    }
  }

 private:
  void collect() {
    std::optional<Clock::time_point> deadline;  // from the first introduction on
    while (ranks_ == 0 || members_.size() < ranks_) {
      std::vector<pollfd> sources{{listener_.get(), POLLIN, 0}};
      for (const Member& member : members_) sources.push_back({member.connection.get(), POLLIN, 0});
      int wait = -1;
      if (deadline) {
        if (Clock::now() >= *deadline) {
          throw Error(HCCL_E_TIMEOUT,
                      "not all ranks came within HCCL_CONNECT_TIMEOUT = " + std::to_string(connect_timeout().count()) +
                          " s: of " + std::to_string(ranks_) + " ranks, these are missing: " + missing());
        }
        wait = static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(*deadline - Clock::now()).count());
      }
      if (poll(sources.data(), sources.size(), wait) < 0 && errno != EINTR) {
        throw std::system_error(errno, std::generic_category(), "poll");
      }
      // A member says nothing after its introduction: what can be read is the end of its process.
      for (std::size_t i = 1; i < sources.size(); ++i) {
        if (sources[i].revents != 0) {
          throw Error(HCCL_E_REMOTE, "rank " + std::to_string(members_[i - 1].introduction.rank) +
                                         " ended while the communicator was set up; not there yet: " + missing());
        }
      }
      if (sources[0].revents != 0) admit();
      if (!deadline && !members_.empty()) deadline = Clock::now() + connect_timeout();
    }
  }

  void admit() {
    Member member;
    member.connection = accept_peer(listener_.get());
    Message message;
    if (!member.connection ||
        !receive_message(member.connection.get(), Clock::now() + std::chrono::seconds(5), message) ||
        message.bytes.size() != sizeof(Introduction) || message.descriptors.size() != 2) {
      return;
    }
    std::memcpy(&member.introduction, message.bytes.data(), sizeof(Introduction));
    member.memory = std::move(message.descriptors[0]);
    member.process = std::move(message.descriptors[1]);
    members_.push_back(std::move(member));
    const Introduction& first = members_.front().introduction;
    const Introduction& last = members_.back().introduction;
    if (ranks_ == 0) ranks_ = first.ranks;
    const std::string who = "rank " + std::to_string(first.rank) + " and rank " + std::to_string(last.rank);
    if (last.ranks != first.ranks) {
      throw Error(HCCL_E_PARA, who + " disagree on the number of ranks: " + std::to_string(first.ranks) + " and " +
                                   std::to_string(last.ranks));
    }
    if (std::strncmp(last.name, first.name, sizeof(first.name)) != 0) {
      throw Error(HCCL_E_PARA,
                  who + " give the communicator different names: \"" + first.name + "\" and \"" + last.name + "\"");
    }
    for (std::size_t i = 0; i + 1 < members_.size(); ++i) {
      if (members_[i].introduction.rank == last.rank) {
        throw Error(HCCL_E_PARA, "two processes or threads came as rank " + std::to_string(last.rank));
      }
    }
  }

  void answer() {
    std::sort(members_.begin(), members_.end(),
              [](const Member& a, const Member& b) { return a.introduction.rank < b.introduction.rank; });
    FileDescriptor control(memfd_create("tt-sim-hccl", MFD_CLOEXEC));
    const std::size_t bytes = ControlBlock::bytes_for(ranks_);
    if (!control || ftruncate(control.get(), static_cast<off_t>(bytes)) != 0) {
      throw std::system_error(errno, std::generic_category(), "memfd_create");
    }
    std::vector<int> descriptors{control.get()};
    for (const Member& member : members_) descriptors.push_back(member.memory.get());
    for (const Member& member : members_) descriptors.push_back(member.process.get());
    const Introduction& first = members_.front().introduction;
    const std::string name =
        first.name[0] != '\0' ? std::string(first.name) : "simulated-hccl-" + random_name().substr(0, 12);
    for (const Member* member : in_order_of_telling()) {
      send_message(member->connection.get(), kTable + name, descriptors);
    }
  }

  void refuse(HcclResult code, const std::string& text) {
    for (const Member* member : in_order_of_telling()) {
      try {
        send_message(member->connection.get(), std::string(1, kRefusal) + static_cast<char>(code) + text, {});
      } catch (const std::exception&) {
        // It went away: it is told nothing.
      }
    }
  }

  // Members in this process last: a rank that has been told may end, and this thread with it.
  std::vector<const Member*> in_order_of_telling() const {
    std::vector<const Member*> members;
    for (const Member& member : members_) members.push_back(&member);
    std::stable_partition(members.begin(), members.end(),
                          [](const Member* member) { return process_of_peer(member->connection.get()) != getpid(); });
    return members;
  }

  std::string missing() const {
    std::string list;
    for (std::uint32_t rank = 0; rank < ranks_; ++rank) {
      const bool here = std::any_of(members_.begin(), members_.end(),
                                    [rank](const Member& member) { return member.introduction.rank == rank; });
      if (!here) list += (list.empty() ? "" : ", ") + std::to_string(rank);
    }
    return list.empty() ? "none" : list;
  }

  FileDescriptor listener_;
  std::uint32_t ranks_ = 0;
  std::vector<Member> members_;
};

FileDescriptor open_own_process() {
  FileDescriptor process(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
  if (!process) throw Error(HCCL_E_SYSCALL, "pidfd_open failed: the simulator needs Linux 5.3 or newer");
  return process;
}

FileDescriptor connect_until(const std::string& name, bool may_be_early, Clock::time_point deadline) {
  for (;;) {
    FileDescriptor connection = connect_to(name);
    if (connection) return connection;
    if (!may_be_early) {
      throw Error(
          HCCL_E_TCP_CONNECT,
          "nobody listens at the address in the root info: the process that called HcclGetRootInfo has ended, or "
          "the root info has served a communicator before");
    }
    if (Clock::now() >= deadline) {
      throw Error(HCCL_E_TIMEOUT,
                  "the first rank of the sub-communicator did not come with the same subCommId and rankIds within "
                  "HCCL_CONNECT_TIMEOUT = " +
                      std::to_string(connect_timeout().count()) + " s; missing rank: 0");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

}  // namespace

std::chrono::seconds connect_timeout() { return std::chrono::seconds(seconds_setting("HCCL_CONNECT_TIMEOUT", 120)); }

void serve_group(const std::string& socket_name) {
  std::thread([server = Server(listen_at(socket_name))]() mutable { server.run(); }).detach();
}

Group join_group(const std::string& socket_name, const Introduction& self, int memory, bool may_be_early) {
  if (self.ranks * 2 + 1 > kMostDescriptors) {
    throw Error(HCCL_E_NOT_SUPPORT, "the simulator takes at most " + std::to_string((kMostDescriptors - 1) / 2) +
                                        " ranks in a communicator, not " + std::to_string(self.ranks));
  }
  const Clock::time_point deadline = Clock::now() + connect_timeout();
  const FileDescriptor process = open_own_process();
  const FileDescriptor connection = connect_until(socket_name, may_be_early, deadline);
  send_message(connection.get(), std::string(reinterpret_cast<const char*>(&self), sizeof(self)),
               {memory, process.get()});
  Message message;
  // The server, whose clock started with the first rank, knows who is missing: it speaks first.
  if (!receive_message(connection.get(), deadline + std::chrono::seconds(3), message)) {
    throw Error(HCCL_E_TIMEOUT, "the process that called HcclGetRootInfo does not answer");
  }
  if (message.bytes.empty()) {
    throw Error(HCCL_E_REMOTE, "the process that called HcclGetRootInfo ended while the communicator was set up");
  }
  if (message.bytes[0] != kTable) {
    throw Error(static_cast<HcclResult>(message.bytes[1]), message.bytes.substr(2));
  }
  Group group;
  group.name = message.bytes.substr(1);
  auto next = message.descriptors.begin();
  group.control = std::move(*next++);
  for (std::uint32_t rank = 0; rank < self.ranks; ++rank) group.memories.push_back(std::move(*next++));
  for (std::uint32_t rank = 0; rank < self.ranks; ++rank) group.processes.push_back(std::move(*next++));
  return group;
}

}  // namespace sim::hccl
