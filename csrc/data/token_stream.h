// Token files as one stream: all documents back to back, each with an end-of-document id behind it where one is asked
// for; and training samples cut from it. The files stay where they are, in memory that is mapped: nothing here grows
// with the number of documents.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace tt::data {

// Views; whoever makes a TokenStream of them keeps the memory. Document d is tokens[offsets[d] .. offsets[d + 1]).
struct TokenFile {
  const void* tokens;           // num_tokens of std::uint16_t or std::uint32_t
  std::size_t token_bytes;      // 2 or 4
  std::int64_t num_tokens;      //
  const std::int64_t* offsets;  // documents + 1
  std::int64_t documents;
};

constexpr std::int64_t kIgnoreIndex = -100;  // the label of a place without a target

class TokenStream {
 public:
  // `eos_id`: stands behind every document, an empty one too, without being stored.
  // Errors: ValueError when token_bytes is not 2 or 4, or when the ends of `offsets` are not 0 and num_tokens.
  TokenStream(std::vector<TokenFile> files, std::optional<std::int64_t> eos_id);

  // Positions of the stream: tokens, and an end for each document where there are ends.
  std::int64_t size() const { return first_position_.back(); }
  std::int64_t documents() const { return first_document_.back(); }

  // Where a document begins, for 0 <= document <= documents(); that of the one behind the last is size().
  std::int64_t start_of(std::int64_t document) const;

  // Cuts one sample: positions begin .. begin + count of the stream, which goes on at its start behind its end.
  //
  // Outputs of seq_len elements each; 1 <= count <= seq_len + 1:
  //   inputs        the ids of the first seq_len positions, then pad_id
  //   labels        the id one position further on, kIgnoreIndex where that is of another document or not counted
  //   document_ids  counts the documents of the sample from 0; padding is one more
  // Errors: ValueError for arguments out of range; Error when offsets that it meets are not in order (a damaged file).
  void sample(std::int64_t begin, std::int64_t count, std::int64_t seq_len, std::int64_t pad_id, std::int64_t* inputs,
              std::int64_t* labels, std::int64_t* document_ids) const;

 private:
  std::int64_t extra() const { return eos_id_ ? 1 : 0; }

  std::vector<TokenFile> files_;
  std::optional<std::int64_t> eos_id_;
  std::vector<std::int64_t> first_document_, first_position_;  // of each file, and the end
};

}  // namespace tt::data
