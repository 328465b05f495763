// Errors of the core. Error is for users (it becomes RuntimeError in Python), ValueError for bad arguments,
// TT_CHECK for what only a bug of ours can break.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace tt {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An argument that breaks a rule; becomes ValueError in Python.
class ValueError : public Error {
 public:
  using Error::Error;
};

// A peer is dead, late, failed, or out of step; becomes torchtitan_npu.PeerError in Python.
class PeerError : public Error {
 public:
  using Error::Error;
};

namespace detail {
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}
}  // namespace detail

// Joins its arguments into one message: str("rank ", 3, " failed").
template <typename... Parts>
std::string str(const Parts&... parts) {
  return detail::concat(parts...);
}

}  // namespace tt

#define TT_CHECK(condition, ...)                                                                                      \
  do {                                                                                                                \
    if (!(condition)) {                                                                                               \
      throw ::tt::Error(::tt::str("internal error at ", __FILE__, ":", __LINE__, ": " #condition ". ", __VA_ARGS__)); \
    }                                                                                                                 \
  } while (false)
