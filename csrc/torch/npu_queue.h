// Submission to the streams of torch_npu, in the order of its own operators.
//
// Two ways. "queue": through torch_npu's task queue, as its operators go: the host does not wait. Its entry is C++ that
// libtorch_npu.so exports; it is looked up at run time, so that one wheel serves with and without torch_npu. "drain":
// waits until the queue is empty and submits directly; right with any torch_npu, but the host stands still each time.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "ascend/queue.h"

namespace tt {

class NpuQueue final : public ascend::Queue {
 public:
  // `ordering`: "auto" (the queue where torch_npu has the entry), "queue" or "drain". ValueError for another word, or
  // where "queue" cannot be had.
  NpuQueue(c10::Device device, const std::string& ordering);

  void submit(const char* name, std::function<int(ascend::AclStream)> call) override;
  std::shared_ptr<void> workspace(std::size_t bytes) override;

  const char* ordering() const { return run_ == nullptr ? "drain" : "queue"; }

 private:
  // OpCommand::RunOpApiV2(name, call, sync)
  using Run = void (*)(const std::string&, const std::function<int()>&, bool);
  // Survives this object, as what was queued may.
  struct Failure {
    std::mutex mutex;
    std::string message;  // of the first call that failed
  };

  c10::Stream current() const;
  ascend::AclStream handle(c10::Stream stream);
  void raise_failure();

  c10::Device device_;
  Run run_ = nullptr;
  std::mutex mutex_;
  std::map<c10::StreamId, ascend::AclStream> handles_;
  std::shared_ptr<Failure> failure_ = std::make_shared<Failure>();
};

}  // namespace tt
