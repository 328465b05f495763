// The virtual memory functions, which torch_npu uses for expandable segments only, and sharing of physical memory.
#include "ascendcl/entry.h"

using sim::unsupported;

extern "C" {

aclError aclrtReserveMemAddress(void**, size_t, size_t, void*, uint64_t) {
  return unsupported("aclrtReserveMemAddress (expandable segments)");
}
aclError aclrtReleaseMemAddress(void*) { return unsupported("aclrtReleaseMemAddress"); }
aclError aclrtMallocPhysical(aclrtDrvMemHandle*, size_t, const aclrtPhysicalMemProp*, uint64_t) {
  return unsupported("aclrtMallocPhysical (expandable segments)");
}
aclError aclrtFreePhysical(aclrtDrvMemHandle) { return unsupported("aclrtFreePhysical"); }
aclError aclrtMapMem(void*, size_t, size_t, aclrtDrvMemHandle, uint64_t) { return unsupported("aclrtMapMem"); }
aclError aclrtUnmapMem(void*) { return unsupported("aclrtUnmapMem"); }
aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle, aclrtMemHandleType, uint64_t, uint64_t*) {
  return unsupported("aclrtMemExportToShareableHandle");
}
aclError aclrtMemImportFromShareableHandle(uint64_t, int32_t, aclrtDrvMemHandle*) {
  return unsupported("aclrtMemImportFromShareableHandle");
}
aclError aclrtMemSetPidToShareableHandle(uint64_t, int32_t*, size_t) {
  return unsupported("aclrtMemSetPidToShareableHandle");
}
}
