// What the FlashAttention operators are called with, the same for all their versions. A tensor or list that the caller
// left out is undefined or empty.
#pragma once

#include <cstdint>
#include <string>

#include "opapi/operator.h"

namespace sim::opapi {

// Letters of shapes: B batch, N heads of the query, M heads of key and value, S tokens of the query, K tokens of key
// and value, D and E width of a head of query and value, T tokens of all sequences, H = N*D.
struct AttentionInputs {
  at::Tensor query, key, value;          // BSH, SBH, BNSD, BSND, or TND for sequences of different length
  at::Tensor query_rope, key_rope;       // further columns of query and key
  at::Tensor pse;                        // added to the scores: see pse_type
  at::Tensor drop_mask;                  // one bit per score, 1 keeps
  at::Tensor padding_mask;               // reserved
  at::Tensor atten_mask;                 // 1 hides
  at::Tensor sink;                       // [N] fp32, a score that takes part in the softmax and has no value
  IntArray prefix;                       // [B], sparse modes 5 and 6
  IntArray actual_seq_q, actual_seq_kv;  // [B], where each sequence ends; TND only
  IntArray q_start, kv_start;
  double scale = 1.0;
  double keep_prob = 1.0;
  int64_t pre_tokens = 0;
  int64_t next_tokens = 0;
  int64_t head_num = 0;
  std::string layout;
  bool sequences = false;  // an operator for layout TND, the others take all layouts but that
  int64_t inner_precise = 0;
  int64_t sparse_mode = 0;
  int64_t pse_type = 1;  // 1: scale*(scores + pse); 0: scale*scores + pse; 2, 3: made from slopes, see attention_math
  std::string softmax_layout;  // TND: "" or "same_as_input"
};

struct AttentionOutputs {
  at::Tensor softmax_max, softmax_sum;  // [B, N, S, 8] fp32, the value repeated; TND see AttentionGeometry
  at::Tensor attention;                 // like the query, with E in place of D
};

struct AttentionGradInputs {
  at::Tensor dy;
  at::Tensor softmax_max, softmax_sum, attention;  // what the forward operator returned
};

struct AttentionGradOutputs {
  at::Tensor dq, dq_rope, dk, dk_rope, dv;
  at::Tensor dpse;   // documented as not used yet: the operators leave it alone
  at::Tensor dsink;  // [N] fp32
};

}  // namespace sim::opapi
