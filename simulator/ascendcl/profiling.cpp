// The profiler's and the old runtime's entry points that torch_npu is linked to. Nothing is profiled here, and nothing
// can be launched through them.
#include "abi/profiling.h"

#include <chrono>
#include <functional>
#include <string_view>

#include "ascendcl/entry.h"

namespace {

rtError_t unsupported(const char* name) { return static_cast<rtError_t>(sim::unsupported(name)); }

}  // namespace

extern "C" {

int32_t MsprofRegisterCallback(uint32_t, ProfCommandHandle) { return 0; }
int32_t MsprofReportApi(uint32_t, const MsprofApi*) { return 0; }
int32_t MsprofReportCompactInfo(uint32_t, void*, uint32_t) { return 0; }
int32_t MsprofReportAdditionalInfo(uint32_t, void*, uint32_t) { return 0; }
uint64_t MsprofGetHashId(const char* text, size_t length) {
  return text == nullptr ? 0 : std::hash<std::string_view>{}({text, length});
}
uint64_t MsprofSysCycleTime() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

rtError_t rtDevBinaryRegister(const rtDevBinary_t*, void**) { return unsupported("rtDevBinaryRegister"); }
rtError_t rtFunctionRegister(void*, const void*, const char*, const void*, uint32_t) {
  return unsupported("rtFunctionRegister");
}
rtError_t rtKernelLaunch(const void*, uint32_t, void*, uint32_t, rtSmDesc_t*, void*) {
  return unsupported("rtKernelLaunch");
}
rtError_t rtGetC2cCtrlAddr(uint64_t*, uint32_t*) { return unsupported("rtGetC2cCtrlAddr"); }
}
