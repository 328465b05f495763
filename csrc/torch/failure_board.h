// Where ranks that have no other channel tell each other, through a c10d store, that they go no further.
#pragma once

#include <cstdint>
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
  // This rank sends nothing after its operation `last`.
  void post_stop(std::uint64_t last) noexcept;

  // Why nothing will complete any more, as far as the board tells; empty: it may.
  std::string failure();
  // Why `operation` will never complete: a partner has stopped before it; empty: it may.
  std::string stop(std::uint64_t operation);

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  std::string mine_;
  std::vector<std::string> partners_;
};

}  // namespace tt
