#include "torch/bucket_storage.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/error.h"
#include "torch/compat.h"

namespace tt {
namespace {

char placeholder = 0;

}  // namespace

BucketStorage::BucketStorage(std::int64_t bytes, c10::Device device, std::string message)
    : message_(std::move(message)) {
  // at::empty, so that a backend makes its own kind of storage; the memory it brings is untouched and dropped at once.
  storage_ = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device)).storage();
  storage_.unsafeGetStorageImpl()->set_resizable(false);
  unseat();
}

at::Tensor BucketStorage::view(std::int64_t byte_offset, at::IntArrayRef sizes, c10::ScalarType dtype) const {
  const auto item = static_cast<std::int64_t>(c10::elementSize(dtype));
  if (byte_offset % item != 0) {
    throw Error(
        str("not supported: a parameter of type ", c10::toString(dtype), " at byte ", byte_offset,
            " of its bucket, which is not a multiple of its element size; wrap integer parameters of different types "
            "in units of their own"));
  }
  auto tensor = at::empty({0}, at::TensorOptions().dtype(dtype).device(storage_.device()));
  std::vector<std::int64_t> strides(sizes.size());
  std::int64_t stride = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<std::int64_t>(sizes[i], 1);
  }
  // set_ asks for the address; any will do.
  torch_compat::seat(*storage_.unsafeGetStorageImpl(), &placeholder);
  tensor.set_(storage_, byte_offset / item, sizes, strides);
  torch_compat::unseat(*storage_.unsafeGetStorageImpl(), message_);
  return tensor;
}

void BucketStorage::seat(void* where) { torch_compat::seat(*storage_.unsafeGetStorageImpl(), where); }

void BucketStorage::unseat() { torch_compat::unseat(*storage_.unsafeGetStorageImpl(), message_); }

}  // namespace tt
