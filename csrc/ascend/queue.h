// The one way by which work reaches a stream of an NPU.
//
// torch_npu launches operators from a task queue, so the stream is behind the program: a call on its raw handle would
// overtake what the program did before. Everything that this backend submits therefore goes through submit(), in the
// order of torch's own operators. Nothing else in the code base may take a raw stream.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "ascend/abi.h"

namespace tt::ascend {

class Queue {
 public:
  virtual ~Queue() = default;

  // Runs `call` with the handle of this thread's current stream, after everything that was submitted to that stream
  // before; later, and on another thread, or now. `call` returns its status; what it captures stays alive until then.
  // A failure is raised here or by a later submit(). `name` is a string literal.
  virtual void submit(const char* name, std::function<int(AclStream)> call) = 0;

  // Memory of the card that work of the current stream may use until the last copy of the pointer is dropped (by the
  // host: the stream may still be using it).
  virtual std::shared_ptr<void> workspace(std::size_t bytes) = 0;
};

}  // namespace tt::ascend
