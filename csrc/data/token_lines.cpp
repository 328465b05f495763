#include "data/token_lines.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "base/error.h"

namespace tt::data {

namespace {

static_assert(std::endian::native == std::endian::little, "eight digits are read as one little-endian word");

bool is_digit(char c) { return static_cast<unsigned char>(c - '0') < 10; }
bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\r'; }

// Eight ASCII digits as a number; the lowest byte is the first digit. The three steps join neighbours: digits to
// pairs, pairs to fours, fours to eight.
std::uint64_t eight_digits(std::uint64_t word) {
  word = (word & 0x0F0F0F0F0F0F0F0Full) * 2561 >> 8;
  word = (word & 0x00FF00FF00FF00FFull) * 6553601 >> 16;
  return (word & 0x0000FFFF0000FFFFull) * 42949672960001ull >> 32;
}

// Length of the UTF-8 sequence at p, 0 if it is not valid. Surrogates and overlong forms are not.
std::size_t utf8_length(const char* p, const char* end) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(p[i]); };
  const auto left = static_cast<std::size_t>(end - p);
  const auto continues = [&](std::size_t i) { return i < left && (byte(i) & 0xC0) == 0x80; };
  if (byte(0) < 0x80) return 1;
  if (byte(0) >= 0xC2 && byte(0) <= 0xDF) return continues(1) ? 2 : 0;
  if ((byte(0) & 0xF0) == 0xE0) {
    if (!continues(1) || !continues(2)) return 0;
    if (byte(0) == 0xE0 && byte(1) < 0xA0) return 0;
    return byte(0) == 0xED && byte(1) > 0x9F ? 0 : 3;
  }
  if (byte(0) >= 0xF0 && byte(0) <= 0xF4) {
    if (!continues(1) || !continues(2) || !continues(3)) return 0;
    if (byte(0) == 0xF0 && byte(1) < 0x90) return 0;
    return byte(0) == 0xF4 && byte(1) > 0x8F ? 0 : 4;
  }
  return 0;
}

// One line. Its end is that of the text, and no newline is inside, so that a failed look-ahead is a refusal.
template <typename Token>
class LineParser {
 public:
  LineParser(std::string_view line, std::uint64_t vocab_size, Token* tokens)
      : p_(line.data()), end_(line.data() + line.size()), vocab_size_(vocab_size), tokens_(tokens) {}

  bool parse() {
    skip_blanks();
    if (!take('{')) return false;
    do {
      std::string_view key;
      skip_blanks();
      if (!string(&key)) return false;
      skip_blanks();
      if (!take(':')) return false;
      skip_blanks();
      if (key == "tokens") {
        if (has_tokens_ || !token_list()) return false;
        has_tokens_ = true;
      } else if (key == "length") {
        if (has_length_ || !whole_number(&length_)) return false;
        has_length_ = true;
      } else if (!plain_value()) {
        return false;
      }
      skip_blanks();
    } while (take(','));
    if (!take('}')) return false;
    skip_blanks();
    return p_ == end_ && has_tokens_ && (!has_length_ || length_ == count_);
  }

  std::size_t count() const { return count_; }
  const char* position() const { return p_; }
  std::uint64_t largest() const { return largest_; }

 private:
  void skip_blanks() {
    while (p_ != end_ && is_blank(*p_)) ++p_;
  }

  bool take(char wanted) {
    if (p_ == end_ || *p_ != wanted) return false;
    ++p_;
    return true;
  }

  bool take(std::string_view wanted) {
    if (static_cast<std::size_t>(end_ - p_) < wanted.size() || std::memcmp(p_, wanted.data(), wanted.size()) != 0) {
      return false;
    }
    p_ += wanted.size();
    return true;
  }

  // `plain`: where not null, the string must have no escapes, and its text is put there.
  bool string(std::string_view* plain) {
    if (!take('"')) return false;
    const char* start = p_;
    while (p_ != end_ && *p_ != '"') {
      if (static_cast<unsigned char>(*p_) < 0x20) return false;
      if (*p_ == '\\') {
        if (plain != nullptr || !escape()) return false;
        continue;
      }
      const std::size_t length = utf8_length(p_, end_);
      if (length == 0) return false;
      p_ += length;
    }
    if (plain != nullptr) *plain = std::string_view(start, static_cast<std::size_t>(p_ - start));
    return take('"');
  }

