#include "opapi/attention_math.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "opapi/attention_geometry.h"
#include "opapi/attention_mask.h"

namespace sim::opapi {
namespace {

constexpr int64_t kBlockScores =
    4 << 20;  // scores in work at a time: 16 MiB each for the scores, the mask's numbers, …
constexpr float kHidden = std::numeric_limits<float>::lowest();

// A segment's tensors in fp32, [heads, rows, width].
struct Pieces {
  at::Tensor q, k, v;
};

// Heads [kv_head * group, ...) and rows that are worked on at a time.
struct Block {
  int64_t kv_head = 0, kv_heads = 0;
  int64_t row = 0, rows = 0;
};

struct Probabilities {
  at::Tensor p;         // [heads, rows, K], without dropout
  at::Tensor max, sum;  // [heads, rows, 1]
};

at::Tensor with_rope(const at::Tensor& piece, const at::Tensor& rope) {
  return rope.defined() ? at::cat({piece, rope}, -1) : piece;
}

Pieces pieces_of(const AttentionInputs& inputs, const AttentionGeometry& geometry, const Segment& segment) {
  at::Tensor q = query_piece(geometry, inputs.query, segment, geometry.d);
  at::Tensor k = kv_piece(geometry, inputs.key, segment, geometry.d);
  if (inputs.query_rope.defined()) {
    const int64_t width = inputs.query_rope.size(-1);
    q = with_rope(q, query_piece(geometry, inputs.query_rope, segment, width));
    k = with_rope(k, kv_piece(geometry, inputs.key_rope, segment, width));
  }
  return {q.to(at::kFloat), k.to(at::kFloat), kv_piece(geometry, inputs.value, segment, geometry.dv).to(at::kFloat)};
}

// All heads and rows at once where they fit, then fewer heads, then fewer rows.
std::vector<Block> blocks_of(const AttentionGeometry& geometry, const Segment& segment) {
  const int64_t row_scores = geometry.group * std::max<int64_t>(segment.kv_len, 1);
  const int64_t rows = std::clamp<int64_t>(kBlockScores / row_scores, 1, segment.q_len);
  const int64_t heads = std::clamp<int64_t>(kBlockScores / (row_scores * rows), 1, geometry.kv_heads);
  std::vector<Block> blocks;
  for (int64_t head = 0; head < geometry.kv_heads; head += heads) {
    for (int64_t row = 0; row < segment.q_len; row += rows) {
      blocks.push_back({head, std::min(heads, geometry.kv_heads - head), row, std::min(rows, segment.q_len - row)});
    }
  }
  return blocks;
}

// The block's part of a tensor with the heads and rows of the query.
at::Tensor of_query(const at::Tensor& piece, const AttentionGeometry& geometry, const Block& block) {
  return piece.narrow(0, block.kv_head * geometry.group, block.kv_heads * geometry.group)
      .narrow(1, block.row, block.rows);
}

at::Tensor of_kv(const at::Tensor& piece, const Block& block) { return piece.narrow(0, block.kv_head, block.kv_heads); }

// [kv_heads * group, rows, width] <-> [kv_heads, group * rows, width]: heads that share key and value side by side.
at::Tensor grouped(const at::Tensor& tensor, const Block& block) {
  return tensor.reshape({block.kv_heads, -1, tensor.size(-1)});
}

at::Tensor ungrouped(const at::Tensor& tensor, const AttentionGeometry& geometry, const Block& block) {
  return tensor.reshape({block.kv_heads * geometry.group, block.rows, tensor.size(-1)});
}

// What is added to the scores of a block: [heads, rows or 1, K].
at::Tensor pse_block(const AttentionInputs& inputs, const AttentionGeometry& geometry, const Segment& segment,
                     const Block& block) {
  const int64_t heads = block.kv_heads * geometry.group;
  const int64_t first = block.kv_head * geometry.group;
  const at::Tensor i = at::arange(block.row, block.row + block.rows, at::kLong).unsqueeze(1);
  const at::Tensor j = at::arange(segment.kv_len, at::kLong).unsqueeze(0);
  if (inputs.pse_type >= 2) {
    const at::Tensor slopes = inputs.pse.dim() == 1 ? inputs.pse : inputs.pse.select(0, segment.index);
    const int64_t shift =
        (inputs.q_start.empty() ? 0 : inputs.q_start[0]) - (inputs.kv_start.empty() ? 0 : inputs.kv_start[0]);
    at::Tensor distance = (i - j + shift).abs().to(at::kFloat);
    if (inputs.pse_type == 3) {
      distance = distance.sqrt();
    }
    return slopes.narrow(0, first, heads).view({heads, 1, 1}) * -distance;
  }
  at::Tensor pse = inputs.pse.select(0, inputs.pse.size(0) == 1 ? 0 : segment.index).narrow(0, first, heads);
  if (pse.size(1) == 1) {
    return pse.to(at::kFloat);
  }
  if (pse.size(1) == segment.q_len) {
    return pse.narrow(1, block.row, block.rows).to(at::kFloat);
  }
  // Its last rows only, of numbers that depend on j - i: row i is found in the last row that has a column for it.
  const int64_t rows = pse.size(1);
  const at::Tensor row = (rows - 1 - (j - i).clamp_min(0)).clamp_min(0);
  const at::Tensor column = (j - i + (segment.kv_len - rows) + row).clamp_max(segment.kv_len - 1);
  return pse.flatten(1)
      .index_select(1, (row * segment.kv_len + column).flatten())
      .view({heads, block.rows, -1})
      .to(at::kFloat);
}

at::Tensor scores_of(const AttentionInputs& inputs, const AttentionGeometry& geometry, const Segment& segment,
                     const Block& block, const Pieces& pieces) {
  const at::Tensor q = grouped(of_query(pieces.q, geometry, block), block);
  at::Tensor scores = ungrouped(at::bmm(q, of_kv(pieces.k, block).transpose(1, 2)), geometry, block);
  const bool shifted = inputs.pse.defined();
  if (shifted && inputs.pse_type == 1) {
    scores.add_(pse_block(inputs, geometry, segment, block));
  }
  scores.mul_(inputs.scale);
  if (shifted && inputs.pse_type != 1) {
    scores.add_(pse_block(inputs, geometry, segment, block));
  }
  return scores;
}

MaskedBlock hide(const AttentionInputs& inputs, const AttentionGeometry& geometry, const Segment& segment,
                 const Block& block, at::Tensor& scores) {
  MaskedBlock mask = masked_block(inputs, geometry, segment, block.kv_head * geometry.group,
                                  block.kv_heads * geometry.group, block.row, block.rows);
  if (mask.hidden.defined()) {
    scores.masked_fill_(mask.hidden, kHidden);
  }
  return mask;
}

at::Tensor sink_of(const AttentionInputs& inputs, const AttentionGeometry& geometry, const Block& block) {
  return inputs.sink.narrow(0, block.kv_head * geometry.group, block.kv_heads * geometry.group).view({-1, 1, 1});
}

Probabilities softmax(const AttentionInputs& inputs, const AttentionGeometry& geometry, const Segment& segment,
                      const Block& block, const Pieces& pieces) {
  at::Tensor scores = scores_of(inputs, geometry, segment, block, pieces);
  const MaskedBlock mask = hide(inputs, geometry, segment, block, scores);
  Probabilities result;
  result.max = scores.amax(-1, true);
  if (inputs.sink.defined()) {
    result.max = at::maximum(result.max, sink_of(inputs, geometry, block));
  }
  result.p = scores.sub_(result.max).exp_();
  result.sum = result.p.sum(-1, true);
  if (inputs.sink.defined()) {
    result.sum.add_((sink_of(inputs, geometry, block) - result.max).exp_());
  } else if (mask.invalid_rows.defined()) {
    result.sum.masked_fill_(mask.invalid_rows, std::numeric_limits<float>::infinity());
  }
  result.p.div_(result.sum);
  return result;
}

// Bits of the mask, 1 keeps, as numbers 0 and 1 / keep_prob: [heads, rows, K].
at::Tensor kept_block(const AttentionInputs& inputs, const AttentionGeometry& geometry, const Segment& segment,
                      const Block& block) {
  const int64_t heads = block.kv_heads * geometry.group;
  const at::Tensor bits = inputs.drop_mask.contiguous();
  const auto* bytes = bits.const_data_ptr<uint8_t>();
  at::Tensor kept = at::empty({heads, block.rows, segment.kv_len}, at::kFloat);
  float* out = kept.mutable_data_ptr<float>();
  const float factor = static_cast<float>(1.0 / inputs.keep_prob);
  for (int64_t head = 0; head < heads; ++head) {
    const int64_t row = (block.kv_head * geometry.group + head) * segment.q_len + block.row;
    const int64_t first = segment.first_score + row * segment.kv_len;
    for (int64_t bit = first; bit < first + block.rows * segment.kv_len; ++bit) {
      *out++ = (bytes[bit / 8] >> (bit % 8) & 1) != 0 ? factor : 0.0F;
    }
  }
  return kept;
}

at::Tensor first_of_eight(const AttentionGeometry& geometry, const at::Tensor& tensor, const Segment& segment,
                          const std::string& layout, const Block& block) {
  return of_query(softmax_piece(geometry, tensor, segment, layout), geometry, block).narrow(2, 0, 1);
}

// The gradient of one segment; dk and dv collect what the blocks add.
class SegmentGradient {
 public:
  SegmentGradient(const AttentionInputs& inputs, const AttentionGeometry& geometry, const Segment& segment,
                  const AttentionGradInputs& grad)
      : inputs_(inputs),
        geometry_(geometry),
        segment_(segment),
        grad_(grad),
        pieces_(pieces_of(inputs, geometry, segment)),
        dy_(query_piece(geometry, grad.dy, segment, geometry.dv).to(at::kFloat)),
        out_(query_piece(geometry, grad.attention, segment, geometry.dv).to(at::kFloat)),
        dq(at::zeros_like(pieces_.q, at::MemoryFormat::Contiguous)),
        dk(at::zeros_like(pieces_.k, at::MemoryFormat::Contiguous)),
        dv(at::zeros_like(pieces_.v, at::MemoryFormat::Contiguous)) {}

