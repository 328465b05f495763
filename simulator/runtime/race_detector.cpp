#include "runtime/race_detector.h"

#include <algorithm>

namespace sim {

Stamp RaceDetector::stamp(Slot slot, std::uint64_t time, const std::string& name) {
  auto [found, is_new] = name_numbers_.try_emplace(name, static_cast<std::uint32_t>(names_.size()));
  if (is_new) names_.push_back(name);
  return {time, slot, found->second};
}

RaceDetector::Spans::iterator RaceDetector::first_overlapping(std::uintptr_t begin) {
  auto span = spans_.upper_bound(begin);
  if (span != spans_.begin() && std::prev(span)->second.end > begin) --span;
  return span;
}

// The part of the span from `at` on.
RaceDetector::Spans::iterator RaceDetector::split(Spans::iterator span, std::uintptr_t at) {
  Span rest = span->second;
  span->second.end = at;
  return spans_.emplace_hint(std::next(span), at, std::move(rest));
}

void RaceDetector::join_with_previous(Spans::iterator span) {
  if (span == spans_.begin() || span == spans_.end()) return;
  auto previous = std::prev(span);
  if (previous->second.end != span->first || previous->second.write != span->second.write ||
      previous->second.reads != span->second.reads) {
    return;
  }
  previous->second.end = span->second.end;
  spans_.erase(span);
}

std::optional<Conflict> RaceDetector::access(const Clock& clock, Stamp now, std::uintptr_t begin, std::uintptr_t end,
                                             bool writes) {
  std::optional<Conflict> conflict;
  auto note = [&](Stamp earlier, bool earlier_wrote, std::uintptr_t from, std::uintptr_t to) {
    if (conflict || earlier.time == 0 || clock.covers(earlier.slot, earlier.time)) return;
    conflict = Conflict{earlier, earlier_wrote, std::max(from, begin), std::min(to, end)};
  };

  auto span = first_overlapping(begin);
  if (span != spans_.end() && span->first < begin) span = split(span, begin);
  std::uintptr_t done = begin;  // up to here
  while (done < end) {
    if (span == spans_.end() || span->first > done) {  // bytes that nobody touched yet
      const std::uintptr_t until = span == spans_.end() ? end : std::min(end, span->first);
      span = std::next(spans_.emplace_hint(span, done, Span{until, {}, {}}));
      --span;
    }
    if (span->second.end > end) split(span, end);
    const auto from = span->first;
    const auto to = span->second.end;
    note(span->second.write, true, from, to);
    if (writes) {
      for (const Stamp& read : span->second.reads) note(read, false, from, to);
      span->second.write = now;
      span->second.reads.clear();
    } else {
      auto& reads = span->second.reads;
      std::erase_if(reads, [&](const Stamp& read) { return clock.covers(read.slot, read.time); });
      reads.push_back(now);
    }
    done = to;
    auto next = std::next(span);
    if (from > begin) join_with_previous(span);
    span = next;
  }
  return conflict;
}

std::optional<Conflict> RaceDetector::unordered(const Clock& clock, std::uintptr_t begin, std::uintptr_t end) const {
  auto span = spans_.upper_bound(begin);
  if (span != spans_.begin() && std::prev(span)->second.end > begin) --span;
  for (; span != spans_.end() && span->first < end; ++span) {
    const Stamp& write = span->second.write;
    if (write.time != 0 && !clock.covers(write.slot, write.time)) {
      return Conflict{write, true, span->first, span->second.end};
    }
    for (const Stamp& read : span->second.reads) {
      if (!clock.covers(read.slot, read.time)) return Conflict{read, false, span->first, span->second.end};
    }
  }
  return {};
}

void RaceDetector::forget(std::uintptr_t begin, std::uintptr_t end) {
  auto span = first_overlapping(begin);
  if (span != spans_.end() && span->first < begin) span = split(span, begin);
  while (span != spans_.end() && span->first < end) {
    if (span->second.end > end) split(span, end);
    span = spans_.erase(span);
  }
}

void RaceDetector::prune(const Clock& clock) {
  for (auto entry = spans_.begin(); entry != spans_.end();) {
    Span& span = entry->second;
    std::erase_if(span.reads, [&](const Stamp& read) { return clock.covers(read.slot, read.time); });
    const bool over = span.reads.empty() && clock.covers(span.write.slot, span.write.time);
    entry = over ? spans_.erase(entry) : std::next(entry);
  }
}

}  // namespace sim
