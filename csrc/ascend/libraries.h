// CANN's libraries, opened at first use: one table of functions for each.
//
// The wheel is built without CANN and runs without it; what is missing is said when an NPU is asked for, all at once,
// with the places that were searched.
#pragma once

#include <string>
#include <vector>

#include "ascend/abi.h"

namespace tt::ascend {

#define TT_DECLARE(result, name, arguments) result(*name) arguments = nullptr;

struct AscendClTable {
  TT_ASCENDCL_FUNCTIONS(TT_DECLARE)
};

struct OpApiTable {
  TT_OPAPI_FUNCTIONS(TT_DECLARE)
};

struct HcclTable {
  TT_HCCL_FUNCTIONS(TT_DECLARE)
};

#undef TT_DECLARE

// Each throws Error where the library or one of its functions is missing, at every call.
const AscendClTable& ascendcl();
const OpApiTable& opapi();
const HcclTable& hccl();

// What is missing of all three, with the paths searched; empty if nothing is. For `doctor` and error messages.
std::string missing_from_cann();

// Where a library of CANN is looked for, in this order: as the loader finds it, then in these folders.
std::vector<std::string> cann_folders();

}  // namespace tt::ascend
