// Python view of the Ascend backend.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>

#include "ascend/acl_device.h"
#include "ascend/codes.h"
#include "ascend/libraries.h"
#include "bindings/bindings.h"
#include "torch/hccl_transport.h"
#include "torch/npu_queue.h"
#include "torch/torch_device.h"

namespace py = pybind11;

void bind_ascend(py::module_& m) {
  using tt::NpuQueue;
  using tt::ascend::AclDevice;
  py::class_<NpuQueue, std::shared_ptr<NpuQueue>>(m, "NpuQueue", "Submission in the order of torch_npu's operators.")
      .def(py::init<c10::Device, const std::string&>(), py::arg("device"), py::arg("ordering") = "auto")
      .def_property_readonly("ordering", &NpuQueue::ordering);
  py::class_<AclDevice, tt::runtime::Device, std::shared_ptr<AclDevice>>(m, "AclDevice",
                                                                         "An Ascend NPU, through aclnn operators.")
      .def(py::init([](c10::Device device, std::shared_ptr<NpuQueue> queue) {
             return std::make_shared<AclDevice>(std::make_shared<tt::TorchDevice>(device), std::move(queue));
           }),
           py::arg("device"), py::arg("queue"));
  py::class_<tt::DataTransport, std::shared_ptr<tt::DataTransport>>(m, "DataTransport",
                                                                    "How the data of collectives travel.")
      .def_property_readonly("name", &tt::DataTransport::name);
  py::class_<tt::HcclTransport, tt::DataTransport, std::shared_ptr<tt::HcclTransport>>(
      m, "HcclTransport", "Through an HCCL communicator of its own.")
      .def(py::init<const c10::intrusive_ptr<c10d::ProcessGroup>&, const std::string&, c10::Device,
                    std::shared_ptr<NpuQueue>>(),
           py::arg("group"), py::arg("key"), py::arg("device"), py::arg("queue"),
           py::call_guard<py::gil_scoped_release>());
  m.def("explain_acl", [](int code) { return tt::ascend::explain(tt::ascend::Source::kAcl, code); }, py::arg("code"));
  m.def("explain_hccl", [](int code) { return tt::ascend::explain(tt::ascend::Source::kHccl, code); }, py::arg("code"));
  m.def("missing_from_cann", &tt::ascend::missing_from_cann, py::call_guard<py::gil_scoped_release>());
  m.def("cann_folders", &tt::ascend::cann_folders);
}
