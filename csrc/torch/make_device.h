// The engine's device for where a model lives.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "runtime/device.h"

namespace tt {

// Host memory: our own kernels. An NPU of torch_npu: aclnn. Any other accelerator: torch's operators.
std::shared_ptr<runtime::Device> make_device(c10::Device where);

}  // namespace tt
