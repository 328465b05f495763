#include "data/token_stream.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace tt::data {

namespace {

template <typename Token>
void widen(const void* tokens, std::int64_t first, std::int64_t count, std::int64_t* out) {
  const Token* from = static_cast<const Token*>(tokens) + first;
  std::copy(from, from + count, out);
}

// The last file that begins at or before `value`, among starts and an end; files that hold nothing are passed over.
std::size_t file_of(const std::vector<std::int64_t>& starts, std::int64_t value) {
  const auto after = std::upper_bound(starts.begin(), starts.end(), value);
  return static_cast<std::size_t>(after - starts.begin()) - 1;
}

}  // namespace

TokenStream::TokenStream(std::vector<TokenFile> files, std::optional<std::int64_t> eos_id)
    : files_(std::move(files)), eos_id_(eos_id), first_document_{0}, first_position_{0} {
  for (const TokenFile& file : files_) {
    if (file.token_bytes != 2 && file.token_bytes != 4) {
      throw ValueError(str("tokens of ", file.token_bytes, " bytes: must be 2 or 4"));
    }
    if (file.documents < 0 || file.offsets[0] != 0 || file.offsets[file.documents] != file.num_tokens) {
      throw ValueError(str("the offsets of ", file.documents, " documents do not span ", file.num_tokens, " tokens"));
    }
    first_document_.push_back(first_document_.back() + file.documents);
    first_position_.push_back(first_position_.back() + file.num_tokens + extra() * file.documents);
  }
}

std::int64_t TokenStream::start_of(std::int64_t document) const {
  if (document < 0 || document > documents()) {
    throw ValueError(str("document ", document, " of ", documents()));
  }
  if (document == documents()) return size();
  const std::size_t file = file_of(first_document_, document);
  const std::int64_t local = document - first_document_[file];
  return first_position_[file] + files_[file].offsets[local] + extra() * local;
}

void TokenStream::sample(std::int64_t begin, std::int64_t count, std::int64_t seq_len, std::int64_t pad_id,
                         std::int64_t* inputs, std::int64_t* labels, std::int64_t* document_ids) const {
  if (begin < 0 || begin >= size() || count < 1 || count > seq_len + 1) {
    throw ValueError(str("a sample of ", count, " positions from ", begin, " on, of a stream of ", size(),
                         ": needs 0 <= begin < size and 1 <= count <= seq_len + 1 = ", seq_len + 1));
  }
  std::int64_t filled = 0, number = -1, position = begin;
  // The last of seq_len + 1 positions is a label only.
  std::int64_t last_id = 0, last_document = -1;
  const auto put = [&](const TokenFile& file, std::int64_t first, std::int64_t many) {
    const auto copy = file.token_bytes == 2 ? widen<std::uint16_t> : widen<std::uint32_t>;
    const std::int64_t shown = std::min(many, seq_len - filled);
    copy(file.tokens, first, shown, inputs + filled);
    std::fill_n(document_ids + filled, shown, number);
    if (many > shown) {
      copy(file.tokens, first + shown, 1, &last_id);
      last_document = number;
    }
    filled += many;
  };
  while (filled < count) {
    const std::size_t index = file_of(first_position_, position);
    const TokenFile& file = files_[index];
    const auto start_in_file = [&](std::int64_t document) { return file.offsets[document] + extra() * document; };
    const std::int64_t local = position - first_position_[index];
    // The last document that begins at or before the position: an empty one takes no place.
    std::int64_t low = 0, high = file.documents;
    while (high - low > 1) {
      const std::int64_t middle = low + (high - low) / 2;
      (start_in_file(middle) <= local ? low : high) = middle;
    }
    std::int64_t skipped = local - start_in_file(low);  // of the document
    for (std::int64_t document = low; document < file.documents && filled < count; ++document, skipped = 0) {
      const std::int64_t first = file.offsets[document], last = file.offsets[document + 1];
      if (first < 0 || first > last || last > file.num_tokens || skipped < 0 || skipped > last - first) {
        throw Error(str("the index is damaged: document ", document, " of a file is tokens ", first, " to ", last,
                        " of ", file.num_tokens));
      }
      const std::int64_t many = std::min(last - first - skipped, count - filled);
      number += many > 0 || eos_id_ ? 1 : 0;
      put(file, first + skipped, many);
      if (eos_id_ && filled < count) {
        (filled < seq_len ? inputs[filled] : last_id) = *eos_id_;
        (filled < seq_len ? document_ids[filled] : last_document) = number;
        ++filled;
      }
    }
    position = first_position_[index + 1] % size();
  }
  for (std::int64_t i = count; i < seq_len; ++i) {
    inputs[i] = pad_id;
    document_ids[i] = number + 1;
  }
  for (std::int64_t i = 0; i < seq_len; ++i) {
    const bool inside = i + 1 < seq_len;
    const std::int64_t next_document = inside ? document_ids[i + 1] : last_document;
    const bool counted = i + 1 < count && next_document == document_ids[i];
    labels[i] = counted ? (inside ? inputs[i + 1] : last_id) : kIgnoreIndex;
  }
}

}  // namespace tt::data
