#include "runtime/checks.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "runtime/counters.h"
#include "runtime/settings.h"

namespace sim {
namespace {

struct Fault {
  std::string kind;
  std::string name;  // empty: any
  int rank = -1;     // -1: any
  long at = 1;
  long seen = 0;
};

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    std::size_t end = std::min(text.find(separator, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

bool is_number(const std::string& text) {
  return !text.empty() && text.size() < 10 &&
         std::all_of(text.begin(), text.end(), [](unsigned char letter) { return letter >= '0' && letter <= '9'; });
}

Fault parse(const std::string& text) {
  std::vector<std::string> parts = split(text, ':');
  Fault fault;
  fault.kind = parts[0];
  const bool known =
      fault.kind == "operator" || fault.kind == "oom" || fault.kind == "hccl_timeout" || fault.kind == "peer_death";
  bool counted = false;
  bool good = known;
  for (std::size_t i = 1; i < parts.size(); ++i) {
    const std::string& part = parts[i];
    if (is_number(part)) {
      fault.at = std::stol(part);
      counted = true;
    } else if (part.starts_with("rank") && is_number(part.substr(4))) {
      fault.rank = std::stoi(part.substr(4));
    } else if (i == 1 && !part.empty()) {
      fault.name = part;
    } else {
      good = false;
    }
  }
  if (!good || !counted || fault.at < 1) {
    throw std::invalid_argument("TT_SIM_FAULT=" + text +
                                ": expected kind[:name]:n[:rankR] with kind operator, oom, hccl_timeout or peer_death");
  }
  return fault;
}

class Faults {
 public:
  Faults() {
    if (settings().faults.empty()) return;
    for (const std::string& text : split(settings().faults, ',')) faults_.push_back(parse(text));
  }

  bool is_due(const std::string& kind, const std::string& name) {
    if (faults_.empty()) return false;
    std::scoped_lock lock(mutex_);
    bool due = false;
    for (Fault& fault : faults_) {
      if (fault.kind != kind || (!fault.name.empty() && fault.name != name)) continue;
      if (fault.rank >= 0 && fault.rank != rank()) continue;
      due = ++fault.seen == fault.at || due;
    }
    return due;
  }

 private:
  std::mutex mutex_;
  std::vector<Fault> faults_;
};

}  // namespace

void violation(const std::string& kind, const std::string& message) {
  const std::string text = "simulated Ascend: rank " + std::to_string(rank()) + ": " + kind + ": " + message + "\n";
  std::fputs(text.c_str(), stderr);
  std::fflush(stderr);
  count_violation(kind);
  if (settings().report_only) return;
  write_statistics();
  std::abort();
}

bool fault_is_due(const std::string& kind, const std::string& name) { return immortal<Faults>().is_due(kind, name); }

}  // namespace sim
