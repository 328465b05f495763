// The profiler's and the old runtime's functions that torch_npu is linked to: our own declarations, as in acl.h.
#pragma once

#include <cstddef>
#include <cstdint>

struct MsprofApi;
struct rtDevBinary_t;
struct rtSmDesc_t;
enum rtError_t : int32_t {};

using ProfCommandHandle = int32_t (*)(uint32_t type, void* data, uint32_t len);

extern "C" {

int32_t MsprofRegisterCallback(uint32_t moduleId, ProfCommandHandle handle);
int32_t MsprofReportApi(uint32_t nonPersistantFlag, const MsprofApi* api);
int32_t MsprofReportCompactInfo(uint32_t nonPersistantFlag, void* data, uint32_t length);
int32_t MsprofReportAdditionalInfo(uint32_t nonPersistantFlag, void* data, uint32_t length);
uint64_t MsprofGetHashId(const char* hashInfo, size_t length);
uint64_t MsprofSysCycleTime();

rtError_t rtDevBinaryRegister(const rtDevBinary_t* bin, void** handle);
rtError_t rtFunctionRegister(void* binHandle, const void* stubFunc, const char* stubName, const void* devFunc,
                             uint32_t funcMode);
rtError_t rtKernelLaunch(const void* stubFunc, uint32_t blockDim, void* args, uint32_t argsSize, rtSmDesc_t* smDesc,
                         void* stream);
rtError_t rtGetC2cCtrlAddr(uint64_t* addr, uint32_t* len);
}
