#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "ascendcl/entry.h"

namespace {

thread_local aclError last_error = ACL_SUCCESS;
thread_local std::string handed_out;

}  // namespace

namespace sim {

aclError remember(aclError code) {
  if (code != ACL_SUCCESS) last_error = code;
  return code;
}

}  // namespace sim

extern "C" {

// Valid until the next call on this thread, and gone then.
const char* aclGetRecentErrMsg() {
  handed_out = sim::take_error_message();
  return handed_out.c_str();
}

aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return last_error; }

aclError aclrtGetLastError(aclrtLastErrLevel) { return std::exchange(last_error, ACL_SUCCESS); }

// ASCEND_GLOBAL_LOG_LEVEL: 0 debug, 1 info, 2 warning, 3 error; anything else is silence, which is the default here.
void aclAppLog(aclLogLevel level, const char* function, const char* file, uint32_t line, const char* format, ...) {
  static const int lowest = [] {
    const char* text = std::getenv("ASCEND_GLOBAL_LOG_LEVEL");
    return text == nullptr || *text == '\0' ? 4 : std::atoi(text);
  }();
  if (static_cast<int>(level) < lowest) return;
  std::va_list arguments;
  va_start(arguments, format);
  char text[1024];
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "[AscendCL log %d] %s:%u %s: %s\n", static_cast<int>(level), file, line, function, text);
}
}
