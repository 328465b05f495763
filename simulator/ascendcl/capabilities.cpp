// What a card can do, and options that are kept and change nothing here.
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "ascendcl/entry.h"
#include "runtime/context.h"
#include "runtime/settings.h"

namespace {

using sim::entry;

struct Options {
  std::mutex mutex;
  std::map<int, int64_t> system_parameters;
  std::map<int, std::string> compile_options = {{ACL_OP_JIT_COMPILE, "disable"}};
  aclrtFloatOverflowMode saturation = ACL_RT_OVERFLOW_MODE_INFNAN;
};

Options& options() { return sim::immortal<Options>(); }

// Round numbers, near those of a 910B2.
constexpr int64_t kCubeCores = 24;
constexpr int64_t kVectorCores = 48;
constexpr int64_t kL2CacheBytes = int64_t{192} << 20;

aclError get_system_parameter(const char* name, aclSysParamOpt option, int64_t* value) {
  if (value == nullptr) return sim::null_argument(name);
  std::scoped_lock lock(options().mutex);
  *value = options().system_parameters[option];
  return ACL_SUCCESS;
}

aclError set_system_parameter(aclSysParamOpt option, int64_t value) {
  std::scoped_lock lock(options().mutex);
  options().system_parameters[option] = value;
  return ACL_SUCCESS;
}

}  // namespace

extern "C" {

const char* aclrtGetSocName() {
  try {
    return sim::settings().soc_name.c_str();
  } catch (const std::exception& exception) {
    sim::set_error_message(exception.what());
    return nullptr;
  }
}

aclError aclGetCannAttributeList(const aclCannAttr** list, size_t* count) {
  return entry("aclGetCannAttributeList", [&] {
    static constexpr aclCannAttr kAll[] = {ACL_CANN_ATTR_INF_NAN, ACL_CANN_ATTR_BF16};
    if (list == nullptr || count == nullptr) return sim::null_argument("aclGetCannAttributeList");
    *list = kAll;
    *count = std::size(kAll);
    return ACL_SUCCESS;
  });
}

aclError aclGetCannAttribute(aclCannAttr attribute, int32_t* value) {
  return entry("aclGetCannAttribute", [&] {
    if (value == nullptr) return sim::null_argument("aclGetCannAttribute");
    *value = attribute == ACL_CANN_ATTR_INF_NAN || attribute == ACL_CANN_ATTR_BF16 ? 1 : 0;
    return ACL_SUCCESS;
  });
}

aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo info, int64_t* value) {
  return entry("aclGetDeviceCapability", [&] {
    if (value == nullptr) return sim::null_argument("aclGetDeviceCapability");
    sim::card_of_device(static_cast<int>(device));
    switch (info) {
      case ACL_DEVICE_INFO_AI_CORE_NUM:
        *value = kCubeCores;
        return ACL_SUCCESS;
      case ACL_DEVICE_INFO_VECTOR_CORE_NUM:
        *value = kVectorCores;
        return ACL_SUCCESS;
      case ACL_DEVICE_INFO_L2_SIZE:
        *value = kL2CacheBytes;
        return ACL_SUCCESS;
      default:
        return sim::error(ACL_ERROR_INVALID_PARAM, "aclGetDeviceCapability: no such property");
    }
  });
}

aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attribute, int64_t* value) {
  return entry("aclrtGetDeviceInfo", [&] {
    if (value == nullptr) return sim::null_argument("aclrtGetDeviceInfo");
    sim::card_of_device(static_cast<int>(device));
    switch (attribute) {
      case ACL_DEV_ATTR_AICPU_CORE_NUM:
        *value = 6;
        return ACL_SUCCESS;
      case ACL_DEV_ATTR_AICORE_CORE_NUM:
      case ACL_DEV_ATTR_CUBE_CORE_NUM:
        *value = kCubeCores;
        return ACL_SUCCESS;
      case ACL_DEV_ATTR_VECTOR_CORE_NUM:
        *value = kVectorCores;
        return ACL_SUCCESS;
      case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE:
        *value = static_cast<int64_t>(sim::settings().memory_bytes);
        return ACL_SUCCESS;
      case ACL_DEV_ATTR_L2_CACHE_SIZE:
        *value = kL2CacheBytes;
        return ACL_SUCCESS;
      default:
        return sim::error(ACL_ERROR_FEATURE_UNSUPPORTED,
                          "aclrtGetDeviceInfo: attribute " + std::to_string(attribute) + " is not simulated");
    }
  });
}

aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) {
  return entry("aclrtSetDeviceSatMode", [&] {
    // Everything here is computed with infinities and NaN.
    if (mode != ACL_RT_OVERFLOW_MODE_INFNAN) {
      return sim::error(ACL_ERROR_FEATURE_UNSUPPORTED, "aclrtSetDeviceSatMode: saturation is not simulated");
    }
    std::scoped_lock lock(options().mutex);
    options().saturation = mode;
    return ACL_SUCCESS;
  });
}

aclError aclrtGetDeviceSatMode(aclrtFloatOverflowMode* mode) {
  return entry("aclrtGetDeviceSatMode", [&] {
    if (mode == nullptr) return sim::null_argument("aclrtGetDeviceSatMode");
    std::scoped_lock lock(options().mutex);
    *mode = options().saturation;
    return ACL_SUCCESS;
  });
}

aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }

aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t* actual) {
  return entry("aclrtSetOpExecuteTimeOutV2", [&] {
    if (actual == nullptr) return sim::null_argument("aclrtSetOpExecuteTimeOutV2");
    *actual = timeout;
    return ACL_SUCCESS;
  });
}

aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  return entry("aclrtSetSysParamOpt", [&] { return set_system_parameter(option, value); });
}
aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  return entry("aclrtGetSysParamOpt", [&] { return get_system_parameter("aclrtGetSysParamOpt", option, value); });
}
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  return entry("aclrtCtxSetSysParamOpt", [&] { return set_system_parameter(option, value); });
}
aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  return entry("aclrtCtxGetSysParamOpt", [&] { return get_system_parameter("aclrtCtxGetSysParamOpt", option, value); });
}

aclError aclSetCompileopt(aclCompileOpt option, const char* value) {
  return entry("aclSetCompileopt", [&] {
    if (value == nullptr) return sim::null_argument("aclSetCompileopt");
    std::scoped_lock lock(options().mutex);
    options().compile_options[option] = value;
    return ACL_SUCCESS;
  });
}

size_t aclGetCompileoptSize(aclCompileOpt option) {
  size_t size = 0;
  entry("aclGetCompileoptSize", [&] {
    std::scoped_lock lock(options().mutex);
    size = options().compile_options[option].size() + 1;
    return ACL_SUCCESS;
  });
  return size;
}

aclError aclGetCompileopt(aclCompileOpt option, char* value, size_t length) {
  return entry("aclGetCompileopt", [&] {
    if (value == nullptr) return sim::null_argument("aclGetCompileopt");
    std::scoped_lock lock(options().mutex);
    const std::string& text = options().compile_options[option];
    if (length < text.size() + 1) return sim::error(ACL_ERROR_INVALID_PARAM, "aclGetCompileopt: too little room");
    std::memcpy(value, text.c_str(), text.size() + 1);
    return ACL_SUCCESS;
  });
}
}
