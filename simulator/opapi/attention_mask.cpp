#include "opapi/attention_mask.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace sim::opapi {
namespace {

// Sparse modes, by the names of the documentation.
enum Mode : int64_t {
  kDefault = 0,
  kAllMask = 1,
  kLeftUpCausal = 2,
  kRightDownCausal = 3,
  kBand = 4,
  kPrefix = 5,
  kPrefixCompressed = 6,
  kRightDownCausalBand = 7,
  kBandLeftUpCausal = 8,
};

constexpr int64_t kFar = int64_t{1} << 40;  // beyond every sequence; sums of such numbers do not overflow
constexpr int64_t kCompressed = 2048;
constexpr int64_t kPrefixRows = 1024;

bool is_compressed(int64_t mode) { return mode >= kLeftUpCausal && mode != kPrefix; }

// The segment of modes 7 and 8 whose window is a band: the last or the first that has any query.
int64_t band_segment(const AttentionInputs& inputs, const AttentionGeometry& geometry) {
  int64_t found = -1;
  for (const Segment& segment : geometry.segments) {
    if (segment.q_len > 0 && segment.kv_len > 0) {
      found = segment.index;
      if (inputs.sparse_mode == kBandLeftUpCausal) {
        break;
      }
    }
  }
  return found;
}

std::string tokens(const AttentionInputs& inputs) {
  return "preTokens is " + std::to_string(inputs.pre_tokens) + ", nextTokens " + std::to_string(inputs.next_tokens);
}

std::string lengths(const AttentionGeometry& geometry, const Segment& segment) {
  const std::string which =
      geometry.layout == Layout::kTND ? "sequence " + std::to_string(segment.index) + " has " : "";
  return which + "Sq = " + std::to_string(segment.q_len) + ", Skv = " + std::to_string(segment.kv_len);
}

void check_mask_shape(const AttentionInputs& inputs, const AttentionGeometry& geometry) {
  const at::IntArrayRef shape = inputs.atten_mask.sizes();
  const std::string what =
      "attenMask has shape " + describe(shape) + " in sparseMode " + std::to_string(inputs.sparse_mode);
  if (is_compressed(inputs.sparse_mode)) {
    const int64_t rows = inputs.sparse_mode == kPrefixCompressed ? kCompressed + kPrefixRows : kCompressed;
    if (shape != at::IntArrayRef({rows, kCompressed}) && shape != at::IntArrayRef({1, 1, rows, kCompressed})) {
      reject(what, "a compressed mask has shape " + describe({rows, kCompressed}));
    }
    return;
  }
  const bool sequences = geometry.layout == Layout::kTND;
  const bool plane = shape.size() == 2 && inputs.sparse_mode != kPrefix;
  const bool full =
      shape.size() == 4 && ((shape[0] == geometry.batch && (shape[1] == 1 || shape[1] == geometry.heads)) ||
                            (shape[0] == 1 && shape[1] == 1 && inputs.sparse_mode != kPrefix));
  const bool fits =
      (plane || full) &&
      (sequences ? shape[shape.size() - 2] >= geometry.max_q && shape[shape.size() - 1] >= geometry.max_kv
                 : shape[shape.size() - 2] == geometry.max_q && shape[shape.size() - 1] == geometry.max_kv);
  if (!fits) {
    reject(what, std::string(inputs.sparse_mode == kPrefix
                                 ? "it must be [B, N, Sq, Skv] or [B, 1, Sq, Skv]"
                                 : "it must be [B, N, Sq, Skv], [B, 1, Sq, Skv], [1, 1, Sq, Skv] or "
                                   "[Sq, Skv]") +
                     " with B = " + std::to_string(geometry.batch) + ", N = " + std::to_string(geometry.heads) + ", " +
                     (sequences ? "the longest Sq = " : "Sq = ") + std::to_string(geometry.max_q) +
                     ", Skv = " + std::to_string(geometry.max_kv));
  }
}

void check_prefix(const AttentionInputs& inputs, const AttentionGeometry& geometry) {
  if (static_cast<int64_t>(inputs.prefix.size()) != geometry.batch) {
    reject("prefix has " + std::to_string(inputs.prefix.size()) + " entries",
           "sparseMode " + std::to_string(inputs.sparse_mode) +
               " needs one for each of B = " + std::to_string(geometry.batch));
  }
  for (const Segment& segment : geometry.segments) {
    const int64_t prefix = inputs.prefix.at(segment.index);
    const int64_t least = std::max<int64_t>(0, segment.kv_len - segment.q_len);
    if (prefix < least || prefix > segment.kv_len) {
      reject("prefix[" + std::to_string(segment.index) + "] is " + std::to_string(prefix),
             "with " + lengths(geometry, segment) + " it must be in [" + std::to_string(least) + ", " +
                 std::to_string(segment.kv_len) + "]");
    }
  }
}

void check_tokens(const AttentionInputs& inputs, const AttentionGeometry& geometry) {
  const int64_t mode = inputs.sparse_mode;
  const int64_t pre = inputs.pre_tokens;
  const int64_t next = inputs.next_tokens;
  if (mode == kDefault || mode == kBand || mode >= kRightDownCausalBand) {
    if (std::clamp(pre, -kFar, kFar) + std::clamp(next, -kFar, kFar) < 0) {
      reject(tokens(inputs), "the band between them must not be empty: preTokens + nextTokens >= 0");
    }
  }
  const int64_t band = mode >= kRightDownCausalBand ? band_segment(inputs, geometry) : -1;
  for (const Segment& segment : geometry.segments) {
    const int64_t q = segment.q_len;
    const int64_t kv = segment.kv_len;
    if (q == 0 || kv == 0) {
      continue;
    }
    const bool outside = mode == kDefault ? std::min(next, pre) <= -std::min(q, kv) : next <= -kv || pre <= -q;
    if ((mode == kDefault || mode == kBand) && outside) {
      reject(tokens(inputs), "the band lies outside of the scores: " + lengths(geometry, segment));
    }
    const bool causal = mode == kRightDownCausal || (mode == kRightDownCausalBand && segment.index != band);
    if (geometry.layout == Layout::kTND && causal && q > kv) {
      reject(lengths(geometry, segment),
             "sparseMode " + std::to_string(mode) + " with layout TND needs Sq <= Skv in every sequence");
    }
    if (segment.index != band) {
      continue;
    }
    if (pre < kv) {
      reject(tokens(inputs),
             "sparseMode " + std::to_string(mode) + " needs preTokens >= Skv: " + lengths(geometry, segment));
    }
    if (mode == kRightDownCausalBand && (next > 0 || next < q - kv)) {
      reject(tokens(inputs), "sparseMode 7 needs Sq - Skv <= nextTokens <= 0: " + lengths(geometry, segment));
    }
    if (mode == kBandLeftUpCausal && next < q - kv) {
      reject(tokens(inputs), "sparseMode 8 needs nextTokens >= Sq - Skv: " + lengths(geometry, segment));
    }
  }
}

// The part of a full mask that belongs to the block, bool [heads or 1, rows, K].
at::Tensor given_mask(const AttentionInputs& inputs, const Segment& segment, int64_t head, int64_t heads, int64_t row,
                      int64_t rows) {
  at::Tensor mask = inputs.atten_mask;
  if (mask.dim() == 2) {
    mask = mask.unsqueeze(0);
  } else {
    mask = mask.select(0, mask.size(0) == 1 ? 0 : segment.index);
    if (mask.size(0) > 1) {
      mask = mask.narrow(0, head, heads);
    }
  }
  return mask.narrow(1, row, rows).narrow(2, 0, segment.kv_len).ne(0);
}

}  // namespace

