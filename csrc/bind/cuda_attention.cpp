// What Python sees of the device's attention, sampling, moves and tree. Addresses are the device's, so of arrays only
// their sizes and alignment can be checked here.
#include "bind/arguments.h"

#include <pybind11/stl.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>

#include "kernels_cuda.h"

namespace {

using swiftspec::cuda::Stream;
using swiftspec::binding::check;
using swiftspec::binding::kMaxSize;
using swiftspec::binding::pointer_arg;
namespace cuda = swiftspec::cuda;

template <class T>
T* at(const char* name, uintptr_t address, bool optional = false) {
  return pointer_arg<T>(name, address, optional ? 0 : 1);
}

void* at16(const char* name, uintptr_t address) {
  if (address == 0 || address % 16 != 0) throw py::value_error(std::string(name) + " must be aligned to 16 bytes");
  return reinterpret_cast<void*>(address);
}

Stream stream_at(uintptr_t address) { return reinterpret_cast<Stream>(address); }

bool int32_sized(int64_t value) { return value >= 0 && value <= kMaxSize; }

cuda::AttentionSetup plan(uintptr_t cos, uintptr_t sin, uintptr_t positions, uintptr_t slots, uintptr_t sequence,
                         uintptr_t kv_len, uintptr_t mask, uintptr_t owner, uintptr_t tail, uintptr_t count,
                         uintptr_t groups, uintptr_t arrived, uintptr_t part_values, uintptr_t part_sums, int64_t rows,
                         int64_t width, int64_t sequences, int64_t heads, int64_t kv_heads, int64_t capacity,
                         int64_t dim, int64_t clusters) {
  check(dim == 64 || dim == 128, "dim must be 64 or 128");
  check(kv_heads >= 1 && heads >= kv_heads && heads % kv_heads == 0, "heads must be a multiple of kv_heads");
  check(heads / kv_heads <= 64, "at most 64 heads share keys");
  check(kv_heads < 65536 && rows >= 1 && int32_sized(rows), "no rows, or too many rows or heads");
  check(width >= 1 && capacity >= 1 && sequences >= 1 && clusters >= 1, "sizes must be above 0");
  check(int32_sized(rows * width) && int32_sized(sequences * capacity), "the mask or the cache is too large");
  check(sequences == 1 || sequence != 0, "rows of several sequences need `sequence`");
  return {at16("cos", cos),
          at16("sin", sin),
          at<const int64_t>("positions", positions),
          at<const int64_t>("slots", slots),
          at<const int64_t>("sequence", sequence, true),
          at<const int64_t>("kv_len", kv_len),
          at<const uint8_t>("mask", mask),
          at<int32_t>("owner", owner),
          at<int32_t>("tail", tail),
          at<int32_t>("count", count),
          at<cuda::RowGroup>("groups", groups),
          at<uint32_t>("arrived", arrived),
          at<float>("part_values", part_values),
          at<float>("part_sums", part_sums),
          rows,
          width,
          sequences,
          heads,
          kv_heads,
          capacity,
          dim,
          clusters,
          1.44269504f / std::sqrt(static_cast<float>(dim))};
}

void plan_attention(const cuda::AttentionSetup& plan, uintptr_t stream) {
  cuda::prepare_attention(plan, stream_at(stream));
}

void attention(const cuda::AttentionSetup& plan, uintptr_t qkv, uintptr_t keys, uintptr_t values, uintptr_t out,
               uintptr_t stream) {
  cuda::attention(plan, at16("qkv", qkv), at16("keys", keys), at16("values", values), at16("out", out),
                  stream_at(stream));
}

void gumbel_rows(uint64_t seed, uint32_t noise_stream, uintptr_t positions, int64_t rows, uint32_t first, int64_t count,
                 uintptr_t out, uintptr_t stream) {
  check(rows >= 1 && rows < 65536 && int32_sized(count), "between 1 and 65535 rows");
  cuda::gumbel_rows(seed, noise_stream, at<const int64_t>("positions", positions), rows, first, count,
                    at<float>("out", out), stream_at(stream));
}

void children(uintptr_t logits, uintptr_t bias, uintptr_t noise, uintptr_t rows_of_noise, float temperature, float tau,
              int64_t rows, int64_t vocab, int64_t stride, int64_t k, uintptr_t tokens, uintptr_t values,
              uintptr_t stream) {
  check(temperature > 0 && tau > 0, "temperature and tau must be above 0");
  check(rows >= 1 && rows < 65536 && vocab >= 1 && vocab <= stride && int32_sized(stride),
        "between 1 and 65535 rows of at least `vocab` columns");
  check(k >= 1 && k <= 64 && k <= vocab, "k must lie in 1..64 and within the vocabulary");
  check(values != 0 || k == 1, "a draw is of one token");
  const swiftspec::ScoreArgs args{at<const float>("logits", logits),
                                        at<const float>("bias", bias, true),
                                        at<const float>("noise", noise, true),
                                        at<const int64_t>("rows_of_noise", rows_of_noise, noise == 0),
                                        temperature,
                                        tau,
                                        rows,
                                        vocab,
                                        stride};
  cuda::children(args, k, at<int64_t>("tokens", tokens), at<float>("values", values, true), stream_at(stream));
}

void verify(uintptr_t target, uintptr_t draft, uintptr_t tokens, uintptr_t coins, uintptr_t keys, uintptr_t marks,
            uintptr_t arrived, uintptr_t accepted, uintptr_t count, uintptr_t bonus, int64_t batch, int64_t steps,
            int64_t vocab, const std::pair<int64_t, int64_t>& target_strides,
            const std::pair<int64_t, int64_t>& draft_strides, bool wide, uintptr_t stream) {
  check(batch >= 1 && batch < 65536 && steps >= 0 && steps < 65535, "between 1 and 65535 requests and positions");
  check(vocab >= 1 && int32_sized(vocab), "the vocabulary is empty or too large");
  check(steps == 0 || (draft != 0) == (coins != 0), "a draft and coins come together");
  const auto logits = [wide](const char* name, uintptr_t address, const std::pair<int64_t, int64_t>& strides) {
    return cuda::Logits{swiftspec::binding::type_arg(name, address, wide, 0), strides.first, strides.second};
  };
  check(target != 0, "target is null");
  const cuda::VerifyArgs args{logits("target", target, target_strides),
                              logits("draft", draft, draft_strides),
                              at<const int64_t>("tokens", tokens, steps == 0),
                              at<const float>("coins", coins, true),
                              at<const uint32_t>("keys", keys, true),
                              static_cast<cuda::PositionMark*>(at16("marks", marks)),
                              at<uint32_t>("arrived", arrived),
                              at<uint8_t>("accepted", accepted, steps == 0),
                              at<int64_t>("count", count),
                              at<int64_t>("bonus", bonus),
                              batch,
                              steps,
                              vocab,
                              wide};
  cuda::verify(args, stream_at(stream));
}

void move_kv(uintptr_t keys, uintptr_t values, int64_t layer_stride, int64_t layers, int64_t kv_heads, int64_t capacity,
             int64_t slot_bytes, uintptr_t source, int64_t count, int64_t start, uintptr_t stream) {
  check(layers >= 1 && layers < 65536 && kv_heads >= 1, "between 1 and 65535 layers");
  check(slot_bytes >= 16 && slot_bytes % 16 == 0 && layer_stride % 16 == 0, "slots must be multiples of 16 bytes");
  check(count >= 1 && start >= 0 && start + count <= capacity, "the slots do not fit the region");
  const swiftspec::MoveArgs args{static_cast<uint8_t*>(at16("keys", keys)),
                                       layer_stride,
                                       layers,
                                       kv_heads,
                                       capacity,
                                       slot_bytes,
                                       at<const int64_t>("source", source),
                                       count,
                                       start};
  cuda::move_kv(args, static_cast<uint8_t*>(at16("values", values)), stream_at(stream));
}

void embed(uintptr_t tokens, uintptr_t table, int64_t rows, int64_t row_bytes, uintptr_t out, uintptr_t stream) {
  check(int32_sized(rows) && row_bytes >= 16 && row_bytes % 16 == 0, "rows must be multiples of 16 bytes");
  cuda::embed(at<const int64_t>("tokens", tokens), at16("table", table), rows, row_bytes, at16("out", out),
              stream_at(stream));
}

void rms_norm(uintptr_t x, uintptr_t weight, float eps, int64_t rows, int64_t dim, uintptr_t out, uintptr_t stream) {
  check(int32_sized(rows) && dim >= 8 && dim % 8 == 0, "dim must be a multiple of 8");
  cuda::rms_norm(at16("x", x), at16("weight", weight), eps, rows, dim, at16("out", out), stream_at(stream));
}

cuda::TreeState tree_state(uintptr_t token, uintptr_t parent, uintptr_t slot, uintptr_t weight, uintptr_t visible,
                           uintptr_t used, int64_t nodes, int64_t slots) {
  check(nodes >= 1 && slots >= 1 && int32_sized(nodes) && int32_sized(slots), "nodes and slots must be above 0");
  return {at<int64_t>("token", token),
          at<int32_t>("parent", parent),
          at<int32_t>("slot", slot),
          at<double>("weight", weight),
          at<uint8_t>("visible", visible),
          at<int32_t>("used", used),
          static_cast<int32_t>(nodes),
          static_cast<int32_t>(slots)};
}

void tree_leaves(const cuda::TreeState& tree, int64_t w, uintptr_t prefix, uintptr_t node, uintptr_t tokens,
                 uintptr_t positions, uintptr_t places, uintptr_t mask, uintptr_t stream) {
  check(w >= 1 && w <= 64 && w <= tree.slots, "w must lie in 1..64 and within the slots");
  const cuda::Expansion out{at<int32_t>("node", node), at<int64_t>("tokens", tokens),
                            at<int64_t>("positions", positions), at<int64_t>("places", places),
                            at<uint8_t>("mask", mask)};
  cuda::tree_leaves(tree, static_cast<int32_t>(w), at<const int64_t>("prefix", prefix), out, stream_at(stream));
}

void tree_add(const cuda::TreeState& tree, int64_t w, uintptr_t node, int64_t k, uintptr_t tokens, uintptr_t values,
              uintptr_t stream) {
  check(w >= 1 && w <= 64 && k >= 1 && w * k < tree.nodes, "w must lie in 1..64, and w k below the nodes");
  cuda::tree_add(tree, static_cast<int32_t>(w), at<const int32_t>("node", node), static_cast<int32_t>(k),
                 at<const int64_t>("tokens", tokens), at<const float>("values", values), stream_at(stream));
}

}  // namespace

