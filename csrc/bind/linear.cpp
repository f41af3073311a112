// Projections on the CPU.
#include <memory>
#include <string>

#include "bind/arguments.h"
#include "bind/module.h"
#include "kernels_host.h"

namespace swiftspec::binding {

namespace {

// Who holds one of these keeps the tensors behind it alive.
std::unique_ptr<host::Weights> make_weights(const std::string& format, uintptr_t data, uintptr_t groups, uintptr_t bias,
                                            int64_t k, int64_t n, int64_t group) {
  using host::Format;
  const bool int4 = format == "int4";
  check(int4 || format == "bf16" || format == "f32", "format must be f32, bf16 or int4");
  size_arg("k", k, 1);
  size_arg("n", n, 1);
  check(!int4 || (group >= 16 && group % 16 == 0 && k % group == 0), "group must be a multiple of 16 that divides k");
  check(int4 == (groups != 0), "int4 weights have scales, others none");
  return std::make_unique<host::Weights>(host::Weights{int4               ? Format::int4
                                                       : format == "bf16" ? Format::bf16
                                                                          : Format::f32,
                                                       pointer_arg<const float>("data", data, n),
                                                       pointer_arg<const float>("groups", groups, 0),
                                                       pointer_arg<const float>("bias", bias, 0), k, n, group});
}

void linear(const host::Weights& weights, uintptr_t x, uintptr_t norm, float eps, uintptr_t residual, uintptr_t out,
            uintptr_t logits, bool swiglu, bool wide, int64_t rows) {
  using host::Format;
  size_arg("rows", rows, 0);
  check((out == 0) != (logits == 0), "give one of out and logits");
  check(!swiglu || (weights.n % 2 == 0 && residual == 0 && logits == 0), "swiglu halves the outputs into out");
  check(wide || weights.format != Format::f32, "float32 weights need a float32 model");
  const host::LinearArgs args{&weights,
                              type_arg("x", x, wide, rows),
                              type_arg("norm", norm, wide, 0),
                              eps,
                              type_arg("residual", residual, wide, 0),
                              type_arg("out", out, wide, 0),
                              pointer_arg<float>("logits", logits, 0),
                              swiglu,
                              rows};
  py::gil_scoped_release unlocked;
  host::linear(args, wide);
}

}  // namespace

void bind_linear(py::module_& m) {
  py::class_<host::Weights>(m, "Weights", "A projection's addresses and sizes; see kernels_host.h.")
      .def(py::init(&make_weights), py::arg("format"), py::arg("data"), py::arg("groups"), py::arg("bias"),
           py::arg("k"), py::arg("n"), py::arg("group"));
  m.def("linear", &linear, py::arg("weights"), py::arg("x"), py::arg("norm"), py::arg("eps"), py::arg("residual"),
        py::arg("out"), py::arg("logits"), py::arg("swiglu"), py::arg("wide"), py::arg("rows"),
        "RMSNorm, product and epilogue; see LinearArgs in kernels_host.h. 0 is null.");
}

}  // namespace swiftspec::binding
