#include "torch/failure_board.h"

#include <exception>
#include <sstream>

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

void FailureBoard::post_stop(std::uint64_t last, std::uint64_t round) noexcept {
  try {
    store_->set(mine_, bytes_of(str(last, " ", round)));
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

std::string FailureBoard::stop(std::uint64_t operation, std::uint64_t round) {
  try {
    for (const auto& partner : partners_) {
      if (partner == mine_ || !store_->check({partner})) {
        continue;
      }
      std::istringstream stop(text_of(store_->get(partner)));
      std::uint64_t last = 0;
      std::uint64_t its_round = 0;
      stop >> last >> its_round;
      if (operation > last && its_round == 0) {
        return str(partner, " has closed its communicator. All ranks must run the same number of steps");
      }
      if (operation > last && its_round == round) {
        return str(partner, " has given this backward pass up. An exception on one rank must stop all");
      }
    }
  } catch (const std::exception& error) {
    return str(kStoreIsGone, " (", error.what(), ")");
  }
  return {};
}

}  // namespace tt
