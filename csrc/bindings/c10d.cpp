// Python view of the c10d communicator.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "torch/c10d_communicator.h"
#include "torch/hybrid_communicator.h"

namespace py = pybind11;

void bind_c10d(py::module_& m) {
  py::module_::import("torch._C._distributed_c10d");  // registers ProcessGroup
  py::class_<tt::C10dCommunicator, tt::runtime::Communicator, std::shared_ptr<tt::C10dCommunicator>>(
      m, "C10dCommunicator", "Collectives through two torch process groups of the same ranks: gathers and reductions.")
      .def(py::init([](tt::C10dCommunicator::Group gathers, tt::C10dCommunicator::Group reductions, c10::Device device,
                       double timeout_seconds, std::vector<int> global_ranks,
                       std::shared_ptr<tt::DataTransport> gather_transport,
                       std::shared_ptr<tt::DataTransport> reduction_transport) {
             return std::make_shared<tt::C10dCommunicator>(
                 std::move(gathers), std::move(reductions), device, timeout_seconds, std::move(global_ranks),
                 tt::C10dCommunicator::Transports{std::move(gather_transport), std::move(reduction_transport)});
           }),
           py::arg("gathers"), py::arg("reductions"), py::kw_only(), py::arg("device"), py::arg("timeout_seconds"),
           py::arg("global_ranks") = std::vector<int>(), py::arg("gather_transport") = nullptr,
           py::arg("reduction_transport") = nullptr, py::call_guard<py::gil_scoped_release>(),
           "`device`: where parameters and gradients live. Transports: how data travel, if not through the groups.");
  py::class_<tt::HybridCommunicator, tt::runtime::Communicator, std::shared_ptr<tt::HybridCommunicator>>(
      m, "HybridCommunicator",
      "Collectives of a sharded model with replicas. `inner`: inside this rank's replica; `between`: the group of the "
      "ranks that hold the same shard, `global_ranks` by name; `board`: a store of this model's own; `compute`: the "
      "engine's device; `transport`: how sums travel, if not through `between`.")
      .def(py::init([](std::shared_ptr<tt::runtime::Communicator> inner, tt::HybridCommunicator::Group between,
                       std::vector<int> global_ranks, c10::intrusive_ptr<c10d::Store> board, c10::Device where,
                       std::shared_ptr<tt::runtime::Device> compute, double timeout_seconds,
                       std::shared_ptr<tt::DataTransport> transport) {
             return std::make_shared<tt::HybridCommunicator>(
                 std::move(inner), std::move(between), std::move(global_ranks), std::move(board),
                 tt::HybridCommunicator::Place{where, std::move(compute)}, timeout_seconds, std::move(transport));
           }),
           py::arg("inner"), py::arg("between"), py::arg("global_ranks"), py::arg("board"), py::kw_only(),
           py::arg("device"), py::arg("compute"), py::arg("timeout_seconds"), py::arg("transport") = nullptr)
      .def_property_readonly("replicas", &tt::HybridCommunicator::replicas);
}
