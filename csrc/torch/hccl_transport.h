// Data through an HCCL communicator of our own, straight on the stream that the engine submits to.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <memory>
#include <string>

#include "ascend/hccl_group.h"
#include "torch/data_transport.h"
#include "torch/npu_queue.h"

namespace tt {

class HcclTransport final : public DataTransport {
 public:
  // Collective over `group`'s ranks: rank 0's root info goes through its store under `key`, which no other communicator
  // uses. HCCL itself waits for the ranks, for HCCL_CONNECT_TIMEOUT.
  HcclTransport(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& key, c10::Device device,
                std::shared_ptr<NpuQueue> queue);
  ~HcclTransport() override;

  const char* name() const override { return "hccl"; }
  Work all_gather(at::Tensor all, at::Tensor mine) override;
  Work all_to_all(at::Tensor received, at::Tensor sent) override;
  // Sums of float32 take no memory for what the others send.
  bool adds(DType wire) const override { return wire == DType::kFloat32; }
  Work reduce_scatter(at::Tensor received, at::Tensor sent, DType wire) override;
  Work all_reduce(at::Tensor data) override;
  std::string error() const override { return group_->error(); }

 private:
  c10::Stream current() const;
  Work submitted(at::Tensor written, at::Tensor read);

  c10::Device device_;
  std::unique_ptr<ascend::HcclGroup> group_;
  std::unique_ptr<c10::Stream> stream_;  // the one that was used last
};

}  // namespace tt
