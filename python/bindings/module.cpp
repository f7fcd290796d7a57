// The extension module clowder._core. It links no libtorch: tensors cross as integers, the addresses of their memory.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <new>

#include "workspace.h"

namespace nb = nanobind;

namespace clowder::python {
namespace {

void raise_clowder_error(ErrorCode code, const char* message) {
  const nb::object type = nb::module_::import_("clowder.errors").attr("ClowderError");
  const nb::object value = type(to_string(code), message);
  PyErr_SetObject(type.ptr(), value.ptr());
}

// clowder::Error becomes clowder.ClowderError(code, message).
void translate_error(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    raise_clowder_error(error.code(), error.what());
  } catch (const std::bad_alloc&) {
    raise_clowder_error(ErrorCode::kUnsupported, "memory: this machine has too little for the workspace");
  }
}

void bind(nb::module_& m) {
  using nb::literals::operator""_a;
  nb::register_exception_translator(translate_error);

  nb::enum_<GradientMode>(m, "GradientMode")
      .value("WRITE_BF16", GradientMode::kWriteBf16)
      .value("WRITE_FP32", GradientMode::kWriteFp32)
      .value("ACCUMULATE_BF16", GradientMode::kAccumulateBf16)
      .value("ACCUMULATE_FP32", GradientMode::kAccumulateFp32);

  nb::class_<Matrices>(m, "Matrices")
      .def(nb::init<std::vector<Address>, std::int64_t>(), "addresses"_a = std::vector<Address>{}, "stride"_a = 0)
      .def_ro("addresses", &Matrices::addresses)
      .def_ro("stride", &Matrices::stride);
  nb::class_<WeightAddresses>(m, "WeightAddresses")
      .def(nb::init<Matrices, Matrices, Matrices, Matrices, Matrices, Matrices>(), "w1"_a, "w3"_a, "w2"_a,
           "shared_w1"_a, "shared_w3"_a, "shared_w2"_a);
  nb::class_<SavedAddresses>(m, "SavedAddresses")
      .def(nb::init<Address, Address, Address>(), "gate_up"_a = 0, "x"_a = 0, "shared_gate_up"_a = 0);
  nb::class_<GradientAddresses>(m, "GradientAddresses")
      .def(nb::init<Address, Address, Matrices, Matrices, Matrices, Matrices, Matrices, Matrices>(), "x"_a,
           "topk_weights"_a, "w1"_a, "w3"_a, "w2"_a, "shared_w1"_a, "shared_w3"_a, "shared_w2"_a);
  nb::class_<PassAddresses>(m, "PassAddresses")
      .def(nb::init<std::vector<std::int64_t>, Address, Address, Address, WeightAddresses, SavedAddresses>(),
           "tokens_per_rank"_a, "schedule"_a, "x"_a, "topk_weights"_a, "weights"_a, "saved"_a);

  nb::class_<VirtualWorkspace>(m, "VirtualWorkspace")
      .def(
          "__init__",
          [](VirtualWorkspace* self, int ranks, std::int64_t hidden, std::int64_t intermediate,
             std::int32_t num_experts, std::int32_t topk, std::int64_t max_tokens, std::int64_t shared_intermediate,
             const std::string& activation, std::int64_t ring_rows, std::int64_t saved_rows, std::int64_t chunk_rows,
             std::int32_t blocks, bool keep_x, double timeout_s, bool poison, std::uint64_t jitter_seed) {
            const LayerShape shape{hidden,
                                   intermediate,
                                   shared_intermediate,
                                   num_experts,
                                   topk,
                                   max_tokens,
                                   parse_activation_name(activation)};
            const WorkspaceOptions options{ring_rows, saved_rows, chunk_rows, blocks,
                                           keep_x,    timeout_s,  poison,     jitter_seed};
            new (self) VirtualWorkspace(shape, ranks, options);
          },
          nb::kw_only(), "ranks"_a, "hidden"_a, "intermediate"_a, "num_experts"_a, "topk"_a, "max_tokens"_a,
          "shared_intermediate"_a, "activation"_a, "ring_rows"_a = WorkspaceOptions::kDefault,
          "saved_rows"_a = WorkspaceOptions::kDefault, "chunk_rows"_a = WorkspaceOptions::kDefault,
          "blocks"_a = static_cast<std::int32_t>(WorkspaceOptions::kDefault), "keep_x"_a = false, "timeout_s"_a = 60.0,
          "poison"_a = false, "jitter_seed"_a = 0, nb::call_guard<nb::gil_scoped_release>())
      .def("build_schedule", &VirtualWorkspace::build_schedule, "topk_idx"_a, "is_int64"_a, "tokens_per_rank"_a,
           "schedule"_a, "expert_counts"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("forward", &VirtualWorkspace::forward, "inputs"_a, "save"_a, "out"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("backward", &VirtualWorkspace::backward, "inputs"_a, "dout"_a, "gradients"_a, "mode"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("ring_rows", &VirtualWorkspace::ring_rows)
      .def_prop_ro("saved_rows", &VirtualWorkspace::saved_rows)
      .def_prop_ro("schedule_words", &VirtualWorkspace::schedule_words)
      .def("check", &VirtualWorkspace::check_alive);
}

}  // namespace
}  // namespace clowder::python

NB_MODULE(_core, m) {
  // Operators registered with PyTorch outlive the interpreter's teardown, and hold this module.
  nb::set_leak_warnings(false);
  m.doc() = "The engines of Clowder, by address. Use the package clowder instead.";
  clowder::python::bind(m);
}
