#include "runtime/statistics.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

#include "runtime/allocations.h"
#include "runtime/counters.h"
#include "runtime/settings.h"

namespace sim {
namespace {

struct Count {
  std::uint64_t calls = 0;
  std::uint64_t bytes = 0;
};

// A part of the memory in use.
struct CommunicatorBuffers {
  std::ptrdiff_t current = 0;
  std::ptrdiff_t peak = 0;
};

using Counts = std::map<std::string, Count>;

struct Counters {
  std::mutex mutex;
  Counts operators;
  Counts copies;
  Counts collectives;
  Counts violations;
  std::map<int, CommunicatorBuffers> communicator_buffers;  // per card
};

void add(Counts Counters::* which, const std::string& name, std::uint64_t calls, std::uint64_t bytes) {
  auto& counters = immortal<Counters>();
  std::scoped_lock lock(counters.mutex);
  Count& count = (counters.*which)[name];
  count.calls += calls;
  count.bytes += bytes;
}

// Names are those of functions: nothing in them needs escaping, but what does must not break the file.
std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (char letter : text) {
    if (letter == '"' || letter == '\\') result += '\\';
    if (static_cast<unsigned char>(letter) >= ' ') result += letter;
  }
  return result + '"';
}

std::string object(const Counts& counts, const char* calls, const char* bytes) {
  std::string text;
  for (const auto& [name, count] : counts) {
    if (!text.empty()) text += ", ";
    text += quoted(name) + ": {" + quoted(calls) + ": " + std::to_string(count.calls) + ", " + quoted(bytes) + ": " +
            std::to_string(count.bytes) + "}";
  }
  return "{" + text + "}";
}

std::string numbers(const Counts& counts) {
  std::string text;
  for (const auto& [name, count] : counts) {
    if (!text.empty()) text += ", ";
    text += quoted(name) + ": " + std::to_string(count.calls);
  }
  return "{" + text + "}";
}

std::string memory() {
  std::map<int, CommunicatorBuffers> communicators;
  {
    auto& counters = immortal<Counters>();
    std::scoped_lock lock(counters.mutex);
    communicators = counters.communicator_buffers;
  }
  std::string text;
  for (int card = 0; card < settings().cards; ++card) {
    const CardUsage usage = card_usage_if_used(card);
    if (usage.capacity == 0) continue;
    if (!text.empty()) text += ", ";
    text += quoted(std::to_string(card)) + ": {\"current_bytes\": " + std::to_string(usage.current) +
            ", \"peak_bytes\": " + std::to_string(usage.peak) +
            ", \"communicator_peak_bytes\": " + std::to_string(communicators[card].peak) + "}";
  }
  return "{" + text + "}";
}

std::string statistics_path() {
  std::string path = settings().statistics_path;
  for (std::size_t at = path.find("%r"); at != std::string::npos; at = path.find("%r", at)) {
    path.replace(at, 2, std::to_string(rank()));
  }
  return path;
}

}  // namespace

void count_launch(const std::string& operator_name) { add(&Counters::operators, operator_name, 1, 0); }
void count_bytes_written(const std::string& operator_name, std::size_t bytes) {
  add(&Counters::operators, operator_name, 0, bytes);
}
void count_copy(const char* direction, std::size_t bytes) { add(&Counters::copies, direction, 1, bytes); }
void count_collective(const std::string& name, std::size_t bytes_sent) {
  add(&Counters::collectives, name, 1, bytes_sent);
}
void count_communicator_buffers(int card, std::ptrdiff_t bytes) {
  auto& counters = immortal<Counters>();
  std::scoped_lock lock(counters.mutex);
  CommunicatorBuffers& buffers = counters.communicator_buffers[card];
  buffers.current += bytes;
  buffers.peak = std::max(buffers.peak, buffers.current);
}
void count_violation(const std::string& kind) { add(&Counters::violations, kind, 1, 0); }

std::string statistics_json() {
  auto& counters = immortal<Counters>();
  std::string memory_text = memory();
  std::scoped_lock lock(counters.mutex);
  return "{\"simulated\": \"Ascend, computed on the CPU\", \"rank\": " + std::to_string(rank()) +
         ", \"operators\": " + object(counters.operators, "launches", "bytes_written") +
         ", \"copies\": " + object(counters.copies, "calls", "bytes") +
         ", \"collectives\": " + object(counters.collectives, "calls", "bytes_sent") + ", \"memory\": " + memory_text +
         ", \"violations\": " + numbers(counters.violations) + "}\n";
}

void write_statistics() {
  const std::string path = statistics_path();
  if (path.empty()) return;
  const std::string text = statistics_json();
  const std::string partial = path + ".partial";
  std::FILE* file = std::fopen(partial.c_str(), "w");
  bool good = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  good = file != nullptr && std::fclose(file) == 0 && good;
  if (!good || std::rename(partial.c_str(), path.c_str()) != 0) {
    std::fprintf(stderr, "simulated Ascend: cannot write %s: %s\n", path.c_str(), std::strerror(errno));
  }
}

void reset_statistics() {
  auto& counters = immortal<Counters>();
  reset_peaks();
  std::scoped_lock lock(counters.mutex);
  counters.operators.clear();
  counters.copies.clear();
  counters.collectives.clear();
  counters.violations.clear();
}

}  // namespace sim
