// The storage behind one bucket's gathered parameters. It owns no memory: it is seated on the arena while the bucket is
// gathered.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace tt {

class BucketStorage {
 public:
  // `bytes`: the whole bucket. `message`: what a read of an unseated parameter raises.
  BucketStorage(std::int64_t bytes, c10::Device device, std::string message);

  // A tensor of `sizes` and `dtype` that starts `byte_offset` into the bucket; it follows the seat.
  at::Tensor view(std::int64_t byte_offset, at::IntArrayRef sizes, c10::ScalarType dtype) const;

  void seat(void* where);
  void unseat();

 private:
  c10::Storage storage_;
  std::string message_;
};

}  // namespace tt
