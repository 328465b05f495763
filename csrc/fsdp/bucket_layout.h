// Where the parameters of one bucket lie, and how long its shards are. The search behind ShardPlan.
//
// How much padding a bucket may cost. With P elements of payload on N ranks, the smallest shard that holds it is
// M = ceil(P / N). Let
//
//   budget = max(P / 100, 4 KiB, N * M - P)
//
// Every bucket has N * S - P <= budget. N * M - P is what no layout can avoid; 4 KiB (of param_dtype) lets small
// buckets keep whole rows, since nobody minds 4 KiB. Inside the budget the search prefers, in this order: whole rows,
// then the granularity asked for, then shards of whole cache lines, then parameters that start on one, then the
// smallest S. (Bytes buckets: M also covers the gaps that keep every element at a multiple of its size, see
// `LayoutItem::unit`.)
#pragma once

#include <compare>
#include <cstdint>
#include <limits>
#include <tuple>
#include <vector>

namespace tt::fsdp {

// One parameter in the eyes of the search; all counts in elements. Problems are compared so that of a model's equal
// blocks only the first is searched.
struct LayoutItem {
  std::int64_t numel = 0;
  std::int64_t row = 1;     // a row
  std::int64_t wanted = 1;  // atom asked for: granularity rows, at most the whole parameter
  // Finest atom and start alignment, a power of two. For bytes gcd(row, 16): then no element of any torch dtype is cut.
  std::int64_t unit = 1;
  auto operator<=>(const LayoutItem&) const = default;
};

struct LayoutProblem {
  std::vector<LayoutItem> items{};
  std::int64_t max_numel = std::numeric_limits<std::int64_t>::max();  // of N * S: the cap
  std::int64_t line = 1;           // elements of the narrower of the two dtypes in 64 bytes
  std::int64_t small_padding = 0;  // elements of param_dtype in 4 KiB
  auto operator<=>(const LayoutProblem&) const = default;
};

struct BucketLayout {
  std::int64_t shard_numel = 0;         // S
  std::vector<std::int64_t> offsets{};  // per item
  std::vector<std::int64_t> atoms{};    // per item: boundaries fall on multiples of it
  std::int64_t cut_row_numel = 0;       // elements of parameters whose rows are cut
  std::int64_t cut_block_numel = 0;     // elements of parameters cut finer than their granularity
  std::int64_t misaligned_shards = 0;   // 1 if S is no whole number of lines
  std::int64_t misaligned_starts = 0;   // parameters, tiny ones apart, that do not start on a line

  auto score() const {
    return std::tie(cut_row_numel, cut_block_numel, misaligned_shards, misaligned_starts, shard_numel);
  }
  bool perfect() const { return cut_row_numel + cut_block_numel + misaligned_shards + misaligned_starts == 0; }
};

// M: the smallest shard that holds the items when rows may be cut.
std::int64_t smallest_shard(const std::vector<LayoutItem>& items, std::int64_t world_size);

// The best layout found within the budget. Should smallest_shard already pass max_numel, it goes that far beyond.
BucketLayout find_layout(const LayoutProblem& problem, std::int64_t world_size);

// Whether all shard boundaries inside [offset, offset + numel) lie on multiples of `atom`, counted from offset.
bool cut_on(std::int64_t atom, std::int64_t offset, std::int64_t numel, std::int64_t shard_numel);

}  // namespace tt::fsdp
