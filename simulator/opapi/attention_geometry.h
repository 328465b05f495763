// Sizes of an attention call and where its sequences lie, the same for every layout.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "opapi/attention_arguments.h"

namespace sim::opapi {

enum class Layout { kBSH, kSBH, kBNSD, kBSND, kTND };

// One batch entry, or one sequence of a TND call.
struct Segment {
  int64_t index = 0;
  int64_t q_begin = 0, q_len = 0;    // rows of the query, 0 and S unless TND
  int64_t kv_begin = 0, kv_len = 0;  // rows of key and value
  int64_t first_score = 0;  // number of scores of all heads of the segments before: where its dropout bits begin
};

struct AttentionGeometry {
  Layout layout = Layout::kBNSD;
  int64_t batch = 0;
  int64_t heads = 0, kv_heads = 0, group = 0;  // group = heads / kv_heads
  int64_t d = 0, dv = 0;                       // width of a head of query and key, of value
  int64_t max_q = 0, max_kv = 0;
  std::vector<Segment> segments;
};

// Throws for layouts, shapes, types and sequence lists that do not fit together.
AttentionGeometry attention_geometry(const AttentionInputs& inputs);

// [heads, rows, width] of one segment: a view of a tensor in the call's layout.
at::Tensor query_piece(const AttentionGeometry& geometry, const at::Tensor& tensor, const Segment& segment,
                       int64_t width);
at::Tensor kv_piece(const AttentionGeometry& geometry, const at::Tensor& tensor, const Segment& segment, int64_t width);

// [heads, rows, 8] of one segment: a view of softmaxMax or softmaxSum. With TND and softmax_layout "" the operators put
// [N, rows, 8] of one sequence behind that of the one before, although the shape of the tensor says [T, N, 8].
at::Tensor softmax_piece(const AttentionGeometry& geometry, const at::Tensor& tensor, const Segment& segment,
                         const std::string& softmax_layout);

// Shapes the outputs must have.
std::vector<int64_t> attention_shape(const AttentionGeometry& geometry, const at::Tensor& query);
std::vector<int64_t> softmax_shape(const AttentionGeometry& geometry, const at::Tensor& query);

std::string describe(at::IntArrayRef shape);
// Throws InvalidArgument; `what` names the argument and its value.
[[noreturn]] void reject(const std::string& what, const std::string& rule);

}  // namespace sim::opapi
