// Bindings of the verification of chains on a GPU.
#include <pybind11/stl.h>

#include "bind/cuda_arguments.h"
#include "bind/module.h"

namespace swiftspec::binding {

namespace {

constexpr int64_t kMarkWords = sizeof(cuda::PositionMark) / sizeof(int32_t);

void verify_chains(const Array& target, const MaybeArray& draft, const MaybeArray& bias, float temperature,
                   const Array& tokens, const MaybeArray& uniforms, const MaybeArray& keys, const Array& marks,
                   const Array& arrived, const Array& accepted, const Array& count, const Array& bonus,
                   uintptr_t stream) {
  const int64_t batch = tokens.size(0), steps = tokens.size(1), vocab = target.size(2);
  check(batch >= 1 && batch < 65536 && steps < 65535, "between 1 and 65535 requests and positions");
  check(vocab >= 1 && int32_sized(vocab), "the vocabulary is empty or too large");
  check(draft.has_value() == uniforms.has_value(), "draft and uniforms come together");
  check(temperature > 0 && (!draft || (temperature == 1.0f && !bias)),
        "temperature must be above 0; with a draft it and the bias are applied before");
  const Device here = gpu();
  const bool wide = target.type() != kBfloat16;
  const auto logits = [&](const char* name, const Array& array, int64_t positions) {
    const void* data = array.rows_at(model_type(wide), here, name, {batch, positions, vocab});
    return cuda::ChainLogits{data, array.stride(0), array.stride(1)};
  };
  auto* scratch = marks.at<int32_t>(here, "marks", {batch * (steps + 1) * kMarkWords});
  const cuda::VerifyChainsArgs args{logits("target", target, steps + 1),
                                    draft ? logits("draft", *draft, steps) : cuda::ChainLogits{},
                                    at_or_null<float>(bias, here, "bias", {vocab}),
                                    temperature,
                                    tokens.at<int64_t>(here, "tokens", {batch, steps}),
                                    at_or_null<float>(uniforms, here, "uniforms", {batch, steps}),
                                    at_or_null<uint32_t>(keys, here, "keys", {batch, steps + 1}),
                                    static_cast<cuda::PositionMark*>(aligned("marks", scratch)),
                                    arrived.at<uint32_t>(here, "arrived", {batch}),
                                    accepted.at<bool>(here, "accepted", {batch, steps}),
                                    count.at<int64_t>(here, "count", {batch}),
                                    bonus.at<int64_t>(here, "bonus", {batch}),
                                    batch,
                                    steps,
                                    vocab,
                                    wide};
  cuda::verify_chains(args, stream_arg(stream));
}

}  // namespace

void bind_cuda_chains(py::module_& m) {
  m.def("verify_chains_cuda", &verify_chains, py::kw_only(), py::arg("target"), py::arg("draft"), py::arg("bias"),
        py::arg("temperature"), py::arg("tokens"), py::arg("uniforms"), py::arg("keys"), py::arg("marks"),
        py::arg("arrived"), py::arg("accepted"), py::arg("count"), py::arg("bonus"), py::arg("stream"),
        "Verifies chains of draft tokens in one launch; see VerifyChainsArgs in kernels_cuda.h.");
}

}  // namespace swiftspec::binding
