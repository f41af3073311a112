// The operators for Python. Nothing but this file and bindings_*.cpp knows it. Tensors arrive as addresses and
// sizes; what can be checked of them is checked here.
#include "bind/arguments.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/noise.h"
#include "kernels_cuda.h"
#include "kernels_host.h"

namespace {

using swiftspec::binding::check;
using swiftspec::binding::check_inside;
using swiftspec::binding::pointer_arg;
using swiftspec::binding::size_arg;
using swiftspec::binding::type_arg;

struct NoiseArgs {
  const int32_t* positions;
  uint32_t* out;

  NoiseArgs(uintptr_t positions_ptr, int64_t rows, int64_t vocab, uintptr_t out_ptr) {
    size_arg("rows", rows, 0);
    size_arg("vocab", vocab, 1);
    positions = pointer_arg<const int32_t>("positions", positions_ptr, rows);
    out = pointer_arg<uint32_t>("out", out_ptr, rows);
  }
};

void noise_bits(uint64_t seed, uint32_t stream, uintptr_t positions, int64_t rows, int64_t vocab,
                uintptr_t out) {
  const NoiseArgs args(positions, rows, vocab, out);
  py::gil_scoped_release unlocked;
  swiftspec::host::noise_bits(seed, stream, args.positions, rows, vocab, args.out);
}

void set_threads(int64_t count) {
  size_arg("count", count, 1);
  check(count <= 1024, "more threads than any machine has");
  py::gil_scoped_release unlocked;
  swiftspec::host::set_threads(static_cast<int>(count));
}

// Who holds one of these keeps the tensors behind it alive.
std::unique_ptr<swiftspec::host::Weights> make_weights(const std::string& format, uintptr_t data,
                                                       uintptr_t groups, uintptr_t bias, int64_t k, int64_t n,
                                                       int64_t group) {
  using swiftspec::host::Format;
  const bool int4 = format == "int4";
  check(int4 || format == "bf16" || format == "f32", "format must be f32, bf16 or int4");
  size_arg("k", k, 1);
  size_arg("n", n, 1);
  check(!int4 || (group >= 16 && group % 16 == 0 && k % group == 0),
        "group must be a multiple of 16 that divides k");
  check(int4 == (groups != 0), "int4 weights have scales, others none");
  return std::make_unique<swiftspec::host::Weights>(swiftspec::host::Weights{
      int4               ? Format::int4
      : format == "bf16" ? Format::bf16
                         : Format::f32,
      pointer_arg<const float>("data", data, n), pointer_arg<const float>("groups", groups, 0),
      pointer_arg<const float>("bias", bias, 0), k, n, group});
}

void linear(const swiftspec::host::Weights& weights, uintptr_t x, uintptr_t norm, float eps,
            uintptr_t residual, uintptr_t out, uintptr_t logits, bool swiglu, bool wide, int64_t rows) {
  using swiftspec::host::Format;
  size_arg("rows", rows, 0);
  check((out == 0) != (logits == 0), "give one of out and logits");
  check(!swiglu || (weights.n % 2 == 0 && residual == 0 && logits == 0),
        "swiglu halves the outputs into out");
  check(wide || weights.format != Format::f32, "float32 weights need a float32 model");
  const swiftspec::host::LinearArgs args{&weights,
                                         type_arg("x", x, wide, rows),
                                         type_arg("norm", norm, wide, 0),
                                         eps,
                                         type_arg("residual", residual, wide, 0),
                                         type_arg("out", out, wide, 0),
                                         pointer_arg<float>("logits", logits, 0),
                                         swiglu,
                                         rows};
  py::gil_scoped_release unlocked;
  swiftspec::host::linear(args, wide);
}

void attention(uintptr_t qkv, uintptr_t cos, uintptr_t sin, uintptr_t slots, uintptr_t mask, uintptr_t keys,
               uintptr_t values, uintptr_t out, int64_t rows, int64_t heads, int64_t kv_heads,
               int64_t capacity, int64_t length, int64_t width, int64_t dim, bool wide) {
  size_arg("rows", rows, 0);
  size_arg("kv_heads", kv_heads, 1);
  size_arg("length", length, 1);
  check(heads >= kv_heads && heads % kv_heads == 0, "heads must be a multiple of kv_heads");
  check(dim % 16 == 0 && dim >= 16 && dim <= 256, "dim must be a multiple of 16 up to 256");
  check(length <= capacity && width >= 0 && width <= length, "width <= length <= capacity must hold");
  const swiftspec::host::AttentionArgs args{type_arg("qkv", qkv, wide, rows),
                                            type_arg("cos", cos, wide, rows),
                                            type_arg("sin", sin, wide, rows),
                                            pointer_arg<const int64_t>("slots", slots, rows),
                                            pointer_arg<const uint8_t>("mask", mask, rows * width),
                                            type_arg("keys", keys, wide, rows),
                                            type_arg("values", values, wide, rows),
                                            type_arg("out", out, wide, rows),
                                            rows,
                                            heads,
                                            kv_heads,
                                            capacity,
                                            length,
                                            width,
                                            dim};
  for (int64_t row = 0; row < rows; ++row) {
    check(args.slots[row] >= 0 && args.slots[row] < length, "a slot lies outside the slots in use");
  }
  py::gil_scoped_release unlocked;
  swiftspec::host::attention(args, wide);
}

void gumbel_rows(uint64_t seed, uint32_t stream, uintptr_t positions, int64_t rows, uint32_t first,
                 int64_t count, uintptr_t out) {
  const NoiseArgs args(positions, rows, count, out);
  py::gil_scoped_release unlocked;
  auto* noise = reinterpret_cast<float*>(args.out);
  swiftspec::host::gumbel_rows(seed, stream, args.positions, rows, first, count, noise);
}

void gumbel_of(uintptr_t bits, int64_t count, uintptr_t out) {
  size_arg("count", count, 0);
  swiftspec::host::gumbel(pointer_arg<const uint32_t>("bits", bits, count), count,
                          pointer_arg<float>("out", out, count));
}

swiftspec::ScoreArgs score_args(uintptr_t logits, uintptr_t bias, uintptr_t noise,
                                      uintptr_t rows_of_noise, int64_t noise_rows, float temperature,
                                      float tau, int64_t rows, int64_t vocab, int64_t stride) {
  size_arg("rows", rows, 0);
  size_arg("vocab", vocab, 1);
  size_arg("stride", stride, vocab);
  check(temperature > 0 && tau > 0, "temperature and tau must be above 0");
  const swiftspec::ScoreArgs args{
      pointer_arg<const float>("logits", logits, rows),
      pointer_arg<const float>("bias", bias, 0),
      pointer_arg<const float>("noise", noise, noise_rows),
      pointer_arg<const int64_t>("rows_of_noise", rows_of_noise, noise == 0 ? 0 : rows),
      temperature,
      tau,
      rows,
      vocab,
      stride};
  for (int64_t row = 0; noise != 0 && row < rows; ++row) {
    check(args.rows_of_noise[row] >= 0 && args.rows_of_noise[row] < noise_rows,
          "a row of noise that is not there");
  }
  return args;
}

void draw(uintptr_t logits, uintptr_t bias, uintptr_t noise, uintptr_t rows_of_noise, int64_t noise_rows,
          float temperature, int64_t rows, int64_t vocab, int64_t stride, uintptr_t tokens) {
  const auto args =
      score_args(logits, bias, noise, rows_of_noise, noise_rows, temperature, 1.0f, rows, vocab, stride);
  int64_t* out = pointer_arg<int64_t>("tokens", tokens, rows);
  py::gil_scoped_release unlocked;
  swiftspec::host::draw(args, out, nullptr);
}

void children(uintptr_t logits, uintptr_t bias, uintptr_t noise, uintptr_t rows_of_noise, int64_t noise_rows,
              float temperature, float tau, int64_t rows, int64_t vocab, int64_t stride, int64_t k,
              uintptr_t tokens, uintptr_t values) {
  const auto args =
      score_args(logits, bias, noise, rows_of_noise, noise_rows, temperature, tau, rows, vocab, stride);
  check(k >= 1 && k <= vocab, "k must lie in 1..vocab");
  int64_t* ids = pointer_arg<int64_t>("tokens", tokens, rows);
  float* out = pointer_arg<float>("values", values, rows);
  py::gil_scoped_release unlocked;
  swiftspec::host::children(args, k, ids, out, nullptr);
}

void gumbel_keyed(uintptr_t keys, int64_t rows, uint32_t first, int64_t count, uintptr_t out) {
  size_arg("rows", rows, 0);
  size_arg("count", count, 1);
  const auto* of = pointer_arg<const uint32_t>("keys", keys, rows);
  auto* noise = pointer_arg<float>("out", out, rows);
  py::gil_scoped_release unlocked;
  swiftspec::host::gumbel_keyed(of, rows, first, count, noise);
}

void log_probs(uintptr_t logits, uintptr_t bias, float temperature, int64_t rows, int64_t vocab, int64_t stride,
               uintptr_t tokens, uintptr_t out) {
  const auto args = score_args(logits, bias, 0, 0, 0, temperature, 1.0f, rows, vocab, stride);
  const auto* of = pointer_arg<const int64_t>("tokens", tokens, rows);
  check_inside(of, rows, vocab, "a token lies outside the vocabulary");
  auto* values = pointer_arg<float>("out", out, rows);
  py::gil_scoped_release unlocked;
  swiftspec::host::log_probs(args, of, values);
}

void move_kv(uintptr_t keys, uintptr_t values, int64_t layer_stride, int64_t layers, int64_t kv_heads,
             int64_t capacity, int64_t slot_bytes, const std::vector<int64_t>& source, int64_t start) {
  const auto count = static_cast<int64_t>(source.size());
  size_arg("layers", layers, 1);
  size_arg("kv_heads", kv_heads, 1);
  size_arg("slot_bytes", slot_bytes, 1);
  check(start >= 0 && count >= 0 && start + count <= capacity, "the slots do not fit the region");
  swiftspec::MoveArgs args{
      pointer_arg<uint8_t>("keys", keys, 1), layer_stride,  layers, kv_heads, capacity, slot_bytes,
      source.data(),                         count,         start};
  auto* region = pointer_arg<uint8_t>("values", values, 1);
  for (int64_t i = 0; i < count; ++i) {
    check(args.source[i] >= start + i && args.source[i] < capacity,
          "a source lies before its place or outside");
    check(i == 0 || args.source[i] > args.source[i - 1], "sources must ascend");
  }
  py::gil_scoped_release unlocked;
  swiftspec::host::move_kv(args);
  args.region = region;
  swiftspec::host::move_kv(args);
}

#ifdef SWIFTSPEC_WITH_CUDA
void noise_bits_cuda(uint64_t seed, uint32_t stream, uintptr_t positions, int64_t rows, int64_t vocab,
                     uintptr_t out, uintptr_t cuda_stream) {
  const NoiseArgs args(positions, rows, vocab, out);
  swiftspec::cuda::noise_bits(seed, stream, args.positions, rows, vocab, args.out,
                              reinterpret_cast<swiftspec::cuda::Stream>(cuda_stream));
}
#endif

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "SwiftSpec's native kernels: addresses and sizes in, nothing out.";
  m.attr("build_info") = SWIFTSPEC_BUILD_INFO;
#ifdef SWIFTSPEC_WITH_CUDA
  m.attr("cuda_built") = true;
#else
  m.attr("cuda_built") = false;
#endif

