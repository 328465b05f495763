#include "fsdp/bucket_layout.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "base/error.h"

namespace tt::fsdp {
namespace {

using i64 = std::int64_t;

constexpr i64 kNoLimit = std::numeric_limits<i64>::max();
constexpr i64 kExhaustive = 512;      // so many shard sizes are all tried
constexpr std::size_t kMaxBases = 6;  // else: distinct atoms that the search for S combines

i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }
i64 round_up(i64 a, i64 multiple) { return ceil_div(a, multiple) * multiple; }

i64 smallest_factor(i64 n) {
  if (n % 2 == 0) return 2;
  for (i64 p = 3; p < 1024 && p * p <= n; p += 2) {
    if (n % p == 0) return p;
  }
  return n;  // prime, or not worth a longer search
}

// The next finer atom: fewer rows, then a divisor of a row, down to item.unit.
i64 finer(const LayoutItem& item, i64 atom) {
  const i64 base = atom > item.row ? item.row : item.unit;
  const i64 count = atom / base;
  return base * (count / smallest_factor(count));
}

// The coarsest atom not above `atom` that divides S: whole rows if they do.
i64 dividing(const LayoutItem& item, i64 atom, i64 S) {
  if (atom >= item.row && S % item.row == 0) return item.row * std::gcd(atom / item.row, S / item.row);
  return std::gcd(std::min(atom, item.row), S);
}

// First place at or after `cursor` whose boundaries fall on atoms. Refines `atom` where that is impossible with this S.
i64 first_place(const LayoutItem& item, i64 cursor, i64 S, i64 align, i64& atom) {
  if (item.numel > S && atom > S) atom = dividing(item, atom, S);
  i64 start = cursor;
  while (true) {
    const i64 boundary = (start / S + 1) * S;
    if (start + item.numel <= boundary) return start;
    i64 offset = boundary;
    for (i64 j = (boundary - start) / atom, tries = align / std::gcd(align, atom); j >= 0 && tries > 0; --j, --tries) {
      offset = boundary - j * atom;
      if (offset % align == 0) break;
    }
    if (offset == boundary && start + S > boundary) {  // no atom fits into what is left of this shard: on to the next
      start = boundary;
    } else if (offset == boundary) {  // not even into a whole one, at this alignment
      atom = dividing(item, atom, S);
      start = cursor;
    } else if (offset + item.numel <= boundary + S || S % atom == 0) {
      return offset;
    } else if (item.numel <= 2 * S && start + S > boundary) {  // further on it may cross one boundary instead of two
      start = boundary;
    } else {
      atom = dividing(item, atom, S);
      start = cursor;
    }
  }
}

// Places all items in order. A parameter whose start would move by more than `max_shift` gets finer atoms instead.
// Returns false if they do not fit into N * S.
bool place(const LayoutProblem& problem, i64 world_size, i64 S, bool lines, i64 max_shift, BucketLayout& out) {
  out = BucketLayout{.shard_numel = S, .misaligned_shards = S % problem.line != 0};
  i64 cursor = 0;
  for (const LayoutItem& item : problem.items) {
    i64 atom = item.wanted;
    i64 offset = cursor;
    if (item.numel > 0) {
      const bool tiny = item.numel < problem.line;
      const i64 align = lines && !tiny ? problem.line : item.unit;
      const i64 start = round_up(cursor, align);
      offset = first_place(item, start, S, align, atom);
      while (offset - start > max_shift && atom > item.unit) {
        atom = finer(item, atom);
        offset = first_place(item, start, S, align, atom);
      }
      cursor = offset + item.numel;
      if (cursor > world_size * S) return false;
      const bool rows_whole = cut_on(item.row, offset, item.numel, S);
      const bool blocks_whole = cut_on(item.wanted, offset, item.numel, S);
      if (blocks_whole) {
        atom = item.wanted;
      } else if (rows_whole && atom < item.row) {
        atom = item.row;
      }
      if (!rows_whole) out.cut_row_numel += item.numel;
      if (!blocks_whole) out.cut_block_numel += item.numel;
      if (!tiny && offset % problem.line != 0) ++out.misaligned_starts;
    }
    out.offsets.push_back(offset);
    out.atoms.push_back(atom);
  }
  return true;
}

// The best layout with this S: the largest max_shift, a power of two or 0, with which everything fits.
bool place_with(const LayoutProblem& problem, i64 world_size, i64 S, bool lines, BucketLayout& out) {
  if (place(problem, world_size, S, lines, kNoLimit, out)) return true;
  if (!place(problem, world_size, S, lines, 0, out)) return false;
  int low = -1;
  int high = 0;
  for (const LayoutItem& item : problem.items) {
    while ((i64{1} << high) < item.wanted) ++high;
  }
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    BucketLayout candidate;
    if (place(problem, world_size, S, lines, i64{1} << middle, candidate)) {
      low = middle;
      out = std::move(candidate);
    } else {
      high = middle;
    }
  }
  return true;
}