bool Window::hides(int64_t row, int64_t columns) const {
  return prefix <= 0 && (row + high < 0 || row + low >= columns || columns == 0);
}

Window attention_window(const AttentionInputs& inputs, const AttentionGeometry& geometry, const Segment& segment) {
  Window window{-kFar, kFar, 0};
  const int64_t pre = std::clamp(inputs.pre_tokens, -kFar, kFar);
  const int64_t next = std::clamp(inputs.next_tokens, -kFar, kFar);
  const int64_t right_down = segment.kv_len - segment.q_len;
  int64_t mode = inputs.atten_mask.defined() ? inputs.sparse_mode : int64_t{kAllMask};
  if (mode == kRightDownCausalBand || mode == kBandLeftUpCausal) {
    const int64_t others = mode == kRightDownCausalBand ? kRightDownCausal : kLeftUpCausal;
    mode = segment.index == band_segment(inputs, geometry) ? int64_t{kBand} : others;
  }
  switch (mode) {
    case kDefault:
      window.low = -pre;
      window.high = next;
      break;
    case kLeftUpCausal:
      window.high = 0;
      break;
    case kRightDownCausal:
      window.high = right_down;
      break;
    case kBand:
      window.low = right_down - pre;
      window.high = right_down + next;
      break;
    case kPrefix:
    case kPrefixCompressed:
      window.high = right_down;
      window.prefix = inputs.prefix.at(segment.index);
      break;
    default:
      break;
  }
  return window;
}