  void add(const Block& block, at::Tensor& dsink) {
    at::Tensor scores = scores_of(inputs_, geometry_, segment_, block, pieces_);
    hide(inputs_, geometry_, segment_, block, scores);
    const at::Tensor max = first_of_eight(geometry_, grad_.softmax_max, segment_, inputs_.softmax_layout, block);
    const at::Tensor sum = first_of_eight(geometry_, grad_.softmax_sum, segment_, inputs_.softmax_layout, block);
    const at::Tensor p = scores.sub_(max).exp_().div_(sum);
    const at::Tensor dy = of_query(dy_, geometry_, block);
    const at::Tensor delta = (dy * of_query(out_, geometry_, block)).sum(-1, true);
    const at::Tensor grouped_dy = grouped(dy, block);
    at::Tensor dp = ungrouped(at::bmm(grouped_dy, of_kv(pieces_.v, block).transpose(1, 2)), geometry_, block);
    at::Tensor used = p;  // after dropout
    if (inputs_.keep_prob < 1.0) {
      const at::Tensor kept = kept_block(inputs_, geometry_, segment_, block);
      used = p * kept;
      dp.mul_(kept);
    }
    of_kv(dv, block).add_(at::bmm(grouped(used, block).transpose(1, 2), grouped_dy));
    const at::Tensor ds = grouped(dp.sub_(delta).mul_(p).mul_(inputs_.scale), block);
    of_query(dq, geometry_, block).copy_(ungrouped(at::bmm(ds, of_kv(pieces_.k, block)), geometry_, block));
    of_kv(dk, block).add_(at::bmm(ds.transpose(1, 2), grouped(of_query(pieces_.q, geometry_, block), block)));
    if (inputs_.sink.defined()) {
      const at::Tensor share = (sink_of(inputs_, geometry_, block) - max).exp_().div_(sum);
      dsink.narrow(0, block.kv_head * geometry_.group, block.kv_heads * geometry_.group)
          .sub_((share * delta).sum({1, 2}));
    }
  }

