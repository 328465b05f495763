// Random token files and indices through their readers, for the address sanitizer: data_fuzz CASES SEED.
//
// Lines are valid ones with a few bytes changed; what the reader takes has to keep its promises. Streams get offsets
// that are partly out of order, as a damaged file may have them: an error is right, a read outside is not.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "data/permutation.h"
#include "data/token_lines.h"
#include "data/token_rows.h"
#include "data/token_stream.h"

namespace {

using Random = std::mt19937_64;

std::int64_t between(Random& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}

void require(bool holds, const char* what, std::uint64_t number) {
  if (!holds) {
    std::fprintf(stderr, "case %llu: %s\n", static_cast<unsigned long long>(number), what);
    std::abort();
  }
}

std::string line_of(Random& random, std::int64_t vocab_size) {
  static const char* const kMore[] = {"",
                                      "\"id\": \"a\\u00e9\xc3\xa9\\n\", ",
                                      "\"x\": -1.5e3, ",
                                      "\"y\": null , ",
                                      "\"z\": {\"a\": [1]}, ",
                                      "\"tokens\": [], "};
  const std::int64_t count = between(random, 0, 20);
  std::string line = "{";
  line += kMore[between(random, 0, 5)];
  line += "\"tokens\": [";
  for (std::int64_t i = 0; i < count; ++i) {
    line +=
        (i > 0 ? (between(random, 0, 1) != 0 ? ", " : ",") : "") + std::to_string(between(random, 0, vocab_size - 1));
  }
  line += "]";
  if (between(random, 0, 1) != 0) line += ", \"length\": " + std::to_string(count);
  return line + "}";
}

void damage(Random& random, std::string& text) {
  static const std::string_view kBytes("0123456789,[]{}\":\\ue-+. \n\r\t\0\x7f\x80\xc3\xed\xf0\xff", 34);
  for (std::int64_t changes = between(random, 0, 3); changes > 0 && !text.empty(); --changes) {
    const auto at = static_cast<std::size_t>(between(random, 0, static_cast<std::int64_t>(text.size()) - 1));
    const char byte =
        kBytes[static_cast<std::size_t>(between(random, 0, static_cast<std::int64_t>(kBytes.size()) - 1))];
    switch (between(random, 0, 3)) {
      case 0:
        text[at] = byte;
        break;
      case 1:
        text.erase(at, static_cast<std::size_t>(between(random, 1, 8)));
        break;
      case 2:
        text.insert(at, 1, byte);
        break;
      default:
        text.resize(at);
    }
  }
}

template <typename Token>
void lines(Random& random, std::uint64_t number) {
  const std::int64_t vocab_size = sizeof(Token) == 2 ? between(random, 1, 1 << 16) : between(random, 1, 1LL << 32);
  std::string text;
  for (std::int64_t count = between(random, 0, 4); count > 0; --count) text += line_of(random, vocab_size) + "\n";
  damage(random, text);
  // Exactly as large as they are: the sanitizer sees every byte beyond.
  const std::unique_ptr<char[]> exact(new char[text.size()]);
  text.copy(exact.get(), text.size());
  std::vector<Token> tokens(tt::data::most_tokens(text.size()));
  std::vector<std::int64_t> ends(tt::data::most_documents(text.size()));
  const bool at_end = between(random, 0, 1) != 0;
  const auto parsed = tt::data::parse_token_lines<Token>(std::string_view(exact.get(), text.size()), at_end,
                                                         static_cast<std::uint64_t>(vocab_size), tokens, ends, 5);
  require(parsed.bytes <= text.size(), "took more than there is", number);
  require(parsed.bytes == text.size() || parsed.refused || !at_end, "stopped without a reason", number);
  std::int64_t before = 5;
  for (std::size_t document = 0; document < parsed.documents; ++document) {
    require(ends[document] >= before, "a document of less than no tokens", number);
    before = ends[document];
  }
  require(before == 5 + static_cast<std::int64_t>(parsed.tokens), "counts that differ", number);
  std::int64_t largest = -1;
  for (std::size_t i = 0; i < parsed.tokens; ++i) largest = std::max<std::int64_t>(largest, tokens[i]);
  require(largest == parsed.largest_id && largest < vocab_size, "a wrong largest id", number);
}

// Rows as they are written, into exactly as much memory as they take, are what the reader takes.
template <typename Token>
void rows(Random& random, std::uint64_t number) {
  std::vector<Token> tokens;
  std::vector<std::int64_t> lengths;
  std::string expected;
  for (std::int64_t documents = between(random, 0, 4); documents > 0; --documents) {
    lengths.push_back(between(random, 1, 12));
    expected += "{\"tokens\":[";
    for (std::int64_t i = 0; i < lengths.back(); ++i) {
      tokens.push_back(static_cast<Token>(random() >> between(random, 0, 63)));
      expected += (i > 0 ? "," : "") + std::to_string(tokens.back());
    }
    expected += "],\"length\":" + std::to_string(lengths.back()) + "}\n";
  }
  const std::span<const Token> ids = tokens;
  require(tt::data::rows_bytes(ids, lengths) == expected.size(), "rows of another size", number);
  const std::unique_ptr<char[]> exact(new char[expected.size()]);
  tt::data::write_rows(ids, lengths, exact.get());
  require(std::string_view(exact.get(), expected.size()) == expected, "other rows", number);
}

void samples(Random& random, std::uint64_t number) {
  struct Held {
    std::vector<std::uint16_t> tokens;
    std::vector<std::int64_t> offsets;
  };
  std::vector<Held> held(static_cast<std::size_t>(between(random, 1, 3)));
  std::vector<tt::data::TokenFile> files;
  const bool damaged = between(random, 0, 1) != 0;
  for (Held& file : held) {
    file.offsets.push_back(0);
    for (std::int64_t count = between(random, 0, 6); count > 0; --count) {
      file.offsets.push_back(file.offsets.back() + between(random, 0, 5));
    }
    file.tokens.resize(static_cast<std::size_t>(file.offsets.back()), 7);
    if (damaged && file.offsets.size() > 2) {
      const std::int64_t at = between(random, 1, static_cast<std::int64_t>(file.offsets.size()) - 2);
      const std::int64_t wild = between(random, 0, 1) != 0 ? 20 : std::int64_t{1} << 62;
      file.offsets[static_cast<std::size_t>(at)] = between(random, -wild, wild);
    }
    files.push_back({file.tokens.data(), 2, static_cast<std::int64_t>(file.tokens.size()), file.offsets.data(),
                     static_cast<std::int64_t>(file.offsets.size()) - 1});
  }
  const bool ends = between(random, 0, 1) != 0;
  const tt::data::TokenStream stream(files, ends ? std::optional<std::int64_t>(9) : std::nullopt);
  if (stream.size() == 0) return;
  const std::int64_t seq_len = between(random, 1, 12);
  std::vector<std::int64_t> inputs(static_cast<std::size_t>(seq_len)), labels(inputs), documents(inputs);
  const std::int64_t begin = between(random, 0, stream.size() - 1), count = between(random, 1, seq_len + 1);
  try {
    stream.sample(begin, count, seq_len, 3, inputs.data(), labels.data(), documents.data());
  } catch (const tt::Error&) {
    require(damaged, "an error without damage", number);
    return;
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const bool padding = static_cast<std::int64_t>(i) >= count;
    require(padding ? inputs[i] == 3 : inputs[i] == 7 || (ends && inputs[i] == 9), "a wrong id", number);
    require(labels[i] == tt::data::kIgnoreIndex || (!padding && (labels[i] == 7 || labels[i] == 9)), "a wrong label",
            number);
    require(i == 0 ? documents[i] == 0 : documents[i] - documents[i - 1] == 0 || documents[i] - documents[i - 1] == 1,
            "documents that are not counted", number);
  }
}

void order(Random& random, std::uint64_t number) {
  const std::int64_t size = between(random, 1, 300);
  const tt::data::Permutation permutation(size, random(), random());
  std::vector<bool> seen(static_cast<std::size_t>(size));
  for (std::int64_t i = 0; i < size; ++i) {
    const auto at = static_cast<std::size_t>(permutation.at(i));
    require(!seen.at(at), "an element twice", number);
    seen[at] = true;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: data_fuzz CASES SEED\n");
    return 2;
  }
  const std::uint64_t cases = std::strtoull(argv[1], nullptr, 10), seed = std::strtoull(argv[2], nullptr, 10);
  for (std::uint64_t number = 0; number < cases; ++number) {
    Random random(seed * 1'000'003 + number);  // a case can be repeated alone
    lines<std::uint16_t>(random, number);
    lines<std::uint32_t>(random, number);
    rows<std::uint16_t>(random, number);
    rows<std::uint32_t>(random, number);
    samples(random, number);
    if (number % 16 == 0) order(random, number);
  }
  std::printf("data_fuzz: %llu cases of seed %llu\n", static_cast<unsigned long long>(cases),
              static_cast<unsigned long long>(seed));
  return 0;
}
