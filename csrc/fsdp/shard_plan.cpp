#include "fsdp/shard_plan.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "fsdp/bucket_layout.h"

namespace tt::fsdp {
namespace {

using i64 = std::int64_t;

constexpr i64 kNoLimit = std::numeric_limits<i64>::max();
constexpr i64 kLineBytes = 64;
constexpr i64 kSmallPaddingBytes = 4096;
constexpr i64 kMaxNumel = i64{1} << 55;  // far above any model, far below overflow of N * S

// Cuts one sequence of parameters of equal kind into buckets.
class Packer {
 public:
  Packer(i64 world_size, std::optional<i64> cap_bytes) : world_size_(world_size), cap_bytes_(cap_bytes) {}

  // The bucket that starts at specs[begin], and how many of them it takes.
  std::pair<std::size_t, BucketLayout> next(const std::vector<const ParamSpec*>& specs, std::size_t begin) {
    const auto param_size = static_cast<i64>(size_of(specs[begin]->param_dtype));
    const auto master_size = static_cast<i64>(size_of(specs[begin]->master_dtype));
    const i64 cap = cap_bytes_ ? *cap_bytes_ / param_size : kNoLimit;
    LayoutProblem problem{.max_numel = cap,
                          .line = kLineBytes / std::min(param_size, master_size),
                          .small_padding = kSmallPaddingBytes / param_size};
    std::vector<LayoutItem>& items = problem.items;
    while (begin + items.size() < specs.size()) {
      items.push_back(item_of(*specs[begin + items.size()]));
      if (cap_bytes_ && items.back().numel > 0 && non_empty(items) > 1 &&
          world_size_ * smallest_shard(items, world_size_) > cap) {
        items.pop_back();
        break;
      }
    }
    while (true) {
      // The cap holds for the padded bucket. Where only that would cut rows, the last parameter goes to the next bucket
      // instead; a parameter that is alone goes over the cap by its padding.
      const BucketLayout& layout = solve(problem);
      if (layout.cut_row_numel == 0) return {items.size(), layout};
      LayoutProblem uncapped = problem;
      uncapped.max_numel = kNoLimit;
      const BucketLayout& free_layout = solve(uncapped);
      if (free_layout.cut_row_numel >= layout.cut_row_numel) return {items.size(), layout};
      if (non_empty(items) <= 1) return {items.size(), free_layout};
      while (items.back().numel == 0) items.pop_back();
      items.pop_back();
    }
  }

 private:
  static LayoutItem item_of(const ParamSpec& spec) {
    LayoutItem item{.numel = spec.rows * spec.row_numel};
    if (item.numel == 0) return item;
    item.row = spec.row_numel;
    item.wanted = spec.row_numel * std::min(spec.granularity, spec.rows);
    if (!is_floating(spec.param_dtype)) item.unit = std::gcd(spec.row_numel, i64{16});
    return item;
  }

  static std::ptrdiff_t non_empty(const std::vector<LayoutItem>& items) {
    return std::count_if(items.begin(), items.end(), [](const LayoutItem& item) { return item.numel > 0; });
  }

  const BucketLayout& solve(const LayoutProblem& problem) {
    auto found = solved_.find(problem);
    if (found == solved_.end()) found = solved_.emplace(problem, find_layout(problem, world_size_)).first;
    return found->second;
  }

