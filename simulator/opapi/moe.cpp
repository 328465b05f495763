// Mixtures of experts: products of groups of rows, and the routing of tokens to experts and back.
#include "opapi/kernels.h"

namespace sim::opapi {

namespace {

at::Tensor activate(const at::Tensor& x, int64_t kind) {
  switch (kind) {
    case 0:
      return x;
    case 1:
      return at::relu(x);
    case 2:
      return at::gelu(x, "tanh");
    case 3:
      return at::gelu(x);
    case 4:
      return x * at::sigmoid(x * 1.702);
    case 5:
      return at::silu(x);
    default:
      throw InvalidArgument("activation " + std::to_string(kind) + " is none of 0 … 5");
  }
}

// Where each group ends, from ends or counts.
IntArray group_ends(const at::Tensor& groups, int64_t list_type) {
  require(list_type == 0 || list_type == 1, "group list type " + std::to_string(list_type) + " is not simulated");
  const at::Tensor ends = groups.to(at::kLong);
  const at::Tensor sums = list_type == 1 ? at::cumsum(ends, 0) : ends;
  const at::Tensor values = sums.contiguous();
  return IntArray(values.data_ptr<int64_t>(), values.data_ptr<int64_t>() + values.numel());
}

struct GroupedProduct {
  const Ins& x;
  const Ins& weight;
  const OptIns& bias;
  IntArray ends;
  int64_t group_type;
  int64_t activation;

  at::Tensor weight_of(size_t group) const {
    if (weight.size() == 1 && weight[0].dim() == 3) return weight[0].select(0, static_cast<int64_t>(group));
    require(group < weight.size(), "fewer weights than groups");
    return weight[group];
  }

  std::optional<at::Tensor> bias_of(size_t group) const {
    if (bias.empty() || !bias[0] || bias[0]->numel() == 0) return std::nullopt;
    if (bias.size() == 1 && bias[0]->dim() == 2) return bias[0]->select(0, static_cast<int64_t>(group));
    return bias.at(group);
  }

  at::Tensor one(const at::Tensor& rows, size_t group) const {
    at::Tensor product = at::matmul(wide(rows), wide(weight_of(group)));
    if (const auto addend = bias_of(group)) product = product + wide(*addend);
    return activate(product, activation);
  }

  void pairs(const Outs& out) const {
    require(x.size() == weight.size() && x.size() == out.size(), "as many outputs as inputs and weights are needed");
    for (size_t i = 0; i < x.size(); ++i) out[i].set(one(x[i], i));
  }

  void rows(const Outs& out) const {
    if (x.size() > 1) return pairs(out);
    int64_t begin = 0;
    for (size_t g = 0; g < ends.size(); ++g) {
      require(ends[g] >= begin && ends[g] <= x[0].size(0), "the ends of the groups do not grow, or pass the last row");
      const at::Tensor product = one(x[0].slice(0, begin, ends[g]), g);
      if (out.size() == 1) {
        out[0].slice(0, begin, ends[g]).copy_(product);
      } else {
        out.at(g).set(product);
      }
      begin = ends[g];
    }
  }

  // Groups of the dimension that is summed over: one product for each, as the gradient of the weights needs.
  void sums(const Outs& out) const {
    require(x.size() == 1 && weight.size() == 1, "one input and one weight are needed");
    int64_t begin = 0;
    for (size_t g = 0; g < ends.size(); ++g) {
      const at::Tensor product =
          at::matmul(wide(x[0].slice(-1, begin, ends[g])), wide(weight[0].slice(0, begin, ends[g])));
      if (out.size() == 1) {
        out[0].select(0, static_cast<int64_t>(g)).copy_(product);
      } else {
        out.at(g).set(product);
      }
      begin = ends[g];
    }
  }

