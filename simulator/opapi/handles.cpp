#include "opapi/handles.h"

#include <ATen/EmptyTensor.h>

#include <cstring>
#include <exception>
#include <new>
#include <sstream>

#include "opapi/operator.h"
#include "runtime/card_memory.h"

namespace sim::opapi {

at::ScalarType scalar_type(aclDataType type) {
  switch (type) {
    case ACL_FLOAT:
      return at::kFloat;
    case ACL_FLOAT16:
      return at::kHalf;
    case ACL_BF16:
      return at::kBFloat16;
    case ACL_DOUBLE:
      return at::kDouble;
    case ACL_INT8:
      return at::kChar;
    case ACL_INT16:
      return at::kShort;
    case ACL_INT32:
      return at::kInt;
    case ACL_INT64:
      return at::kLong;
    case ACL_UINT8:
      return at::kByte;
    case ACL_UINT16:
      return at::kUInt16;
    case ACL_UINT32:
      return at::kUInt32;
    case ACL_UINT64:
      return at::kUInt64;
    case ACL_BOOL:
      return at::kBool;
    case ACL_COMPLEX32:
      return at::kComplexHalf;
    case ACL_COMPLEX64:
      return at::kComplexFloat;
    case ACL_COMPLEX128:
      return at::kComplexDouble;
    case ACL_FLOAT8_E5M2:
      return at::kFloat8_e5m2;
    case ACL_FLOAT8_E4M3FN:
      return at::kFloat8_e4m3fn;
    case ACL_FLOAT8_E8M0:
      return at::kFloat8_e8m0fnu;
    default:
      throw InvalidArgument("aclDataType " + std::to_string(type) + " is not simulated");
  }
}

View::View(const aclTensor* tensor, Role role)
    : sizes(tensor->sizes),
      strides(tensor->strides),
      type(scalar_type(tensor->type)),
      address(tensor->data),
      handle(const_cast<aclTensor*>(tensor)),
      role(role) {
  const int64_t element = static_cast<int64_t>(c10::elementSize(type));
  address += tensor->offset * element;
  int64_t storage = 1;
  for (int64_t size : tensor->storage_sizes) storage *= size;
  int64_t last = tensor->offset;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] < 0 || strides[d] < 0) throw InvalidArgument("negative size or stride in " + describe());
    last += (sizes[d] - 1) * strides[d];
  }
  if (numel() == 0) return;
  if (tensor->data == nullptr) throw InvalidArgument(describe() + " has no memory");
  if (!tensor->storage_sizes.empty() && (tensor->offset < 0 || last >= storage)) {
    throw InvalidArgument(describe() + " reaches element " + std::to_string(last) + " of a storage of " +
                          std::to_string(storage));
  }
}

int64_t View::numel() const {
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
  return count;
}

Access View::access() const {
  const bool writes = role != Role::kRead;
  if (numel() == 0) return {address, 0, writes};
  int64_t elements = 1;
  for (size_t d = 0; d < sizes.size(); ++d) elements += (sizes[d] - 1) * strides[d];
  return {address, static_cast<size_t>(elements) * c10::elementSize(type), writes};
}

std::string View::describe() const {
  std::ostringstream text;
  text << type << " " << at::IntArrayRef(sizes);
  return text.str();
}

at::Tensor View::tensor() const {
  if (checking()) return at::detail::empty_strided_meta(sizes, strides, type);
  return at::from_blob(kernel_address(address), sizes, strides, at::TensorOptions(type));
}

namespace {

at::Scalar scalar_value(const void* value, aclDataType type) {
  const auto read = [value](auto zero) {
    std::memcpy(&zero, value, sizeof(zero));
    return zero;
  };
  switch (scalar_type(type)) {
    case at::kFloat:
      return read(float{});
    case at::kHalf:
      return static_cast<float>(read(at::Half{}));
    case at::kBFloat16:
      return static_cast<float>(read(at::BFloat16{}));
    case at::kDouble:
      return read(double{});
    case at::kChar:
      return static_cast<int64_t>(read(int8_t{}));
    case at::kShort:
      return static_cast<int64_t>(read(int16_t{}));
    case at::kInt:
      return static_cast<int64_t>(read(int32_t{}));
    case at::kLong:
      return read(int64_t{});
    case at::kByte:
      return static_cast<int64_t>(read(uint8_t{}));
    case at::kUInt16:
      return static_cast<int64_t>(read(uint16_t{}));
    case at::kUInt32:
      return static_cast<int64_t>(read(uint32_t{}));
    case at::kUInt64:
      return read(uint64_t{});
    case at::kBool:
      return read(bool{});
    case at::kComplexFloat:
      return read(c10::complex<float>{});
    case at::kComplexDouble:
      return read(c10::complex<double>{});
    default:
      throw InvalidArgument("a scalar of aclDataType " + std::to_string(type) + " is not simulated");
  }
}

// A handle made by `make`, or null with the message of what it threw.
template <typename Make>
auto create(const char* function, Make make) -> decltype(make()) {
  try {
    return make();
  } catch (const std::exception& error) {
    set_error_message(std::string(function) + ": " + error.what());
  } catch (...) {
    set_error_message(std::string(function) + ": unknown exception");
  }
  return nullptr;
}

}  // namespace
}  // namespace sim::opapi

