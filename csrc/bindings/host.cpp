// Python: the host backend. Pointers are integers (Tensor.data_ptr()), memory is given as buffers (memoryview, numpy).
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "host/host_device.h"
#include "host/rendezvous.h"
#include "host/shm_communicator.h"
#include "runtime/communicator.h"

namespace py = pybind11;

namespace {

namespace host = tt::host;
namespace runtime = tt::runtime;
using host::HostDevice;
using host::Isa;
using host::ShmCommunicator;
using runtime::Communicator;
using tt::DType;

std::byte* pointer(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

Isa isa_named(const std::string& name) {
  for (Isa isa : host::available_isas()) {
    if (name == host::name_of(isa)) return isa;
  }
  throw tt::ValueError(tt::str("isa '", name, "' is not available on this processor; see HostDevice.available_isas()"));
}

// Bytes of a communicator's memory; keeps the mapping alive for as long as somebody looks at it.
struct HostMemory {
  std::shared_ptr<host::ShmSegment> segment;
  std::byte* data;
  std::size_t bytes;
};

void bind_device(py::module_& m) {
  using runtime::Device;
  py::class_<Device, std::shared_ptr<Device>>(
      m, "Device", "Casts and sums in a device's memory; pointers are addresses, counts are elements.")
      .def(
          "cast",
          [](Device& self, std::uintptr_t dst, DType dst_dtype, std::uintptr_t src, DType src_dtype,
             std::size_t numel) { self.cast(pointer(dst), dst_dtype, pointer(src), src_dtype, numel); },
          py::arg("dst"), py::arg("dst_dtype"), py::arg("src"), py::arg("src_dtype"), py::arg("numel"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "add",
          [](Device& self, std::uintptr_t dst, DType dst_dtype, std::uintptr_t src, DType src_dtype,
             std::size_t numel) { self.add(pointer(dst), dst_dtype, pointer(src), src_dtype, numel); },
          py::arg("dst"), py::arg("dst_dtype"), py::arg("src"), py::arg("src_dtype"), py::arg("numel"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "sum",
          [](Device& self, std::uintptr_t dst, const std::vector<std::uintptr_t>& sources, std::size_t numel,
             DType wire, DType result, DType round_to, double divisor, bool accumulate) {
            std::vector<const std::byte*> pointers;
            for (std::uintptr_t source : sources) pointers.push_back(pointer(source));
            self.sum(pointer(dst), pointers, numel, {wire, result, round_to, divisor, accumulate});
          },
          py::arg("dst"), py::arg("sources"), py::arg("numel"), py::kw_only(), py::arg("wire"), py::arg("result"),
          py::arg("round_to"), py::arg("divisor") = 1.0, py::arg("accumulate") = false,
          py::call_guard<py::gil_scoped_release>(), "A source of 0 counts as zeros.")
      .def(
          "sum_squares",
          [](Device& self, std::uintptr_t src, DType dtype, std::size_t numel) {
            return self.sum_squares(pointer(src), dtype, numel);
          },
          py::arg("src"), py::arg("dtype"), py::arg("numel"), py::call_guard<py::gil_scoped_release>(), "In float64.")
      .def(
          "zero", [](Device& self, std::uintptr_t dst, std::size_t bytes) { self.zero(pointer(dst), bytes); },
          py::arg("dst"), py::arg("bytes"), py::call_guard<py::gil_scoped_release>());
  py::class_<HostDevice, Device, std::shared_ptr<HostDevice>>(m, "HostDevice", "Host memory, with kernels of our own.")
      .def(py::init<>(), "With the best kernels of this processor.")
      .def(py::init([](const std::string& isa) { return std::make_shared<HostDevice>(isa_named(isa)); }),
           py::arg("isa"))
      .def_property_readonly("isa", [](const HostDevice& self) { return host::name_of(self.isa()); })
      .def_static("available_isas", [] {
        std::vector<std::string> names;
        for (Isa isa : host::available_isas()) names.emplace_back(host::name_of(isa));
        return names;
      });
}

// The collectives, for every kind of communicator. All may block, so none holds the interpreter.
void bind_collectives(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  m.attr("NO_GRADIENT") = runtime::kNoGradient;
  py::class_<Communicator, std::shared_ptr<Communicator>>(m, "Communicator")
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("name", &Communicator::name)
      .def_property_readonly("needs_fixed_order", &Communicator::needs_fixed_order)
      .def(
          "allocate",
          [](Communicator& self, std::size_t gather_bytes, std::size_t reduce_bytes, std::uint32_t places,
             std::vector<std::uint32_t> bucket_params, std::vector<std::string> unit_names,
             std::size_t gather_reserved_bytes, std::size_t reduce_reserved_bytes) {
            self.allocate({gather_bytes,
                           std::max(gather_bytes, gather_reserved_bytes),
                           reduce_bytes,
                           std::max(reduce_bytes, reduce_reserved_bytes),
                           places,
                           std::move(bucket_params),
                           std::move(unit_names),
                           {}});
          },
          py::kw_only(), py::arg("gather_bytes"), py::arg("reduce_bytes"), py::arg("places"), py::arg("bucket_params"),
          py::arg("unit_names"), py::arg("gather_reserved_bytes") = 0, py::arg("reduce_reserved_bytes") = 0, Release())
      .def("place_is_free", &Communicator::place_is_free, py::arg("place"), Release())
      .def("wait_place_free", &Communicator::wait_place_free, py::arg("place"), Release())
      .def(
          "launch_gather",
          [](Communicator& self, std::uint32_t place, std::uint32_t unit, std::uint64_t sequence,
             const std::vector<std::pair<std::size_t, std::size_t>>& buckets) {
            std::vector<runtime::Segments> segments;
            for (const auto& [offset, shard_bytes] : buckets) segments.push_back({offset, shard_bytes});
            self.launch_gather(place, {unit, sequence}, segments);
          },
          py::arg("place"), py::arg("unit"), py::arg("sequence"), py::arg("buckets"), Release(),
          "`buckets`: (offset, shard_bytes) pairs.")
      .def(
          "wait_gather",
          [](Communicator& self, std::uint32_t place, std::uint32_t unit, std::uint64_t sequence) {
            self.wait_gather(place, {unit, sequence});
          },
          py::arg("place"), py::arg("unit"), py::arg("sequence"), Release())
      .def("release", &Communicator::release, py::arg("place"), Release())
      .def(
          "launch_reduce",
          [](Communicator& self, std::uint32_t bucket, std::uint64_t round, std::size_t offset, std::size_t shard_numel,
             DType wire, std::vector<std::uint64_t> reported) {
            self.launch_reduce({bucket, round, offset, shard_numel, wire, std::move(reported)});
          },
          py::arg("bucket"), py::arg("round"), py::arg("offset"), py::arg("shard_numel"), py::arg("wire"),
          py::arg("reported"), Release())
      .def("close_round", &Communicator::close_round, py::arg("round"), Release())
      .def("reduce_is_ready", &Communicator::reduce_is_ready, py::arg("bucket"), py::arg("round"), Release())
      .def("wait_reduce_ready", &Communicator::wait_reduce_ready, py::arg("bucket"), py::arg("round"), Release())
      .def("wait_reduce_ready_or_stuck", &Communicator::wait_reduce_ready_or_stuck, py::arg("bucket"), py::arg("round"),
           Release())
      .def("reported_anywhere", &Communicator::reported_anywhere, py::arg("bucket"), py::arg("round"), Release())
      .def(
          "my_segment_everywhere",
          [](Communicator& self, std::uint32_t bucket, std::uint64_t round) {
            std::vector<std::uintptr_t> addresses;
            for (const std::byte* segment : self.my_segment_everywhere(bucket, round)) {
              addresses.push_back(reinterpret_cast<std::uintptr_t>(segment));
            }
            return addresses;
          },
          py::arg("bucket"), py::arg("round"), Release(), "Addresses in rank order; 0 where a rank has no gradient.")
      .def("finish_reduce", &Communicator::finish_reduce, py::arg("bucket"), py::arg("round"), Release())
      .def("contribution_is_free", &Communicator::contribution_is_free, py::arg("bucket"), py::arg("round"), Release())
      .def("wait_contribution_free", &Communicator::wait_contribution_free, py::arg("bucket"), py::arg("round"),
           Release())
      .def("fail", &Communicator::fail, py::arg("why"), Release())
      .def(
          "set_progress",
          [](Communicator& self, std::function<void()> progress) {
            // pybind11's function takes the interpreter for the call.
            self.set_progress(std::move(progress));
          },
          py::arg("progress"));
}

}  // namespace

void bind_host(py::module_& m) {
  bind_device(m);
  bind_collectives(m);
  py::class_<HostMemory>(m, "HostMemory", py::buffer_protocol(),
                         "Bytes shared by the ranks; use as memoryview(memory).")
      .def_buffer([](HostMemory& self) {
        return py::buffer_info(self.data, 1, py::format_descriptor<std::uint8_t>::format(), 1, {self.bytes}, {1});
      })
      .def_property_readonly("address",
                             [](const HostMemory& self) { return reinterpret_cast<std::uintptr_t>(self.data); });
  py::class_<ShmCommunicator, Communicator, std::shared_ptr<ShmCommunicator>>(
      m, "ShmCommunicator",
      "Collectives in shared memory among `size` processes of one machine. `socket_name` is a random name that the "
      "ranks "
      "have agreed in; allocate() connects them.")
      .def(
          py::init([](int rank, int size, std::string socket_name, double timeout_seconds,
                      double connect_timeout_seconds, std::vector<int> global_ranks) {
            return std::make_shared<ShmCommunicator>(host::ShmOptions{
                rank, size, std::move(socket_name), timeout_seconds, connect_timeout_seconds, std::move(global_ranks)});
          }),
          py::arg("rank"), py::arg("size"), py::arg("socket_name") = "", py::kw_only(),
          py::arg("timeout_seconds") = 1800.0, py::arg("connect_timeout_seconds") = 120.0,
          py::arg("global_ranks") = std::vector<int>{})
      .def_property_readonly("gather_memory",
                             [](ShmCommunicator& self) {
                               return HostMemory{self.segment(), self.gather_memory(0), self.gather_reserved_bytes()};
                             })
      .def_property_readonly("reduce_memory", [](ShmCommunicator& self) {
        return HostMemory{self.segment(), self.reduce_memory(0), self.reduce_reserved_bytes()};
      });
  m.def("shm_identity", &host::shm_identity,
        "Equal in two processes that can share memory: same boot, user, process and network namespace.");
}
