// What the handles of the aclnn interface hold, and the copies of them that a call keeps: a program may destroy its
// handles as soon as the second phase has returned, before the operator has run.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "abi/aclnn.h"
#include "runtime/stream.h"

struct aclTensor {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  // elements
  int64_t offset = 0;            // elements
  aclDataType type = ACL_DT_UNDEFINED;
  std::vector<int64_t> storage_sizes;
  char* data = nullptr;  // start of the storage
};

struct aclScalar {
  at::Scalar value;
};

struct aclIntArray {
  std::vector<int64_t> values;
};

struct aclBoolArray {
  std::vector<bool> values;
};

struct aclFloatArray {
  std::vector<float> values;
};

struct aclTensorList {
  std::vector<const aclTensor*> values;
};

struct aclScalarList {
  std::vector<const aclScalar*> values;
};

namespace sim::opapi {

// torch's name of a type; throws for one that torch does not have.
at::ScalarType scalar_type(aclDataType type);

enum class Role { kAbsent, kRead, kWritten, kUpdated };  // updated: read and written

// A tensor argument of a call.
struct View {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  at::ScalarType type = at::kFloat;
  char* address = nullptr;      // of the first element, as the program knows it
  aclTensor* handle = nullptr;  // only to be used while the second phase runs
  Role role = Role::kAbsent;

  View() = default;
  View(const aclTensor* tensor, Role role);  // throws when the handle makes no sense

  int64_t numel() const;
  bool present() const { return role != Role::kAbsent; }
  Access access() const;         // the bytes from the first to the last element
  std::string describe() const;  // "float32 [2, 3]"

  // The memory that the view means, for a kernel; without data while arguments are checked, see operator.h.
  at::Tensor tensor() const;
};

}  // namespace sim::opapi
