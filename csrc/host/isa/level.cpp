// Selects the ISA level and forwards the operators of kernels_host.h to its kernels.
#include "host/isa/level.h"

#include <atomic>
#include <stdexcept>
#include <vector>

#include "common/noise.h"

namespace swiftspec::host {

namespace {

struct Selection {
  const char* name;
  Kernels kernels;
};

// The levels that this CPU supports, the preferred one first.
const std::vector<Selection>& supported_levels() {
  static const std::vector<Selection> found = [] {
    std::vector<Selection> supported;
    for (const Level& level : levels()) {
      if (level.supported()) supported.push_back({level.name, level.kernels()});
    }
    return supported;
  }();
  return found;
}

std::atomic<const Selection*>& selected() {
  static std::atomic<const Selection*> chosen{supported_levels().data()};
  return chosen;
}

// The kernels in use. An operator calls this once, so it runs at one level even if `use_level` selects another one
// meanwhile.
const Kernels& kernels() { return selected().load(std::memory_order_acquire)->kernels; }

template <class F>
F require_kernel(F kernel) {
  if (kernel == nullptr) throw std::runtime_error("the native kernels need x86-64 with AVX2, or aarch64");
  return kernel;
}

}  // namespace

const char* level() { return selected().load(std::memory_order_acquire)->name; }

bool use_level(const std::string& name) {
  for (const Selection& level : supported_levels()) {
    if (name != level.name) continue;
    selected().store(&level, std::memory_order_release);
    return true;
  }
  return false;
}

std::vector<std::string> supported_level_names() {
  std::vector<std::string> names;
  for (const Selection& level : supported_levels()) {
    if (level.kernels.linear_f32 != nullptr) names.emplace_back(level.name);
  }
  return names;
}

int64_t peak(int64_t rounds, bool is_f32) {
  float seed[16] = {};
  const Kernels& k = kernels();
  return require_kernel(is_f32 ? k.peak_f32 : k.peak_bf16)(rounds, seed);
}

void linear(const LinearArgs& args, bool is_f32) {
  const Kernels& k = kernels();
  require_kernel(is_f32 ? k.linear_f32 : k.linear_bf16)(args);
}

void mixture(const MixtureArgs& args, bool is_f32) {
  const Kernels& k = kernels();
  require_kernel(is_f32 ? k.mixture_f32 : k.mixture_bf16)(args);
}

void add(const void* x, int64_t count, void* into, bool is_f32) {
  const Kernels& k = kernels();
  if (is_f32) return require_kernel(k.add_f32)(static_cast<const float*>(x), count, static_cast<float*>(into));
  require_kernel(k.add_bf16)(static_cast<const uint16_t*>(x), count, static_cast<uint16_t*>(into));
}

void norm_add(const void* x, int64_t rows, int64_t n, const float* norm, float eps, float scale, void* into,
              bool is_f32) {
  const Kernels& k = kernels();
  if (is_f32) {
    return require_kernel(k.norm_add_f32)(static_cast<const float*>(x), rows, n, norm, eps, scale,
                                          static_cast<float*>(into));
  }
  require_kernel(k.norm_add_bf16)(static_cast<const uint16_t*>(x), rows, n, norm, eps, scale,
                                  static_cast<uint16_t*>(into));
}

void apply_gates(const void* x, int64_t stride, int64_t rows, int64_t n, Gate gate, void* gates, bool is_f32) {
  const Kernels& k = kernels();
  if (is_f32) {
    return require_kernel(k.apply_gates_f32)(static_cast<const float*>(x), stride, rows, n, gate,
                                             static_cast<float*>(gates));
  }
  require_kernel(k.apply_gates_bf16)(static_cast<const uint16_t*>(x), stride, rows, n, gate,
                                     static_cast<uint16_t*>(gates));
}

void multiply(void* x, int64_t count, float factor, bool is_f32) {
  const Kernels& k = kernels();
  if (is_f32) return require_kernel(k.multiply_f32)(static_cast<float*>(x), count, factor);
  require_kernel(k.multiply_bf16)(static_cast<uint16_t*>(x), count, factor);
}

void attention(const AttentionArgs& args, bool is_f32, bool cache_is_f32) {
  const Kernels& k = kernels();
  require_kernel(!is_f32 ? k.attention_bf16 : cache_is_f32 ? k.attention_f32 : k.attention_mixed)(args);
}

void projection_sums(const void* qkv, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim,
                     const uint8_t* counted, float* sums, bool is_f32) {
  const Kernels& k = kernels();
  if (is_f32) {
    return require_kernel(k.projection_sums_f32)(static_cast<const float*>(qkv), rows, heads, kv_heads, dim, counted,
                                                 sums);
  }
  require_kernel(k.projection_sums_bf16)(static_cast<const uint16_t*>(qkv), rows, heads, kv_heads, dim, counted, sums);
}

void multiply_sigmoid(const void* gate, int64_t stride, int64_t rows, int64_t n, void* into, bool is_f32) {
  const Kernels& k = kernels();
  if (is_f32) {
    return require_kernel(k.multiply_sigmoid_f32)(static_cast<const float*>(gate), stride, rows, n,
                                                  static_cast<float*>(into));
  }
  require_kernel(k.multiply_sigmoid_bf16)(static_cast<const uint16_t*>(gate), stride, rows, n,
                                          static_cast<uint16_t*>(into));
}

void gated_delta(const DeltaArgs& args, bool is_f32) {
  const Kernels& k = kernels();
  require_kernel(is_f32 ? k.gated_delta_f32 : k.gated_delta_bf16)(args);
}

void fold_delta(const DeltaShape& shape, const DeltaSlots& slots) {
  require_kernel(kernels().fold_delta)(shape, slots);
}

void gumbel(const uint32_t* bits, int64_t count, float* out) {
  require_kernel(kernels().gumbel)(bits, count, out);
}

void gumbel_rows(uint64_t seed, uint32_t stream, const int32_t* positions, int64_t rows, uint32_t first,
                 int64_t count, float* out) {
  const auto kernel = require_kernel(kernels().gumbel_row);
  for (int64_t row = 0; row < rows; ++row) {
    kernel(noise::row_key(seed, stream, static_cast<uint32_t>(positions[row])), first, count, out + row * count);
  }
}

void gumbel_keyed(const uint32_t* keys, int64_t rows, uint32_t first, int64_t count, float* out) {
  const auto kernel = require_kernel(kernels().gumbel_row);
  for (int64_t row = 0; row < rows; ++row) kernel(keys[row], first, count, out + row * count);
}

void draw(const ScoreArgs& args, int64_t* tokens, float* values) {
  require_kernel(kernels().draw)(args, tokens, values);
}

void children(const ScoreArgs& args, int64_t k, int64_t* tokens, float* values, float* totals) {
  require_kernel(kernels().children)(args, k, tokens, values, totals);
}

void log_probs(const ScoreArgs& args, const int64_t* tokens, float* out) {
  require_kernel(kernels().log_probs)(args, tokens, out);
}

void draw_keyed(const ScoreArgs& args, const uint32_t* keys, int64_t* tokens, float* log_probs) {
  require_kernel(kernels().draw_keyed)(args, keys, tokens, log_probs);
}

void draw_filtered(const ScoreArgs& args, const FilterArgs& filter, const uint32_t* keys, int64_t* tokens) {
  require_kernel(kernels().draw_filtered)(args, filter, keys, tokens);
}

void filter_scores(const ScoreArgs& args, const FilterArgs& filter, float* out) {
  require_kernel(kernels().filter_scores)(args, filter, out);
}

}  // namespace swiftspec::host
