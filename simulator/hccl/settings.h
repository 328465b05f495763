// Environment variables of HCCL, read when a communicator is made.
#pragma once

#include <cstdlib>
#include <string>

#include "hccl/rendezvous.h"

namespace sim::hccl {

// A whole number >= 0; throws Error for anything else, with the variable's name and value.
inline long seconds_setting(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return otherwise;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (*end != '\0' || value < 0) {
    throw Error(HCCL_E_PARA, std::string(name) + " = \"" + text + "\": must be a whole number, 0 or more");
  }
  return value;
}

}  // namespace sim::hccl
