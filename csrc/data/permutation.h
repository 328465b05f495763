// A random order of 0 .. size - 1 that is computed, not stored.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "base/error.h"

namespace tt::data {

// Feistel network over the smallest 2^bits >= size, walked on until it lands inside (Black and Rogaway 2002, "Ciphers
// with Arbitrary Finite Domains", method 3): less than two steps on average. The order is part of what a checkpoint's
// data position means: it must stay as it is, on all platforms.
class Permutation {
 public:
  // Errors: ValueError for size < 1.
  Permutation(std::int64_t size, std::uint64_t seed, std::uint64_t stream) : size_(static_cast<std::uint64_t>(size)) {
    if (size < 1) {
      throw ValueError(str("a permutation of ", size, " elements: must be at least 1"));
    }
    const int bits = std::bit_width(size_ - 1);
    right_bits_ = (bits + 1) / 2;
    left_bits_ = bits - right_bits_;
    std::uint64_t key = mix(seed) ^ mix(~stream);
    for (std::uint64_t& round_key : round_keys_) {
      key += 0x9E3779B97F4A7C15ull;
      round_key = mix(key);
    }
  }

  // Errors: ValueError for an index outside 0 .. size - 1.
  std::int64_t at(std::int64_t index) const {
    if (index < 0 || static_cast<std::uint64_t>(index) >= size_) {
      throw ValueError(str("index ", index, " of a permutation of ", size_));
    }
    std::uint64_t value = static_cast<std::uint64_t>(index);
    do {
      value = step(value);
    } while (value >= size_);
    return static_cast<std::int64_t>(value);
  }

 private:
  // splitmix64's finaliser (Steele, Lea, Flood 2014).
  static std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
  }

  static std::uint64_t mask(int bits) { return (std::uint64_t{1} << bits) - 1; }

  // In turns, each half is changed by a function of the other one, so that every round can be undone.
  std::uint64_t step(std::uint64_t value) const {
    std::uint64_t left = value >> right_bits_, right = value & mask(right_bits_);
    for (std::size_t round = 0; round < round_keys_.size(); round += 2) {
      left ^= mix(right ^ round_keys_[round]) & mask(left_bits_);
      right ^= mix(left ^ round_keys_[round + 1]) & mask(right_bits_);
    }
    return left << right_bits_ | right;
  }

  std::uint64_t size_;
  int left_bits_, right_bits_;
  std::array<std::uint64_t, 8> round_keys_;
};

}  // namespace tt::data
