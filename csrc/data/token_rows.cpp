#include "data/token_rows.h"

#include <array>
#include <bit>
#include <charconv>
#include <cstring>
#include <string_view>

#include "base/error.h"

namespace tt::data {

namespace {

static_assert(std::endian::native == std::endian::little, "the first digit is a word's lowest byte");

constexpr std::string_view kBegin = "{\"tokens\":[", kMiddle = "],\"length\":", kEnd = "}\n";

// "0," to "9999,": the characters in the low bytes, their number in the highest.
std::array<std::uint64_t, 10000> make_ids() {
  std::array<std::uint64_t, 10000> ids{};
  for (std::uint64_t id = 0; id < ids.size(); ++id) {
    std::uint64_t text = ',', length = 1, left = id;
    do {
      text = text << 8 | ('0' + left % 10);
      left /= 10;
      ++length;
    } while (left > 0);
    ids[id] = text | length << 56;
  }
  return ids;
}

// "0000" to "9999".
std::array<std::uint32_t, 10000> make_fours() {
  std::array<std::uint32_t, 10000> fours{};
  for (std::uint32_t value = 0; value < fours.size(); ++value) {
    std::uint32_t text = 0, left = value;
    for (int digit = 0; digit < 4; ++digit, left /= 10) text = text << 8 | ('0' + left % 10);
    fours[value] = text;
  }
  return fours;
}

const auto kIds = make_ids();
const auto kFours = make_fours();

// Eight bytes are written, of which those before the returned place count. `value` < 10000.
char* put_small(char* out, std::uint32_t value) {
  const std::uint64_t text = kIds[value];
  std::memcpy(out, &text, sizeof text);
  return out + (text >> 56);
}

char* put_four(char* out, std::uint32_t value) {
  std::memcpy(out, &kFours[value], 4);
  return out + 4;
}

// The id and a comma. Up to six bytes behind are written, too.
char* put_id(char* out, std::uint32_t id) {
  if (id < 10'000) return put_small(out, id);
  if (id < 100'000'000) {
    out = put_four(put_small(out, id / 10'000) - 1, id % 10'000);
  } else {
    out = put_small(out, id / 100'000'000) - 1;
    out = put_four(put_four(out, id / 10'000 % 10'000), id % 10'000);
  }
  *out = ',';
  return out + 1;
}

char* put(char* out, std::string_view text) {
  std::memcpy(out, text.data(), text.size());
  return out + text.size();
}

std::size_t digits(std::int64_t number) {
  std::size_t count = 1;
  for (; number >= 10; number /= 10) ++count;
  return count;
}

}  // namespace

template <typename Token>
std::size_t rows_bytes(std::span<const Token> tokens, std::span<const std::int64_t> lengths) {
  // A comma for each id but the last one of each document.
  std::size_t bytes = tokens.size(), left = tokens.size();
  for (const std::int64_t length : lengths) {
    if (length < 1 || static_cast<std::uint64_t>(length) > left) {
      throw ValueError(str("a document of ", length, " tokens, where ", left, " are left: must be at least 1"));
    }
    left -= static_cast<std::size_t>(length);
    bytes += kBegin.size() + kMiddle.size() + digits(length) + kEnd.size() - 1;
  }
  if (left > 0) throw ValueError(str("the lengths leave out the last ", left, " of ", tokens.size(), " tokens"));
  // Plain sums of comparisons, which compilers turn into vector code.
  std::size_t more = 0;
  for (const Token token : tokens) {
    const std::uint32_t id = token;
    std::uint32_t count = 1u + (id > 9) + (id > 99) + (id > 999) + (id > 9'999);
    if constexpr (sizeof(Token) > 2) {
      count += 0u + (id > 99'999) + (id > 999'999) + (id > 9'999'999) + (id > 99'999'999) + (id > 999'999'999);
    }
    more += count;
  }
  return bytes + more;
}

template <typename Token>
void write_rows(std::span<const Token> tokens, std::span<const std::int64_t> lengths, char* out) {
  const Token* next = tokens.data();
  for (const std::int64_t length : lengths) {
    out = put(out, kBegin);
    // What put_id writes too much is overwritten by what follows: there is always kMiddle.
    for (const Token* end = next + length; next != end; ++next) out = put_id(out, *next);
    out = put(out - 1, kMiddle);
    out = std::to_chars(out, out + 20, length).ptr;
    out = put(out, kEnd);
  }
}

template std::size_t rows_bytes<std::uint16_t>(std::span<const std::uint16_t>, std::span<const std::int64_t>);
template std::size_t rows_bytes<std::uint32_t>(std::span<const std::uint32_t>, std::span<const std::int64_t>);
template void write_rows<std::uint16_t>(std::span<const std::uint16_t>, std::span<const std::int64_t>, char*);
template void write_rows<std::uint32_t>(std::span<const std::uint32_t>, std::span<const std::int64_t>, char*);

}  // namespace tt::data
