// The entry points that make, end and describe communicators.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <thread>

#include "hccl/operations.h"
#include "hccl/settings.h"
#include "runtime/card_memory.h"

namespace sim::hccl {
namespace {

constexpr char kMagic[] = "simulated hccl root";

[[noreturn]] void not_simulated(const std::string& why) {
  throw Error(HCCL_E_NOT_SUPPORT, "not simulated" + (why.empty() ? "" : ": " + why));
}

void check_pointer(const char* what, const void* pointer) {
  if (pointer == nullptr) throw Error(HCCL_E_PTR, std::string(what) + " is null");
}

void fill_root_info(HcclRootInfo* root_info) {
  check_pointer("rootInfo", root_info);
  const std::string name = "tt-sim-hccl-" + random_name();
  serve_group(name);
  std::memset(root_info->internal, 0, sizeof(root_info->internal));
  std::memcpy(root_info->internal, kMagic, sizeof(kMagic));
  std::memcpy(root_info->internal + sizeof(kMagic), name.data(), name.size());
}

HcclComm make_communicator(uint32_t ranks, const HcclRootInfo* root_info, uint32_t rank, const HcclCommConfig* config) {
  check_pointer("rootInfo", root_info);
  if (ranks == 0 || rank >= ranks) {
    throw Error(HCCL_E_PARA, "rank " + std::to_string(rank) + " of " + std::to_string(ranks));
  }
  if (std::memcmp(root_info->internal, kMagic, sizeof(kMagic)) != 0) {
    throw Error(HCCL_E_PARA, "the root info was not made by HcclGetRootInfo of the simulated HCCL");
  }
  const char* name = root_info->internal + sizeof(kMagic);
  Introduction self;
  self.ranks = ranks;
  self.rank = rank;
  return register_communicator(Communicator::join(std::string(name, strnlen(name, 64)), self, config, false));
}

HcclComm make_subgroup(HcclComm parent, const std::vector<uint32_t>& members, uint64_t id, uint32_t rank,
                       const HcclCommConfig* config) {
  const auto communicator = find_communicator(parent);
  std::uint64_t hash = 14695981039346656037u;
  for (std::size_t i = 0; i < members.size(); ++i) {
    check_rank(*communicator, "a member of rankIds", members[i]);
    if (std::count(members.begin(), members.end(), members[i]) != 1) {
      throw Error(HCCL_E_PARA, "rankIds names rank " + std::to_string(members[i]) + " twice");
    }
    hash = (hash ^ members[i]) * 1099511628211u;
  }
  if (rank >= members.size() || members[rank] != communicator->rank()) {
    throw Error(HCCL_E_PARA, "subCommRankId = " + std::to_string(rank) + " is not the place of this rank (" +
                                 std::to_string(communicator->rank()) + ") in rankIds");
  }
  // A name that only members of the parent know, another one at each call.
  const std::uint64_t key = (hash ^ id) * 1099511628211u;
  const std::string name =
      communicator->secret() + "/" + std::to_string(key) + "-" + std::to_string(communicator->next_subgroup(key));
  if (rank == 0) serve_group(name);
  Introduction self;
  self.ranks = static_cast<std::uint32_t>(members.size());
  self.rank = rank;
  return register_communicator(Communicator::join(name, self, config, true));
}

std::atomic<int32_t> deterministic{0};

}  // namespace
}  // namespace sim::hccl

using namespace sim::hccl;

