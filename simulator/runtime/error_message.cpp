#include "runtime/error_message.h"

#include <utility>

namespace sim {
namespace {

thread_local std::string recent;

}  // namespace

void set_error_message(std::string message) { recent = std::move(message); }

std::string take_error_message() { return std::exchange(recent, {}); }

aclError error(aclError code, std::string message) {
  set_error_message(std::move(message));
  return code;
}

}  // namespace sim
