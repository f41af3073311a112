// Bindings of resampling on a GPU.
#include "bind/cuda_arguments.h"
#include "bind/module.h"

namespace swiftspec::binding {

namespace {

void resample(const Array& log_weights, const Array& mask, const Array& ends, const Array& path, const Array& log_z,
              const Array& ess, const Array& resampled, const Array& rounds, const Array& uniform, double threshold,
              int64_t width, uintptr_t stream) {
  const int64_t groups = log_weights.size(0), count = log_weights.size(1), slots = mask.size(2);
  check(groups < 65536, "at most 65535 groups");
  check(count >= 1 && count <= cuda::kMaxParticles, "between 1 and 1024 particles");
  check(width >= 0 && width <= slots, "the window is wider than the mask");
  const Device here = gpu();
  auto* rows = path.at<int64_t>(here, "path", {groups, count, kAny});
  const cuda::ResampleArgs args{log_weights.at<double>(here, "log_weights", {groups, count}),
                                mask.at<bool>(here, "mask", {groups, count, kAny}),
                                ends.at<bool>(here, "ends", {groups, count, kAny}),
                                reinterpret_cast<uint8_t*>(rows),
                                log_z.at<double>(here, "log_z", {groups}),
                                ess.at<double>(here, "ess", {groups}),
                                resampled.at<int64_t>(here, "resampled", {groups}),
                                rounds.at<int64_t>(here, "rounds", {groups}),
                                uniform.at<double>(here, "uniform", {groups}),
                                threshold,
                                groups,
                                count,
                                slots,
                                width,
                                ends.size(2),
                                path.size(2) * static_cast<int64_t>(sizeof(int64_t))};
  cuda::resample(args, stream_arg(stream));
}

}  // namespace

void bind_cuda_particles(py::module_& m) {
  m.def("resample_cuda", &resample, py::kw_only(), py::arg("log_weights"), py::arg("mask"), py::arg("ends"),
        py::arg("path"), py::arg("log_z"), py::arg("ess"), py::arg("resampled"), py::arg("rounds"), py::arg("uniform"),
        py::arg("threshold"), py::arg("width"), py::arg("stream"),
        "Normalises the weights of groups of particles and resamples uneven groups, in one launch; see ResampleArgs in "
        "kernels_cuda.h.");
}

}  // namespace swiftspec::binding
