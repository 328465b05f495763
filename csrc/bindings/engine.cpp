// Python view of the engine.
#include <ATen/SequenceNumber.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "torch/dtypes.h"
#include "torch/make_device.h"
#include "torch/torch_device.h"
#include "torch/torch_engine.h"

namespace py = pybind11;

namespace {

using tt::fsdp::Arena;
using tt::fsdp::Engine;
using tt::fsdp::EngineCounters;
using tt::fsdp::Schedule;
using tt::fsdp::ShardPlan;

// `owner` is a weak reference to a Python object with methods _expose(unit, gathered), _prepare(unit),
// _wrap_gradient(param, tensor) and _log(message): the engine must not keep the module tree alive that keeps the engine
// alive.
tt::EngineCallbacks callbacks_to(const py::weakref& owner) {
  const auto held = std::shared_ptr<py::weakref>(new py::weakref(owner), [](py::weakref* reference) {
    const py::gil_scoped_acquire gil;
    delete reference;
  });
  const auto call = [held](const char* method, auto... arguments) {
    const py::gil_scoped_acquire gil;
    try {
      const py::object target = (*held)();
      if (!target.is_none()) {
        target.attr(method)(arguments...);
      }
    } catch (py::error_already_set& error) {
      throw tt::Error(error.what());
    }
  };
  tt::EngineCallbacks callbacks;
  callbacks.expose = [call](std::int32_t unit, bool gathered) { call("_expose", unit, gathered); };
  callbacks.prepare = [call](std::int32_t unit) { call("_prepare", unit); };
  callbacks.log = [call](const std::string& message) { call("_log", message); };
  callbacks.wrap_gradient = [held](std::int32_t param, const at::Tensor& gradient) {
    const py::gil_scoped_acquire gil;
    try {
      const py::object target = (*held)();
      return target.is_none() ? gradient : py::cast<at::Tensor>(target.attr("_wrap_gradient")(param, gradient));
    } catch (py::error_already_set& error) {
      throw tt::Error(error.what());
    }
  };
  callbacks.check_signals = [] {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) {
      python_error error;
      error.persist();
      throw error;
    }
  };
  return callbacks;
}

Schedule make_schedule(std::vector<bool> reshard_after_forward, std::int32_t nesting, std::int32_t prefetch,
                       std::optional<tt::DType> reduce_dtype, std::int32_t replicas) {
  Schedule schedule;
  schedule.reshard_after_forward = std::move(reshard_after_forward);
  schedule.nesting = nesting;
  schedule.prefetch = prefetch;
  schedule.replicas = replicas;
  schedule.has_reduce_dtype = reduce_dtype.has_value();
  schedule.reduce_dtype = reduce_dtype.value_or(tt::DType::kFloat32);
  return schedule;
}

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

}  // namespace