  m.def("noise_bits", &noise_bits, py::arg("seed"), py::arg("stream"), py::arg("positions"), py::arg("rows"),
        py::arg("vocab"), py::arg("out"),
        "Fill out[rows, vocab] (uint32, host) with the noise of the rows at positions[rows] (int32, host).");
  m.def("level", &swiftspec::host::level, "The instructions in use: avx512_bf16, avx512, avx2 or none.");
  m.def("use_level", &swiftspec::host::use_level, py::arg("name"),
        "Use others, for a test; False where they are missing.");
  m.def("set_threads", &set_threads, py::arg("count"),
        "How many threads share large products, the caller's among them.");
  m.def("threads", &swiftspec::host::threads, "What set_threads was told; 1 at first, and after a fork.");
  m.def("peak", &swiftspec::host::peak, py::arg("rounds"), py::arg("wide"),
        "Run a loop of products alone; how many floating-point operations it was.");
  py::class_<swiftspec::host::Weights>(m, "Weights", "A projection's addresses and sizes; see kernels.h.")
      .def(py::init(&make_weights), py::arg("format"), py::arg("data"), py::arg("groups"), py::arg("bias"),
           py::arg("k"), py::arg("n"), py::arg("group"));
  m.def("linear", &linear, py::arg("weights"), py::arg("x"), py::arg("norm"), py::arg("eps"),
        py::arg("residual"), py::arg("out"), py::arg("logits"), py::arg("swiglu"), py::arg("wide"),
        py::arg("rows"), "RMSNorm, product and epilogue; see LinearArgs in kernels.h. 0 is null.");
  m.def("attention", &attention, py::arg("qkv"), py::arg("cos"), py::arg("sin"), py::arg("slots"),
        py::arg("mask"), py::arg("keys"), py::arg("values"), py::arg("out"), py::arg("rows"),
        py::arg("heads"), py::arg("kv_heads"), py::arg("capacity"), py::arg("length"), py::arg("width"),
        py::arg("dim"), py::arg("wide"),
        "RoPE, KV append and masked attention; see AttentionArgs in kernels.h.");
  m.def("gumbel_of", &gumbel_of, py::arg("bits"), py::arg("count"), py::arg("out"),
        "The Gumbel noise (float32) of bits[count] (uint32), as gumbel_rows computes it.");
  m.def("gumbel_rows", &gumbel_rows, py::arg("seed"), py::arg("stream"), py::arg("positions"),
        py::arg("rows"), py::arg("first"), py::arg("count"), py::arg("out"),
        "noise_bits of `count` tokens from `first` on, as Gumbel noise (float32).");
  m.def("draw", &draw, py::arg("logits"), py::arg("bias"), py::arg("noise"), py::arg("rows_of_noise"),
        py::arg("noise_rows"), py::arg("temperature"), py::arg("rows"), py::arg("vocab"), py::arg("stride"),
        py::arg("tokens"), "The token of each row's highest score; see ScoreArgs in kernels.h.");
  m.def("children", &children, py::arg("logits"), py::arg("bias"), py::arg("noise"), py::arg("rows_of_noise"),
        py::arg("noise_rows"), py::arg("temperature"), py::arg("tau"), py::arg("rows"), py::arg("vocab"),
        py::arg("stride"), py::arg("k"), py::arg("tokens"), py::arg("values"),
        "The k largest of each row's log_softmax(scores); see ScoreArgs in kernels.h.");
  m.def("gumbel_keyed", &gumbel_keyed, py::arg("keys"), py::arg("rows"), py::arg("first"), py::arg("count"),
        py::arg("out"), "gumbel_rows of rows with these keys (uint32).");
  m.def("log_probs", &log_probs, py::arg("logits"), py::arg("bias"), py::arg("temperature"), py::arg("rows"),
        py::arg("vocab"), py::arg("stride"), py::arg("tokens"), py::arg("out"),
        "Each row's log_softmax(scores) at its token; see ScoreArgs in kernels.h.");
  m.def("move_kv", &move_kv, py::arg("keys"), py::arg("values"), py::arg("layer_stride"), py::arg("layers"),
        py::arg("kv_heads"), py::arg("capacity"), py::arg("slot_bytes"), py::arg("source"), py::arg("start"),
        "Moves cache slots forward in place; see MoveArgs in kernels.h.");
  swiftspec::binding::define_shared_memory(m);
  swiftspec::binding::define_decoder(m);
  swiftspec::binding::define_rounds(m);
  m.def("gumbel", &swiftspec::noise::gumbel, py::arg("bits"), "The float32 Gumbel draw of 32 noise bits.");
  m.def("gumbel64", &swiftspec::noise::gumbel64, py::arg("bits"),
        "The float64 Gumbel draw of 32 noise bits.");
#ifdef SWIFTSPEC_WITH_CUDA
  m.def("noise_bits_cuda", &noise_bits_cuda, py::arg("seed"), py::arg("stream"), py::arg("positions"),
        py::arg("rows"), py::arg("vocab"), py::arg("out"), py::arg("cuda_stream") = 0,
        "noise_bits on device memory, on a CUDA stream (0: the default stream) of the current device.");
  swiftspec::binding::bind_linear(m);
  swiftspec::binding::bind_cuda_attention(m);
  swiftspec::binding::bind_peers(m);
#endif
}
