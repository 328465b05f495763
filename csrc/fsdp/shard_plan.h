// Which parameter lies where in which bucket (the plan). A pure function of shapes, world size and cap: no devices, no
// torch.
//
// A bucket is N equal shards of `shard_numel` elements, rank-major, so that an in-place all-gather of equal counts
// yields all of it. Parameters lie in it back to back, in order; a shard boundary that falls inside a parameter falls
// between two of its *atoms* (rows, or multiples of rows).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/dtype.h"

namespace tt::fsdp {

struct ParamSpec {
  std::string name;
  std::int64_t rows = 1;                 // shape[0]; 1 for a scalar; 0 is legal
  std::int64_t row_numel = 1;            // product of shape[1:]
  DType param_dtype = DType::kFloat32;   // as gathered; kBytes: rows and row_numel are the tensor's, row_numel in bytes
  DType master_dtype = DType::kFloat32;  // as sharded
  bool requires_grad = true;
  std::int64_t granularity = 1;  // rows that must stay together
};

struct UnitSpec {
  std::string name;
  std::vector<std::int32_t> params;  // indices into the parameter list, in order
};

struct Bucket {
  std::int32_t unit = 0;
  DType param_dtype = DType::kFloat32;
  DType master_dtype = DType::kFloat32;
  bool requires_grad = true;
  std::int64_t shard_numel = 0;    // S
  std::int64_t payload_numel = 0;  // sum of its parameters; N*S - payload is padding
  std::vector<std::int32_t> params;
};

// Where a parameter lies.
struct Placement {
  std::int32_t bucket = -1;
  std::int64_t offset = 0;  // elements from the bucket's start
  std::int64_t numel = 0;
  std::int64_t atom_numel = 1;  // boundaries inside the parameter fall on multiples of this, counted from its start
};

// The part of one parameter that lies in one rank's shard.
struct Piece {
  std::int64_t start = 0;         // first element, counted from the parameter's start
  std::int64_t numel = 0;         // may be 0
  std::int64_t shard_offset = 0;  // elements from the shard's start
};

class ShardPlan {
 public:
  // `cap_bytes`: largest bucket in bytes of param_dtype; nullopt: one bucket per unit and kind (dtype, requires_grad).
  // Throws ValueError that names the parameter or option at fault.
  ShardPlan(std::vector<ParamSpec> params, std::vector<UnitSpec> units, std::int32_t world_size,
            std::optional<std::int64_t> cap_bytes);

  const std::vector<ParamSpec>& params() const { return params_; }
  const std::vector<UnitSpec>& units() const { return units_; }
  const std::vector<Bucket>& buckets() const { return buckets_; }
  const std::vector<std::vector<std::int32_t>>& unit_buckets() const { return unit_buckets_; }
  const Placement& placement(std::int32_t param) const { return placements_[static_cast<std::size_t>(param)]; }
  std::int32_t world_size() const { return world_size_; }

  Piece piece(std::int32_t param, std::int32_t rank) const;
  // Whether all of the parameter's pieces are whole rows (false where long rows had to be cut to keep padding down).
  bool row_aligned(std::int32_t param) const;
  std::int64_t bucket_numel(std::int32_t bucket) const;  // N * S
  double padding_fraction() const;                       // padding / payload over the whole model
  // Equal on all ranks if and only if the plans are.
  std::uint64_t hash() const;

 private:
  std::vector<ParamSpec> params_;
  std::vector<UnitSpec> units_;
  std::int32_t world_size_;
  std::vector<Bucket> buckets_;
  std::vector<std::vector<std::int32_t>> unit_buckets_;
  std::vector<Placement> placements_;
};

}  // namespace tt::fsdp
