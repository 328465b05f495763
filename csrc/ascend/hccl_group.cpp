#include "ascend/hccl_group.h"

#include <cstring>
#include <utility>

#include "ascend/codes.h"
#include "ascend/libraries.h"
#include "base/error.h"

namespace tt::ascend {
namespace {

void check(HcclStatus status, const char* what) {
  if (status != 0) {
    const char* said = ascendcl().aclGetRecentErrMsg();
    throw Error(
        str(what, " failed: ", explain(Source::kHccl, status), said == nullptr ? "" : str(". CANN says: ", said)));
  }
}

HcclDataType to_hccl(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return kHcclFloat32;
    case DType::kFloat16:
      return kHcclFloat16;
    case DType::kBFloat16:
      return kHcclBFloat16;
    case DType::kFloat64:
      return kHcclFloat64;
    case DType::kBytes:
      return kHcclInt8;
  }
  throw Error("unknown dtype");
}

}  // namespace

std::string new_root_info() {
  HcclRootInfo root{};
  check(hccl().HcclGetRootInfo(&root), "HcclGetRootInfo");
  return {root.bytes, sizeof root.bytes};
}

HcclGroup::HcclGroup(std::shared_ptr<Queue> queue, int rank, int size, const std::string& root_info)
    : queue_(std::move(queue)), rank_(rank), size_(size) {
  HcclRootInfo root{};
  if (root_info.size() != sizeof root.bytes) {
    throw ValueError(str("root info of ", root_info.size(), " bytes: it has ", sizeof root.bytes));
  }
  std::memcpy(root.bytes, root_info.data(), sizeof root.bytes);
  HcclComm comm = nullptr;
  check(hccl().HcclCommInitRootInfo(static_cast<std::uint32_t>(size), &root, static_cast<std::uint32_t>(rank), &comm),
        "HcclCommInitRootInfo");
  comm_ = std::shared_ptr<void>(comm, [](void* dropped) { hccl().HcclCommDestroy(dropped); });
}

void HcclGroup::all_gather(std::byte* all, std::size_t bytes) {
  std::byte* mine = all + static_cast<std::size_t>(rank_) * bytes;
  queue_->submit("HcclAllGather", [comm = comm_, all, mine, bytes](AclStream stream) {
    return hccl().HcclAllGather(mine, all, bytes, kHcclInt8, comm.get(), stream);
  });
}

void HcclGroup::all_to_all(std::byte* received, const std::byte* sent, std::size_t bytes) {
  queue_->submit("HcclAlltoAll", [comm = comm_, received, sent, bytes](AclStream stream) {
    return hccl().HcclAlltoAll(sent, bytes, kHcclInt8, received, bytes, kHcclInt8, comm.get(), stream);
  });
}

void HcclGroup::reduce_scatter(std::byte* received, std::byte* sent, std::size_t numel, DType dtype) {
  queue_->submit("HcclReduceScatter", [comm = comm_, received, sent, numel, dtype](AclStream stream) {
    return hccl().HcclReduceScatter(sent, received, numel, to_hccl(dtype), kHcclSum, comm.get(), stream);
  });
}

void HcclGroup::all_reduce(std::byte* data, std::size_t numel, DType dtype) {
  queue_->submit("HcclAllReduce", [comm = comm_, data, numel, dtype](AclStream stream) {
    return hccl().HcclAllReduce(data, data, numel, to_hccl(dtype), kHcclSum, comm.get(), stream);
  });
}

std::string HcclGroup::error() const {
  HcclStatus status = 0;
  const HcclStatus asked = hccl().HcclGetCommAsyncError(comm_.get(), &status);
  if (asked != 0) {
    status = asked;
  }
  return status == 0 ? "" : explain(Source::kHccl, status);
}

}  // namespace tt::ascend
