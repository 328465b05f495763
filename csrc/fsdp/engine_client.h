// What the engine asks of the framework above it (torch): to point tensors at memory, and to own gradients.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tt::fsdp {

inline constexpr std::int32_t kAllUnits = -1;

class EngineClient {
 public:
  virtual ~EngineClient() = default;

  // The bucket's parameters are readable at `where` until unseat().
  virtual void seat(std::int32_t bucket, std::byte* where) = 0;
  // They are not readable any more; a read raises an error that names the unit.
  virtual void unseat(std::int32_t bucket) = 0;
  // The modules of the unit (or of all units) hold the gathered (true) or the sharded (false) parameters from now on.
  virtual void expose(std::int32_t unit, bool gathered) = 0;

  // My shard of the bucket in master_dtype, and its gradient in the same layout.
  virtual const std::byte* master_shard(std::int32_t bucket) = 0;
  virtual std::byte* gradient_shard(std::int32_t bucket) = 0;
  // Whether gradient_shard() holds a gradient of this parameter that the next one is added to.
  virtual bool has_gradient(std::int32_t param) = 0;
  // Whether the backward pass in progress can bring a gradient of this parameter. Ranks differ in that where a
  // parameter is used on some of them only; each must know, to let go of a unit at the same point of the program.
  virtual bool will_report(std::int32_t param) = 0;
  // gradient_shard() now holds the parameter's gradient.
  virtual void gradient_written(std::int32_t param) = 0;

  // Memory that lives as long as the client, for gradients that are accumulated without reduction.
  virtual std::byte* allocate(std::size_t bytes) = 0;
  // The end of the backward pass in progress must call Engine::end_backward.
  virtual void backward_began() = 0;
  virtual void log(const std::string& message) = 0;
};

}  // namespace tt::fsdp
