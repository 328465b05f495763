#include "host/control_block.h"

#include <algorithm>
#include <bit>

namespace tt::host {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

std::size_t round_up(std::size_t value, std::size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

SegmentLayout::SegmentLayout(int size, const runtime::MemoryLayout& memory)
    : num_ranks(static_cast<std::size_t>(size)), num_places(memory.places), num_buckets(memory.bucket_params.size()) {
  // A peer can be ahead by as many gathers as there are places, as each needs a place that this rank has released.
  ring = std::bit_ceil(std::max<std::size_t>(64, 2 * num_places));
  constexpr std::size_t kWordsPerLine = kCacheLine / sizeof(std::uint64_t);
  places_stride = round_up(num_places, kWordsPerLine);
  masks_stride = 0;
  for (const std::uint32_t params : memory.bucket_params) {
    const std::size_t words = round_up((params + std::size_t{63}) / 64, kWordsPerLine);
    mask_offset.push_back(masks_stride);
    mask_words.push_back(words);
    masks_stride += 2 * words;
  }

  std::size_t end = sizeof(Header);
  const auto place_table = [&end](std::size_t bytes) {
    const std::size_t begin = end;
    end = round_up(end + bytes, kCacheLine);
    return begin;
  };
  ranks = place_table(num_ranks * sizeof(RankState));
  entries = place_table(num_ranks * ring * sizeof(GatherEntry));
  released = place_table(num_ranks * places_stride * sizeof(std::uint64_t));
  buckets = place_table(num_ranks * num_buckets * sizeof(BucketState));
  masks = place_table(num_ranks * masks_stride * sizeof(std::uint64_t));
  control_bytes = end;

  // Huge pages begin at multiples of their size.
  gather = round_up(control_bytes, kHugePage);
  reduce = gather + round_up(std::max(memory.gather_bytes, memory.gather_reserved_bytes), kHugePage);
  reduce_stride = round_up(std::max(memory.reduce_bytes, memory.reduce_reserved_bytes), kHugePage);
  total_bytes = reduce + num_ranks * reduce_stride;
}

}  // namespace tt::host
