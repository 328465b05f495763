#include <cstring>

#include "ascendcl/entry.h"

namespace {

using sim::entry;

constexpr const char* kVersion = "8.5.0";

template <size_t size>
void copy(char (&field)[size], const char* text) {
  std::strncpy(field, text, size - 1);
  field[size - 1] = '\0';
}

}  // namespace

extern "C" {

aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion* version) {
  return entry("aclsysGetCANNVersion", [&] {
    if (version == nullptr) return sim::null_argument("aclsysGetCANNVersion");
    if (name < ACL_PKG_NAME_CANN || name > ACL_PKG_NAME_DRIVER) {
      return sim::error(ACL_ERROR_INVALID_PARAM, "aclsysGetCANNVersion: no such package");
    }
    *version = {};
    copy(version->version, kVersion);
    copy(version->majorVersion, "8");
    copy(version->minorVersion, "5");
    copy(version->releaseVersion, "0");
    copy(version->patchVersion, "");
    return ACL_SUCCESS;
  });
}

// The caller's buffer has 128 bytes.
aclError aclsysGetVersionStr(char* package, char* version) {
  return entry("aclsysGetVersionStr", [&] {
    if (package == nullptr || version == nullptr) return sim::null_argument("aclsysGetVersionStr");
    std::strcpy(version, kVersion);
    return ACL_SUCCESS;
  });
}

// Not of AscendCL: by this name a program recognises that its libascendcl is simulated.
const char* simulated_ascend() { return "Ascend, computed on the CPU"; }
}
