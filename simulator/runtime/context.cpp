#include "runtime/context.h"

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "runtime/error_message.h"
#include "runtime/settings.h"

namespace sim {
namespace {

thread_local Context* current = nullptr;

struct Primary {
  Context* context = nullptr;
  bool active = false;
};

struct Contexts {
  std::mutex mutex;
  std::vector<std::unique_ptr<Context>> all;
  std::map<int, Primary> primary;

  Context* make(int device, bool is_primary) {
    auto context = std::make_unique<Context>();
    context->device = device;
    context->card = card_of_device(device);
    context->primary = is_primary;
    all.push_back(std::move(context));
    return all.back().get();
  }

  Context* find(aclrtContext handle) {
    for (auto& context : all) {
      if (context.get() == handle) return context->alive ? context.get() : nullptr;
    }
    return nullptr;
  }
};

}  // namespace

int card_of_device(int device) {
  const auto& visible = settings().visible;
  if (device < 0 || static_cast<std::size_t>(device) >= visible.size()) {
    throw std::out_of_range("device " + std::to_string(device) + ": there are " + std::to_string(visible.size()) +
                            " visible simulated cards");
  }
  return visible[static_cast<std::size_t>(device)];
}

Context* current_context() { return current != nullptr && current->alive ? current : nullptr; }

void set_current_context(Context* context) { current = context; }

Context* use_primary_context(int device) {
  auto& contexts = immortal<Contexts>();
  std::scoped_lock lock(contexts.mutex);
  Primary& primary = contexts.primary[device];
  if (primary.context == nullptr) primary.context = contexts.make(device, true);
  primary.active = true;
  return primary.context;
}

void release_primary_context(int device) {
  auto& contexts = immortal<Contexts>();
  std::scoped_lock lock(contexts.mutex);
  contexts.primary[device].active = false;
}

bool primary_context_is_active(int device) {
  auto& contexts = immortal<Contexts>();
  std::scoped_lock lock(contexts.mutex);
  auto found = contexts.primary.find(device);
  return found != contexts.primary.end() && found->second.active;
}

Context* create_context(int device) {
  auto& contexts = immortal<Contexts>();
  std::scoped_lock lock(contexts.mutex);
  return contexts.make(device, false);
}

Context* find_context(aclrtContext handle) {
  auto& contexts = immortal<Contexts>();
  std::scoped_lock lock(contexts.mutex);
  return contexts.find(handle);
}

aclError destroy_context(aclrtContext handle) {
  auto& contexts = immortal<Contexts>();
  std::scoped_lock lock(contexts.mutex);
  Context* context = contexts.find(handle);
  if (context == nullptr) return error(ACL_ERROR_RT_CONTEXT_NULL, "aclrtDestroyContext: not a context");
  if (context->primary) return error(ACL_ERROR_RT_PARAM_INVALID, "aclrtDestroyContext: the context is a primary one");
  context->alive = false;
  return ACL_SUCCESS;
}

}  // namespace sim
