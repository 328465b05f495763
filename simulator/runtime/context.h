// Devices and contexts, as each thread sees them. A device number is an index into the visible cards.
#pragma once

#include "abi/acl.h"

namespace sim {

struct Context {
  int device = 0;
  int card = 0;
  bool primary = false;
  bool alive = true;
  aclrtStream default_stream = nullptr;  // made when it is first used
};

// Throws std::out_of_range for a device that there is not.
int card_of_device(int device);

// Null when the thread has set no device. Contexts are never freed: other threads may still hold them.
Context* current_context();
void set_current_context(Context* context);

Context* use_primary_context(int device);
// As on a card, one reset is enough, however often the device was set.
void release_primary_context(int device);
bool primary_context_is_active(int device);

Context* create_context(int device);
// Null for what is no context, or was destroyed.
Context* find_context(aclrtContext handle);
aclError destroy_context(aclrtContext handle);

}  // namespace sim
