#include "opapi/operator.h"

#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>
#include <sstream>

#include "runtime/card_memory.h"
#include "runtime/checks.h"
#include "runtime/stream.h"

extern "C" void omp_set_num_threads(int);  // of the OpenMP runtime that torch brings

namespace sim::opapi {
namespace {

thread_local bool checking_now = false;

std::map<std::string, const Description*>& registry() {
  static std::map<std::string, const Description*> operators;
  return operators;
}

// The dispatcher's state of a thread that has nothing to do with the program's: no autograd, no autocast, no Python
// modes of whoever calls the first phase.
struct OwnDispatch {
  c10::impl::ForceDispatchKeyGuard clean{c10::default_included_set, c10::default_excluded_set};
  c10::InferenceMode inference;
};

struct CheckingNow {
  CheckingNow() { checking_now = true; }
  ~CheckingNow() { checking_now = false; }
};

// A stream is one thread, and streams share few processors: no kernel starts threads of its own.
void use_one_thread() {
  thread_local const bool done = [] {
    at::init_num_threads();  // else the first operator would do it, and undo ours
    omp_set_num_threads(1);
    return true;
  }();
  static_cast<void>(done);
}

// The first line of a message: torch appends a backtrace, and tables of its dispatcher.
std::string first_line(const std::exception& error) {
  const auto* torch = dynamic_cast<const c10::Error*>(&error);
  const std::string message = torch == nullptr ? error.what() : torch->what_without_backtrace();
  return message.substr(0, message.find('\n'));
}

std::string describe(const Value& value) {
  if (const auto* view = std::get_if<View>(&value)) return view->describe();
  if (const auto* views = std::get_if<std::vector<View>>(&value)) return std::to_string(views->size()) + " tensors";
  return "";
}

// "aclnnAdd(Float [2, 3], Float [2, 4])": the tensors of a call.
std::string describe(const Call& call) {
  std::string text = std::string(call.operator_->name) + "(";
  for (const Value& value : call.arguments) {
    const std::string one = describe(value);
    if (one.empty()) continue;
    if (text.back() != '(') text += ", ";
    text += one;
  }
  return text + ")";
}

aclError run(const Call& call, char* workspace) noexcept {
  std::string problem = "unknown exception";
  try {
    use_one_thread();
    OwnDispatch own;
    // Whatever the program keeps in what it gave as workspace is lost, as on a card.
    if (call.workspace_bytes > 0) std::memset(kernel_address(workspace), 0xa5, call.workspace_bytes);
    call.operator_->run(call.arguments);
    return ACL_SUCCESS;
  } catch (const std::exception& error) {
    problem = first_line(error);
  } catch (...) {
  }
  problem = describe(call) + ": " + problem;
  std::fprintf(stderr, "simulated Ascend: %s\n", problem.c_str());
  set_error_message(problem);
  return ACL_ERROR_RT_AICORE_EXCEPTION;
}

aclnnStatus fail(aclnnStatus status, const std::string& message) {
  set_error_message(message);
  return status;
}

// Some operators ask for workspace, as many do on a card, so that it is seen whether callers provide it: as much as the
// call's tensors hold, up to a megabyte.
uint64_t workspace_of(const Call& call) {
  static const std::set<std::string> names = {"aclnnMatmul",
                                              "aclnnMm",
                                              "aclnnBatchMatMul",
                                              "aclnnGroupedMatmulV4",
                                              "aclnnMean",
                                              "aclnnReduceSum",
                                              "aclnnLogSoftmax",
                                              "aclnnSoftmax",
                                              "aclnnSort",
                                              "aclnnIndex",
                                              "aclnnTopk",
                                              "aclnnRmsNormGrad",
                                              "aclnnForeachNorm",
                                              "aclnnEmbeddingDenseBackward",
                                              "aclnnIndexPutImpl",
                                              "aclnnLayerNorm",
                                              "aclnnNLLLoss",
                                              "aclnnFlashAttentionScore",
                                              "aclnnFlashAttentionScoreGrad",
                                              "aclnnCumsum"};
  if (names.count(call.operator_->name) == 0) return 0;
  uint64_t bytes = 0;
  for (const Access& access : call.accesses) bytes += access.bytes;
  return std::min<uint64_t>((bytes + 511) / 512 * 512, uint64_t{1} << 20);
}

void check_body(const Call& call) {
  OwnDispatch own;
  CheckingNow now;
  call.operator_->run(call.arguments);
}

// That all inputs broadcast to the output's shape.
void check_pointwise(const Call& call) {
  std::vector<int64_t> shape;
  for (const Value& value : call.arguments) {
    const View* view = std::get_if<View>(&value);
    if (view != nullptr && view->role == Role::kRead) shape = at::infer_size(shape, view->sizes);
  }
  for (const Value& value : call.arguments) {
    const View* view = std::get_if<View>(&value);
    if (view == nullptr || view->role == Role::kRead || !view->present()) continue;
    const bool fits = view->role == Role::kUpdated ? at::is_expandable_to(shape, view->sizes) : shape == view->sizes;
    if (fits) continue;
    std::ostringstream text;
    text << "the result has shape " << at::IntArrayRef(shape) << ", the output " << at::IntArrayRef(view->sizes);
    throw InvalidArgument(text.str());
  }
}

}  // namespace

bool checking() { return checking_now; }

Description::Description(const char* name, std::string signature, Check check, void (*run)(const std::vector<Value>&))
    : name(name), signature(std::move(signature)), check(check), run(run) {
  registry().emplace(name, this);
}

aclnnStatus prepare(const Description& description, void (*keep)(Call& call, void* arguments), void* arguments,
                    uint64_t* workspace_bytes, aclOpExecutor** executor) noexcept {
  const std::string name = description.name;
  std::string at = name;
  try {
    if (workspace_bytes == nullptr || executor == nullptr) {
      return fail(ACLNN_ERR_PARAM_NULLPTR, name + ": no place for the workspace size or the executor");
    }
    auto call = std::make_unique<Call>();
    call->operator_ = &description;
    try {
      keep(*call, arguments);
    } catch (const std::exception&) {
      at += ", argument " + std::to_string(call->arguments.size() + 1);
      throw;
    }
    at = describe(*call);
    if (description.check == Check::kBody) check_body(*call);
    if (description.check == Check::kPointwise) check_pointwise(*call);
    call->workspace_bytes = *workspace_bytes = workspace_of(*call);
    *executor = call.release();
    return ACLNN_SUCCESS;
  } catch (const NullArgument& error) {
    return fail(ACLNN_ERR_PARAM_NULLPTR, at + ": " + error.what());
  } catch (const std::bad_alloc&) {
    return fail(ACLNN_ERR_INNER, name + ": out of host memory");
  } catch (const std::exception& error) {
    return fail(ACLNN_ERR_PARAM_INVALID, at + ": " + first_line(error));
  } catch (...) {
    return fail(ACLNN_ERR_INNER, name + ": unknown exception");
  }
}

aclnnStatus launch(const Description& description, void* workspace, uint64_t workspace_bytes, aclOpExecutor* executor,
                   aclrtStream stream) noexcept {
  const std::string name = description.name;
  try {
    std::shared_ptr<Call> call(executor);
    if (call == nullptr) return fail(ACLNN_ERR_PARAM_NULLPTR, name + ": no executor");
    if (call->operator_ != &description) {
      return fail(ACLNN_ERR_PARAM_INVALID, name + ": the executor belongs to " + call->operator_->name);
    }
    if (call->workspace_bytes > 0 && (workspace == nullptr || workspace_bytes < call->workspace_bytes)) {
      return fail(ACLNN_ERR_PARAM_INVALID, name + ": the first phase asked for " +
                                               std::to_string(call->workspace_bytes) + " bytes of workspace, " +
                                               std::to_string(workspace == nullptr ? 0 : workspace_bytes) +
                                               " were given");
    }
    Task task;
    task.name = name;
    task.accesses = std::move(call->accesses);
    if (call->workspace_bytes > 0) task.accesses.push_back({workspace, call->workspace_bytes, true});
    const bool waits = call->waits;
    task.run = [call = std::move(call), workspace] { return run(*call, static_cast<char*>(workspace)); };
    const aclError error = submit(stream, std::move(task));
    return error == ACL_SUCCESS && waits ? aclrtSynchronizeStream(stream) : error;
  } catch (const std::exception& error) {
    return fail(ACLNN_ERR_INNER, name + ": " + error.what());
  } catch (...) {
    return fail(ACLNN_ERR_INNER, name + ": unknown exception");
  }
}

void Out::set(const at::Tensor& value) const {
  if (value.sizes() != sizes()) {
    std::ostringstream text;
    text << "the result has shape " << value.sizes() << ", the output " << sizes();
    throw InvalidArgument(text.str());
  }
  copy_(value);
}

void DynamicOut::set(const at::Tensor& value) const {
  if (value.numel() > memory.numel()) {
    std::ostringstream text;
    text << "the result has shape " << value.sizes() << ", there is memory for " << memory.numel() << " elements";
    throw InvalidArgument(text.str());
  }
  const at::Tensor room = memory.as_strided(value.sizes(), value.contiguous().strides());
  room.copy_(value);
  handle->sizes = value.sizes().vec();
  handle->strides = room.strides().vec();
}

}  // namespace sim::opapi

// All operators as "name<TAB>letters" lines in the order of their names; the letters are those of
// aclnn_signatures.tsv.
extern "C" const char* sim_operator_signatures() {
  static const std::string lines = [] {
    std::string text;
    for (const auto& [name, description] : sim::opapi::registry()) text += name + "\t" + description->signature + "\n";
    return text;
  }();
  return lines.c_str();
}
