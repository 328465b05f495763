// Where ranks that have no other channel tell each other, through a c10d store, that they go no further.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

namespace tt {

class FailureBoard {
 public:
  // `mine` and `partners`: names, unique among all ranks that share the store.
  FailureBoard(c10::intrusive_ptr<c10d::Store> store, std::string mine, std::vector<std::string> partners)
      : store_(std::move(store)), mine_(std::move(mine)), partners_(std::move(partners)) {}

  // The first reason stays.
  void post_failure(const std::string& why) noexcept;
  // This rank sends nothing after its operation `last`: in `round`, or (0) ever.
  void post_stop(std::uint64_t last, std::uint64_t round) noexcept;

  // Why nothing will complete any more, as far as the board tells; empty: it may.
  std::string failure();
  // Why `operation` of `round` will never complete: a partner has stopped before it.
  std::string stop(std::uint64_t operation, std::uint64_t round);
  // Whether all partners have given `round` up after the same operation `last` as this rank: nothing as long as some
  // have not given it up, else the difference, empty if there is none.
  std::optional<std::string> compare_stops(std::uint64_t last, std::uint64_t round);

 private:
  // The last operation that `name` sends in `round`, if it has given that up (0: has left).
  std::optional<std::uint64_t> last_of(const std::string& name, std::uint64_t round);

  c10::intrusive_ptr<c10d::Store> store_;
  std::string mine_;
  std::vector<std::string> partners_;
};

}  // namespace tt
