// The FlashAttention operators of Ascend910B. The versions differ in what they take:
//   Score, ScoreGrad                      every layout but TND
//   VarLenScore, UnpaddingScoreGrad       layout TND, sequences of different length
//   V2 adds pseType and start positions; V3 adds a sink (Score) or rotary columns apart (VarLen); VarLen V4 is the
//   first with the layout of the softmax numbers; V5 is V3 with a sink and that layout.
#include "opapi/attention_math.h"
#include "opapi/operator.h"

namespace sim::opapi {
namespace {

at::Tensor required(const OptIn& tensor) { return tensor.value_or(at::Tensor()); }

// A tensor without elements stands for none.
at::Tensor optional(const OptIn& tensor) { return tensor && tensor->numel() > 0 ? *tensor : at::Tensor(); }

at::Tensor optional(const OptOut& tensor) { return tensor ? at::Tensor(*tensor) : at::Tensor(); }

IntArray list(const OptIntArray& values) { return values.value_or(IntArray()); }

AttentionInputs make_inputs(const OptIn& query, const OptIn& key, const OptIn& value, const OptIn& pse,
                            const OptIn& drop_mask, const OptIn& padding_mask, const OptIn& atten_mask,
                            const OptIntArray& prefix, double scale, double keep_prob, int64_t pre_tokens,
                            int64_t next_tokens, int64_t head_num, const Text& layout, int64_t inner_precise,
                            int64_t sparse_mode) {
  AttentionInputs inputs;
  inputs.query = required(query);
  inputs.key = required(key);
  inputs.value = required(value);
  inputs.pse = optional(pse);
  inputs.drop_mask = optional(drop_mask);
  inputs.padding_mask = optional(padding_mask);
  inputs.atten_mask = optional(atten_mask);
  inputs.prefix = list(prefix);
  inputs.scale = scale;
  inputs.keep_prob = keep_prob;
  inputs.pre_tokens = pre_tokens;
  inputs.next_tokens = next_tokens;
  inputs.head_num = head_num;
  inputs.layout = layout;
  inputs.inner_precise = inner_precise;
  inputs.sparse_mode = sparse_mode;
  return inputs;
}

void set_sequences(AttentionInputs& inputs, const OptIntArray& actual_seq_q, const OptIntArray& actual_seq_kv) {
  inputs.sequences = true;
  inputs.actual_seq_q = list(actual_seq_q);
  inputs.actual_seq_kv = list(actual_seq_kv);
}

void set_positions(AttentionInputs& inputs, const OptIntArray& q_start, const OptIntArray& kv_start, int64_t pse_type) {
  inputs.q_start = list(q_start);
  inputs.kv_start = list(kv_start);
  inputs.pse_type = pse_type;
}

void set_rope(AttentionInputs& inputs, const OptIn& query_rope, const OptIn& key_rope) {
  inputs.query_rope = optional(query_rope);
  inputs.key_rope = optional(key_rope);
}

void forward(const AttentionInputs& inputs, const Out& softmax_max, const Out& softmax_sum, const Out& attention) {
  const AttentionOutputs outputs{softmax_max, softmax_sum, attention};
  check_attention(inputs, outputs);
  if (!checking()) {
    compute_attention(inputs, outputs);
  }
}

void backward(const AttentionInputs& inputs, const OptIn& dy, const OptIn& softmax_max, const OptIn& softmax_sum,
              const OptIn& attention, const AttentionGradOutputs& outputs) {
  const AttentionGradInputs grad{required(dy), required(softmax_max), required(softmax_sum), required(attention)};
  check_attention_grad(inputs, grad, outputs);
  if (!checking()) {
    compute_attention_grad(inputs, grad, outputs);
  }
}

}  // namespace

// Parameters and arguments that all of them have in common, in the order of the C functions.
#define MASKS OptIn pse, OptIn drop_mask, OptIn padding_mask, OptIn atten_mask
#define SEQUENCES OptIntArray actual_seq_q, OptIntArray actual_seq_kv
#define STARTS OptIntArray q_start, OptIntArray kv_start
#define NUMBERS                                                                                           \
  double scale, double keep_prob, int64_t pre_tokens, int64_t next_tokens, int64_t head_num, Text layout, \
      int64_t inner_precise, int64_t sparse_mode
#define FORWARD_OUTPUTS Out softmax_max, Out softmax_sum, OptOut, Out attention
#define SAVED OptIn softmax_max, OptIn softmax_sum, OptIn, OptIn attention
#define INPUTS                                                                                                   \
  make_inputs(query, key, value, pse, drop_mask, padding_mask, atten_mask, prefix, scale, keep_prob, pre_tokens, \
              next_tokens, head_num, layout, inner_precise, sparse_mode)

SIM_CHECKED_OPERATOR(FlashAttentionScore, OptIn query, OptIn key, OptIn value, MASKS, OptIntArray prefix, NUMBERS,
                     FORWARD_OUTPUTS) {
  forward(INPUTS, softmax_max, softmax_sum, attention);
}

SIM_CHECKED_OPERATOR(FlashAttentionScoreV2, OptIn query, OptIn key, OptIn value, MASKS, OptIntArray prefix, STARTS,
                     NUMBERS, int64_t pse_type, FORWARD_OUTPUTS) {
  AttentionInputs inputs = INPUTS;
  set_positions(inputs, q_start, kv_start, pse_type);
  forward(inputs, softmax_max, softmax_sum, attention);
}

SIM_CHECKED_OPERATOR(FlashAttentionScoreV3, OptIn query, OptIn key, OptIn value, MASKS, OptIn sink, OptIntArray prefix,
                     STARTS, NUMBERS, int64_t pse_type, FORWARD_OUTPUTS) {
  AttentionInputs inputs = INPUTS;
  set_positions(inputs, q_start, kv_start, pse_type);
  inputs.sink = optional(sink);
  forward(inputs, softmax_max, softmax_sum, attention);
}

SIM_CHECKED_OPERATOR(FlashAttentionVarLenScore, OptIn query, OptIn key, OptIn value, MASKS, OptIntArray prefix,
                     SEQUENCES, NUMBERS, FORWARD_OUTPUTS) {
  AttentionInputs inputs = INPUTS;
  set_sequences(inputs, actual_seq_q, actual_seq_kv);
  forward(inputs, softmax_max, softmax_sum, attention);
}

SIM_CHECKED_OPERATOR(FlashAttentionVarLenScoreV2, OptIn query, OptIn key, OptIn value, MASKS, OptIntArray prefix,
                     SEQUENCES, STARTS, NUMBERS, int64_t pse_type, FORWARD_OUTPUTS) {
  AttentionInputs inputs = INPUTS;
  set_sequences(inputs, actual_seq_q, actual_seq_kv);
  set_positions(inputs, q_start, kv_start, pse_type);
  forward(inputs, softmax_max, softmax_sum, attention);
}

SIM_CHECKED_OPERATOR(FlashAttentionVarLenScoreV3, OptIn query, OptIn query_rope, OptIn key, OptIn key_rope, OptIn value,
                     MASKS, OptIntArray prefix, SEQUENCES, STARTS, NUMBERS, int64_t pse_type, FORWARD_OUTPUTS) {
  AttentionInputs inputs = INPUTS;
  set_sequences(inputs, actual_seq_q, actual_seq_kv);
  set_positions(inputs, q_start, kv_start, pse_type);
  set_rope(inputs, query_rope, key_rope);
  forward(inputs, softmax_max, softmax_sum, attention);
}

SIM_CHECKED_OPERATOR(FlashAttentionVarLenScoreV4, OptIn query, OptIn key, OptIn value, MASKS, OptIntArray prefix,
                     SEQUENCES, NUMBERS, Text softmax_layout, FORWARD_OUTPUTS) {
  AttentionInputs inputs = INPUTS;
  set_sequences(inputs, actual_seq_q, actual_seq_kv);
  inputs.softmax_layout = softmax_layout;
  forward(inputs, softmax_max, softmax_sum, attention);
}

SIM_CHECKED_OPERATOR(FlashAttentionVarLenScoreV5, OptIn query, OptIn query_rope, OptIn key, OptIn key_rope, OptIn value,
                     MASKS, OptIn sink, OptIntArray prefix, SEQUENCES, STARTS, NUMBERS, int64_t pse_type,
                     Text softmax_layout, FORWARD_OUTPUTS) {
  AttentionInputs inputs = INPUTS;
  set_sequences(inputs, actual_seq_q, actual_seq_kv);
  set_positions(inputs, q_start, kv_start, pse_type);
  set_rope(inputs, query_rope, key_rope);
  inputs.sink = optional(sink);
  inputs.softmax_layout = softmax_layout;
  forward(inputs, softmax_max, softmax_sum, attention);
}

SIM_CHECKED_OPERATOR(FlashAttentionScoreGrad, OptIn query, OptIn key, OptIn value, OptIn dy, MASKS, SAVED,
                     OptIntArray prefix, NUMBERS, Out dq, Out dk, Out dv, OptOut dpse) {
  backward(INPUTS, dy, softmax_max, softmax_sum, attention, {dq, {}, dk, {}, dv, optional(dpse), {}});
}

SIM_CHECKED_OPERATOR(FlashAttentionScoreGradV2, OptIn query, OptIn key, OptIn value, OptIn dy, MASKS, SAVED,
                     OptIntArray prefix, STARTS, NUMBERS, int64_t pse_type, Out dq, Out dk, Out dv, OptOut dpse) {
  AttentionInputs inputs = INPUTS;
  set_positions(inputs, q_start, kv_start, pse_type);
  backward(inputs, dy, softmax_max, softmax_sum, attention, {dq, {}, dk, {}, dv, optional(dpse), {}});
}

SIM_CHECKED_OPERATOR(FlashAttentionScoreGradV3, OptIn query, OptIn key, OptIn value, OptIn dy, MASKS, SAVED, OptIn sink,
                     OptIntArray prefix, STARTS, NUMBERS, int64_t pse_type, Out dq, Out dk, Out dv, OptOut dpse,
                     OptOut dsink) {
  AttentionInputs inputs = INPUTS;
  set_positions(inputs, q_start, kv_start, pse_type);
  inputs.sink = optional(sink);
  backward(inputs, dy, softmax_max, softmax_sum, attention, {dq, {}, dk, {}, dv, optional(dpse), optional(dsink)});
}

SIM_CHECKED_OPERATOR(FlashAttentionUnpaddingScoreGrad, OptIn query, OptIn key, OptIn value, OptIn dy, MASKS, SAVED,
                     OptIntArray prefix, SEQUENCES, NUMBERS, Out dq, Out dk, Out dv, OptOut dpse) {
  AttentionInputs inputs = INPUTS;
  set_sequences(inputs, actual_seq_q, actual_seq_kv);
  backward(inputs, dy, softmax_max, softmax_sum, attention, {dq, {}, dk, {}, dv, optional(dpse), {}});
}

SIM_CHECKED_OPERATOR(FlashAttentionUnpaddingScoreGradV2, OptIn query, OptIn key, OptIn value, OptIn dy, MASKS, SAVED,
                     OptIntArray prefix, SEQUENCES, STARTS, NUMBERS, int64_t pse_type, Out dq, Out dk, Out dv,
                     OptOut dpse) {
  AttentionInputs inputs = INPUTS;
  set_sequences(inputs, actual_seq_q, actual_seq_kv);
  set_positions(inputs, q_start, kv_start, pse_type);
  backward(inputs, dy, softmax_max, softmax_sum, attention, {dq, {}, dk, {}, dv, optional(dpse), {}});
}

SIM_CHECKED_OPERATOR(FlashAttentionUnpaddingScoreGradV3, OptIn query, OptIn query_rope, OptIn key, OptIn key_rope,
                     OptIn value, OptIn dy, MASKS, SAVED, OptIntArray prefix, SEQUENCES, STARTS, NUMBERS,
                     int64_t pse_type, Out dq, OptOut dq_rope, Out dk, OptOut dk_rope, Out dv, OptOut dpse) {
  AttentionInputs inputs = INPUTS;
  set_sequences(inputs, actual_seq_q, actual_seq_kv);
  set_positions(inputs, q_start, kv_start, pse_type);
  set_rope(inputs, query_rope, key_rope);
  backward(inputs, dy, softmax_max, softmax_sum, attention,
           {dq, optional(dq_rope), dk, optional(dk_rope), dv, optional(dpse), {}});
}

SIM_CHECKED_OPERATOR(FlashAttentionUnpaddingScoreGradV4, OptIn query, OptIn key, OptIn value, OptIn dy, MASKS, SAVED,
                     OptIntArray prefix, SEQUENCES, NUMBERS, Out dq, Out dk, Out dv, OptOut dpse, Text softmax_layout) {
  AttentionInputs inputs = INPUTS;
  set_sequences(inputs, actual_seq_q, actual_seq_kv);
  inputs.softmax_layout = softmax_layout;
  backward(inputs, dy, softmax_max, softmax_sum, attention, {dq, {}, dk, {}, dv, optional(dpse), {}});
}

SIM_CHECKED_OPERATOR(FlashAttentionUnpaddingScoreGradV5, OptIn query, OptIn query_rope, OptIn key, OptIn key_rope,
                     OptIn value, OptIn dy, MASKS, SAVED, OptIn sink, OptIntArray prefix, SEQUENCES, STARTS, NUMBERS,
                     int64_t pse_type, Text softmax_layout, Out dq, OptOut dq_rope, Out dk, OptOut dk_rope, Out dv,
                     OptOut dpse, OptOut dsink) {
  AttentionInputs inputs = INPUTS;
  set_sequences(inputs, actual_seq_q, actual_seq_kv);
  set_positions(inputs, q_start, kv_start, pse_type);
  set_rope(inputs, query_rope, key_rope);
  inputs.sink = optional(sink);
  inputs.softmax_layout = softmax_layout;
  backward(inputs, dy, softmax_max, softmax_sum, attention,
           {dq, optional(dq_rope), dk, optional(dk_rope), dv, optional(dpse), optional(dsink)});
}

#undef MASKS
#undef SEQUENCES
#undef STARTS
#undef NUMBERS
#undef FORWARD_OUTPUTS
#undef SAVED
#undef INPUTS

}  // namespace sim::opapi
