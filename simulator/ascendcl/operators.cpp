// The operators of the time before aclnn. torch_npu falls back to them where libopapi lacks an operator, and takes
// whatever an execution leaves in the outputs for the result: it must fail, and say which operator was asked for.
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "ascendcl/entry.h"

struct aclDataBuffer {
  void* data = nullptr;
  size_t size = 0;
};

struct aclTensorDesc {
  aclDataType type = ACL_DT_UNDEFINED;
  aclFormat format = ACL_FORMAT_UNDEFINED;
  std::vector<int64_t> dims;
};

// Attributes lead nowhere, as the execution fails.
struct aclopAttr {};

namespace {

using sim::entry;
using sim::unsupported;

aclError refuse(const char* type) {
  const std::string name = type == nullptr ? "?" : type;
  std::fprintf(stderr,
               "simulated Ascend: aclop operator '%s' was asked for: torch_npu found no aclnn operator for it in "
               "libopapi, and aclop operators are not simulated\n",
               name.c_str());
  return sim::remember(sim::error(
      ACL_ERROR_OP_NOT_FOUND,
      "aclopCompileAndExecute: operator '" + name + "' is not simulated (no aclnn operator for it in libopapi)"));
}

}  // namespace

extern "C" {

aclDataBuffer* aclCreateDataBuffer(void* data, size_t size) {
  return std::make_unique<aclDataBuffer>(aclDataBuffer{data, size}).release();
}

aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
  std::unique_ptr<const aclDataBuffer> owner(buffer);
  return ACL_SUCCESS;
}

aclTensorDesc* aclCreateTensorDesc(aclDataType type, int count, const int64_t* dims, aclFormat format) {
  if (count < 0 || (count > 0 && dims == nullptr)) return nullptr;
  return std::make_unique<aclTensorDesc>(aclTensorDesc{type, format, std::vector<int64_t>(dims, dims + count)})
      .release();
}

void aclDestroyTensorDesc(const aclTensorDesc* desc) { std::unique_ptr<const aclTensorDesc> owner(desc); }

aclDataType aclGetTensorDescType(const aclTensorDesc* desc) { return desc == nullptr ? ACL_DT_UNDEFINED : desc->type; }

aclFormat aclGetTensorDescFormat(const aclTensorDesc* desc) {
  return desc == nullptr ? ACL_FORMAT_UNDEFINED : desc->format;
}

size_t aclGetTensorDescNumDims(const aclTensorDesc* desc) { return desc == nullptr ? 0 : desc->dims.size(); }

aclError aclGetTensorDescDimV2(const aclTensorDesc* desc, size_t index, int64_t* size) {
  return entry("aclGetTensorDescDimV2", [&] {
    if (desc == nullptr || size == nullptr || index >= desc->dims.size()) {
      return sim::error(ACL_ERROR_INVALID_PARAM, "aclGetTensorDescDimV2: no such dimension");
    }
    *size = desc->dims[index];
    return ACL_SUCCESS;
  });
}

void aclSetTensorDescName(aclTensorDesc*, const char*) {}

aclError aclSetTensorFormat(aclTensorDesc*, aclFormat) { return ACL_SUCCESS; }
aclError aclSetTensorShape(aclTensorDesc*, int, const int64_t*) { return ACL_SUCCESS; }
aclError aclSetTensorPlaceMent(aclTensorDesc*, aclMemType) { return ACL_SUCCESS; }

aclopAttr* aclopCreateAttr() { return std::make_unique<aclopAttr>().release(); }
void aclopDestroyAttr(const aclopAttr* attr) { std::unique_ptr<const aclopAttr> owner(attr); }

aclError aclopSetAttrBool(aclopAttr*, const char*, uint8_t) { return ACL_SUCCESS; }
aclError aclopSetAttrInt(aclopAttr*, const char*, int64_t) { return ACL_SUCCESS; }
aclError aclopSetAttrFloat(aclopAttr*, const char*, float) { return ACL_SUCCESS; }
aclError aclopSetAttrString(aclopAttr*, const char*, const char*) { return ACL_SUCCESS; }
aclError aclopSetAttrDataType(aclopAttr*, const char*, aclDataType) { return ACL_SUCCESS; }
aclError aclopSetAttrListBool(aclopAttr*, const char*, int, const uint8_t*) { return ACL_SUCCESS; }
aclError aclopSetAttrListInt(aclopAttr*, const char*, int, const int64_t*) { return ACL_SUCCESS; }
aclError aclopSetAttrListFloat(aclopAttr*, const char*, int, const float*) { return ACL_SUCCESS; }
aclError aclopSetAttrListListInt(aclopAttr*, const char*, int, const int*, const int64_t* const[]) {
  return ACL_SUCCESS;
}

aclError aclopCompileAndExecute(const char* type, int, const aclTensorDesc* const[], const aclDataBuffer* const[], int,
                                const aclTensorDesc* const[], aclDataBuffer* const[], const aclopAttr*, aclopEngineType,
                                aclopCompileType, const char*, aclrtStream) {
  return refuse(type);
}

aclError aclopCompileAndExecuteV2(const char* type, int, aclTensorDesc*[], aclDataBuffer*[], int, aclTensorDesc*[],
                                  aclDataBuffer*[], aclopAttr*, aclopEngineType, aclopCompileType, const char*,
                                  aclrtStream) {
  return refuse(type);
}

// Dumps of operators' inputs and outputs: torch_npu sets them up whether or not anything is to be dumped.
aclError aclmdlInitDump() { return ACL_SUCCESS; }
aclError aclmdlSetDump(const char*) { return unsupported("aclmdlSetDump"); }
aclError aclmdlFinalizeDump() { return ACL_SUCCESS; }

aclError aclrtBinaryLoadFromData(const void*, size_t, const aclrtBinaryLoadOptions*, aclrtBinHandle*) {
  return unsupported("aclrtBinaryLoadFromData (compiled kernels)");
}
aclError aclrtBinaryGetFunction(const aclrtBinHandle, const char*, aclrtFuncHandle*) {
  return unsupported("aclrtBinaryGetFunction (compiled kernels)");
}
aclError aclrtGetFunctionAddr(aclrtFuncHandle, void**, void**) {
  return unsupported("aclrtGetFunctionAddr (compiled kernels)");
}
}
