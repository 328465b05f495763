#include "opapi/attention_geometry.h"

#include <array>
#include <utility>

namespace sim::opapi {
namespace {

constexpr int64_t kMaxTokens = 1 << 20;
constexpr int64_t kMaxWidth = 768;

const char* type_name(const at::Tensor& tensor) { return c10::toString(tensor.scalar_type()); }

Layout parse_layout(const AttentionInputs& inputs) {
  static const std::array<std::pair<const char*, Layout>, 5> kLayouts = {{{"BSH", Layout::kBSH},
                                                                          {"SBH", Layout::kSBH},
                                                                          {"BNSD", Layout::kBNSD},
                                                                          {"BSND", Layout::kBSND},
                                                                          {"TND", Layout::kTND}}};
  for (const auto& [name, layout] : kLayouts) {
    if (inputs.layout == name && (layout == Layout::kTND) == inputs.sequences) {
      return layout;
    }
  }
  reject("inputLayout is \"" + inputs.layout + "\"",
         inputs.sequences ? "this operator takes TND only" : "it must be BSH, SBH, BNSD or BSND");
}

void check_range(const std::string& what, int64_t value, int64_t most) {
  if (value < 1 || value > most) {
    reject(what + " is " + std::to_string(value), "it must be in [1, " + std::to_string(most) + "]");
  }
}

void check_types(const AttentionInputs& inputs) {
  const std::array<std::pair<const char*, const at::Tensor*>, 3> required = {
      {{"query", &inputs.query}, {"key", &inputs.key}, {"value", &inputs.value}}};
  for (const auto& [name, tensor] : required) {
    if (!tensor->defined()) {
      throw NullArgument(std::string(name) + " is null; it is required");
    }
    const auto type = tensor->scalar_type();
    if (type != at::kHalf && type != at::kBFloat16 && type != at::kFloat) {
      reject(std::string("the type of ") + name + " is " + type_name(*tensor),
             "it must be float16, bfloat16 or float32");
    }
    if (type != inputs.query.scalar_type()) {
      reject(std::string("the type of ") + name + " is " + type_name(*tensor) + ", that of query " +
                 type_name(inputs.query),
             "query, key and value must have one type");
    }
  }
}

// Cumulative ends -> segments.
void add_sequences(const AttentionInputs& inputs, AttentionGeometry& geometry) {
  if (inputs.actual_seq_q.empty() || inputs.actual_seq_kv.empty()) {
    reject("actualSeqQLen or actualSeqKvLen is missing", "layout TND needs where each sequence ends");
  }
  const std::vector<int64_t>& ends_q = inputs.actual_seq_q;
  const std::vector<int64_t>& ends_kv = inputs.actual_seq_kv;
  if (ends_q.size() != ends_kv.size()) {
    reject("actualSeqQLen has " + std::to_string(ends_q.size()) + " entries, actualSeqKvLen " +
               std::to_string(ends_kv.size()),
           "both must have one per sequence");
  }
  geometry.batch = static_cast<int64_t>(ends_q.size());
  const auto check_ends = [&](const char* name, const std::vector<int64_t>& ends, int64_t tokens, const char* tensor) {
    int64_t last = 0;
    for (const int64_t end : ends) {
      if (end < last) {
        reject(std::string(name) + " is " + describe(ends),
               "it holds where each sequence ends in T, so it must not decrease and not be negative");
      }
      last = end;
    }
    if (last > tokens) {
      reject(std::string(name) + " ends at " + std::to_string(last),
             std::string(tensor) + " has only T = " + std::to_string(tokens) + " tokens");
    }
  };
  check_ends("actualSeqQLen", ends_q, inputs.query.size(0), "query");
  check_ends("actualSeqKvLen", ends_kv, inputs.key.size(0), "key");
  Segment next;
  for (std::size_t i = 0; i < ends_q.size(); ++i) {
    next.index = static_cast<int64_t>(i);
    next.q_len = ends_q[i] - next.q_begin;
    next.kv_len = ends_kv[i] - next.kv_begin;
    geometry.segments.push_back(next);
    geometry.max_q = std::max(geometry.max_q, next.q_len);
    geometry.max_kv = std::max(geometry.max_kv, next.kv_len);
    next.first_score += geometry.heads * next.q_len * next.kv_len;
    next.q_begin = ends_q[i];
    next.kv_begin = ends_kv[i];
  }
}

struct Axes {
  int64_t batch, tokens, heads, width;
};

// `heads` is what H is divided by where the layout has no axis of heads; 0 if unknown, then `width` divides it.
Axes axes_of(const AttentionInputs& inputs, Layout layout, const char* name, const at::Tensor& tensor, int64_t heads,
             int64_t width) {
  const int64_t rank = layout == Layout::kBNSD || layout == Layout::kBSND ? 4 : 3;
  if (tensor.dim() != rank) {
    reject(std::string(name) + " has shape " + describe(tensor.sizes()),
           "layout " + inputs.layout + " has " + std::to_string(rank) + " axes");
  }
  const auto split = [&](int64_t hidden) -> std::pair<int64_t, int64_t> {
    const int64_t divisor = heads > 0 ? heads : width;
    if (divisor == 0 || hidden % divisor != 0) {
      reject(std::string("H of ") + name + " is " + std::to_string(hidden),
             "it must be a multiple of " + std::to_string(divisor) +
                 (heads > 0 ? ", the number of heads" : ", the width of a head of query"));
    }
    return heads > 0 ? std::pair{heads, hidden / heads} : std::pair{hidden / width, width};
  };
  switch (layout) {
    case Layout::kBSH: {
      const auto [n, d] = split(tensor.size(2));
      return {tensor.size(0), tensor.size(1), n, d};
    }
    case Layout::kSBH: {
      const auto [n, d] = split(tensor.size(2));
      return {tensor.size(1), tensor.size(0), n, d};
    }
    case Layout::kBNSD:
      return {tensor.size(0), tensor.size(2), tensor.size(1), tensor.size(3)};
    case Layout::kBSND:
      return {tensor.size(0), tensor.size(1), tensor.size(2), tensor.size(3)};
    case Layout::kTND:
      break;
  }
  return {1, tensor.size(0), tensor.size(1), tensor.size(2)};
}

at::Tensor piece(Layout layout, const at::Tensor& tensor, int64_t index, int64_t begin, int64_t length, int64_t heads,
                 int64_t width) {
  switch (layout) {
    case Layout::kBSH:
      return tensor.select(0, index).unflatten(1, {heads, width}).transpose(0, 1);
    case Layout::kSBH:
      return tensor.select(1, index).unflatten(1, {heads, width}).transpose(0, 1);
    case Layout::kBNSD:
      return tensor.select(0, index);
    case Layout::kBSND:
      return tensor.select(0, index).transpose(0, 1);
    case Layout::kTND:
      break;
  }
  return tensor.narrow(0, begin, length).transpose(0, 1);
}

}  // namespace

std::string describe(at::IntArrayRef shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

void reject(const std::string& what, const std::string& rule) { throw InvalidArgument(what + "; " + rule); }

AttentionGeometry attention_geometry(const AttentionInputs& inputs) {
  const bool sequences = inputs.sequences;
  AttentionGeometry geometry;
  geometry.layout = parse_layout(inputs);
  check_types(inputs);
  check_range("headNum", inputs.head_num, 256);

  const Axes q = axes_of(inputs, geometry.layout, "query", inputs.query, inputs.head_num, 0);
  const Axes k = axes_of(inputs, geometry.layout, "key", inputs.key, 0, q.width);
  const Axes v = axes_of(inputs, geometry.layout, "value", inputs.value, k.heads, 0);
  if (q.heads != inputs.head_num) {
    reject("headNum is " + std::to_string(inputs.head_num),
           "query of shape " + describe(inputs.query.sizes()) + " has " + std::to_string(q.heads) + " heads");
  }
  check_range("D of query", q.width, kMaxWidth);
  check_range("D of value", v.width, kMaxWidth);
  if (q.width != k.width) {
    reject("D of query is " + std::to_string(q.width) + ", D of key " + std::to_string(k.width), "they must be equal");
  }
  if (v.width > k.width) {
    reject("D of value is " + std::to_string(v.width), "it must not be more than D of key, " + std::to_string(k.width));
  }
  if (q.batch != k.batch || k.batch != v.batch) {
    reject("B of query, key, value is " + std::to_string(q.batch) + ", " + std::to_string(k.batch) + ", " +
               std::to_string(v.batch),
           "they must be equal");
  }
  if (k.tokens != v.tokens || k.heads != v.heads) {
    reject("key has shape " + describe(inputs.key.sizes()) + ", value " + describe(inputs.value.sizes()),
           "they may differ in D only");
  }
  if (k.heads < 1 || q.heads % k.heads != 0) {
    reject("query has " + std::to_string(q.heads) + " heads, key " + std::to_string(k.heads),
           "the heads of query must be a multiple of those of key");
  }
  check_range(sequences ? "T of query" : "S of query", q.tokens, kMaxTokens);
  check_range(sequences ? "T of key" : "S of key", k.tokens, kMaxTokens);

  geometry.heads = q.heads;
  geometry.kv_heads = k.heads;
  geometry.group = q.heads / k.heads;
  geometry.d = q.width;
  geometry.dv = v.width;
  if (sequences) {
    add_sequences(inputs, geometry);
  } else {
    geometry.batch = q.batch;
    geometry.max_q = q.tokens;
    geometry.max_kv = k.tokens;
    for (int64_t i = 0; i < q.batch; ++i) {
      geometry.segments.push_back({i, 0, q.tokens, 0, k.tokens, i * q.heads * q.tokens * k.tokens});
    }
  }
  const int64_t most = (sequences ? 2048 : 2 << 20) / (inputs.prefix.empty() ? 1 : sequences ? 2 : 1024);
  check_range(sequences ? "the number of sequences" : "B", geometry.batch, most);
  return geometry;
}

at::Tensor query_piece(const AttentionGeometry& geometry, const at::Tensor& tensor, const Segment& segment,
                       int64_t width) {
  return piece(geometry.layout, tensor, segment.index, segment.q_begin, segment.q_len, geometry.heads, width);
}

at::Tensor kv_piece(const AttentionGeometry& geometry, const at::Tensor& tensor, const Segment& segment,
                    int64_t width) {
  return piece(geometry.layout, tensor, segment.index, segment.kv_begin, segment.kv_len, geometry.kv_heads, width);
}

at::Tensor softmax_piece(const AttentionGeometry& geometry, const at::Tensor& tensor, const Segment& segment,
                         const std::string& softmax_layout) {
  if (geometry.layout != Layout::kTND) {
    return tensor.select(0, segment.index);
  }
  if (softmax_layout == "same_as_input") {
    return tensor.narrow(0, segment.q_begin, segment.q_len).transpose(0, 1);
  }
  const int64_t row = geometry.heads * 8;
  return tensor.view({-1})
      .narrow(0, segment.q_begin * row, segment.q_len * row)
      .view({geometry.heads, segment.q_len, 8});
}

std::vector<int64_t> attention_shape(const AttentionGeometry& geometry, const at::Tensor& query) {
  std::vector<int64_t> shape = query.sizes().vec();
  shape.back() =
      geometry.layout == Layout::kBSH || geometry.layout == Layout::kSBH ? geometry.heads * geometry.dv : geometry.dv;
  return shape;
}

std::vector<int64_t> softmax_shape(const AttentionGeometry& geometry, const at::Tensor& query) {
  if (geometry.layout == Layout::kTND) {
    return {query.size(0), geometry.heads, 8};
  }
  return {geometry.batch, geometry.heads, geometry.max_q, 8};
}

}  // namespace sim::opapi