void swiftspec::binding::bind_cuda_attention(py::module_& m) {
  py::class_<cuda::AttentionSetup>(m, "CudaAttention", "What attention needs on a device; see AttentionSetup in kernels_cuda.h.")
      .def(py::init(&plan), py::kw_only(), py::arg("cos"), py::arg("sin"), py::arg("positions"), py::arg("slots"),
           py::arg("sequence"), py::arg("kv_len"), py::arg("mask"), py::arg("owner"), py::arg("tail"),
           py::arg("count"), py::arg("groups"), py::arg("arrived"), py::arg("part_values"), py::arg("part_sums"),
           py::arg("rows"), py::arg("width"), py::arg("sequences"), py::arg("heads"), py::arg("kv_heads"),
           py::arg("capacity"), py::arg("dim"), py::arg("clusters"))
      .def("prepare", &plan_attention, py::arg("stream"), "Once a forward, before the layers.")
      .def("attend", &attention, py::arg("qkv"), py::arg("keys"), py::arg("values"), py::arg("out"), py::arg("stream"),
           "Once a layer.");
  m.def("attention_groups_cuda", &cuda::attention_groups, py::arg("rows"), py::arg("heads"), py::arg("kv_heads"),
        py::arg("one_sequence"), "How many groups of rows a plan has room for.");
  m.def("attention_lines_cuda", &cuda::attention_lines, py::arg("rows"), py::arg("heads"), py::arg("capacity"),
        "How many lines of `part_values` and `part_sums` a plan needs.");
  m.def("attention_clusters_cuda", &cuda::attention_clusters, py::arg("dim"),
        "How many clusters of attention the current device holds at a time.");
  m.def("gumbel_rows_cuda", &gumbel_rows, py::arg("seed"), py::arg("noise_stream"), py::arg("positions"),
        py::arg("rows"), py::arg("first"), py::arg("count"), py::arg("out"), py::arg("stream"));
  m.def("children_cuda", &children, py::arg("logits"), py::arg("bias"), py::arg("noise"), py::arg("rows_of_noise"),
        py::arg("temperature"), py::arg("tau"), py::arg("rows"), py::arg("vocab"), py::arg("stride"), py::arg("k"),
        py::arg("tokens"), py::arg("values"), py::arg("stream"), "Without values: the token drawn.");
  m.def("verify_cuda", &verify, py::kw_only(), py::arg("target"), py::arg("draft"), py::arg("tokens"),
        py::arg("coins"), py::arg("keys"), py::arg("marks"), py::arg("arrived"), py::arg("accepted"),
        py::arg("count"), py::arg("bonus"), py::arg("batch"), py::arg("steps"), py::arg("vocab"),
        py::arg("target_strides"), py::arg("draft_strides"), py::arg("wide"), py::arg("stream"),
        "Chains against the target in one launch; see VerifyArgs in kernels.h. 0 is null.");
  m.def("move_kv_cuda", &move_kv, py::arg("keys"), py::arg("values"), py::arg("layer_stride"), py::arg("layers"),
        py::arg("kv_heads"), py::arg("capacity"), py::arg("slot_bytes"), py::arg("source"), py::arg("count"),
        py::arg("start"), py::arg("stream"));
  m.def("embed_cuda", &embed, py::arg("tokens"), py::arg("table"), py::arg("rows"), py::arg("row_bytes"),
        py::arg("out"), py::arg("stream"));
  m.def("rms_norm_cuda", &rms_norm, py::arg("x"), py::arg("weight"), py::arg("eps"), py::arg("rows"), py::arg("dim"),
        py::arg("out"), py::arg("stream"));
  py::class_<cuda::TreeState>(m, "CudaTree", "A draft tree on a device; see TreeState in kernels.h.")
      .def(py::init(&tree_state), py::kw_only(), py::arg("token"), py::arg("parent"), py::arg("slot"),
           py::arg("weight"), py::arg("visible"), py::arg("used"), py::arg("nodes"), py::arg("slots"))
      .def("leaves", &tree_leaves, py::arg("w"), py::arg("prefix"), py::arg("node"), py::arg("tokens"),
           py::arg("positions"), py::arg("places"), py::arg("mask"), py::arg("stream"))
      .def("add", &tree_add, py::arg("w"), py::arg("node"), py::arg("k"), py::arg("tokens"), py::arg("values"),
           py::arg("stream"));
}
