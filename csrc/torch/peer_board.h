// What a rank that cannot go on tells its peers, through the store of their process group: a process group itself has
// no way to say "I shall not come".
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace tt {

enum class NoteKind : std::uint8_t {
  kFailed,   // raised an error that ends all collectives
  kAborted,  // gave up backward pass `round`, because of an exception of the user's
  kLeft,     // its communicator is gone
};

struct Note {
  NoteKind kind = NoteKind::kFailed;
  std::uint64_t round = 0;
  // Collectives that it launched on each process group before; these still come.
  std::uint64_t gathers = 0;
  std::uint64_t reductions = 0;
  std::string why;
};

class PeerBoard {
 public:
  PeerBoard(c10::intrusive_ptr<c10d::Store> store, int rank, int size);

  // Replaces this rank's note; one of kFailed stays. A store that is gone is not an error: its server's sockets close,
  // which peers notice.
  void post(const Note& note) noexcept;

  // The notes of all ranks, by rank. One message to the store if nothing was posted since the last call.
  const std::vector<std::optional<Note>>& read() noexcept;

 private:
  void read_all();

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  bool failed_ = false;
  std::int64_t seen_ = 0;  // number of notes ever posted
  std::vector<std::optional<Note>> notes_;
};

}  // namespace tt
