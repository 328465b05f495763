// Which scores an attention call hides.
#pragma once

#include <cstdint>

#include "opapi/attention_geometry.h"

namespace sim::opapi {

// What the sparse mode, the tokens and the prefix leave visible of a segment: row i sees column j when
// low <= j - i <= high or j < prefix.
struct Window {
  int64_t low = 0, high = 0, prefix = 0;
  bool hides(int64_t row, int64_t columns) const;  // the whole row
};

Window attention_window(const AttentionInputs& inputs, const AttentionGeometry& geometry, const Segment& segment);

// Type, shape, tokens and prefix, as far as they are known before the operator runs. Without attenMask nothing is
// hidden, and sparseMode, tokens and prefix have no meaning.
void check_mask(const AttentionInputs& inputs, const AttentionGeometry& geometry);

// A compressed mask must be exactly the triangle that the operator takes it for; a card computes wrong numbers
// otherwise.
void check_compressed_mask(const AttentionInputs& inputs);

struct MaskedBlock {
  at::Tensor hidden;        // bool [heads or 1, rows, K], undefined if nothing is hidden
  at::Tensor invalid_rows;  // bool [heads or 1, rows, 1], rows without any score whose result is zero
};

// For heads [head, head + heads) and rows [row, row + rows) of a segment.
MaskedBlock masked_block(const AttentionInputs& inputs, const AttentionGeometry& geometry, const Segment& segment,
                         int64_t head, int64_t heads, int64_t row, int64_t rows);

}  // namespace sim::opapi
