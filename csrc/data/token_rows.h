// The writer of JSONL token files: one line {"tokens":[1,22,333],"length":3} per document.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tt::data {

// The bytes of the lines of documents that lie back to back, document d being the next lengths[d] ids.
// Errors: ValueError when a length is below 1, or when they do not add up to the number of tokens.
template <typename Token>
std::size_t rows_bytes(std::span<const Token> tokens, std::span<const std::int64_t> lengths);

// Writes these lines to `out`, which has room for exactly rows_bytes. Token: std::uint16_t or std::uint32_t.
template <typename Token>
void write_rows(std::span<const Token> tokens, std::span<const std::int64_t> lengths, char* out);

}  // namespace tt::data
