#include "torch/failure_board.h"

#include <exception>

#include "base/error.h"

namespace tt {
namespace {

constexpr const char* kFailed = "failed";
constexpr const char* kStoreIsGone = "the store of the process group is gone, as a rule with the rank that holds it";

std::vector<std::uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }
std::string text_of(const std::vector<std::uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

}  // namespace

void FailureBoard::post_failure(const std::string& why) noexcept {
  try {
    store_->compareSet(kFailed, {}, bytes_of(str(mine_, ": ", why)));
  } catch (const std::exception&) {
    // The store is gone, and with it the rank that holds it: the others see that themselves.
  }
}

void FailureBoard::post_stop(std::uint64_t last) noexcept {
  try {
    store_->set(str(mine_, "/last"), bytes_of(str(last)));
  } catch (const std::exception&) {
    // As above.
  }
}

std::string FailureBoard::failure() {
  try {
    if (store_->check({kFailed})) {
      return str("a rank has given up (", text_of(store_->get(kFailed)), ")");
    }
  } catch (const std::exception& error) {
    return str(kStoreIsGone, " (", error.what(), ")");
  }
  return {};
}

std::string FailureBoard::stop(std::uint64_t operation) {
  try {
    for (const auto& partner : partners_) {
      const std::string key = str(partner, "/last");
      if (partner != mine_ && store_->check({key}) && operation > std::stoull(text_of(store_->get(key)))) {
        return str(partner, " has closed its communicator. All ranks must run the same number of steps");
      }
    }
  } catch (const std::exception& error) {
    return str(kStoreIsGone, " (", error.what(), ")");
  }
  return {};
}

}  // namespace tt
