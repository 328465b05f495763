// The message of the last error on this thread, as aclGetRecentErrMsg hands it out.
#pragma once

#include <string>

#include "abi/acl.h"
#include "runtime/stream.h"

namespace sim {

std::string take_error_message();

// Sets the message, and is the error.
aclError error(aclError code, std::string message);

}  // namespace sim