i64 payload_of(const std::vector<LayoutItem>& items) {
  i64 payload = 0;
  for (const LayoutItem& item : items) payload += item.numel;
  return payload;
}

// Shard sizes worth trying, ascending: all if they are few, else multiples of the common multiples of the atoms that
// span several shards, near the lower end of [low, high] and at growing distances above it, which buy room for shifts.
std::vector<i64> shard_candidates(const LayoutProblem& problem, i64 low, i64 high) {
  i64 unit = 1;
  for (const LayoutItem& item : problem.items) unit = std::max(unit, item.unit);
  std::vector<i64> candidates = {low};
  if ((high - low) / unit <= kExhaustive) {
    for (i64 S = low + unit; S <= high; S += unit) candidates.push_back(S);
    return candidates;
  }
  std::map<i64, i64> weight;  // atom -> elements that would like S to be a multiple of it
  for (const LayoutItem& item : problem.items) {
    if (item.numel <= low) continue;
    for (const i64 atom : {item.wanted, item.row}) {
      if (atom > 1 && atom <= high) weight[atom] += item.numel;
    }
  }
  std::vector<std::pair<i64, i64>> heaviest;
  for (const auto& [atom, numel] : weight) heaviest.emplace_back(-numel, atom);
  std::sort(heaviest.begin(), heaviest.end());
  if (heaviest.size() > kMaxBases) heaviest.resize(kMaxBases);

  std::vector<i64> bases = {unit, std::max(unit, problem.line)};
  for (const auto& [unused, atom] : heaviest) {
    for (std::size_t i = 0, n = bases.size(); i < n; ++i) {
      const i64 factor = atom / std::gcd(atom, bases[i]);
      if (bases[i] <= high / factor) bases.push_back(bases[i] * factor);
    }
  }
  for (const i64 base : bases) {
    const i64 first = round_up(low, base);
    const i64 last = high / base * base;
    for (i64 distance = 0; distance <= (last - first) / base && first <= last;
         distance += std::max<i64>(1, distance / 4)) {
      candidates.push_back(first + distance * base);
    }
    if (first <= last) candidates.push_back(last);
  }
  std::sort(candidates.begin(), candidates.end());
  candidates.erase(std::unique(candidates.begin(), candidates.end()), candidates.end());
  return candidates;
}

}  // namespace

// Whether all shard boundaries inside [offset, offset + numel) lie on multiples of `atom`, counted from offset.
bool cut_on(i64 atom, i64 offset, i64 numel, i64 S) {
  if (numel == 0 || S == 0) return true;
  const i64 first = (offset / S + 1) * S;
  if (offset + numel <= first) return true;
  return (first - offset) % atom == 0 && (offset + numel <= first + S || S % atom == 0);
}

i64 smallest_shard(const std::vector<LayoutItem>& items, i64 world_size) {
  i64 end = 0;
  i64 unit = 1;
  for (const LayoutItem& item : items) {
    if (item.numel == 0) continue;
    end = round_up(end, item.unit) + item.numel;
    unit = std::max(unit, item.unit);  // all are powers of two
  }
  return round_up(ceil_div(end, world_size), unit);
}

BucketLayout find_layout(const LayoutProblem& problem, i64 world_size) {
  const i64 payload = payload_of(problem.items);
  BucketLayout best;
  if (payload == 0) {
    best.offsets.assign(problem.items.size(), 0);
    for (const LayoutItem& item : problem.items) best.atoms.push_back(item.wanted);
    return best;
  }
  const i64 low = smallest_shard(problem.items, world_size);
  const i64 budget = std::max({payload / 100, problem.small_padding, world_size * low - payload});
  const i64 high = std::max(low, std::min(payload + budget, problem.max_numel) / world_size);
  bool found = false;
  for (const i64 S : shard_candidates(problem, low, high)) {
    for (const bool lines : {true, false}) {
      BucketLayout layout;
      if (lines && S % problem.line != 0) continue;
      if (!place_with(problem, world_size, S, lines, layout)) continue;
      if (!found || layout.score() < best.score()) {
        best = std::move(layout);
        found = true;
      }
      if (best.perfect()) return best;
    }
  }
  TT_CHECK(found, "no layout for a bucket of ", payload, " elements on ", world_size, " ranks");
  return best;
}

}  // namespace tt::fsdp
