// The quick reader of JSONL token files: lines of {"tokens": [...], "length": n}.
//
// It takes a line only when there is no doubt about it, and leaves every other one, right or wrong, to a full JSON
// parser: so all verdicts and messages have one source. What it takes, a full parser takes with the same result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace tt::data {

struct ParsedLines {
  std::size_t bytes = 0;         // whole lines that were taken, with their newlines; the first other line begins here
  std::size_t documents = 0;     // one per line
  std::size_t tokens = 0;        // of all documents
  std::int64_t largest_id = -1;  // -1: no token
  bool refused = false;          // the line at `bytes` is whole and was not taken; else the text ends within it
  std::size_t refused_at = 0;    // how far the refused line was understood, in bytes from its start
};

// The most that `bytes` of text can hold: what the outputs of parse_token_lines need room for.
constexpr std::size_t most_tokens(std::size_t bytes) { return bytes / 2 + 1; }
constexpr std::size_t most_documents(std::size_t bytes) { return bytes / 13 + 1; }

// Reads whole lines from `text` until it ends or a line is refused.
//
// A line is taken when it is one JSON object that has "tokens" once, a list of integers in [0, vocab_size) written
// plainly (no sign, no exponent); "length", if at all, once, and equal to the number of tokens; and otherwise members
// with plain values: strings of valid UTF-8, numbers, true, false, null. Around tokens of JSON stand blanks, tabs and
// carriage returns. An empty line is refused.
//
// `at_end`: the text is the end of the file, so that its last line needs no newline.
// Writes ids to `tokens`, and behind each document the number of tokens so far, counted from `first_end`, to `ends`.
// What lies behind the counts in the result is scratch.
// Errors: ValueError when an output has less room than most_tokens, most_documents; vocab_size not in [1, 2^32], or
// beyond what Token holds. Token: std::uint16_t or std::uint32_t.
template <typename Token>
ParsedLines parse_token_lines(std::string_view text, bool at_end, std::uint64_t vocab_size, std::span<Token> tokens,
                              std::span<std::int64_t> ends, std::int64_t first_end);

}  // namespace tt::data
