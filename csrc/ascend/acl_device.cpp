#include "ascend/acl_device.h"

#include <array>
#include <tuple>
#include <utility>

#include "ascend/codes.h"
#include "ascend/libraries.h"
#include "base/error.h"

namespace tt::ascend {
namespace {

struct Destroy {
  void operator()(AclTensor* tensor) const { opapi().aclDestroyTensor(tensor); }
  void operator()(AclScalar* scalar) const { opapi().aclDestroyScalar(scalar); }
  void operator()(AclIntArray* array) const { opapi().aclDestroyIntArray(array); }
};
template <typename Handle>
using Owned = std::unique_ptr<Handle, Destroy>;

AclDataType to_acl(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return kAclFloat;
    case DType::kFloat16:
      return kAclFloat16;
    case DType::kBFloat16:
      return kAclBFloat16;
    case DType::kFloat64:
      return kAclDouble;
    case DType::kBytes:
      return kAclUInt8;
  }
  throw Error("unknown dtype");
}

// (rows, numel) elements at `where`, or (numel,) for no rows; a row starts `stride` elements after the one before.
Owned<AclTensor> tensor(const std::byte* where, DType dtype, std::size_t numel, std::size_t rows = 0,
                        std::size_t stride = 0) {
  const auto columns = static_cast<std::int64_t>(numel);
  const std::array<std::int64_t, 2> sizes{static_cast<std::int64_t>(rows), columns};
  const std::array<std::int64_t, 2> strides{static_cast<std::int64_t>(stride), 1};
  const std::int64_t storage = rows == 0 ? columns : static_cast<std::int64_t>((rows - 1) * stride) + columns;
  const std::size_t first = rows == 0 ? 1 : 0;
  Owned<AclTensor> made(opapi().aclCreateTensor(sizes.data() + first, 2 - first, to_acl(dtype), strides.data() + first,
                                                0, kAclFormatNd, &storage, 1, const_cast<std::byte*>(where)));
  if (made == nullptr) {
    throw Error("aclCreateTensor made no tensor: the host may have no memory left");
  }
  return made;
}

using SecondPhase = AclStatus (*)(void*, std::uint64_t, AclOpExecutor*, AclStream);

// An aclnn operator: `prepare(handles…, bytes, executor)` is its first phase; the handles live until its second phase
// has returned.
template <typename Prepare, typename... Handles>
void launch(Queue& queue, const char* name, const Prepare& prepare, SecondPhase second, Handles... handles) {
  std::uint64_t bytes = 0;
  AclOpExecutor* executor = nullptr;
  if (const AclStatus status = prepare(handles.get()..., &bytes, &executor); status != kSuccess) {
    const char* said = ascendcl().aclGetRecentErrMsg();
    throw Error(
        str(name, " failed: ", explain(Source::kAcl, status), said == nullptr ? "" : str(". CANN says: ", said)));
  }
  // std::function must be copyable, and the handles are not.
  const auto alive = std::make_shared<std::tuple<Handles...>>(std::move(handles)...);
  auto workspace = bytes == 0 ? nullptr : queue.workspace(bytes);
  queue.submit(name, [second, bytes, executor, workspace = std::move(workspace), alive](AclStream stream) {
    return second(workspace.get(), bytes, executor, stream);
  });
}

}  // namespace

AclDevice::AclDevice(std::shared_ptr<runtime::Device> streams, std::shared_ptr<Queue> queue)
    : streams_(std::move(streams)), queue_(std::move(queue)) {
  ascendcl();
  opapi();
}

void AclDevice::cast(std::byte* dst, DType dst_dtype, const std::byte* src, DType src_dtype, std::size_t numel) {
  if (numel == 0) {
    return;
  }
  auto to = tensor(dst, dst_dtype, numel);
  auto from = tensor(src, src_dtype, numel);
  launch(*queue_, "aclnnInplaceCopy", opapi().aclnnInplaceCopyGetWorkspaceSize, opapi().aclnnInplaceCopy, std::move(to),
         std::move(from));
}

void AclDevice::add(std::byte* dst, DType dst_dtype, const std::byte* src, DType src_dtype, std::size_t numel) {
  if (numel == 0) {
    return;
  }
  auto to = tensor(dst, dst_dtype, numel);
  auto from = tensor(src, src_dtype, numel);
  float one = 1;
  Owned<AclScalar> alpha(opapi().aclCreateScalar(&one, kAclFloat));
  launch(*queue_, "aclnnInplaceAdd", opapi().aclnnInplaceAddGetWorkspaceSize, opapi().aclnnInplaceAdd, std::move(to),
         std::move(from), std::move(alpha));
}

void AclDevice::sum(std::byte* dst, std::span<const std::byte* const> sources, std::size_t numel,
                    const runtime::SumSpec& spec) {
  const std::size_t item = size_of(spec.wire);
  const std::ptrdiff_t step = sources.size() > 1 ? sources[1] - sources[0] : static_cast<std::ptrdiff_t>(numel * item);
  bool is_block = step > 0 && static_cast<std::size_t>(step) % item == 0;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    is_block = is_block && sources[i] != nullptr && sources[i] == sources[0] + static_cast<std::ptrdiff_t>(i) * step;
  }
  const bool is_mean = spec.divisor == static_cast<double>(sources.size()) && !spec.accumulate &&
                       spec.round_to == spec.result && spec.result == DType::kFloat32;
  if (!is_block || !is_mean || numel == 0) {
    streams_->sum(dst, sources, numel, spec);
    return;
  }
  auto from = tensor(sources[0], spec.wire, numel, sources.size(), static_cast<std::size_t>(step) / item);
  auto to = tensor(dst, spec.result, numel);
  const std::int64_t first = 0;
  Owned<AclIntArray> dims(opapi().aclCreateIntArray(&first, 1));
  const auto mean = [result = to_acl(spec.result)](AclTensor* rows, AclTensor* average, AclIntArray* over,
                                                   std::uint64_t* bytes, AclOpExecutor** executor) {
    return opapi().aclnnMeanGetWorkspaceSize(rows, over, /*keep_dims=*/false, result, average, bytes, executor);
  };
  launch(*queue_, "aclnnMean", mean, opapi().aclnnMean, std::move(from), std::move(to), std::move(dims));
}

void AclDevice::zero(std::byte* dst, std::size_t bytes) {
  if (bytes > 0) {
    queue_->submit("aclrtMemsetAsync", [call = ascendcl().aclrtMemsetAsync, dst, bytes](AclStream stream) {
      return call(dst, bytes, 0, bytes, stream);
    });
  }
}

}  // namespace tt::ascend
