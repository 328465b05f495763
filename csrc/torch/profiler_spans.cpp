#include "torch/profiler_spans.h"

#include <string>

#include "base/error.h"
#include "base/span.h"
#include "torch/compat.h"

namespace tt {

void install_profiler_spans() {
  static constexpr Span::Profiler kTorch{
      [](const char* what, const std::string& of) -> void* {
        return torch_compat::begin_range([&] { return str(what, " ", of); });
      },
      torch_compat::end_range,
  };
  Span::install(&kTorch);
}

}  // namespace tt
