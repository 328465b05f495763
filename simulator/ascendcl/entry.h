// What every C entry point does: no exception leaves it, and the last error of the thread is kept.
#pragma once

#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "abi/acl.h"
#include "runtime/error_message.h"

namespace sim {

aclError remember(aclError code);  // for aclrtGetLastError

template <typename Function>
aclError entry(const char* name, Function&& function) noexcept {
  try {
    return remember(function());
  } catch (const std::out_of_range& exception) {
    return remember(error(ACL_ERROR_RT_INVALID_DEVICEID, std::string(name) + ": " + exception.what()));
  } catch (const std::bad_alloc&) {
    return remember(error(ACL_ERROR_BAD_ALLOC, std::string(name) + ": the host has no memory left"));
  } catch (const std::exception& exception) {
    return remember(error(ACL_ERROR_INTERNAL_ERROR, std::string(name) + ": " + exception.what()));
  }
}

inline aclError unsupported(const char* name) {
  return remember(error(ACL_ERROR_FEATURE_UNSUPPORTED,
                        std::string(name) + " is not simulated (simulated Ascend has no such thing)"));
}

inline aclError null_argument(const char* name) {
  return error(ACL_ERROR_RT_PARAM_INVALID, std::string(name) + ": a pointer that must not be null is null");
}

}  // namespace sim
