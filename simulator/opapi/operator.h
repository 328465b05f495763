// Declaring operators. One line defines an operator with both of its C functions; their signature is derived from the
// types of the parameters:
//
//   SIM_OPERATOR(Adds, In self, Scalar other, Scalar alpha, Out out) { out.set(at::add(self, other, alpha)); }
//
// defines aclnnAddsGetWorkspaceSize(const aclTensor*, const aclScalar*, const aclScalar*, aclTensor*, uint64_t*,
// aclOpExecutor**) and aclnnAdds. The body runs on the stream's thread; what it throws becomes the stream's error.
//
// What the first phase checks besides null pointers, types and the bounds of storages:
// - SIM_POINTWISE_OPERATOR: that all inputs broadcast to the output's shape.
// - SIM_CHECKED_OPERATOR: what the body checks. The first phase calls it with tensors without data; it may look at
//   shapes and types, throws InvalidArgument, and returns where checking() before it calls an operator of ATen (whose
//   functions for such tensors are defined in Python, and wait for the interpreter's lock, which the caller may hold).
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "opapi/handles.h"

namespace sim::opapi {

// Thrown where an argument of an operator is not what the operator takes: aclnn's status 161002.
struct InvalidArgument : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// True while the body of a checked operator is called for its checks alone.
bool checking();

// The parameter types of operators. Tensors alias the program's memory.
struct In : at::Tensor {
  explicit In(at::Tensor tensor) : at::Tensor(std::move(tensor)) {}
};
struct OptIn : std::optional<at::Tensor> {
  using std::optional<at::Tensor>::optional;
};
struct Out : at::Tensor {
  explicit Out(at::Tensor tensor) : at::Tensor(std::move(tensor)) {}
  // Copies `value`, casting it; its shape must be that of the output.
  void set(const at::Tensor& value) const;
};
struct InOut : Out {
  using Out::Out;
};
struct OptOut : std::optional<Out> {
  using std::optional<Out>::optional;
  void set(const at::Tensor& value) const {
    if (has_value()) (*this)->set(value);
  }
};
// An output that is as large as the result can get, and whose shape is that of the result afterwards. The second phase
// waits for the result, since the program asks for the shape right after it.
struct DynamicOut {
  at::Tensor memory;
  aclTensor* handle;
  void set(const at::Tensor& value) const;
};
using Ins = std::vector<at::Tensor>;
struct OptIns : std::vector<std::optional<at::Tensor>> {};  // no list is an empty one
struct Outs : std::vector<Out> {};
struct InOuts : std::vector<InOut> {};
struct OptOuts : std::vector<Out> {};
struct Scalar : at::Scalar {
  explicit Scalar(const at::Scalar& value) : at::Scalar(value) {}
};
struct OptScalar : std::optional<at::Scalar> {
  using std::optional<at::Scalar>::optional;
};
using Scalars = std::vector<at::Scalar>;
using IntArray = std::vector<int64_t>;
struct OptIntArray : std::optional<std::vector<int64_t>> {
  using std::optional<std::vector<int64_t>>::optional;
};
using BoolArray = std::vector<bool>;
using FloatArray = std::vector<float>;
struct OptFloatArray : std::optional<std::vector<float>> {
  using std::optional<std::vector<float>>::optional;
};
using Text = std::string;  // a null pointer is an empty text
struct DType {
  at::ScalarType type;
  operator at::ScalarType() const { return type; }  // NOLINT: it is one
};

// An argument as a call keeps it.
using Value =
    std::variant<std::monostate, View, std::vector<View>, at::Scalar, std::vector<at::Scalar>, std::vector<int64_t>,
                 std::vector<bool>, std::vector<float>, int64_t, uint64_t, double, std::string, at::ScalarType>;

enum class Check { kNone, kPointwise, kBody };  // by the first phase

// What is known of an operator.
struct Description {
  const char* name;       // "aclnnAdds"
  std::string signature;  // "T S S T", the letters of aclnn_signatures.tsv
  Check check;
  void (*run)(const std::vector<Value>& arguments);

  Description(const char* name, std::string signature, Check check, void (*run)(const std::vector<Value>&));
  Description(const Description&) = delete;
};

}  // namespace sim::opapi

// A call between its two phases.
struct aclOpExecutor {
  const sim::opapi::Description* operator_ = nullptr;
  std::vector<sim::opapi::Value> arguments;
  std::vector<sim::Access> accesses;
  uint64_t workspace_bytes = 0;
  bool waits = false;  // an output's shape is known only afterwards
};

