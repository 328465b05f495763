#include "ascend/libraries.h"

#include <dlfcn.h>

#include <cstdlib>
#include <utility>

#include "base/error.h"

namespace tt::ascend {
namespace {

// A library with the functions of `Table`, or why it cannot be used.
template <typename Table>
struct Library {
  Table table;
  std::string missing;  // empty: usable
};

void* open(const std::string& file, std::string& tried) {
  std::vector<std::string> candidates{file};
  for (const auto& folder : cann_folders()) {
    candidates.push_back(folder + "/" + file);
  }
  for (const auto& candidate : candidates) {
    if (void* handle = ::dlopen(candidate.c_str(), RTLD_LAZY | RTLD_LOCAL); handle != nullptr) {
      return handle;
    }
    const char* why = ::dlerror();
    tried += str("\n  ", candidate, ": ", why == nullptr ? "cannot be opened" : why);
  }
  return nullptr;
}

// `names`: where to put the address of each function. Libraries stay open for good: handles and threads of theirs may
// outlive everything of ours.
std::string load(const std::string& file, const std::vector<std::pair<const char*, void**>>& names) {
  std::string tried;
  void* handle = open(file, tried);
  if (handle == nullptr) {
    return str(file, " was not found:", tried);
  }
  std::string missing;
  for (const auto& [name, where] : names) {
    *where = ::dlsym(handle, name);
    if (*where == nullptr) {
      missing += str(missing.empty() ? "" : ", ", name);
    }
  }
  return missing.empty() ? "" : str(file, " lacks ", missing, " (is its CANN older than 8.0?)");
}

#define TT_ENTRY(result, name, arguments) {#name, reinterpret_cast<void**>(&library.table.name)},

const Library<AscendClTable>& ascendcl_library() {
  static const auto loaded = [] {
    Library<AscendClTable> library;
    library.missing = load("libascendcl.so", {TT_ASCENDCL_FUNCTIONS(TT_ENTRY)});
    return library;
  }();
  return loaded;
}

const Library<OpApiTable>& opapi_library() {
  static const auto loaded = [] {
    Library<OpApiTable> library;
    library.missing = load("libopapi.so", {TT_OPAPI_FUNCTIONS(TT_ENTRY)});
    return library;
  }();
  return loaded;
}

const Library<HcclTable>& hccl_library() {
  static const auto loaded = [] {
    Library<HcclTable> library;
    library.missing = load("libhccl.so", {TT_HCCL_FUNCTIONS(TT_ENTRY)});
    return library;
  }();
  return loaded;
}

#undef TT_ENTRY

std::string advice() {
  return "Install CANN and run `source <CANN>/set_env.sh`, or set ASCEND_HOME_PATH to its folder; `torchtitan-npu "
         "doctor` shows what is found";
}

template <typename Table>
const Table& usable(const Library<Table>& library) {
  if (!library.missing.empty()) {
    throw Error(str("the Ascend NPU cannot be used: ", library.missing, "\n", advice()));
  }
  return library.table;
}

}  // namespace

std::vector<std::string> cann_folders() {
  std::vector<std::string> folders;
  for (const char* variable : {"ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"}) {
    if (const char* root = std::getenv(variable); root != nullptr && *root != '\0') {
      folders.push_back(std::string(root) + "/lib64");
    }
  }
  folders.emplace_back("/usr/local/Ascend/cann/lib64");
  folders.emplace_back("/usr/local/Ascend/ascend-toolkit/latest/lib64");
  return folders;
}

const AscendClTable& ascendcl() { return usable(ascendcl_library()); }
const OpApiTable& opapi() { return usable(opapi_library()); }
const HcclTable& hccl() { return usable(hccl_library()); }

std::string missing_from_cann() {
  std::string all;
  for (const auto* missing : {&ascendcl_library().missing, &opapi_library().missing, &hccl_library().missing}) {
    if (!missing->empty()) {
      all += str(all.empty() ? "" : "\n", *missing);
    }
  }
  return all.empty() ? all : str(all, "\n", advice());
}

}  // namespace tt::ascend
