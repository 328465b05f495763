// The part of the CANN ABI that this backend calls: our own declarations, compared with torch_npu's headers by a test.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tt::ascend {

using AclStatus = int;  // aclError, aclnnStatus
using HcclStatus = int;
using AclStream = void*;
using HcclComm = void*;
inline constexpr AclStatus kSuccess = 0;

// aclDataType
enum AclDataType : int { kAclFloat = 0, kAclFloat16 = 1, kAclUInt8 = 4, kAclDouble = 11, kAclBFloat16 = 27 };
// aclFormat
enum AclFormat : int { kAclFormatNd = 2 };
// HcclDataType
enum HcclDataType : int {
  kHcclInt8 = 0,
  kHcclFloat16 = 3,
  kHcclFloat32 = 4,
  kHcclInt64 = 5,
  kHcclFloat64 = 10,
  kHcclBFloat16 = 11,
};
// HcclReduceOp
enum HcclReduceOp : int { kHcclSum = 0 };

struct HcclRootInfo {
  char bytes[4108];
};

struct AclTensor;
struct AclScalar;
struct AclIntArray;
struct AclOpExecutor;

// X(result, name, (arguments)); one list per library.
#define TT_ASCENDCL_FUNCTIONS(X)                                                                  \
  X(AclStatus, aclrtMemsetAsync,                                                                  \
    (void* where, std::size_t capacity, std::int32_t value, std::size_t bytes, AclStream stream)) \
  X(const char*, aclGetRecentErrMsg, ())

#define TT_OPAPI_FUNCTIONS(X)                                                                                        \
  X(AclTensor*, aclCreateTensor,                                                                                     \
    (const std::int64_t* sizes, std::uint64_t dims, AclDataType dtype, const std::int64_t* strides,                  \
     std::int64_t offset, AclFormat format, const std::int64_t* storage_sizes, std::uint64_t storage_dims,           \
     void* where))                                                                                                   \
  X(AclStatus, aclDestroyTensor, (const AclTensor* tensor))                                                          \
  X(AclScalar*, aclCreateScalar, (void* value, AclDataType dtype))                                                   \
  X(AclStatus, aclDestroyScalar, (const AclScalar* scalar))                                                          \
  X(AclIntArray*, aclCreateIntArray, (const std::int64_t* values, std::uint64_t count))                              \
  X(AclStatus, aclDestroyIntArray, (const AclIntArray* array))                                                       \
  X(AclStatus, aclnnInplaceCopyGetWorkspaceSize,                                                                     \
    (AclTensor * dst, const AclTensor* src, std::uint64_t* bytes, AclOpExecutor** executor))                         \
  X(AclStatus, aclnnInplaceCopy, (void* workspace, std::uint64_t bytes, AclOpExecutor* executor, AclStream stream))  \
  X(AclStatus, aclnnInplaceAddGetWorkspaceSize,                                                                      \
    (AclTensor * dst, const AclTensor* src, const AclScalar* alpha, std::uint64_t* bytes, AclOpExecutor** executor)) \
  X(AclStatus, aclnnInplaceAdd, (void* workspace, std::uint64_t bytes, AclOpExecutor* executor, AclStream stream))   \
  X(AclStatus, aclnnMeanGetWorkspaceSize,                                                                            \
    (const AclTensor* src, const AclIntArray* dims, bool keep_dims, AclDataType dtype, AclTensor* dst,               \
     std::uint64_t* bytes, AclOpExecutor** executor))                                                                \
  X(AclStatus, aclnnMean, (void* workspace, std::uint64_t bytes, AclOpExecutor* executor, AclStream stream))

#define TT_HCCL_FUNCTIONS(X)                                                                                          \
  X(HcclStatus, HcclGetRootInfo, (HcclRootInfo * root))                                                               \
  X(HcclStatus, HcclCommInitRootInfo,                                                                                 \
    (std::uint32_t ranks, const HcclRootInfo* root, std::uint32_t rank, HcclComm* comm))                              \
  X(HcclStatus, HcclCommDestroy, (HcclComm comm))                                                                     \
  X(HcclStatus, HcclGetCommAsyncError, (HcclComm comm, HcclStatus * error))                                           \
  X(HcclStatus, HcclAllGather,                                                                                        \
    (void* send, void* recv, std::uint64_t send_count, HcclDataType dtype, HcclComm comm, AclStream stream))          \
  X(HcclStatus, HcclReduceScatter,                                                                                    \
    (void* send, void* recv, std::uint64_t recv_count, HcclDataType dtype, HcclReduceOp op, HcclComm comm,            \
     AclStream stream))                                                                                               \
  X(HcclStatus, HcclAllReduce,                                                                                        \
    (void* send, void* recv, std::uint64_t count, HcclDataType dtype, HcclReduceOp op, HcclComm comm,                 \
     AclStream stream))                                                                                               \
  X(HcclStatus, HcclAlltoAll,                                                                                         \
    (const void* send, std::uint64_t send_count, HcclDataType send_dtype, const void* recv, std::uint64_t recv_count, \
     HcclDataType recv_dtype, HcclComm comm, AclStream stream))

}  // namespace tt::ascend
