// Python: token files, as a module of its own, since preparing and indexing them needs no torch. Memory is given as
// buffers (numpy arrays, memoryviews), outputs of a sample as addresses.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "data/permutation.h"
#include "data/token_lines.h"
#include "data/token_rows.h"
#include "data/token_stream.h"

namespace py = pybind11;

namespace {

using tt::data::ParsedLines;
using tt::data::Permutation;
using tt::data::TokenFile;
using tt::data::TokenStream;

template <typename T>
std::span<T> elements(const py::buffer_info& buffer, const char* name) {
  if (buffer.ndim != 1 || buffer.strides[0] != buffer.itemsize || buffer.itemsize != sizeof(T)) {
    throw tt::ValueError(tt::str(name, ": must be one contiguous row of elements of ", sizeof(T), " bytes"));
  }
  return {static_cast<T*>(buffer.ptr), static_cast<std::size_t>(buffer.size)};
}

template <typename Token>
ParsedLines parse(std::string_view text, bool at_end, std::uint64_t vocab_size, const py::buffer_info& tokens,
                  std::span<std::int64_t> ends, std::int64_t first_end) {
  const auto room = elements<Token>(tokens, "tokens");
  py::gil_scoped_release release;
  return tt::data::parse_token_lines<Token>(text, at_end, vocab_size, room, ends, first_end);
}

// A TokenStream with the arrays that it looks into.
class BufferedStream {
 public:
  BufferedStream(const std::vector<std::pair<py::buffer, py::buffer>>& files, std::optional<std::int64_t> eos_id) {
    std::vector<TokenFile> views;
    buffers_.reserve(2 * files.size());  // the references below stay valid
    for (const auto& [tokens, offsets] : files) {
      const py::buffer_info& ids = buffers_.emplace_back(tokens.request());
      const auto ends = elements<const std::int64_t>(buffers_.emplace_back(offsets.request()), "offsets");
      if (ids.ndim != 1 || ends.empty()) {
        throw tt::ValueError("tokens: must be one row; offsets: must not be empty");
      }
      views.push_back({ids.ptr, static_cast<std::size_t>(ids.itemsize), ids.size, ends.data(),
                       static_cast<std::int64_t>(ends.size()) - 1});
    }
    stream_ = std::make_unique<TokenStream>(std::move(views), eos_id);
  }

  const TokenStream& operator*() const { return *stream_; }

 private:
  std::vector<py::buffer_info> buffers_;
  std::unique_ptr<TokenStream> stream_;
};

template <typename Token>
py::bytes rows(const py::buffer_info& tokens, std::span<const std::int64_t> lengths) {
  const auto ids = elements<const Token>(tokens, "tokens");
  std::size_t size = 0;
  {
    py::gil_scoped_release release;
    size = tt::data::rows_bytes(ids, lengths);
  }
  PyObject* text = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
  if (text == nullptr) throw py::error_already_set();
  char* out = PyBytes_AS_STRING(text);  // nobody else knows it yet
  {
    py::gil_scoped_release release;
    tt::data::write_rows(ids, lengths, out);
  }
  return py::reinterpret_steal<py::bytes>(text);
}

// Bytes of UTF-8 as ids, each text framed by `begin` and `end` where those are ids (not -1).
std::pair<py::array_t<std::uint16_t>, py::array_t<std::int64_t>> utf8_ids(const py::list& texts, int begin, int end) {
  const auto count = static_cast<py::ssize_t>(texts.size());
  py::array_t<std::int64_t> lengths(count);
  std::vector<std::string_view> utf8;
  utf8.reserve(texts.size());
  const py::ssize_t framing = (begin >= 0 ? 1 : 0) + (end >= 0 ? 1 : 0);
  py::ssize_t total = 0;
  for (const py::handle text : texts) {
    Py_ssize_t size = 0;
    const char* bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &size);  // the text keeps them
    if (bytes == nullptr) throw py::error_already_set();
    lengths.mutable_data()[utf8.size()] = size + framing;
    utf8.emplace_back(bytes, static_cast<std::size_t>(size));
    total += size + framing;
  }
  py::array_t<std::uint16_t> ids(total);
  std::uint16_t* out = ids.mutable_data();
  for (const std::string_view bytes : utf8) {
    if (begin >= 0) *out++ = static_cast<std::uint16_t>(begin);
    out = std::transform(bytes.begin(), bytes.end(), out, [](char byte) { return static_cast<unsigned char>(byte); });
    if (end >= 0) *out++ = static_cast<std::uint16_t>(end);
  }
  return {std::move(ids), std::move(lengths)};
}