 private:
  const AttentionInputs& inputs_;
  const AttentionGeometry& geometry_;
  const Segment& segment_;
  const AttentionGradInputs& grad_;
  const Pieces pieces_;
  const at::Tensor dy_, out_;

 public:
  const at::Tensor dq, dk, dv;  // [heads, rows, width]
};

}  // namespace

void compute_attention(const AttentionInputs& inputs, const AttentionOutputs& outputs) {
  const AttentionGeometry geometry = attention_geometry(inputs);
  check_compressed_mask(inputs);
  for (const Segment& segment : geometry.segments) {
    if (segment.q_len == 0) {
      continue;
    }
    const at::Tensor attention = query_piece(geometry, outputs.attention, segment, geometry.dv);
    const at::Tensor max = softmax_piece(geometry, outputs.softmax_max, segment, inputs.softmax_layout);
    const at::Tensor sum = softmax_piece(geometry, outputs.softmax_sum, segment, inputs.softmax_layout);
    if (segment.kv_len == 0) {
      attention.zero_();
      max.zero_();
      sum.zero_();
      continue;
    }
    const Pieces pieces = pieces_of(inputs, geometry, segment);
    for (const Block& block : blocks_of(geometry, segment)) {
      const Probabilities result = softmax(inputs, geometry, segment, block, pieces);
      const at::Tensor used =
          inputs.keep_prob < 1.0 ? result.p * kept_block(inputs, geometry, segment, block) : result.p;
      of_query(attention, geometry, block)
          .copy_(ungrouped(at::bmm(grouped(used, block), of_kv(pieces.v, block)), geometry, block));
      of_query(max, geometry, block).copy_(result.max);
      of_query(sum, geometry, block).copy_(result.sum);
    }
  }
}

void compute_attention_grad(const AttentionInputs& inputs, const AttentionGradInputs& grad,
                            const AttentionGradOutputs& outputs) {
  const AttentionGeometry geometry = attention_geometry(inputs);
  check_compressed_mask(inputs);
  at::Tensor dsink = at::zeros({geometry.heads}, at::kFloat);
  for (const Segment& segment : geometry.segments) {
    SegmentGradient gradient(inputs, geometry, segment, grad);
    if (segment.q_len > 0 && segment.kv_len > 0) {
      for (const Block& block : blocks_of(geometry, segment)) {
        gradient.add(block, dsink);
      }
    }
    query_piece(geometry, outputs.dq, segment, geometry.d).copy_(gradient.dq.narrow(2, 0, geometry.d));
    kv_piece(geometry, outputs.dk, segment, geometry.d).copy_(gradient.dk.narrow(2, 0, geometry.d));
    kv_piece(geometry, outputs.dv, segment, geometry.dv).copy_(gradient.dv);
    if (inputs.query_rope.defined()) {
      const int64_t width = inputs.query_rope.size(-1);
      query_piece(geometry, outputs.dq_rope, segment, width).copy_(gradient.dq.narrow(2, geometry.d, width));
      kv_piece(geometry, outputs.dk_rope, segment, width).copy_(gradient.dk.narrow(2, geometry.d, width));
    }
  }
  if (inputs.sink.defined()) {
    outputs.dsink.copy_(dsink);
  }
}

}  // namespace sim::opapi
