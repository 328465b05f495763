#include "torch/peer_board.h"

#include <exception>
#include <sstream>
#include <utility>

#include "base/error.h"

namespace tt {
namespace {

constexpr const char* kCount = "torchtitan_npu/notes";

std::string key_of(int rank) { return str("torchtitan_npu/note/", rank); }

std::string to_text(const Note& note) {
  return str(static_cast<int>(note.kind), ' ', note.round, ' ', note.gathers, ' ', note.reductions, ' ', note.why);
}

Note from_text(const std::string& text) {
  std::istringstream in(text);
  Note note;
  int kind = 0;
  in >> kind >> note.round >> note.gathers >> note.reductions;
  in.ignore(1);
  note.kind = static_cast<NoteKind>(kind);
  note.why.assign(std::istreambuf_iterator<char>(in), {});
  return note;
}

}  // namespace

PeerBoard::PeerBoard(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
    : store_(std::move(store)), rank_(rank), notes_(static_cast<std::size_t>(size)) {}

void PeerBoard::post(const Note& note) noexcept {
  if (failed_) return;
  failed_ = note.kind == NoteKind::kFailed;
  try {
    store_->set(key_of(rank_), to_text(note));
    store_->add(kCount, 1);  // second: who sees the count sees the note
  } catch (const std::exception&) {
    return;  // see the header
  }
}

const std::vector<std::optional<Note>>& PeerBoard::read() noexcept {
  try {
    const std::int64_t count = store_->add(kCount, 0);
    if (count != seen_) {
      read_all();
      seen_ = count;
    }
  } catch (const std::exception&) {
    return notes_;  // what was known before
  }
  return notes_;
}

void PeerBoard::read_all() {
  for (std::size_t rank = 0; rank < notes_.size(); ++rank) {
    const std::string key = key_of(static_cast<int>(rank));
    if (store_->check({key})) notes_[rank] = from_text(store_->get_to_str(key));
  }
}

}  // namespace tt
