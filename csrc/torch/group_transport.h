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
  Work all_gather(at::Tensor all, at::Tensor mine) override { return group_->all_gather_single(all, mine); }
  Work all_to_all(at::Tensor received, at::Tensor sent) override {
    std::vector<std::int64_t> even;
    return group_->all_to_all_single(received, sent, even, even);
  }

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

}  // namespace tt