extern "C" {

HcclResult HcclGetRootInfo(HcclRootInfo* rootInfo) {
  return guarded("HcclGetRootInfo", [&] { fill_root_info(rootInfo); });
}

HcclResult HcclGetRootInfoScalable(HcclRootInfo* rootInfo) {
  return guarded("HcclGetRootInfoScalable", [&] { fill_root_info(rootInfo); });
}

HcclResult HcclCommInitRootInfo(uint32_t nRanks, const HcclRootInfo* rootInfo, uint32_t rank, HcclComm* comm) {
  return guarded("HcclCommInitRootInfo", [&] {
    check_pointer("comm", comm);
    *comm = make_communicator(nRanks, rootInfo, rank, nullptr);
  });
}

HcclResult HcclCommInitRootInfoConfig(uint32_t nRanks, const HcclRootInfo* rootInfo, uint32_t rank,
                                      const HcclCommConfig* config, HcclComm* comm) {
  return guarded("HcclCommInitRootInfoConfig", [&] {
    check_pointer("config", config);
    check_pointer("comm", comm);
    *comm = make_communicator(nRanks, rootInfo, rank, config);
  });
}

// Several roots share the work on large clusters; here the first one does it all.
HcclResult HcclCommInitRootInfoScalable(uint32_t nRanks, uint32_t nRoot, const HcclRootInfo* rootInfoList,
                                        uint32_t rank, uint32_t nExtRoot, const HcclCommConfig* config,
                                        HcclComm* comm) {
  return guarded("HcclCommInitRootInfoScalable", [&] {
    (void)nExtRoot;
    check_pointer("comm", comm);
    if (nRoot == 0) throw Error(HCCL_E_PARA, "nRoot = 0");
    *comm = make_communicator(nRanks, rootInfoList, rank, config);
  });
}

HcclResult HcclCommInitClusterInfo(const char*, uint32_t, HcclComm*) {
  return guarded("HcclCommInitClusterInfo", [] { not_simulated("rank tables; unset RANK_TABLE_FILE"); });
}

HcclResult HcclCommInitClusterInfoConfig(const char*, uint32_t, HcclCommConfig*, HcclComm*) {
  return guarded("HcclCommInitClusterInfoConfig", [] { not_simulated("rank tables; unset RANK_TABLE_FILE"); });
}

// All cards in this process: every rank joins on a thread of its own.
HcclResult HcclCommInitAll(uint32_t ndev, int32_t* devices, HcclComm* comms) {
  return guarded("HcclCommInitAll", [&] {
    check_pointer("devices", devices);
    check_pointer("comms", comms);
    HcclRootInfo root_info;
    fill_root_info(&root_info);
    std::vector<std::exception_ptr> errors(ndev);
    {
      std::vector<std::jthread> threads;
      for (uint32_t rank = 0; rank < ndev; ++rank) {
        threads.emplace_back([&, rank] {
          try {
            if (aclrtSetDevice(devices[rank]) != ACL_SUCCESS) {
              throw Error(HCCL_E_RUNTIME, "aclrtSetDevice(" + std::to_string(devices[rank]) + ") failed");
            }
            comms[rank] = make_communicator(ndev, &root_info, rank, nullptr);
          } catch (...) {
            errors[rank] = std::current_exception();
          }
        });
      }
    }
    for (const std::exception_ptr& error : errors) {
      if (error) std::rethrow_exception(error);
    }
  });
}

HcclResult HcclCreateSubCommConfig(HcclComm* comm, uint32_t rankNum, uint32_t* rankIds, uint64_t subCommId,
                                   uint32_t subCommRankId, HcclCommConfig* config, HcclComm* subComm) {
  return guarded("HcclCreateSubCommConfig", [&] {
    check_pointer("comm", comm);
    check_pointer("subComm", subComm);
    *subComm = nullptr;
    // A rank outside the new communicator may call as well: it says so with an empty list and the largest id.
    if (rankIds == nullptr && subCommId == 0xffffffff) return;
    check_pointer("rankIds", rankIds);
    check_pointer("config", config);
    if (rankNum == 0) throw Error(HCCL_E_PARA, "rankNum = 0");
    *subComm = make_subgroup(*comm, {rankIds, rankIds + rankNum}, subCommId, subCommRankId, config);
  });
}

HcclResult HcclCommDestroy(HcclComm comm) {
  return guarded("HcclCommDestroy", [&] { forget_communicator(comm)->leave(); });
}

HcclResult HcclGetRankSize(HcclComm comm, uint32_t* rankSize) {
  return guarded("HcclGetRankSize", [&] {
    check_pointer("rankSize", rankSize);
    *rankSize = find_communicator(comm)->ranks();
  });
}

HcclResult HcclGetRankId(HcclComm comm, uint32_t* rank) {
  return guarded("HcclGetRankId", [&] {
    check_pointer("rank", rank);
    *rank = find_communicator(comm)->rank();
  });
}

HcclResult HcclGetCommName(HcclComm comm, char* commName) {
  return guarded("HcclGetCommName", [&] {
    check_pointer("commName", commName);
    const std::string& name = find_communicator(comm)->name();
    std::memcpy(commName, name.c_str(), name.size() + 1);  // shorter than 128 bytes
  });
}

HcclResult HcclGetCommAsyncError(HcclComm comm, HcclResult* asyncError) {
  return guarded("HcclGetCommAsyncError", [&] {
    check_pointer("asyncError", asyncError);
    *asyncError = find_communicator(comm)->async_error();
  });
}

uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_RESERVED; }