  void run(const Outs& out) const {
    switch (group_type) {
      case -1:
        return pairs(out);
      case 0:
        return rows(out);
      case 2:
        return sums(out);
      default:
        throw InvalidArgument("group type " + std::to_string(group_type) + " is none of -1, 0, 2");
    }
  }
};

void require_unquantized(std::initializer_list<const OptIns*> lists) {
  for (const OptIns* list : lists) {
    for (const auto& tensor : *list) require(!tensor || tensor->numel() == 0, "quantized products are not simulated");
  }
}

}  // namespace

SIM_OPERATOR(GroupedMatmul, Ins x, Ins weight, OptIns bias, OptIns scale, OptIns offset, OptIns anti_scale,
             OptIns anti_offset, OptIntArray ends, int64_t /*split*/, Outs out) {
  require_unquantized({&scale, &offset, &anti_scale, &anti_offset});
  const int64_t type = ends && !ends->empty() ? 0 : -1;
  GroupedProduct{x, weight, bias, ends.value_or(IntArray()), type, 0}.run(out);
}
SIM_OPERATOR(GroupedMatmulV2, Ins x, Ins weight, OptIns bias, OptIns scale, OptIns offset, OptIns anti_scale,
             OptIns anti_offset, OptIntArray ends, int64_t /*split*/, int64_t group_type, Outs out) {
  require_unquantized({&scale, &offset, &anti_scale, &anti_offset});
  GroupedProduct{x, weight, bias, ends.value_or(IntArray()), group_type, 0}.run(out);
}
SIM_OPERATOR(GroupedMatmulV3, Ins x, Ins weight, OptIns bias, OptIns scale, OptIns offset, OptIns anti_scale,
             OptIns anti_offset, OptIn groups, int64_t /*split*/, int64_t group_type, Outs out) {
  require_unquantized({&scale, &offset, &anti_scale, &anti_offset});
  GroupedProduct{x, weight, bias, groups ? group_ends(*groups, 0) : IntArray(), group_type, 0}.run(out);
}

#define SIM_GROUPED_ARGUMENTS                                                                         \
  Ins x, Ins weight, OptIns bias, OptIns scale, OptIns offset, OptIns anti_scale, OptIns anti_offset, \
      OptIns token_scale, OptIn groups, OptIns /*activation_input*/, OptIns activation_scale,         \
      OptIns activation_offset, int64_t /*split*/, int64_t group_type, int64_t list_type, int64_t activation

SIM_OPERATOR(GroupedMatmulV4, SIM_GROUPED_ARGUMENTS, Outs out, OptOuts /*activated*/, OptOuts /*scales*/) {
  require_unquantized(
      {&scale, &offset, &anti_scale, &anti_offset, &token_scale, &activation_scale, &activation_offset});
  GroupedProduct{x, weight, bias, groups ? group_ends(*groups, list_type) : IntArray(), group_type, activation}.run(
      out);
}
SIM_OPERATOR(GroupedMatmulV5, SIM_GROUPED_ARGUMENTS, OptIntArray /*tuning*/, Outs out, OptOuts /*activated*/,
             OptOuts /*scales*/) {
  require_unquantized(
      {&scale, &offset, &anti_scale, &anti_offset, &token_scale, &activation_scale, &activation_offset});
  GroupedProduct{x, weight, bias, groups ? group_ends(*groups, list_type) : IntArray(), group_type, activation}.run(
      out);
}

namespace {

// Copies of tokens are sorted by their expert. place[c]: where copy c comes to lie; copy[p]: what lies at place p.
struct Order {
  at::Tensor copy, place;

