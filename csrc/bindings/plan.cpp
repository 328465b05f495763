// Python view of the planner: ShardPlan and the records that it takes and gives.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "bindings/bindings.h"
#include "fsdp/shard_plan.h"

namespace py = pybind11;

void bind_plan(py::module_& m) {
  using tt::DType;
  using tt::fsdp::Bucket;
  using tt::fsdp::ParamSpec;
  using tt::fsdp::Piece;
  using tt::fsdp::Placement;
  using tt::fsdp::ShardPlan;
  using tt::fsdp::UnitSpec;

  py::enum_<DType>(m, "DType", "Element type. `bytes`: a type that is moved but never cast or summed.")
      .value("float32", DType::kFloat32)
      .value("float16", DType::kFloat16)
      .value("bfloat16", DType::kBFloat16)
      .value("float64", DType::kFloat64)
      .value("bytes", DType::kBytes);

  py::class_<ParamSpec>(
      m, "ParamSpec",
      "One parameter: `rows` = shape[0] (1 for a scalar), `row_numel` = product of shape[1:] (in bytes "
      "for DType.bytes), `granularity` = rows that must stay together.")
      .def(py::init([](std::string name, std::int64_t rows, std::int64_t row_numel, DType param_dtype,
                       DType master_dtype, bool requires_grad, std::int64_t granularity) {
             return ParamSpec{std::move(name), rows, row_numel, param_dtype, master_dtype, requires_grad, granularity};
           }),
           py::kw_only(), py::arg("name"), py::arg("rows") = 1, py::arg("row_numel") = 1,
           py::arg("param_dtype") = DType::kFloat32, py::arg("master_dtype") = DType::kFloat32,
           py::arg("requires_grad") = true, py::arg("granularity") = 1)
      .def_readonly("name", &ParamSpec::name)
      .def_readonly("rows", &ParamSpec::rows)
      .def_readonly("row_numel", &ParamSpec::row_numel)
      .def_readonly("param_dtype", &ParamSpec::param_dtype)
      .def_readonly("master_dtype", &ParamSpec::master_dtype)
      .def_readonly("requires_grad", &ParamSpec::requires_grad)
      .def_readonly("granularity", &ParamSpec::granularity)
      .def("__repr__", [](const ParamSpec& p) {
        return tt::str("ParamSpec('", p.name, "', ", p.rows, " x ", p.row_numel, ", ", tt::name_of(p.param_dtype), ")");
      });

  py::class_<UnitSpec>(m, "UnitSpec",
                       "Parameters (indices into the list given to ShardPlan) gathered and freed together.")
      .def(py::init([](std::string name, std::vector<std::int32_t> params) {
             return UnitSpec{std::move(name), std::move(params)};
           }),
           py::kw_only(), py::arg("name"), py::arg("params"))
      .def_readonly("name", &UnitSpec::name)
      .def_readonly("params", &UnitSpec::params)
      .def("__repr__",
           [](const UnitSpec& u) { return tt::str("UnitSpec('", u.name, "', ", u.params.size(), " parameters)"); });

  py::class_<Bucket>(m, "Bucket", "One collective: world_size equal shards of `shard_numel` elements, rank-major.")
      .def_readonly("unit", &Bucket::unit)
      .def_readonly("param_dtype", &Bucket::param_dtype)
      .def_readonly("master_dtype", &Bucket::master_dtype)
      .def_readonly("requires_grad", &Bucket::requires_grad)
      .def_readonly("shard_numel", &Bucket::shard_numel)
      .def_readonly("payload_numel", &Bucket::payload_numel)
      .def_readonly("params", &Bucket::params)
      .def("__repr__", [](const Bucket& b) {
        return tt::str("Bucket(unit=", b.unit, ", ", b.params.size(), " parameters, ", tt::name_of(b.param_dtype),
                       ", shard_numel=", b.shard_numel, ", payload_numel=", b.payload_numel, ")");
      });

  py::class_<Placement>(m, "Placement", "Where a parameter lies; elements from its bucket's start.")
      .def_readonly("bucket", &Placement::bucket)
      .def_readonly("offset", &Placement::offset)
      .def_readonly("numel", &Placement::numel)
      .def_readonly("atom_numel", &Placement::atom_numel)
      .def("__repr__", [](const Placement& p) {
        return tt::str("Placement(bucket=", p.bucket, ", offset=", p.offset, ", numel=", p.numel,
                       ", atom_numel=", p.atom_numel, ")");
      });

  py::class_<Piece>(m, "Piece", "The part of one parameter in one rank's shard; `numel` may be 0.")
      .def_readonly("start", &Piece::start)
      .def_readonly("numel", &Piece::numel)
      .def_readonly("shard_offset", &Piece::shard_offset)
      .def("__repr__", [](const Piece& p) {
        return tt::str("Piece(start=", p.start, ", numel=", p.numel, ", shard_offset=", p.shard_offset, ")");
      });

  py::class_<ShardPlan, std::shared_ptr<ShardPlan>>(
      m, "ShardPlan",
      "Which parameter lies where in which bucket. `cap_bytes`: largest bucket in bytes of param_dtype; "
      "None: one bucket per unit and kind. Raises ValueError for specs that break a rule. The lists are made "
      "anew at each access.")
      .def(py::init<std::vector<ParamSpec>, std::vector<UnitSpec>, std::int32_t, std::optional<std::int64_t>>(),
           py::kw_only(), py::arg("params"), py::arg("units"), py::arg("world_size"), py::arg("cap_bytes") = py::none())
      .def_property_readonly("params", &ShardPlan::params)
      .def_property_readonly("units", &ShardPlan::units)
      .def_property_readonly("buckets", &ShardPlan::buckets)
      .def_property_readonly("unit_buckets", &ShardPlan::unit_buckets)
      .def_property_readonly("world_size", &ShardPlan::world_size)
      .def(
          "placement",
          [](const ShardPlan& plan, std::int32_t param) {
            plan.row_aligned(param);  // refuses an index that is out of range
            return plan.placement(param);
          },
          py::arg("param"))
      .def("piece", &ShardPlan::piece, py::arg("param"), py::arg("rank"))
      .def(
          "pieces",
          [](const ShardPlan& plan, std::int32_t rank) {
            std::vector<Piece> pieces;
            pieces.reserve(plan.params().size());
            for (std::size_t i = 0; i < plan.params().size(); ++i) {
              pieces.push_back(plan.piece(static_cast<std::int32_t>(i), rank));
            }
            return pieces;
          },
          py::arg("rank"), "The rank's piece of every parameter, in parameter order.")
      .def("row_aligned", &ShardPlan::row_aligned, py::arg("param"))
      .def("bucket_numel", &ShardPlan::bucket_numel, py::arg("bucket"))
      .def("padding_fraction", &ShardPlan::padding_fraction)
      .def("hash", &ShardPlan::hash);
}
