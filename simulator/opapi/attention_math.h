// FlashAttention on CPU tensors: what the simulated operators compute. All arithmetic is fp32; a block of rows is
// worked on at a time, so that long sequences need no [N, S, K] tensor.
//
//   scores = scale * (Q K^T + pse)            pse_type 1
//          = scale * Q K^T + pse              pse_type 0, 2, 3
//   P      = exp(scores - max) / sum          hidden scores count as -FLT_MAX; max and sum include the sink
//   out    = (P * keep / keep_prob) V
//
// pse_type 2 and 3 take one slope per head and use -slope * |i + q_start - j - kv_start|, type 3 its square root.
// Rows without a visible score: zeros, max = -FLT_MAX and sum = inf where the operator takes care of them, else the
// mean of V.
#pragma once

#include "opapi/attention_arguments.h"

namespace sim::opapi {

// Everything documented that can be said without looking into tensors; throws InvalidArgument or NullArgument.
void check_attention(const AttentionInputs& inputs, const AttentionOutputs& outputs);
void check_attention_grad(const AttentionInputs& inputs, const AttentionGradInputs& grad,
                          const AttentionGradOutputs& outputs);

// Throws InvalidArgument for what only the contents show, as a compressed mask that is no triangle.
void compute_attention(const AttentionInputs& inputs, const AttentionOutputs& outputs);

// Recomputes P from softmaxMax and softmaxSum as a card does: wrong ones give wrong gradients.
void compute_attention_grad(const AttentionInputs& inputs, const AttentionGradInputs& grad,
                            const AttentionGradOutputs& outputs);

}  // namespace sim::opapi
