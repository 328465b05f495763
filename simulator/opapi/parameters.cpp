// How arguments are kept between the phases of a call and handed to its kernel.
#include "opapi/operator.h"

namespace sim::opapi {
namespace {

View keep_view(Call& call, const aclTensor* tensor, Role role) {
  if (tensor == nullptr) throw NullArgument("the tensor is null");
  View view(tensor, role);
  const Access access = view.access();
  if (access.bytes > 0) call.accesses.push_back(access);
  return view;
}

View keep_optional_view(Call& call, const aclTensor* tensor, Role role) {
  return tensor == nullptr ? View() : keep_view(call, tensor, role);
}

std::vector<View> keep_views(Call& call, const aclTensorList* list, Role role, bool optional) {
  std::vector<View> views;
  if (list == nullptr && optional) return views;
  if (list == nullptr) throw NullArgument("the list of tensors is null");
  for (const aclTensor* tensor : list->values) {
    views.push_back(optional ? keep_optional_view(call, tensor, role) : keep_view(call, tensor, role));
  }
  return views;
}

template <typename List, typename Member>
List open_views(const Value& value) {
  List tensors;
  for (const View& view : std::get<std::vector<View>>(value)) tensors.emplace_back(Member(view.tensor()));
  return tensors;
}

at::Tensor open_view(const Value& value) { return std::get<View>(value).tensor(); }

}  // namespace

Value Parameter<In>::keep(Call& call, const aclTensor* argument) { return keep_view(call, argument, Role::kRead); }
In Parameter<In>::open(const Value& value) { return In(open_view(value)); }

Value Parameter<OptIn>::keep(Call& call, const aclTensor* argument) {
  return keep_optional_view(call, argument, Role::kRead);
}
OptIn Parameter<OptIn>::open(const Value& value) {
  return std::get<View>(value).present() ? OptIn(open_view(value)) : OptIn();
}

Value Parameter<Out>::keep(Call& call, aclTensor* argument) { return keep_view(call, argument, Role::kWritten); }
Out Parameter<Out>::open(const Value& value) { return Out(open_view(value)); }

Value Parameter<InOut>::keep(Call& call, aclTensor* argument) { return keep_view(call, argument, Role::kUpdated); }
InOut Parameter<InOut>::open(const Value& value) { return InOut(open_view(value)); }

Value Parameter<OptOut>::keep(Call& call, aclTensor* argument) {
  return keep_optional_view(call, argument, Role::kWritten);
}
OptOut Parameter<OptOut>::open(const Value& value) {
  return std::get<View>(value).present() ? OptOut(Out(open_view(value))) : OptOut();
}

Value Parameter<DynamicOut>::keep(Call& call, aclTensor* argument) {
  call.waits = true;
  return keep_view(call, argument, Role::kWritten);
}
DynamicOut Parameter<DynamicOut>::open(const Value& value) { return {open_view(value), std::get<View>(value).handle}; }

Value Parameter<Ins>::keep(Call& call, const aclTensorList* argument) {
  return keep_views(call, argument, Role::kRead, false);
}
Ins Parameter<Ins>::open(const Value& value) { return open_views<Ins, at::Tensor>(value); }

Value Parameter<OptIns>::keep(Call& call, const aclTensorList* argument) {
  return keep_views(call, argument, Role::kRead, true);
}
OptIns Parameter<OptIns>::open(const Value& value) {
  OptIns tensors;
  for (const View& view : std::get<std::vector<View>>(value)) {
    tensors.push_back(view.present() ? std::optional<at::Tensor>(view.tensor()) : std::nullopt);
  }
  return tensors;
}

Value Parameter<Outs>::keep(Call& call, aclTensorList* argument) {
  return keep_views(call, argument, Role::kWritten, false);
}
Outs Parameter<Outs>::open(const Value& value) { return open_views<Outs, Out>(value); }

Value Parameter<InOuts>::keep(Call& call, aclTensorList* argument) {
  return keep_views(call, argument, Role::kUpdated, false);
}
InOuts Parameter<InOuts>::open(const Value& value) { return open_views<InOuts, InOut>(value); }

Value Parameter<OptOuts>::keep(Call& call, aclTensorList* argument) {
  if (argument == nullptr) return std::vector<View>();
  return keep_views(call, argument, Role::kWritten, false);
}
OptOuts Parameter<OptOuts>::open(const Value& value) { return open_views<OptOuts, Out>(value); }

Value Parameter<Scalar>::keep(Call&, const aclScalar* argument) {
  if (argument == nullptr) throw NullArgument("the scalar is null");
  return argument->value;
}
Scalar Parameter<Scalar>::open(const Value& value) { return Scalar(std::get<at::Scalar>(value)); }

Value Parameter<OptScalar>::keep(Call&, const aclScalar* argument) {
  return argument == nullptr ? Value() : Value(argument->value);
}
OptScalar Parameter<OptScalar>::open(const Value& value) {
  const auto* scalar = std::get_if<at::Scalar>(&value);
  return scalar == nullptr ? OptScalar() : OptScalar(*scalar);
}

Value Parameter<Scalars>::keep(Call&, const aclScalarList* argument) {
  if (argument == nullptr) throw NullArgument("the list of scalars is null");
  std::vector<at::Scalar> values;
  for (const aclScalar* scalar : argument->values) {
    if (scalar == nullptr) throw NullArgument("a scalar of the list is null");
    values.push_back(scalar->value);
  }
  return values;
}
Scalars Parameter<Scalars>::open(const Value& value) { return std::get<Scalars>(value); }

Value Parameter<IntArray>::keep(Call&, const aclIntArray* argument) {
  if (argument == nullptr) throw NullArgument("the array of integers is null");
  return argument->values;
}
IntArray Parameter<IntArray>::open(const Value& value) { return std::get<IntArray>(value); }

Value Parameter<OptIntArray>::keep(Call&, const aclIntArray* argument) {
  return argument == nullptr ? Value() : Value(argument->values);
}
OptIntArray Parameter<OptIntArray>::open(const Value& value) {
  const auto* values = std::get_if<IntArray>(&value);
  return values == nullptr ? OptIntArray() : OptIntArray(*values);
}

Value Parameter<BoolArray>::keep(Call&, const aclBoolArray* argument) {
  if (argument == nullptr) throw NullArgument("the array of booleans is null");
  return argument->values;
}
BoolArray Parameter<BoolArray>::open(const Value& value) { return std::get<BoolArray>(value); }

Value Parameter<FloatArray>::keep(Call&, const aclFloatArray* argument) {
  if (argument == nullptr) throw NullArgument("the array of floats is null");
  return argument->values;
}
FloatArray Parameter<FloatArray>::open(const Value& value) { return std::get<FloatArray>(value); }

Value Parameter<OptFloatArray>::keep(Call&, const aclFloatArray* argument) {
  return argument == nullptr ? Value() : Value(argument->values);
}
OptFloatArray Parameter<OptFloatArray>::open(const Value& value) {
  const auto* values = std::get_if<FloatArray>(&value);
  return values == nullptr ? OptFloatArray() : OptFloatArray(*values);
}

Value Parameter<Text>::keep(Call&, const char* argument) { return std::string(argument == nullptr ? "" : argument); }
Text Parameter<Text>::open(const Value& value) { return std::get<std::string>(value); }

Value Parameter<DType>::keep(Call&, aclDataType argument) { return scalar_type(argument); }
DType Parameter<DType>::open(const Value& value) { return {std::get<at::ScalarType>(value)}; }

#define SIM_NUMBER_(T, Kept)                                                                        \
  Value Parameter<T>::keep(Call&, T argument) { return Value(std::in_place_type<Kept>, argument); } \
  T Parameter<T>::open(const Value& value) { return static_cast<T>(std::get<Kept>(value)); }
SIM_NUMBER_(bool, int64_t)
SIM_NUMBER_(int8_t, int64_t)
SIM_NUMBER_(int32_t, int64_t)
SIM_NUMBER_(int64_t, int64_t)
SIM_NUMBER_(uint64_t, uint64_t)
SIM_NUMBER_(float, double)
SIM_NUMBER_(double, double)
#undef SIM_NUMBER_

}  // namespace sim::opapi
