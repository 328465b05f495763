// The part of the aclnn interface that every operator shares: handles for arguments and the two-phase call. Our own
// declarations. The operators themselves are declared where they are defined, see opapi/operator.h.
#pragma once

#include <cstdint>

#include "abi/acl.h"

struct aclTensor;
struct aclScalar;
struct aclIntArray;
struct aclBoolArray;
struct aclFloatArray;
struct aclTensorList;
struct aclScalarList;
struct aclOpExecutor;

using aclnnStatus = int32_t;
constexpr aclnnStatus ACLNN_SUCCESS = 0;
constexpr aclnnStatus ACLNN_ERR_PARAM_NULLPTR = 161001;
constexpr aclnnStatus ACLNN_ERR_PARAM_INVALID = 161002;
constexpr aclnnStatus ACLNN_ERR_RUNTIME_ERROR = 361001;
constexpr aclnnStatus ACLNN_ERR_INNER = 561000;

extern "C" {

// `offset` counts elements from `data`, the start of the storage. Sizes and strides are copied.
aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t dimensions, aclDataType type, const int64_t* strides,
                           int64_t offset, aclFormat format, const int64_t* storage_sizes, uint64_t storage_dimensions,
                           void* data);
aclScalar* aclCreateScalar(void* value, aclDataType type);
aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t size);
aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t size);
aclFloatArray* aclCreateFloatArray(const float* values, uint64_t size);
aclTensorList* aclCreateTensorList(const aclTensor* const* values, uint64_t size);  // takes the tensors over
aclScalarList* aclCreateScalarList(const aclScalar* const* values, uint64_t size);  // takes the scalars over

aclnnStatus aclDestroyTensor(const aclTensor* tensor);
aclnnStatus aclDestroyScalar(const aclScalar* scalar);
aclnnStatus aclDestroyIntArray(const aclIntArray* array);
aclnnStatus aclDestroyBoolArray(const aclBoolArray* array);
aclnnStatus aclDestroyFloatArray(const aclFloatArray* array);
aclnnStatus aclDestroyTensorList(const aclTensorList* list);
aclnnStatus aclDestroyScalarList(const aclScalarList* list);
aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor* executor);

// The sizes an operator gave an output whose shape depends on values. The caller deletes `*sizes` with delete[].
aclnnStatus aclGetViewShape(const aclTensor* tensor, int64_t** sizes, uint64_t* dimensions);

}  // extern "C"
