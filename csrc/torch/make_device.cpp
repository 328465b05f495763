#include "torch/make_device.h"

#include <c10/core/DeviceType.h>

#include <utility>

#include "ascend/acl_device.h"
#include "host/host_device.h"
#include "torch/npu_queue.h"
#include "torch/torch_device.h"

namespace tt {

std::shared_ptr<runtime::Device> make_device(c10::Device where) {
  if (where.is_cpu()) {
    return std::make_shared<host::HostDevice>();
  }
  auto device = std::make_shared<TorchDevice>(where);
  if (where.is_privateuseone() && c10::get_privateuse1_backend() == "npu") {
    return std::make_shared<ascend::AclDevice>(std::move(device), std::make_shared<NpuQueue>(where, "auto"));
  }
  return device;
}

}  // namespace tt