  explicit Order(const at::Tensor& experts) {
    copy = at::argsort(experts.reshape({-1}).to(at::kLong), /*stable=*/true, 0, /*descending=*/false);
    place = at::argsort(copy);
  }
};

// Rows of `sorted` at the places of each token's copies; zeros for copies that were cut off.
at::Tensor copies_of_tokens(const at::Tensor& sorted, const at::Tensor& place, int64_t tokens, int64_t copies) {
  const at::Tensor at_place = place.to(at::kLong);
  const at::Tensor kept = at_place.lt(sorted.size(0)).logical_and(at_place.ge(0));
  const at::Tensor safe = at::where(kept, at_place, at::zeros_like(at_place));
  const at::Tensor rows = wide(sorted).index_select(0, safe) * kept.unsqueeze(1);
  return rows.view({tokens, copies, sorted.size(1)});
}

}  // namespace

SIM_OPERATOR(MoeTokenPermute, In tokens, In experts, int64_t /*count*/, bool padded, Out sorted, Out place) {
  require(!padded, "the padded mode is not simulated");
  const int64_t copies = experts.dim() == 1 ? 1 : experts.size(1);
  const Order order(experts);
  const at::Tensor rows = order.copy.narrow(0, 0, sorted.size(0)).div(copies, "floor");
  sorted.set(tokens.index_select(0, rows));
  place.set(order.place);
}
SIM_OPERATOR(MoeTokenPermuteGrad, In gradient, In place, int64_t copies, bool padded, Out out) {
  require(!padded, "the padded mode is not simulated");
  out.set(copies_of_tokens(gradient, place, out.size(0), copies).sum(1));
}
SIM_OPERATOR(MoeTokenUnpermute, In sorted, In place, OptIn probabilities, bool padded, OptIntArray /*shape*/, Out out) {
  require(!padded, "the padded mode is not simulated");
  const int64_t copies = place.numel() / out.size(0);
  const at::Tensor rows = copies_of_tokens(sorted, place, out.size(0), copies);
  out.set((probabilities ? rows * wide(*probabilities).unsqueeze(2) : rows).sum(1));
}
SIM_OPERATOR(MoeTokenUnpermuteGrad, In sorted, In gradient, In place, OptIn probabilities, bool padded,
             OptIntArray /*shape*/, Out sorted_gradient, OptOut probabilities_gradient) {
  require(!padded, "the padded mode is not simulated");
  const int64_t tokens = gradient.size(0);
  const int64_t copies = place.numel() / tokens;
  at::Tensor spread = wide(gradient).unsqueeze(1).expand({tokens, copies, gradient.size(1)});
  if (probabilities && probabilities_gradient) {
    probabilities_gradient.set((copies_of_tokens(sorted, place, tokens, copies) * spread).sum(2));
  }
  if (probabilities) spread = spread * wide(*probabilities).unsqueeze(2);
  const at::Tensor copy = at::argsort(place.to(at::kLong)).narrow(0, 0, sorted_gradient.size(0));
  sorted_gradient.set(spread.reshape({tokens * copies, -1}).index_select(0, copy));
}

SIM_OPERATOR(MoeInitRouting, In x, In row, In experts, int64_t /*active*/, Out sorted, Out place, Out sorted_experts) {
  const Order order(experts);
  const at::Tensor row_of_place = row.reshape({-1}).to(at::kLong).index_select(0, order.copy);
  sorted.set(x.index_select(0, row_of_place.narrow(0, 0, sorted.size(0)).remainder(x.size(0))));
  place.set(at::argsort(row_of_place));
  sorted_experts.set(experts.reshape({-1}).index_select(0, order.copy));
}
SIM_OPERATOR(MoeInitRoutingV2, In x, In experts, int64_t /*active*/, int64_t /*capacity*/, int64_t number,
             int64_t drop_or_pad, int64_t count_mode, bool /*before_capacity*/, Out sorted, Out place, OptOut counts,
             OptOut /*counts_before_capacity*/) {
  require(drop_or_pad == 0, "only the mode without dropping and padding is simulated");
  const Order order(experts);
  sorted.set(x.index_select(0, order.copy.narrow(0, 0, sorted.size(0)).div(experts.size(1), "floor")));
  place.set(order.place);
  if (count_mode == 0) return;
  const at::Tensor count = at::bincount(experts.reshape({-1}).to(at::kLong), {}, number);
  counts.set(count_mode == 1 ? at::cumsum(count, 0) : count);
}
SIM_OPERATOR(MoeInitRoutingV2Grad, In gradient, In place, int64_t copies, int64_t drop_or_pad, int64_t /*active*/,
             Out out) {
  require(drop_or_pad == 0, "only the mode without dropping and padding is simulated");
  out.set(copies_of_tokens(gradient, place, out.size(0), copies).sum(1));
}

SIM_OPERATOR(MoeGatingTopKSoftmax, In x, OptIn finished, int64_t k, Out y, Out experts, Out row) {
  const auto [best, where] = at::topk(at::softmax(wide(x), -1), k, -1);
  y.set(best);
  at::Tensor chosen = where;
  if (finished)
    chosen = at::where(finished->to(at::kBool).unsqueeze(-1), at::scalar_tensor(x.size(-1), at::kLong), where);
  experts.set(chosen);
  row.set(at::arange(row.numel(), at::kLong).view({k, -1}).t().reshape(row.sizes()));
}

}  // namespace sim::opapi