void bind_engine(py::module_& m) {
  py::class_<Schedule>(m, "Schedule",
                       "How units are used over time: the part of the memory plan that shapes do not give.")
      .def(py::init(&make_schedule), py::kw_only(), py::arg("reshard_after_forward"), py::arg("nesting") = 1,
           py::arg("prefetch") = 1, py::arg("reduce_dtype") = py::none(), py::arg("replicas") = 1);

  py::class_<Arena>(m, "Arena", "Sizes of gather, reduce and staging memory, in bytes. Needs no device.")
      .def(py::init<const ShardPlan&, const Schedule&>(), py::arg("plan"), py::arg("schedule"))
      .def_property_readonly("gather_bytes", &Arena::gather_bytes)
      .def_property_readonly("gather_reserved_bytes", &Arena::gather_reserved_bytes)
      .def_property_readonly("reduce_bytes", &Arena::reduce_bytes)
      .def_property_readonly("reduce_reserved_bytes", &Arena::reduce_reserved_bytes)
      .def_property_readonly("staging_bytes", &Arena::staging_bytes)
      .def("wire_dtype", &Arena::wire_dtype, py::arg("bucket"));

  py::class_<EngineCounters>(m, "EngineCounters")
      .def_readonly("gathers", &EngineCounters::gathers)
      .def_readonly("prefetches", &EngineCounters::prefetches)
      .def_readonly("order_misses", &EngineCounters::order_misses)
      .def_readonly("overflow_places", &EngineCounters::overflow_places)
      .def_readonly("rounds", &EngineCounters::rounds)
      .def_readonly("bytes_written", &EngineCounters::bytes_written)
      .def_readonly("wait_seconds", &EngineCounters::wait_seconds);

  py::class_<tt::TorchDevice, tt::runtime::Device, std::shared_ptr<tt::TorchDevice>>(
      m, "TorchDevice", "Any device that torch knows, through torch's operators, streams and events.")
      .def(py::init<c10::Device>(), py::arg("device"));

  m.def("make_device", &tt::make_device, py::arg("device"));

  py::class_<tt::TorchEngine, std::shared_ptr<tt::TorchEngine>>(m, "Engine", "The FSDP engine of one wrapped model.")
      .def(py::init([](std::shared_ptr<ShardPlan> plan, const Schedule& schedule,
                       std::shared_ptr<tt::runtime::Communicator> comm, const py::weakref& owner, c10::Device where,
                       std::shared_ptr<tt::runtime::Device> compute) {
             auto callbacks = callbacks_to(owner);
             const py::gil_scoped_release release;
             return std::make_shared<tt::TorchEngine>(std::move(plan), schedule, std::move(comm), std::move(compute),
                                                      where, std::move(callbacks));
           }),
           py::arg("plan"), py::arg("schedule"), py::arg("communicator"), py::arg("owner"), py::arg("device"),
           py::arg("compute"))
      .def("master", &tt::TorchEngine::master, py::arg("bucket"))
      .def(
          "gathered_view",
          [](const tt::TorchEngine& self, std::int32_t param, const std::vector<std::int64_t>& sizes,
             py::object dtype) { return self.gathered_view(param, sizes, py::cast<c10::ScalarType>(dtype)); },
          py::arg("param"), py::arg("sizes"), py::arg("dtype"))
      .def("bind", &tt::TorchEngine::bind, py::arg("param"), py::arg("gathered"), py::arg("sharded"))
      .def(
          "allocate", [](tt::TorchEngine& self) { self.engine().allocate(); }, ReleaseGil())
      .def(
          "begin_forward", [](tt::TorchEngine& self) { self.begin_forward(); }, ReleaseGil())
      .def(
          "end_forward", [](tt::TorchEngine& self, bool backward) { self.engine().end_forward(backward); },
          py::arg("backward_follows"), ReleaseGil())
      .def(
          "before_forward", [](tt::TorchEngine& self, std::int32_t unit) { self.before_forward(unit); },
          py::arg("unit"), ReleaseGil())
      .def(
          "after_forward",
          [](tt::TorchEngine& self, std::int32_t unit, bool backward, bool last_module) {
            self.after_forward(unit, backward, last_module);
          },
          py::arg("unit"), py::arg("backward_follows"), py::arg("last_module") = true, ReleaseGil())
      .def("refresh", &tt::TorchEngine::refresh, py::arg("unit"))
      .def_static("sequence_number", [] { return at::sequence_number::peek(); })
      .def(
          "before_recomputation",
          [](tt::TorchEngine& self, std::int32_t unit, std::uint64_t began, std::uint64_t ended) {
            self.engine().before_backward(unit, ended, began);
          },
          py::arg("unit"), py::arg("began"), py::arg("ended"), ReleaseGil())
      .def("hook_outputs", &tt::TorchEngine::hook_outputs, py::arg("unit"), py::arg("outputs"))
      .def(
          "set_reduce", [](tt::TorchEngine& self, bool reduce) { self.engine().set_reduce(reduce); }, py::arg("reduce"))
      .def("abort", &tt::TorchEngine::abort, ReleaseGil())
      .def(
          "is_gathered", [](tt::TorchEngine& self, std::int32_t unit) { return self.engine().is_gathered(unit); },
          py::arg("unit"))
      .def_property_readonly("in_forward", [](tt::TorchEngine& self) { return self.engine().in_forward(); })
      .def_property_readonly("in_backward", [](tt::TorchEngine& self) { return self.engine().in_backward(); })
      .def_property_readonly("counters", [](tt::TorchEngine& self) { return self.engine().counters(); })
      .def_property_readonly("accumulation_bytes", &tt::TorchEngine::accumulation_bytes)
      .def_property_readonly("buffer_bytes",
                             [](const tt::TorchEngine& self) { return self.communicator().buffer_bytes(); })
      .def_property_readonly("communicator_name",
                             [](const tt::TorchEngine& self) { return self.communicator().name(); });
}
