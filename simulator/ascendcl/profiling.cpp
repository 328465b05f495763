// The profiler's and the old runtime's entry points that torch_npu is linked to. Nothing is profiled here, and nothing
// can be launched through them.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>

#include "ascendcl/entry.h"

struct MsprofApi;
struct rtSmDesc_t;

extern "C" {

int32_t MsprofRegisterCallback(uint32_t, int32_t (*)(uint32_t, void*, uint32_t)) { return 0; }
int32_t MsprofReportApi(uint32_t, const MsprofApi*) { return 0; }
int32_t MsprofReportCompactInfo(uint32_t, void*, uint32_t) { return 0; }
int32_t MsprofReportAdditionalInfo(uint32_t, void*, uint32_t) { return 0; }
uint64_t MsprofGetHashId(const char* text, size_t length) {
  return text == nullptr ? 0 : std::hash<std::string_view>{}({text, length});
}
uint64_t MsprofSysCycleTime() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

int32_t rtDevBinaryRegister(const rtDevBinary_t*, void**) { return sim::unsupported("rtDevBinaryRegister"); }
int32_t rtFunctionRegister(void*, const void*, const char*, const void*, uint32_t) {
  return sim::unsupported("rtFunctionRegister");
}
int32_t rtKernelLaunch(const void*, uint32_t, void*, uint32_t, rtSmDesc_t*, void*) {
  return sim::unsupported("rtKernelLaunch");
}
int32_t rtGetC2cCtrlAddr(uint64_t*, uint32_t*) { return sim::unsupported("rtGetC2cCtrlAddr"); }
}