// The simulator always adds in rank order; the setting is kept and has no effect.
HcclResult HcclSetConfig(HcclConfig config, HcclConfigValue configValue) {
  return guarded("HcclSetConfig", [&] {
    if (config != HCCL_DETERMINISTIC) not_simulated("configuration item " + std::to_string(config));
    deterministic = configValue.value;
  });
}

HcclResult HcclGetConfig(HcclConfig config, HcclConfigValue* configValue) {
  return guarded("HcclGetConfig", [&] {
    check_pointer("configValue", configValue);
    if (config != HCCL_DETERMINISTIC) not_simulated("configuration item " + std::to_string(config));
    configValue->value = deterministic;
  });
}

HcclResult HcclSetCommConfig(HcclComm, HcclConfig, HcclConfigValue) {
  return guarded("HcclSetCommConfig", [] { not_simulated(""); });
}

HcclResult HcclGetCommConfig(HcclComm, HcclConfig, HcclConfigValue*) {
  return guarded("HcclGetCommConfig", [] { not_simulated(""); });
}

// Announcing memory saves a real card a copy. Here nothing is ever staged: the call is checked, and changes nothing.
HcclResult HcclCommRegister(HcclComm comm, void* addr, uint64_t size, void** handle, uint32_t flag) {
  return guarded("HcclCommRegister", [&] {
    (void)flag;
    check_pointer("handle", handle);
    const Buffer range(*find_communicator(comm), "addr", addr, size, HCCL_DATA_TYPE_INT8);
    if (range.bytes == 0) throw Error(HCCL_E_PARA, "size = 0");
    *handle = addr;
  });
}

HcclResult HcclCommDeregister(HcclComm comm, void* handle) {
  return guarded("HcclCommDeregister", [&] {
    find_communicator(comm);
    check_pointer("handle", handle);
  });
}

HcclResult HcclCommExchangeMem(HcclComm comm, void* windowHandle, uint32_t* peerRanks, uint32_t peerRankNum) {
  return guarded("HcclCommExchangeMem", [&] {
    const auto communicator = find_communicator(comm);
    check_pointer("windowHandle", windowHandle);
    if (peerRankNum != 0) check_pointer("peerRanks", peerRanks);
    for (uint32_t i = 0; i < peerRankNum; ++i) check_rank(*communicator, "a member of peerRanks", peerRanks[i]);
  });
}

HcclResult HcclCommSuspend(HcclComm) {
  return guarded("HcclCommSuspend", [] { not_simulated(""); });
}
HcclResult HcclCommResume(HcclComm) {
  return guarded("HcclCommResume", [] { not_simulated(""); });
}
HcclResult HcclCommSetMemoryRange(HcclComm, void*, size_t, size_t, uint64_t) {
  return guarded("HcclCommSetMemoryRange", [] { not_simulated(""); });
}
HcclResult HcclCommUnsetMemoryRange(HcclComm, void*) {
  return guarded("HcclCommUnsetMemoryRange", [] { not_simulated(""); });
}
HcclResult HcclCommActivateCommMemory(HcclComm, void*, size_t, size_t, aclrtDrvMemHandle, uint64_t) {
  return guarded("HcclCommActivateCommMemory", [] { not_simulated(""); });
}
HcclResult HcclCommDeactivateCommMemory(HcclComm, void*) {
  return guarded("HcclCommDeactivateCommMemory", [] { not_simulated(""); });
}
HcclResult HcclCommWorkingDevNicSet(HcclComm, uint32_t*, bool*, uint32_t) {
  return guarded("HcclCommWorkingDevNicSet", [] { not_simulated(""); });
}

}  // extern "C"