  bool escape() {
    ++p_;
    if (p_ == end_) return false;
    const char kind = *p_++;
    if (kind != 'u') return std::string_view("\"\\/bfnrt").find(kind) != std::string_view::npos;
    for (int i = 0; i < 4; ++i, ++p_) {
      const auto is_hex = [](char c) { return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); };
      if (p_ == end_ || !is_hex(*p_)) return false;
    }
    return true;
  }

  bool digits() {
    const char* start = p_;
    while (p_ != end_ && is_digit(*p_)) ++p_;
    return p_ != start;
  }

  // Any JSON number that is not so long that a full parser may have a limit of its own.
  bool number() {
    const char* start = p_;
    take('-');
    const char* whole = p_;
    if (!digits() || (*whole == '0' && p_ - whole > 1)) return false;
    if (take('.') && !digits()) return false;
    if (take('e') || take('E')) {
      if (!take('+')) take('-');
      if (!digits()) return false;
    }
    return p_ - start <= 64;
  }

  bool plain_value() {
    if (p_ == end_) return false;
    switch (*p_) {
      case '"':
        return string(nullptr);
      case 't':
        return take("true");
      case 'f':
        return take("false");
      case 'n':
        return take("null");
      default:
        return number();
    }
  }

  // Digits, up to 18: no overflow. What follows them is the caller's to judge ("1.5", "1e3").
  bool whole_number(std::uint64_t* value) {
    const char* start = p_;
    std::uint64_t sum = 0;
    while (p_ != end_ && is_digit(*p_) && p_ - start < 18) {
      sum = sum * 10 + static_cast<std::uint64_t>(*p_++ - '0');
    }
    *value = sum;
    return p_ != start && (*start != '0' || p_ - start == 1);
  }

  // Up to 7 digits without a branch on their number, which would be mispredicted for most tokens.
  bool token(std::uint64_t* value) {
    if (end_ - p_ < 8) return whole_number(value);
    std::uint64_t word;
    std::memcpy(&word, p_, 8);
    // A byte of `others` is not zero where the byte is no digit: above '9' the addition carries into the high half.
    const std::uint64_t zeroed = word ^ 0x3030303030303030ull;
    const std::uint64_t others = ((zeroed + 0x0606060606060606ull) | zeroed) & 0xF0F0F0F0F0F0F0F0ull;
    if (others == 0) return whole_number(value);  // eight digits or more
    const int count = std::countr_zero(others) / 8;
    if (count == 0 || (*p_ == '0' && count > 1)) return false;
    *value = eight_digits(word << (64 - 8 * count));
    p_ += count;
    return true;
  }

  bool token_list() {
    if (!take('[')) return false;
    skip_blanks();
    if (take(']')) return true;
    Token* out = tokens_;
    std::uint64_t largest = 0;
    while (true) {
      std::uint64_t value;
      if (!token(&value) || value >= vocab_size_) return false;
      largest = value > largest ? value : largest;
      *out++ = static_cast<Token>(value);
      // Most often: a comma and at most one blank.
      if (p_ == end_) return false;
      if (*p_ != ',') {
        skip_blanks();
        if (take(']')) break;
        if (!take(',')) return false;
      } else {
        ++p_;
      }
      if (p_ != end_ && *p_ == ' ') ++p_;
      if (p_ != end_ && !is_digit(*p_)) skip_blanks();
    }
    count_ = static_cast<std::uint64_t>(out - tokens_);
    largest_ = largest;
    return true;
  }

  const char* p_;
  const char* end_;
  std::uint64_t vocab_size_;
  Token* tokens_;
  std::uint64_t count_ = 0, largest_ = 0, length_ = 0;
  bool has_tokens_ = false, has_length_ = false;
};

}  // namespace

template <typename Token>
ParsedLines parse_token_lines(std::string_view text, bool at_end, std::uint64_t vocab_size, std::span<Token> tokens,
                              std::span<std::int64_t> ends, std::int64_t first_end) {
  if (vocab_size < 1 || vocab_size > std::uint64_t{std::numeric_limits<Token>::max()} + 1) {
    throw ValueError(str("vocab_size = ", vocab_size, ": must be in [1, 2^", 8 * sizeof(Token), "]"));
  }
  if (tokens.size() < most_tokens(text.size()) || ends.size() < most_documents(text.size())) {
    throw ValueError(str(text.size(), " bytes of text may hold ", most_tokens(text.size()), " tokens in ",
                         most_documents(text.size()), " documents; there is room for ", tokens.size(), " in ",
                         ends.size()));
  }
  ParsedLines parsed;
  while (parsed.bytes < text.size()) {
    const std::string_view rest = text.substr(parsed.bytes);
    const std::size_t newline = rest.find('\n');
    if (newline == std::string_view::npos && !at_end) break;
    const std::string_view line = rest.substr(0, newline);
    LineParser<Token> parser(line, vocab_size, tokens.data() + parsed.tokens);
    if (!parser.parse()) {
      parsed.refused = true;
      parsed.refused_at = static_cast<std::size_t>(parser.position() - line.data());
      break;
    }
    parsed.bytes += line.size() + (newline == std::string_view::npos ? 0 : 1);
    parsed.tokens += parser.count();
    ends[parsed.documents++] = first_end + static_cast<std::int64_t>(parsed.tokens);
    if (parser.count() > 0) {
      parsed.largest_id = std::max(parsed.largest_id, static_cast<std::int64_t>(parser.largest()));
    }
  }
  return parsed;
}

template ParsedLines parse_token_lines<std::uint16_t>(std::string_view, bool, std::uint64_t, std::span<std::uint16_t>,
                                                      std::span<std::int64_t>, std::int64_t);
template ParsedLines parse_token_lines<std::uint32_t>(std::string_view, bool, std::uint64_t, std::span<std::uint32_t>,
                                                      std::span<std::int64_t>, std::int64_t);

}  // namespace tt::data