using sim::opapi::create;

extern "C" {

aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t dimensions, aclDataType type, const int64_t* strides,
                           int64_t offset, aclFormat /*format*/, const int64_t* storage_sizes,
                           uint64_t storage_dimensions, void* data) {
  return create("aclCreateTensor", [&] {
    auto tensor = std::make_unique<aclTensor>();
    tensor->sizes.assign(sizes, sizes + dimensions);
    if (strides != nullptr) {
      tensor->strides.assign(strides, strides + dimensions);
    } else {
      tensor->strides.resize(dimensions);
      int64_t stride = 1;
      for (uint64_t d = dimensions; d-- > 0; stride *= sizes[d]) tensor->strides[d] = stride;
    }
    tensor->offset = offset;
    tensor->type = type;
    if (storage_sizes != nullptr) tensor->storage_sizes.assign(storage_sizes, storage_sizes + storage_dimensions);
    tensor->data = static_cast<char*>(data);
    return tensor.release();
  });
}

aclScalar* aclCreateScalar(void* value, aclDataType type) {
  return create("aclCreateScalar", [&] {
    return std::make_unique<aclScalar>(aclScalar{sim::opapi::scalar_value(value, type)}).release();
  });
}

aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t size) {
  return create("aclCreateIntArray",
                [&] { return std::make_unique<aclIntArray>(aclIntArray{{values, values + size}}).release(); });
}

aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t size) {
  return create("aclCreateBoolArray", [&] {
    auto array = std::make_unique<aclBoolArray>();
    array->values.assign(values, values + size);
    return array.release();
  });
}

aclFloatArray* aclCreateFloatArray(const float* values, uint64_t size) {
  return create("aclCreateFloatArray",
                [&] { return std::make_unique<aclFloatArray>(aclFloatArray{{values, values + size}}).release(); });
}

aclTensorList* aclCreateTensorList(const aclTensor* const* values, uint64_t size) {
  return create("aclCreateTensorList",
                [&] { return std::make_unique<aclTensorList>(aclTensorList{{values, values + size}}).release(); });
}

aclScalarList* aclCreateScalarList(const aclScalar* const* values, uint64_t size) {
  return create("aclCreateScalarList",
                [&] { return std::make_unique<aclScalarList>(aclScalarList{{values, values + size}}).release(); });
}

aclnnStatus aclDestroyTensor(const aclTensor* tensor) {
  delete tensor;
  return ACLNN_SUCCESS;
}

aclnnStatus aclDestroyScalar(const aclScalar* scalar) {
  delete scalar;
  return ACLNN_SUCCESS;
}

aclnnStatus aclDestroyIntArray(const aclIntArray* array) {
  delete array;
  return ACLNN_SUCCESS;
}

aclnnStatus aclDestroyBoolArray(const aclBoolArray* array) {
  delete array;
  return ACLNN_SUCCESS;
}

aclnnStatus aclDestroyFloatArray(const aclFloatArray* array) {
  delete array;
  return ACLNN_SUCCESS;
}

aclnnStatus aclDestroyTensorList(const aclTensorList* list) {
  if (list != nullptr) {
    for (const aclTensor* tensor : list->values) delete tensor;
  }
  delete list;
  return ACLNN_SUCCESS;
}

aclnnStatus aclDestroyScalarList(const aclScalarList* list) {
  if (list != nullptr) {
    for (const aclScalar* scalar : list->values) delete scalar;
  }
  delete list;
  return ACLNN_SUCCESS;
}

aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor* executor) {
  delete executor;
  return ACLNN_SUCCESS;
}

aclnnStatus aclGetViewShape(const aclTensor* tensor, int64_t** sizes, uint64_t* dimensions) {
  if (tensor == nullptr || sizes == nullptr || dimensions == nullptr) return ACLNN_ERR_PARAM_NULLPTR;
  *sizes = new (std::nothrow) int64_t[tensor->sizes.size()];
  if (*sizes == nullptr) return ACLNN_ERR_INNER;
  std::copy(tensor->sizes.begin(), tensor->sizes.end(), *sizes);
  *dimensions = tensor->sizes.size();
  return ACLNN_SUCCESS;
}

}  // extern "C"
