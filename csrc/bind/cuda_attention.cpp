// Bindings of tree attention on a GPU.
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "bind/cuda_arguments.h"
#include "bind/cuda_cache.h"
#include "bind/module.h"
#include "cuda/device/device.h"
#include "cuda/linear/tiling.h"

namespace swiftspec::binding {

namespace {

// The arguments of attention that are the same in every layer of a forward.
struct Attention {
  cuda::AttentionSetup setup;
  CudaCache cache;
};

void check_sizes(const CudaCache& cache, int64_t rows, int64_t width, int64_t heads, bool sequences_told) {
  const int64_t kv_heads = cache.kv_heads;
  check(cache.type == kBfloat16 || cache.type == kUint8, "the cache must be bfloat16, or float8 as uint8");
  check(cache.head_dim == 64 || cache.head_dim == 128, "head_dim must be 64 or 128");
  check(heads >= kv_heads && heads % kv_heads == 0, "heads must be a multiple of kv_heads");
  check(heads / kv_heads <= 64, "at most 64 heads share keys");
  check(kv_heads < 65536 && rows >= 1 && rows < 65536, "no rows, or too many rows or heads");
  check(width >= 1 && cache.capacity >= 1 && cache.sequences >= 1, "sizes must be above 0");
  check(int32_sized(rows * width) && int32_sized(cache.sequences * cache.capacity),
        "the mask or the cache is too large");
  check(cache.sequences == 1 || sequences_told, "rows of several sequences need `sequence`");
}

const std::vector<std::string> kShapes = {"short", "long", "paired"};  // by cuda::AttentionShape

// The shape of this name; without one the default for caches of this capacity.
cuda::AttentionShape shape_arg(const std::optional<std::string>& name, int64_t capacity) {
  if (!name) return cuda::attention_shape(capacity);
  const auto found = std::find(kShapes.begin(), kShapes.end(), *name);
  check(found != kShapes.end(), "shape must be short, long or paired");
  return static_cast<cuda::AttentionShape>(found - kShapes.begin());
}

// The default for caches of this capacity, then the others that the device has.
std::vector<std::string> shape_names(int64_t capacity) {
  const std::string& usual = kShapes.at(static_cast<size_t>(cuda::attention_shape(capacity)));
  std::vector<std::string> names{usual};
  if (!cuda::device_info().has_clusters()) return names;
  std::copy_if(kShapes.begin(), kShapes.end(), std::back_inserter(names), [&](auto& name) { return name != usual; });
  return names;
}

Attention make_attention(const Array& cos, const Array& sin, const Array& positions, const Array& slots,
                         const MaybeArray& sequence, const Array& kv_len, const Array& mask, const CudaCache& cache,
                         int64_t heads, const Array& queries, const Array& tail, const Array& count,
                         const Array& groups, const Array& arrived, const Array& part_values, const Array& part_sums,
                         const std::optional<std::string>& shape_name) {
  const int64_t rows = mask.size(0), width = mask.size(1), dim = cache.head_dim, kv_heads = cache.kv_heads;
  check_sizes(cache, rows, width, heads, sequence.has_value());
  const Device here = gpu();
  const bool float8 = cache.type == kUint8;
  const int64_t most = cuda::attention_groups(rows, heads, kv_heads, cache.sequences == 1);
  const cuda::AttentionShape shape = shape_arg(shape_name, cache.capacity);
  const int64_t lines = cuda::attention_lines(rows, heads, kv_heads, cache.capacity, shape);
  check(int32_sized(lines), "too many rows for the capacity of the cache");
  const cuda::AttentionSetup setup{
      bfloat16_arg("cos", cos, here, {kAny, dim}),
      bfloat16_arg("sin", sin, here, {cos.size(0), dim}),
      positions.at<int64_t>(here, "positions", {rows}),
      slots.at<int64_t>(here, "slots", {rows}),
      at_or_null<int64_t>(sequence, here, "sequence", {rows}),
      kv_len.at<int64_t>(here, "kv_len", {cache.sequences}),
      mask.at<bool>(here, "mask", {rows, width}),
      static_cast<uint16_t*>(bfloat16_arg("queries", queries, here, {rows, heads * dim})),
      tail.at<int32_t>(here, "tail", {rows, width}),
      count.at<int32_t>(here, "count", {rows}),
      reinterpret_cast<cuda::RowGroup*>(groups.at<int32_t>(here, "groups", {most, cuda::kRowGroupWords})),
      arrived.at<uint32_t>(here, "arrived", {most, kv_heads}),
      part_values.at<float>(here, "part_values", {lines, dim}),
      part_sums.at<float>(here, "part_sums", {lines, 2}),
      rows,
      width,
      cache.sequences,
      heads,
      kv_heads,
      cache.capacity,
      dim,
      cuda::attention_clusters(dim, float8, shape),
      1.44269504f / std::sqrt(static_cast<float>(dim)),
      static_cast<int32_t>(heads / kv_heads),
      static_cast<int32_t>(cuda::attention_group_rows(heads, kv_heads)),
      cuda::attention_most_parts(kv_heads, shape),
      shape,
      float8};
  return {setup, cache};
}

void prepare(Attention& attention, uintptr_t stream) {
  attention.setup.prepared = false;
  cuda::prepare_attention(attention.setup, stream_arg(stream));
}

void attend(Attention& attention, const Array& qkv, int64_t layer, const Array& out, uintptr_t stream) {
  const cuda::AttentionSetup& setup = attention.setup;
  const CudaCache& cache = attention.cache;
  const Device here = gpu();
  const int64_t skipped = cache.offset(layer, 0);
  const void* from = bfloat16_arg("qkv", qkv, here, {setup.rows, (setup.heads + 2 * setup.kv_heads) * setup.dim});
  void* to = bfloat16_arg("out", out, here, {setup.rows, setup.heads * setup.dim});
  cuda::attention(setup, from, cache.keys + skipped, cache.values + skipped, to, stream_arg(stream));
  attention.setup.prepared = true;  // for the next layer
}

bool appends(const Attention& attention, const cuda::Weights& weights) {
  return cuda::can_append(weights, attention.setup.rows, attention.setup.dim);
}

void project_and_attend(Attention& attention, const cuda::Weights& weights, const Array& x, const Array& norm, float eps,
                        int64_t layer, const Array& out, uintptr_t stream) {
  const cuda::AttentionSetup& setup = attention.setup;
  const CudaCache& cache = attention.cache;
  check(appends(attention, weights), "this projection cannot append");
  check(weights.tiling.n == (setup.heads + 2 * setup.kv_heads) * setup.dim, "qkv has other heads");
  const Device here = gpu();
  const int64_t skipped = cache.offset(layer, 0), k = weights.tiling.k;
  const cuda::RopeAppend append{setup, cache.keys + skipped, cache.values + skipped};
  cuda::LinearArgs args{};
  args.weights = &weights;
  args.x = bfloat16_arg("x", x, here, {setup.rows, k});
  args.norm = bfloat16_arg("norm", norm, here, {k});
  args.eps = eps;
  args.rows = setup.rows;
  args.append = &append;
  void* to = bfloat16_arg("out", out, here, {setup.rows, setup.heads * setup.dim});
  cuda::linear(args, stream_arg(stream));
  cuda::attention(setup, nullptr, append.keys, append.values, to, stream_arg(stream));
  attention.setup.prepared = true;  // for the next layer
}

void rope_append(const Array& qkv, const Array& cos, const Array& sin, const Array& positions, const Array& slots,
                 const MaybeArray& sequence, const CudaCache& cache, int64_t layer, const Array& queries,
                 uintptr_t stream) {
  const int64_t rows = queries.size(0), heads = queries.size(1), dim = cache.head_dim;
  check_sizes(cache, rows, 1, heads, sequence.has_value());
  const Device here = gpu();
  cuda::AttentionSetup setup{};
  setup.cos = bfloat16_arg("cos", cos, here, {kAny, dim});
  setup.sin = bfloat16_arg("sin", sin, here, {cos.size(0), dim});
  setup.positions = positions.at<int64_t>(here, "positions", {rows});
  setup.slots = slots.at<int64_t>(here, "slots", {rows});
  setup.sequence = at_or_null<int64_t>(sequence, here, "sequence", {rows});
  setup.queries = static_cast<uint16_t*>(bfloat16_arg("queries", queries, here, {rows, heads, dim}));
  setup.rows = rows;
  setup.heads = heads;
  setup.kv_heads = cache.kv_heads;
  setup.capacity = cache.capacity;
  setup.dim = dim;
  setup.float8 = cache.type == kUint8;
  const void* from = bfloat16_arg("qkv", qkv, here, {rows, (heads + 2 * cache.kv_heads) * dim});
  const int64_t skipped = cache.offset(layer, 0);
  const UnlockedLaunches unlocked(rows);
  cuda::rope_append(setup, from, cache.keys + skipped, cache.values + skipped, stream_arg(stream));
}

void norm_heads(const Array& qkv, const Array& weight, double eps, uintptr_t stream) {
  const int64_t rows = qkv.size(0), width = qkv.size(1), heads = weight.size(0), dim = weight.size(1);
  check(dim == 64 || dim == 128, "head_dim must be 64 or 128");
  check(rows < 65536, "at most 65535 rows");
  check(width % dim == 0 && heads * dim <= width, "qkv has fewer heads than the weights, or a part of one");
  const Device here = gpu();
  void* data = bfloat16_arg("qkv", qkv, here, {rows, width});
  const void* factors = bfloat16_arg("weight", weight, here, {heads, dim});
  const UnlockedLaunches unlocked(rows);
  cuda::head_norm(data, factors, static_cast<float>(eps), rows, heads, width, dim, stream_arg(stream));
}

}  // namespace

void bind_cuda_attention(py::module_& m) {
  using py::keep_alive;
  py::class_<Attention>(m, "CudaAttention",
                        "Attention of one forward; see AttentionSetup in kernels_cuda.h. It keeps its arrays alive. "
                        "`shape`: short, long or paired (cuda/attention/sizes.h); by capacity without it.")
      .def(py::init(&make_attention), py::kw_only(), py::arg("cos"), py::arg("sin"), py::arg("positions"),
           py::arg("slots"), py::arg("sequence"), py::arg("kv_len"), py::arg("mask"), py::arg("cache"),
           py::arg("heads"), py::arg("queries"), py::arg("tail"), py::arg("count"), py::arg("groups"),
           py::arg("arrived"), py::arg("part_values"), py::arg("part_sums"), py::arg("shape") = py::none(),
           keep_alive<1, 2>(), keep_alive<1, 3>(),
           keep_alive<1, 4>(), keep_alive<1, 5>(), keep_alive<1, 6>(), keep_alive<1, 7>(), keep_alive<1, 8>(),
           keep_alive<1, 9>(), keep_alive<1, 11>(), keep_alive<1, 12>(), keep_alive<1, 13>(), keep_alive<1, 14>(),
           keep_alive<1, 15>(), keep_alive<1, 16>(), keep_alive<1, 17>())
      .def("prepare", &prepare, py::arg("stream"), "Runs once per forward, before the layers.")
      .def("attend", &attend, py::arg("qkv"), py::arg("layer"), py::arg("out"), py::arg("stream"),
           "Runs once per layer.")
      .def("appends", &appends, py::arg("weights"), "Whether a QKV projection can apply RoPE and append.")
      .def("project_and_attend", &project_and_attend, py::arg("weights"), py::arg("x"), py::arg("norm"), py::arg("eps"),
           py::arg("layer"), py::arg("out"), py::arg("stream"),
           "The QKV projection, with RoPE and append in its kernel, and `attend`.");
  m.def("rope_append_cuda", &rope_append, py::arg("qkv"), py::arg("cos"), py::arg("sin"), py::arg("positions"),
        py::arg("slots"), py::arg("sequence"), py::arg("cache"), py::arg("layer"), py::arg("queries"),
        py::arg("stream"),
        "Applies RoPE and appends keys and values to the cache: qkv [rows, (heads + 2 * kv_heads) * head_dim], queries "
        "[rows, heads, head_dim] (output).");
  m.def("norm_heads_cuda", &norm_heads, py::arg("qkv"), py::arg("weight"), py::arg("eps"), py::arg("stream"),
        "RMSNorm of the first heads of each row, which it overwrites: qkv [rows, width], weight [heads, head_dim].");
  m.def("attention_shapes_cuda", &shape_names, py::arg("capacity"),
        "Shapes of CudaAttention on the current GPU: the default for caches of this capacity, then the others.");
  m.attr("ROW_GROUP_WORDS") = cuda::kRowGroupWords;
  m.def("attention_groups_cuda", &cuda::attention_groups, py::arg("rows"), py::arg("heads"), py::arg("kv_heads"),
        py::arg("one_sequence"), "Number of entries of `groups`.");
  m.def(
      "attention_lines_cuda",
      [](int64_t rows, int64_t heads, int64_t kv_heads, int64_t capacity, const std::optional<std::string>& shape) {
        return cuda::attention_lines(rows, heads, kv_heads, capacity, shape_arg(shape, capacity));
      },
      py::arg("rows"), py::arg("heads"), py::arg("kv_heads"), py::arg("capacity"), py::arg("shape") = py::none(),
      "Number of rows of `part_values` and `part_sums`. `shape`: as of CudaAttention.");
}

}  // namespace swiftspec::binding
