// Named ranges for a profiler: where the core spends its time. Whoever knows a profiler installs it; while none is
// recording, a span costs one call.
#pragma once

#include <atomic>
#include <string>

namespace tt {

class Span {
 public:
  struct Profiler {
    // Opens a range "what of" on the calling thread; null while nobody records.
    void* (*begin)(const char* what, const std::string& of);
    void (*end)(void* range);
  };

  // `profiler` must live as long as the process.
  static void install(const Profiler* profiler) { installed().store(profiler, std::memory_order_release); }

  // Ends in the scope that it began in.
  Span(const char* what, const std::string& of) : profiler_(installed().load(std::memory_order_acquire)) {
    range_ = profiler_ == nullptr ? nullptr : profiler_->begin(what, of);
  }
  ~Span() {
    if (range_ != nullptr) {
      profiler_->end(range_);
    }
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  static std::atomic<const Profiler*>& installed() {
    static std::atomic<const Profiler*> profiler{nullptr};
    return profiler;
  }

  const Profiler* profiler_;
  void* range_;
};

}  // namespace tt