  i64 world_size_;
  std::optional<i64> cap_bytes_;
  std::map<LayoutProblem, BucketLayout> solved_;  // the blocks of a model are alike
};

void validate(const std::vector<ParamSpec>& params, const std::vector<UnitSpec>& units, std::int32_t world_size,
              std::optional<i64> cap_bytes) {
  if (world_size < 1) throw ValueError(str("world_size is ", world_size, "; it must be at least 1"));
  if (cap_bytes && *cap_bytes < 1) {
    throw ValueError(str("cap_bytes is ", *cap_bytes, "; it must be positive, or none for one bucket per unit"));
  }
  i64 total = 0;
  for (const ParamSpec& p : params) {
    if (p.rows < 0 || p.row_numel < 0) {
      throw ValueError(
          str("parameter '", p.name, "': shape (", p.rows, " rows of ", p.row_numel, " elements) is negative"));
    }
    if (p.granularity < 1) {
      throw ValueError(str("parameter '", p.name, "': granularity is ", p.granularity, "; it must be at least 1 row"));
    }
    if (is_floating(p.param_dtype) != is_floating(p.master_dtype)) {
      throw ValueError(str("parameter '", p.name, "': param_dtype ", name_of(p.param_dtype), " and master_dtype ",
                           name_of(p.master_dtype), " do not go together; bytes are never cast"));
    }
    i64 numel = 0;
    if (__builtin_mul_overflow(p.rows, p.row_numel, &numel) || numel > kMaxNumel || (total += numel) > kMaxNumel) {
      throw ValueError(str("parameter '", p.name, "': ", p.rows, " rows of ", p.row_numel,
                           " elements make the model larger than 2^55 elements; check the shape"));
    }
  }
  std::vector<std::int32_t> owner(params.size(), -1);
  for (std::size_t u = 0; u < units.size(); ++u) {
    for (const std::int32_t p : units[u].params) {
      if (p < 0 || static_cast<std::size_t>(p) >= params.size()) {
        throw ValueError(str("unit '", units[u].name, "': parameter index ", p, " is out of range; there are ",
                             params.size(), " parameters"));
      }
      std::int32_t& who = owner[static_cast<std::size_t>(p)];
      if (who >= 0) {
        throw ValueError(str("parameter '", params[static_cast<std::size_t>(p)].name, "' is in unit '",
                             units[static_cast<std::size_t>(who)].name, "' and again in unit '", units[u].name,
                             "'; it must be in exactly one (a tied parameter is one entry)"));
      }
      who = static_cast<std::int32_t>(u);
    }
  }
  for (std::size_t p = 0; p < params.size(); ++p) {
    if (owner[p] < 0)
      throw ValueError(str("parameter '", params[p].name, "' is in no unit; it must be in exactly one"));
  }
}

// 64-bit hash of a stream of integers and strings, the same on every machine.
class Hasher {
 public:
  void add(i64 value) {
    state_ += static_cast<std::uint64_t>(value) + 0x9E3779B97F4A7C15U;  // splitmix64
    state_ = (state_ ^ (state_ >> 30)) * 0xBF58476D1CE4E5B9U;
    state_ = (state_ ^ (state_ >> 27)) * 0x94D049BB133111EBU;
    state_ ^= state_ >> 31;
  }
  void add(DType value) { add(static_cast<i64>(value)); }
  void add(const std::string& text) {
    add(static_cast<i64>(text.size()));
    for (const char c : text) add(static_cast<i64>(static_cast<unsigned char>(c)));
  }
  void add(const std::vector<std::int32_t>& values) {
    add(static_cast<i64>(values.size()));
    for (const std::int32_t v : values) add(v);
  }
  std::uint64_t value() const { return state_; }

