#include "torch/hccl_transport.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>
#include <vector>

#include "base/dtype.h"
#include "torch/dtypes.h"
#include "torch/stream_event.h"

namespace tt {
namespace {

// What was submitted to a stream, as torch's own collectives say it.
class StreamWork final : public c10d::Work {
 public:
  // Keeps both tensors, as the stream still uses them.
  StreamWork(c10::Device device, c10::Stream stream, at::Tensor written, at::Tensor read)
      : device_(device), done_(device), written_(std::move(written)), read_(std::move(read)) {
    done_.record(stream);
  }

  bool isCompleted() override { return done_.query(); }
  bool wait(std::chrono::milliseconds) override {
    done_.block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
    return true;
  }

 private:
  c10::Device device_;
  StreamEvent done_;
  at::Tensor written_;
  at::Tensor read_;
};

std::byte* bytes_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.mutable_data_ptr()); }

}  // namespace

HcclTransport::HcclTransport(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& key,
                             c10::Device device, std::shared_ptr<NpuQueue> queue)
    : device_(device) {
  const auto store = group->getStore();
  std::string root;
  if (group->getRank() == 0) {
    root = ascend::new_root_info();
    store->set(key, std::vector<std::uint8_t>(root.begin(), root.end()));
  } else {
    const auto given = store->get(key);
    root.assign(given.begin(), given.end());
  }
  group_ = std::make_unique<ascend::HcclGroup>(std::move(queue), group->getRank(), group->getSize(), root);
}

HcclTransport::~HcclTransport() {
  if (stream_ == nullptr) {
    return;
  }
  try {
    c10::impl::VirtualGuardImpl(device_.type()).synchronizeStream(*stream_);
  } catch (const std::exception&) {
    // The card has failed; whoever uses it next is told. The communicator goes in any case.
  }
}

c10::Stream HcclTransport::current() const { return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_); }

DataTransport::Work HcclTransport::submitted(at::Tensor written, at::Tensor read) {
  stream_ = std::make_unique<c10::Stream>(current());
  return c10::make_intrusive<StreamWork>(device_, *stream_, std::move(written), std::move(read));
}

DataTransport::Work HcclTransport::all_gather(at::Tensor all, at::Tensor mine) {
  group_->all_gather(bytes_of(all), mine.nbytes());
  return submitted(std::move(all), std::move(mine));
}

DataTransport::Work HcclTransport::all_to_all(at::Tensor received, at::Tensor sent) {
  group_->all_to_all(bytes_of(received), bytes_of(sent), sent.nbytes() / static_cast<std::size_t>(group_->size()));
  return submitted(std::move(received), std::move(sent));
}

DataTransport::Work HcclTransport::reduce_scatter(at::Tensor received, at::Tensor sent, DType wire) {
  group_->reduce_scatter(bytes_of(received), bytes_of(sent), received.nbytes() / size_of(wire), wire);
  return submitted(std::move(received), std::move(sent));
}

DataTransport::Work HcclTransport::all_reduce(at::Tensor data) {
  group_->all_reduce(bytes_of(data), static_cast<std::size_t>(data.numel()), from_torch(data.scalar_type()));
  return submitted(data, data);
}

}  // namespace tt
