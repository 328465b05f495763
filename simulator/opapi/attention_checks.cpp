#include <array>
#include <utility>

#include "opapi/attention_geometry.h"
#include "opapi/attention_mask.h"
#include "opapi/attention_math.h"

namespace sim::opapi {
namespace {

constexpr int64_t kPseRows = 1024;  // the last rows of a longer pse that is the same along diagonals

using Named = std::pair<const char*, const at::Tensor*>;

void check_given(const Named& argument) {
  if (!argument.second->defined()) {
    throw NullArgument(std::string(argument.first) + " is null; it is required");
  }
}

void check_like(const Named& argument, at::ScalarType type, at::IntArrayRef shape) {
  check_given(argument);
  const at::Tensor& tensor = *argument.second;
  if (tensor.scalar_type() != type) {
    reject(std::string("the type of ") + argument.first + " is " + c10::toString(tensor.scalar_type()),
           std::string("it must be ") + c10::toString(type));
  }
  if (tensor.sizes() != shape) {
    reject(std::string(argument.first) + " has shape " + describe(tensor.sizes()), "it must be " + describe(shape));
  }
}

void check_softmax(const AttentionInputs& inputs, const AttentionGeometry& geometry, const Named& argument) {
  check_like(argument, at::kFloat, softmax_shape(geometry, inputs.query));
  if (geometry.layout == Layout::kTND && !argument.second->is_contiguous()) {
    reject(std::string(argument.first) + " has strides " + describe(argument.second->strides()),
           "it must be contiguous with layout TND");
  }
}

void check_dropout(const AttentionInputs& inputs, const AttentionGeometry& geometry) {
  if (!(inputs.keep_prob > 0.0 && inputs.keep_prob <= 1.0)) {
    reject("keepProb is " + std::to_string(inputs.keep_prob), "it must be in (0, 1]");
  }
  if (inputs.keep_prob == 1.0) {
    return;
  }
  if (!inputs.drop_mask.defined()) {
    reject("dropMask is null", "keepProb " + std::to_string(inputs.keep_prob) + " < 1 needs the mask of what is kept");
  }
  int64_t scores = 0;
  for (const Segment& segment : geometry.segments) {
    scores += geometry.heads * segment.q_len * segment.kv_len;
  }
  const int64_t bytes = (scores + 127) / 128 * 16;
  if (inputs.drop_mask.scalar_type() != at::kByte || inputs.drop_mask.dim() != 1 || inputs.drop_mask.numel() < bytes) {
    reject(std::string("dropMask has type ") + c10::toString(inputs.drop_mask.scalar_type()) + " and shape " +
               describe(inputs.drop_mask.sizes()),
           "it must be uint8 [" + std::to_string(bytes) + "]: one bit for each of " + std::to_string(scores) +
               " scores, padded to 128");
  }
}

void check_slopes(const AttentionInputs& inputs, const AttentionGeometry& geometry) {
  const std::string type = "pseType " + std::to_string(inputs.pse_type);
  if (!inputs.pse.defined()) {
    reject("pse is null", type + " needs the slopes of the heads");
  }
  const at::IntArrayRef shape = inputs.pse.sizes();
  if (inputs.pse.scalar_type() != at::kFloat ||
      (shape != at::IntArrayRef({geometry.heads}) && shape != at::IntArrayRef({geometry.batch, geometry.heads}))) {
    reject(std::string("pse has type ") + c10::toString(inputs.pse.scalar_type()) + " and shape " + describe(shape),
           type + " needs float32 [N] or [B, N] with N = " + std::to_string(geometry.heads));
  }
  for (const Segment& segment : geometry.segments) {
    if (segment.q_len != segment.kv_len) {
      reject("Sq = " + std::to_string(segment.q_len) + ", Skv = " + std::to_string(segment.kv_len),
             type + " needs them to be equal");
    }
  }
  for (const auto& [name, start] :
       {std::pair{"qStartIdx", &inputs.q_start}, std::pair{"kvStartIdx", &inputs.kv_start}}) {
    if (start->size() > 1) {
      reject(std::string(name) + " has " + std::to_string(start->size()) + " entries", "it must have one");
    }
  }
}

void check_pse(const AttentionInputs& inputs, const AttentionGeometry& geometry) {
  if (inputs.pse_type < 0 || inputs.pse_type > 3) {
    reject("pseType is " + std::to_string(inputs.pse_type), "it must be 0, 1, 2 or 3");
  }
  if (inputs.pse_type >= 2) {
    check_slopes(inputs, geometry);
    return;
  }
  if (!inputs.pse.defined()) {
    return;
  }
  if (inputs.pse.scalar_type() != inputs.query.scalar_type()) {
    reject(std::string("the type of pse is ") + c10::toString(inputs.pse.scalar_type()),
           std::string("it must be that of query, ") + c10::toString(inputs.query.scalar_type()));
  }
  if (inputs.sparse_mode >= 7 && inputs.atten_mask.defined()) {
    reject("pse is given in sparseMode " + std::to_string(inputs.sparse_mode), "that mode takes none");
  }
  for (const Segment& segment : geometry.segments) {
    if (segment.q_len != geometry.max_q || segment.kv_len != geometry.max_kv) {
      reject("pse is given and the sequences have different lengths",
             "the simulator takes pse with equal lengths only, and a card takes none with an empty sequence");
    }
  }
  const at::IntArrayRef shape = inputs.pse.sizes();
  bool fits = shape.size() == 4 && (shape[0] == geometry.batch || (shape[0] == 1 && shape[2] != 1)) &&
              shape[1] == geometry.heads && shape[3] == geometry.max_kv;
  fits = fits && (shape[2] == geometry.max_q || shape[2] == 1 || (shape[2] == kPseRows && geometry.max_q > kPseRows));
  if (!fits) {
    reject("pse has shape " + describe(shape),
           "it must be [B, N, Sq, Skv], [B, N, 1, Skv] or [1, N, Sq, Skv] with B = " + std::to_string(geometry.batch) +
               ", N = " + std::to_string(geometry.heads) + ", Sq = " + std::to_string(geometry.max_q) +
               ", Skv = " + std::to_string(geometry.max_kv) + "; Sq may be 1024 for a longer query");
  }
  if (shape[2] == kPseRows && geometry.max_q > kPseRows && geometry.max_q != geometry.max_kv) {
    reject("pse has 1024 rows, Sq = " + std::to_string(geometry.max_q),
           "with more than 1024 queries that needs Skv = Sq, but Skv = " + std::to_string(geometry.max_kv));
  }
}

void check_rope(const AttentionInputs& inputs, const AttentionGeometry& geometry) {
  if (!inputs.query_rope.defined() && !inputs.key_rope.defined()) {
    return;
  }
  check_given({"queryRope", &inputs.query_rope});
  check_given({"keyRope", &inputs.key_rope});
  const int64_t width = inputs.query_rope.size(-1);
  check_like({"queryRope", &inputs.query_rope}, inputs.query.scalar_type(),
             {inputs.query.size(0), geometry.heads, width});
  check_like({"keyRope", &inputs.key_rope}, inputs.query.scalar_type(), {inputs.key.size(0), geometry.kv_heads, width});
  if (width < 1 || width > geometry.d || width % 8 != 0 || geometry.d % 8 != 0) {
    reject("D of queryRope is " + std::to_string(width) + ", D of query " + std::to_string(geometry.d),
           "both must be multiples of 8, and the first not more than the second");
  }
  if (inputs.pse.defined() || inputs.keep_prob != 1.0 || !inputs.atten_mask.defined()) {
    reject("queryRope is given", "it needs attenMask, and takes neither pse nor dropout");
  }
}

AttentionGeometry check_inputs(const AttentionInputs& inputs) {
  const AttentionGeometry geometry = attention_geometry(inputs);
  if (inputs.padding_mask.defined()) {
    reject("paddingMask is given", "it is reserved and must be null");
  }
  if (inputs.inner_precise < 0 || inputs.inner_precise > 2) {
    reject("innerPrecise is " + std::to_string(inputs.inner_precise), "it must be 0, 1 or 2");
  }
  if (!inputs.softmax_layout.empty() && inputs.softmax_layout != "same_as_input") {
    reject("softmaxOutLayout is \"" + inputs.softmax_layout + "\"", "it must be \"\" or \"same_as_input\"");
  }
  check_mask(inputs, geometry);
  check_dropout(inputs, geometry);
  check_pse(inputs, geometry);
  check_rope(inputs, geometry);
  if (inputs.sink.defined()) {
    check_like({"sink", &inputs.sink}, at::kFloat, {geometry.heads});
  }
  return geometry;
}

}  // namespace

void check_attention(const AttentionInputs& inputs, const AttentionOutputs& outputs) {
  const AttentionGeometry geometry = check_inputs(inputs);
  check_softmax(inputs, geometry, {"softmaxMaxOut", &outputs.softmax_max});
  check_softmax(inputs, geometry, {"softmaxSumOut", &outputs.softmax_sum});
  check_like({"attentionOut", &outputs.attention}, inputs.query.scalar_type(), attention_shape(geometry, inputs.query));
}

void check_attention_grad(const AttentionInputs& inputs, const AttentionGradInputs& grad,
                          const AttentionGradOutputs& outputs) {
  const AttentionGeometry geometry = check_inputs(inputs);
  const auto type = inputs.query.scalar_type();
  const std::vector<int64_t> shape = attention_shape(geometry, inputs.query);
  check_like({"dy", &grad.dy}, type, shape);
  check_softmax(inputs, geometry, {"softmaxMax", &grad.softmax_max});
  check_softmax(inputs, geometry, {"softmaxSum", &grad.softmax_sum});
  check_like({"attentionIn", &grad.attention}, type, shape);
  check_like({"dqOut", &outputs.dq}, type, inputs.query.sizes());
  check_like({"dkOut", &outputs.dk}, type, inputs.key.sizes());
  check_like({"dvOut", &outputs.dv}, type, inputs.value.sizes());
  if (inputs.query_rope.defined()) {
    check_like({"dqRopeOut", &outputs.dq_rope}, type, inputs.query_rope.sizes());
    check_like({"dkRopeOut", &outputs.dk_rope}, type, inputs.key_rope.sizes());
  }
  if (inputs.sink.defined()) {
    check_like({"dsinkOut", &outputs.dsink}, at::kFloat, {geometry.heads});
  }
}

}  // namespace sim::opapi
