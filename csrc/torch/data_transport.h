// How the data of a collective travel, once all ranks have agreed on it.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/dtype.h"
#include "base/error.h"

namespace tt {

// One for each queue of collectives: each is used by one thread, in the same order on all ranks. On an accelerator
// everything happens in the order of the current stream; Work::wait() then lets the current stream wait.
class DataTransport {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  virtual ~DataTransport() = default;

  virtual const char* name() const = 0;
  // `all`: (N * bytes,) uint8; `mine` is the view of it that this rank has filled.
  virtual Work all_gather(at::Tensor all, at::Tensor mine) = 0;
  // Both (N * bytes,) uint8: part r of `sent` goes to rank r, part r of `received` is from it.
  virtual Work all_to_all(at::Tensor received, at::Tensor sent) = 0;

  // Whether gradients of `wire` are added up on the way: then reduce_scatter() takes the place of all_to_all().
  virtual bool adds(DType wire) const { return static_cast<void>(wire), false; }
  // `sent`: (N * bytes,) uint8, elements of `wire`; `received`: (bytes,), the sum over all ranks of this rank's part.
  virtual Work reduce_scatter(at::Tensor received, at::Tensor sent, DType wire) {
    TT_CHECK(false, name(), " does not add ", name_of(wire), " on the way: ", received.sizes(), ", ", sent.sizes());
  }
  // `data`: (n,) of a floating type; replaced by the sum over all ranks, added in that type.
  virtual Work all_reduce(at::Tensor data) = 0;
  // Empty, or what has gone wrong with the data of an earlier collective.
  virtual std::string error() const { return ""; }
};

}  // namespace tt
