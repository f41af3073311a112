// The verification of chains on a GPU.
#include <pybind11/stl.h>

#include <utility>

#include "bind/cuda_arguments.h"
#include "bind/module.h"

namespace swiftspec::binding {

namespace {

void verify(uintptr_t target, uintptr_t draft, uintptr_t tokens, uintptr_t coins, uintptr_t keys, uintptr_t marks,
            uintptr_t arrived, uintptr_t accepted, uintptr_t count, uintptr_t bonus, int64_t batch, int64_t steps,
            int64_t vocab, const std::pair<int64_t, int64_t>& target_strides,
            const std::pair<int64_t, int64_t>& draft_strides, bool wide, uintptr_t stream) {
  check(batch >= 1 && batch < 65536 && steps >= 0 && steps < 65535, "between 1 and 65535 requests and positions");
  check(vocab >= 1 && int32_sized(vocab), "the vocabulary is empty or too large");
  check(steps == 0 || (draft != 0) == (coins != 0), "a draft and coins come together");
  const auto logits = [wide](const char* name, uintptr_t address, const std::pair<int64_t, int64_t>& strides) {
    return cuda::Logits{type_arg(name, address, wide, 0), strides.first, strides.second};
  };
  check(target != 0, "target is null");
  const cuda::VerifyArgs args{logits("target", target, target_strides),
                              logits("draft", draft, draft_strides),
                              device_arg<const int64_t>("tokens", tokens, steps == 0),
                              device_arg<const float>("coins", coins, true),
                              device_arg<const uint32_t>("keys", keys, true),
                              static_cast<cuda::PositionMark*>(aligned_arg("marks", marks)),
                              device_arg<uint32_t>("arrived", arrived),
                              device_arg<uint8_t>("accepted", accepted, steps == 0),
                              device_arg<int64_t>("count", count),
                              device_arg<int64_t>("bonus", bonus),
                              batch,
                              steps,
                              vocab,
                              wide};
  cuda::verify(args, stream_arg(stream));
}

}  // namespace

void bind_cuda_chains(py::module_& m) {
  m.def("verify_cuda", &verify, py::kw_only(), py::arg("target"), py::arg("draft"), py::arg("tokens"), py::arg("coins"),
        py::arg("keys"), py::arg("marks"), py::arg("arrived"), py::arg("accepted"), py::arg("count"), py::arg("bonus"),
        py::arg("batch"), py::arg("steps"), py::arg("vocab"), py::arg("target_strides"), py::arg("draft_strides"),
        py::arg("wide"), py::arg("stream"),
        "Chains against the target in one launch; see VerifyArgs in kernels_cuda.h. 0 is null.");
}

}  // namespace swiftspec::binding
