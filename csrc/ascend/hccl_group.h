// An HCCL communicator of our own, and the collectives that the engine sends through it.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "ascend/queue.h"
#include "base/dtype.h"

namespace tt::ascend {

// What rank 0 of a group makes, and gives to the others before they create theirs.
std::string new_root_info();

// Calls come from one thread, in the same order on all ranks, and are asynchronous on the current stream. That stream
// must have finished before the group is dropped.
class HcclGroup {
 public:
  // Collective. Throws Error with HCCL's reason.
  HcclGroup(std::shared_ptr<Queue> queue, int rank, int size, const std::string& root_info);

  int rank() const { return rank_; }
  int size() const { return size_; }

  // `all` holds size() parts of `bytes`; mine is filled already, and lies in it.
  void all_gather(std::byte* all, std::size_t bytes);
  // Part r of `sent` goes to rank r; part r of `received` is from it. Both hold size() parts of `bytes`.
  void all_to_all(std::byte* received, const std::byte* sent, std::size_t bytes);
  // The sum over all ranks of my part of `sent`, which holds size() parts of `numel` elements.
  void reduce_scatter(std::byte* received, std::byte* sent, std::size_t numel, DType dtype);
  // Replaced by the sum over all ranks.
  void all_reduce(std::byte* data, std::size_t numel, DType dtype);

  // Empty, or what has gone wrong since: a peer failed, or did not come in time.
  std::string error() const;

 private:
  std::shared_ptr<Queue> queue_;
  int rank_;
  int size_;
  std::shared_ptr<void> comm_;  // HcclComm
};

}  // namespace tt::ascend
