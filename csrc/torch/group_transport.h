// Data through a torch process group.
#pragma once

#include <utility>
#include <vector>

#include "torch/data_transport.h"

namespace tt {

class GroupTransport final : public DataTransport {
 public:
  explicit GroupTransport(c10::intrusive_ptr<c10d::ProcessGroup> group) : group_(std::move(group)) {}

  const char* name() const override { return "c10d"; }
  Work all_gather(at::Tensor all, at::Tensor mine) override {
    return launched(group_->all_gather_single(all, mine), all);
  }
  Work all_to_all(at::Tensor received, at::Tensor sent) override {
    std::vector<std::int64_t> even;
    return launched(group_->all_to_all_single(received, sent, even, even), received);
  }
  Work all_reduce(at::Tensor data) override {
    std::vector<at::Tensor> tensors{data};
    return launched(group_->allreduce(tensors), data);
  }

 private:
  // A group of an accelerator runs its collectives on a stream of its own. The current stream goes on behind them, so
  // that memory which was taken there and is dropped later is given to nothing that runs before.
  static Work launched(Work work, const at::Tensor& data) {
    if (!data.is_cpu()) work->wait();
    return work;
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

}  // namespace tt