 private:
  std::uint64_t state_ = 0;
};

void check_index(const char* what, std::int32_t index, std::size_t count) {
  if (index < 0 || static_cast<std::size_t>(index) >= count) {
    throw ValueError(str(what, " ", index, " is out of range; the plan has ", count));
  }
}

}  // namespace

ShardPlan::ShardPlan(std::vector<ParamSpec> params, std::vector<UnitSpec> units, std::int32_t world_size,
                     std::optional<std::int64_t> cap_bytes)
    : params_(std::move(params)), units_(std::move(units)), world_size_(world_size) {
  validate(params_, units_, world_size_, cap_bytes);
  placements_.resize(params_.size());
  unit_buckets_.resize(units_.size());
  Packer packer(world_size_, cap_bytes);
  for (std::size_t u = 0; u < units_.size(); ++u) {
    // One sequence of buckets per kind, in order of first appearance.
    using Kind = std::tuple<DType, DType, bool>;
    std::vector<std::pair<Kind, std::vector<std::int32_t>>> sequences;
    for (const std::int32_t p : units_[u].params) {
      const ParamSpec& spec = params_[static_cast<std::size_t>(p)];
      const Kind kind{spec.param_dtype, spec.master_dtype, spec.requires_grad};
      auto found = std::find_if(sequences.begin(), sequences.end(), [&](const auto& s) { return s.first == kind; });
      if (found == sequences.end()) found = sequences.insert(found, {kind, {}});
      found->second.push_back(p);
    }
    for (const auto& [kind, members] : sequences) {
      std::vector<const ParamSpec*> specs;
      for (const std::int32_t p : members) specs.push_back(&params_[static_cast<std::size_t>(p)]);
      for (std::size_t begin = 0; begin < members.size();) {
        const auto [count, layout] = packer.next(specs, begin);
        Bucket bucket;
        bucket.unit = static_cast<std::int32_t>(u);
        std::tie(bucket.param_dtype, bucket.master_dtype, bucket.requires_grad) = kind;
        bucket.shard_numel = layout.shard_numel;
        const auto index = static_cast<std::int32_t>(buckets_.size());
        for (std::size_t i = 0; i < count; ++i) {
          const i64 numel = specs[begin + i]->rows * specs[begin + i]->row_numel;
          placements_[static_cast<std::size_t>(members[begin + i])] = {
              .bucket = index, .offset = layout.offsets[i], .numel = numel, .atom_numel = layout.atoms[i]};
          bucket.payload_numel += numel;
          bucket.params.push_back(members[begin + i]);
        }
        unit_buckets_[u].push_back(index);
        buckets_.push_back(std::move(bucket));
        begin += count;
      }
    }
  }
}

Piece ShardPlan::piece(std::int32_t param, std::int32_t rank) const {
  check_index("parameter", param, params_.size());
  check_index("rank", rank, static_cast<std::size_t>(world_size_));
  const Placement& at = placement(param);
  const i64 S = buckets_[static_cast<std::size_t>(at.bucket)].shard_numel;
  const i64 begin = std::clamp<i64>(rank * S - at.offset, 0, at.numel);
  const i64 end = std::clamp<i64>(rank * S + S - at.offset, 0, at.numel);
  return {.start = begin, .numel = end - begin, .shard_offset = std::clamp<i64>(at.offset - rank * S, 0, S)};
}

bool ShardPlan::row_aligned(std::int32_t param) const {
  check_index("parameter", param, params_.size());
  const Placement& at = placement(param);
  return cut_on(params_[static_cast<std::size_t>(param)].row_numel, at.offset, at.numel,
                buckets_[static_cast<std::size_t>(at.bucket)].shard_numel);
}

std::int64_t ShardPlan::bucket_numel(std::int32_t bucket) const {
  check_index("bucket", bucket, buckets_.size());
  return world_size_ * buckets_[static_cast<std::size_t>(bucket)].shard_numel;
}

double ShardPlan::padding_fraction() const {
  i64 payload = 0;
  i64 total = 0;
  for (const Bucket& bucket : buckets_) {
    payload += bucket.payload_numel;
    total += world_size_ * bucket.shard_numel;
  }
  return payload == 0 ? 0.0 : static_cast<double>(total - payload) / static_cast<double>(payload);
}

std::uint64_t ShardPlan::hash() const {
  Hasher h;
  h.add(world_size_);
  h.add(static_cast<i64>(params_.size()));
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const ParamSpec& p = params_[i];
    h.add(p.name);
    for (const i64 value : {p.rows, p.row_numel, i64{p.requires_grad}, p.granularity}) h.add(value);
    h.add(p.param_dtype);
    h.add(p.master_dtype);
    const Placement& at = placements_[i];
    for (const i64 value : {i64{at.bucket}, at.offset, at.numel, at.atom_numel}) h.add(value);
  }
  h.add(static_cast<i64>(units_.size()));
  for (std::size_t u = 0; u < units_.size(); ++u) {
    h.add(units_[u].name);
    h.add(units_[u].params);
    h.add(unit_buckets_[u]);
  }
  h.add(static_cast<i64>(buckets_.size()));
  for (const Bucket& bucket : buckets_) {  // dtypes and payload follow from the parameters
    h.add(bucket.shard_numel);
    h.add(bucket.params);
  }
  return h.value();
}

}  // namespace tt::fsdp
