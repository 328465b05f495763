// Who touched which bytes last, and whether what comes now is ordered after that. Works on what is submitted, not on
// what happens to run: a missing wait is found at the first step, on a machine with one core as well.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime/clock.h"

namespace sim {

// One task among those that were submitted.
struct Stamp {
  std::uint64_t time = 0;  // number of the task on its stream; 0: none
  Slot slot = 0;
  std::uint32_t name = 0;

  bool operator==(const Stamp&) const = default;
};

struct Conflict {
  Stamp earlier;
  bool earlier_wrote = false;
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
};

// Not thread-safe: the caller's lock makes submissions one sequence.
class RaceDetector {
 public:
  Stamp stamp(Slot slot, std::uint64_t time, const std::string& name);
  const std::string& name_of(Stamp stamp) const { return names_[stamp.name]; }

  // `clock` is what lies behind the task `now`. The first access to the bytes that is not behind it and conflicts.
  std::optional<Conflict> access(const Clock& clock, Stamp now, std::uintptr_t begin, std::uintptr_t end, bool writes);

  // The first access to the bytes that does not lie behind `clock`.
  std::optional<Conflict> unordered(const Clock& clock, std::uintptr_t begin, std::uintptr_t end) const;

  void forget(std::uintptr_t begin, std::uintptr_t end);

  // Drops what lies behind `clock`: nothing that comes later can conflict with it.
  void prune(const Clock& clock);

  std::size_t size() const { return spans_.size(); }

 private:
  struct Span {
    std::uintptr_t end = 0;
    Stamp write;
    std::vector<Stamp> reads;  // since the write; those that lie behind another one are left out
  };
  using Spans = std::map<std::uintptr_t, Span>;

  Spans::iterator first_overlapping(std::uintptr_t begin);
  Spans::iterator split(Spans::iterator span, std::uintptr_t at);
  void join_with_previous(Spans::iterator span);

  Spans spans_;  // by their first byte; disjoint
  std::vector<std::string> names_;
  std::unordered_map<std::string, std::uint32_t> name_numbers_;
};

}  // namespace sim