std::int64_t* row(std::uintptr_t address) { return reinterpret_cast<std::int64_t*>(address); }

}  // namespace

PYBIND11_MODULE(_data, m) {
  m.doc() = "Native part of torchtitan_npu.data; without torch.";
  // Of this module only: the core has exceptions of its own for the same types.
  py::register_local_exception<tt::Error>(m, "Error", PyExc_RuntimeError);
  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      if (error) {
        std::rethrow_exception(error);
      }
    } catch (const tt::ValueError& e) {
      PyErr_SetString(PyExc_ValueError, e.what());
    }
  });

  py::class_<ParsedLines>(m, "ParsedLines", "What parse_token_lines took.")
      .def_readonly("bytes", &ParsedLines::bytes)
      .def_readonly("documents", &ParsedLines::documents)
      .def_readonly("tokens", &ParsedLines::tokens)
      .def_readonly("largest_id", &ParsedLines::largest_id)
      .def_readonly("refused", &ParsedLines::refused)
      .def_readonly("refused_at", &ParsedLines::refused_at);

  m.def("most_tokens", &tt::data::most_tokens, py::arg("bytes"));
  m.def("most_documents", &tt::data::most_documents, py::arg("bytes"));
  m.def(
      "parse_token_lines",
      [](const py::buffer& text, bool at_end, std::uint64_t vocab_size, const py::buffer& tokens,
         const py::buffer& ends, std::int64_t first_end) {
        const py::buffer_info text_info = text.request(), tokens_info = tokens.request(true),
                              ends_info = ends.request(true);
        const auto bytes = elements<const char>(text_info, "text");
        const std::string_view view(bytes.data(), bytes.size());
        const auto rows = elements<std::int64_t>(ends_info, "ends");
        return tokens_info.itemsize == 2 ? parse<std::uint16_t>(view, at_end, vocab_size, tokens_info, rows, first_end)
                                         : parse<std::uint32_t>(view, at_end, vocab_size, tokens_info, rows, first_end);
      },
      py::arg("text"), py::arg("at_end"), py::arg("vocab_size"), py::arg("tokens"), py::arg("ends"),
      py::arg("first_end"));

  m.def(
      "jsonl_rows",
      [](const py::buffer& tokens, const py::buffer& lengths) {
        const py::buffer_info tokens_info = tokens.request(), lengths_info = lengths.request();
        const auto counts = elements<const std::int64_t>(lengths_info, "lengths");
        return tokens_info.itemsize == 2 ? rows<std::uint16_t>(tokens_info, counts)
                                         : rows<std::uint32_t>(tokens_info, counts);
      },
      py::arg("tokens"), py::arg("lengths"));

  m.def(
      "utf8_ids",
      [](const py::list& texts, std::optional<std::uint16_t> begin, std::optional<std::uint16_t> end) {
        return utf8_ids(texts, begin ? *begin : -1, end ? *end : -1);
      },
      py::arg("texts"), py::arg("begin"), py::arg("end"));

  py::class_<BufferedStream>(m, "TokenStream", "Token files as one stream, and samples cut from it.")
      .def(py::init<const std::vector<std::pair<py::buffer, py::buffer>>&, std::optional<std::int64_t>>(),
           py::kw_only(), py::arg("files"), py::arg("eos_id"))
      .def_property_readonly("size", [](const BufferedStream& self) { return (*self).size(); })
      .def(
          "start_of", [](const BufferedStream& self, std::int64_t document) { return (*self).start_of(document); },
          py::arg("document"))
      .def(
          "sample",
          [](const BufferedStream& self, std::int64_t begin, std::int64_t count, std::int64_t seq_len,
             std::int64_t pad_id, std::uintptr_t inputs, std::uintptr_t labels, std::uintptr_t document_ids) {
            (*self).sample(begin, count, seq_len, pad_id, row(inputs), row(labels), row(document_ids));
          },
          py::arg("begin"), py::arg("count"), py::arg("seq_len"), py::arg("pad_id"), py::arg("inputs"),
          py::arg("labels"), py::arg("document_ids"), py::call_guard<py::gil_scoped_release>());

  py::class_<Permutation>(m, "Permutation", "A random order of 0 .. size - 1 that is computed, not stored.")
      .def(py::init<std::int64_t, std::uint64_t, std::uint64_t>(), py::kw_only(), py::arg("size"), py::arg("seed"),
           py::arg("stream"))
      .def("at", &Permutation::at, py::arg("index"));
}