void check_mask(const AttentionInputs& inputs, const AttentionGeometry& geometry) {
  const int64_t mode = inputs.sparse_mode;
  const bool sequences = geometry.layout == Layout::kTND;
  if (mode < 0 || mode > (sequences ? kBandLeftUpCausal : kPrefixCompressed) || (sequences && mode == kPrefix)) {
    reject("sparseMode is " + std::to_string(mode),
           sequences ? "layout TND takes 0 to 4 and 6 to 8" : "layout " + inputs.layout + " takes 0 to 6");
  }
  if (!inputs.atten_mask.defined()) {
    return;
  }
  const auto type = inputs.atten_mask.scalar_type();
  if (type != at::kBool && type != at::kByte) {
    reject(std::string("the type of attenMask is ") + c10::toString(type), "it must be bool or uint8");
  }
  check_mask_shape(inputs, geometry);
  if (mode == kPrefix || mode == kPrefixCompressed) {
    check_prefix(inputs, geometry);
  }
  check_tokens(inputs, geometry);
  if (!sequences) {
    return;
  }
  for (const Segment& segment : geometry.segments) {
    const Window window = attention_window(inputs, geometry, segment);
    for (int64_t row = 0; segment.kv_len > 0 && row < segment.q_len; ++row) {
      if (window.hides(row, segment.kv_len)) {
        reject("sparseMode " + std::to_string(mode) + " hides all of row " + std::to_string(row) + " of sequence " +
                   std::to_string(segment.index),
               "with layout TND every row must see a column: " + lengths(geometry, segment));
      }
    }
  }
}

void check_compressed_mask(const AttentionInputs& inputs) {
  if (!inputs.atten_mask.defined() || !is_compressed(inputs.sparse_mode)) {
    return;
  }
  // Called for every layer of every step: rows are compared with a window into 2048 zeros before 2048 ones.
  static const std::vector<uint8_t> pattern = [] {
    std::vector<uint8_t> bytes(2 * kCompressed, 0);
    std::fill(bytes.begin() + kCompressed, bytes.end(), uint8_t{1});
    return bytes;
  }();
  const at::Tensor mask = inputs.atten_mask.reshape({-1, kCompressed}).contiguous();
  const auto* row = static_cast<const uint8_t*>(mask.const_data_ptr());
  for (int64_t i = 0; i < kCompressed; ++i, row += kCompressed) {
    if (std::memcmp(row, pattern.data() + kCompressed - 1 - i, kCompressed) == 0) {
      continue;
    }
    reject("attenMask differs from the upper triangle in row " + std::to_string(i) + " in sparseMode " +
               std::to_string(inputs.sparse_mode),
           "its first 2048 rows must be 1 above the diagonal and 0 elsewhere: ones(2048, 2048).triu(1)");
  }
  if (inputs.sparse_mode == kPrefixCompressed) {
    const at::Tensor block = mask.narrow(0, kCompressed, kPrefixRows).ne(0);
    if (block.narrow(1, 0, kCompressed / 2).any().item<bool>() ||
        !block.narrow(1, kCompressed / 2, kCompressed / 2).all().item<bool>()) {
      reject("attenMask has a wrong prefix block in sparseMode 6",
             "its last 1024 rows must be 0 in the left half and 1 in the right half");
    }
  }
}

MaskedBlock masked_block(const AttentionInputs& inputs, const AttentionGeometry& geometry, const Segment& segment,
                         int64_t head, int64_t heads, int64_t row, int64_t rows) {
  MaskedBlock block;
  if (!inputs.atten_mask.defined()) {
    return block;
  }
  const Window window = attention_window(inputs, geometry, segment);
  const auto diagonal = [&](int64_t distance) { return std::clamp(distance + row, -rows - 1, segment.kv_len + 1); };
  const at::Tensor everything = at::ones({rows, segment.kv_len}, at::kBool);
  at::Tensor outside = everything.triu(diagonal(window.high + 1));
  if (window.low > -kFar) {
    outside.logical_or_(everything.tril(diagonal(window.low - 1)));
  }
  if (window.prefix > 0) {
    outside.narrow(1, 0, window.prefix).fill_(false);
  }
  outside = outside.unsqueeze(0);
  block.invalid_rows = outside.all(-1, true);
  block.hidden = outside;
  if (is_compressed(inputs.sparse_mode)) {
    return block;
  }

  const at::Tensor given = given_mask(inputs, segment, head, heads, row, rows);
  if (outside.logical_and(given.logical_not()).any().item<bool>()) {
    reject(inputs.sparse_mode == kPrefix ? std::string("prefix hides scores that attenMask shows")
                                         : tokens(inputs) + " hide scores that attenMask shows",
           "the mask and the sparse mode must agree, a card skips whole blocks by one and masks the rest by the other");
  }
  block.hidden = given;
  const at::Tensor empty_rows = given.all(-1, true);
  if (geometry.layout == Layout::kTND && segment.kv_len > 0 && empty_rows.any().item<bool>()) {
    reject("attenMask hides a whole row of sequence " + std::to_string(segment.index),
           "with layout TND every row must see a column");
  }
  // 2 asks for zeros in rows without a score; otherwise only rows that are known to be so without a look at the mask.
  block.invalid_rows = inputs.inner_precise == 2 ? empty_rows : block.invalid_rows;
  return block;
}

}  // namespace sim::opapi
