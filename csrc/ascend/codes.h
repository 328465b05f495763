// What the numbers mean that AscendCL, aclnn and HCCL return.
#pragma once

#include <string>

namespace tt::ascend {

enum class Source : unsigned char { kAcl, kHccl };

// "ACL_ERROR_RT_MEMORY_ALLOCATION (207001): the card has no memory left. <next step>"; an unknown code is said to be
// so.
std::string explain(Source source, int code);

}  // namespace tt::ascend
