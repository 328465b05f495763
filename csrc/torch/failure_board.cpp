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

void FailureBoard::post_stop(std::uint64_t last, std::uint64_t round) noexcept {
  try {
    store_->set(str(mine_, "/", round), bytes_of(str(last)));
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

std::optional<std::uint64_t> FailureBoard::last_of(const std::string& name, std::uint64_t round) {
  const std::string key = str(name, "/", round);
  if (!store_->check({key})) {
    return std::nullopt;
  }
  return std::stoull(text_of(store_->get(key)));
}

std::string FailureBoard::stop(std::uint64_t operation, std::uint64_t round) {
  try {
    for (const auto& partner : partners_) {
      if (partner == mine_) {
        continue;
      }
      if (const auto last = last_of(partner, 0); last && operation > *last) {
        return str(partner, " has closed its communicator. All ranks must run the same number of steps");
      }
      if (const auto last = last_of(partner, round); last && operation > *last) {
        return str(partner, " has given this backward pass up. An exception on one rank must stop all");
      }
    }
  } catch (const std::exception& error) {
    return str(kStoreIsGone, " (", error.what(), ")");
  }
  return {};
}

std::optional<std::string> FailureBoard::compare_stops(std::uint64_t last, std::uint64_t round) {
  try {
    for (const auto& partner : partners_) {
      const auto its = partner == mine_ ? std::optional(last) : last_of(partner, round);
      if (!its) {
        return std::nullopt;
      }
      if (*its != last) {
        return str(mine_, " has given backward pass ", round, " up after ", last, " sums, ", partner, " after ", *its,
                   ". An exception must stop all ranks at the same place");
      }
    }
  } catch (const std::exception& error) {
    return str(kStoreIsGone, " (", error.what(), ")");
  }
  return "";
}

}  // namespace tt