namespace sim::opapi {

using Call = aclOpExecutor;

// Thrown for a handle that may not be null and is: aclnn's status 161001.
struct NullArgument : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// How each parameter type is kept and handed to the kernel. `Passed` is its type in C.
template <typename T>
struct Parameter;

#define SIM_PARAMETER_(T, C_TYPE, LETTERS)           \
  template <>                                        \
  struct Parameter<T> {                              \
    using Passed = C_TYPE;                           \
    static constexpr const char* kLetters = LETTERS; \
    static Value keep(Call& call, C_TYPE argument);  \
    static T open(const Value& value);               \
  };
SIM_PARAMETER_(In, const aclTensor*, "T")
SIM_PARAMETER_(OptIn, const aclTensor*, "T")
SIM_PARAMETER_(Out, aclTensor*, "T")
SIM_PARAMETER_(InOut, aclTensor*, "T")
SIM_PARAMETER_(OptOut, aclTensor*, "T")
SIM_PARAMETER_(DynamicOut, aclTensor*, "T")
SIM_PARAMETER_(Ins, const aclTensorList*, "TL")
SIM_PARAMETER_(OptIns, const aclTensorList*, "TL")
SIM_PARAMETER_(Outs, aclTensorList*, "TL")
SIM_PARAMETER_(InOuts, aclTensorList*, "TL")
SIM_PARAMETER_(OptOuts, aclTensorList*, "TL")
SIM_PARAMETER_(Scalar, const aclScalar*, "S")
SIM_PARAMETER_(OptScalar, const aclScalar*, "S")
SIM_PARAMETER_(Scalars, const aclScalarList*, "SL")
SIM_PARAMETER_(IntArray, const aclIntArray*, "IA")
SIM_PARAMETER_(OptIntArray, const aclIntArray*, "IA")
SIM_PARAMETER_(BoolArray, const aclBoolArray*, "BA")
SIM_PARAMETER_(FloatArray, const aclFloatArray*, "FA")
SIM_PARAMETER_(OptFloatArray, const aclFloatArray*, "FA")
SIM_PARAMETER_(Text, const char*, "str")
SIM_PARAMETER_(DType, aclDataType, "dtype")
SIM_PARAMETER_(bool, bool, "bool")
SIM_PARAMETER_(int8_t, int8_t, "i8")
SIM_PARAMETER_(int32_t, int32_t, "i32")
SIM_PARAMETER_(int64_t, int64_t, "i64")
SIM_PARAMETER_(uint64_t, uint64_t, "u64")
SIM_PARAMETER_(float, float, "f32")
SIM_PARAMETER_(double, double, "f64")
#undef SIM_PARAMETER_

// The parts of both phases that are the same for all operators. Nothing is thrown.
aclnnStatus prepare(const Description& description, void (*keep)(Call& call, void* arguments), void* arguments,
                    uint64_t* workspace_bytes, aclOpExecutor** executor) noexcept;
aclnnStatus launch(const Description& description, void* workspace, uint64_t workspace_bytes, aclOpExecutor* executor,
                   aclrtStream stream) noexcept;

// The first phase of an operator with this kernel.
template <auto kernel, const Description& description, typename Kernel = decltype(kernel)>
struct Operator;

template <auto kernel, const Description& description, typename... T>
struct Operator<kernel, description, void (*)(T...)> {
  using Prepare = aclnnStatus(typename Parameter<T>::Passed..., uint64_t*, aclOpExecutor**);

  static aclnnStatus prepare(typename Parameter<T>::Passed... passed, uint64_t* workspace_bytes,
                             aclOpExecutor** executor) {
    std::tuple<typename Parameter<T>::Passed...> all(passed...);
    const auto keep = [](Call& call, void* arguments) {
      std::apply([&call](auto... argument) { (call.arguments.push_back(Parameter<T>::keep(call, argument)), ...); },
                 *static_cast<decltype(all)*>(arguments));
    };
    return opapi::prepare(description, keep, &all, workspace_bytes, executor);
  }

  static void run(const std::vector<Value>& arguments) { run(arguments, std::index_sequence_for<T...>()); }

  static std::string signature() {
    std::string letters;
    ((letters += (letters.empty() ? "" : " "), letters += Parameter<T>::kLetters), ...);
    return letters;
  }

 private:
  template <std::size_t... I>
  static void run(const std::vector<Value>& arguments, std::index_sequence<I...>) {
    kernel(Parameter<T>::open(arguments[I])...);
  }
};

}  // namespace sim::opapi

// The symbol of the first phase is an indirect function: only so can it be given a type that is computed. Its resolver
// uses nothing that needs relocation (the template has internal linkage, since the kernel does).
#define SIM_DEFINE_OPERATOR_(Name, check, ...)                                                                       \
  static void Name##_kernel(__VA_ARGS__);                                                                            \
  namespace {                                                                                                        \
  extern const ::sim::opapi::Description Name##_description;                                                         \
  using Name##_operator = ::sim::opapi::Operator<&Name##_kernel, Name##_description>;                                \
  const ::sim::opapi::Description Name##_description("aclnn" #Name, Name##_operator::signature(), check,             \
                                                     &Name##_operator::run);                                         \
  }                                                                                                                  \
  extern "C" __attribute__((visibility("hidden"))) Name##_operator::Prepare* sim_resolve_##Name() {                  \
    return &Name##_operator::prepare;                                                                                \
  }                                                                                                                  \
  extern "C" __attribute__((ifunc("sim_resolve_" #Name))) Name##_operator::Prepare aclnn##Name##GetWorkspaceSize;    \
  extern "C" aclnnStatus aclnn##Name(void* workspace, uint64_t bytes, aclOpExecutor* executor, aclrtStream stream) { \
    return ::sim::opapi::launch(Name##_description, workspace, bytes, executor, stream);                             \
  }                                                                                                                  \
  static void Name##_kernel(__VA_ARGS__)

#define SIM_OPERATOR(Name, ...) SIM_DEFINE_OPERATOR_(Name, ::sim::opapi::Check::kNone, __VA_ARGS__)
#define SIM_POINTWISE_OPERATOR(Name, ...) SIM_DEFINE_OPERATOR_(Name, ::sim::opapi::Check::kPointwise, __VA_ARGS__)
#define SIM_CHECKED_OPERATOR(Name, ...) SIM_DEFINE_OPERATOR_(Name, ::sim::opapi::Check::kBody, __VA_ARGS__)
