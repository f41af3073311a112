// Selects the ISA level and forwards the operators of kernels_host.h to its kernels.
#include "host/isa/level.h"

#include <stdexcept>

#include "common/noise.h"

#ifdef SWIFTSPEC_X86
#include <cpuid.h>
#endif

namespace swiftspec::host {

namespace {

struct Level {
  const char* name;
  bool (*supported)();
  Kernels (*kernels)();
};

#ifdef SWIFTSPEC_X86

#define SWIFTSPEC_HAS(feature) (__builtin_cpu_supports(feature) != 0)

// CPUID leaf 7.1, which __builtin_cpu_supports of older compilers lacks
bool has_avxvnni_bit() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & 1U << 4) != 0;
}

bool has_avx2() { return SWIFTSPEC_HAS("avx2") && SWIFTSPEC_HAS("fma") && SWIFTSPEC_HAS("f16c"); }
bool has_avx_vnni() { return has_avx2() && has_avxvnni_bit(); }
bool has_avx512() {
  return has_avx2() && SWIFTSPEC_HAS("avx512f") && SWIFTSPEC_HAS("avx512bw") && SWIFTSPEC_HAS("avx512dq") &&
         SWIFTSPEC_HAS("avx512vl");
}
bool has_avx512_vnni() { return has_avx512() && SWIFTSPEC_HAS("avx512vnni"); }
bool has_avx512_bf16() { return has_avx512_vnni() && SWIFTSPEC_HAS("avx512bf16"); }

const Level kLevels[] = {{"avx512_bf16", has_avx512_bf16, avx512_bf16_kernels},
                         {"avx512_vnni", has_avx512_vnni, avx512_vnni_kernels},
                         {"avx512", has_avx512, avx512_kernels},
                         {"avx_vnni", has_avx_vnni, avx_vnni_kernels},
                         {"avx2", has_avx2, avx2_kernels},
#else
const Level kLevels[] = {
#endif
                         {"none", [] { return true; }, [] { return Kernels{}; }}};

struct Selection {
  const char* name;
  Kernels kernels;
};

Selection detect() {
  const Level* level = kLevels;
  while (!level->supported()) ++level;
  return {level->name, level->kernels()};
}

Selection& selected() {
  static Selection chosen = detect();
  return chosen;
}

template <class F>
F require_kernel(F kernel) {
  if (kernel == nullptr) throw std::runtime_error("the native kernels need AVX2, which this CPU lacks");
  return kernel;
}

}  // namespace

const char* level() { return selected().name; }

bool use_level(const std::string& name) {
  for (const Level& level : kLevels) {
    if (name != level.name || !level.supported()) continue;
    selected() = {level.name, level.kernels()};
    return true;
  }
  return false;
}

int64_t peak(int64_t rounds, bool is_f32) {
  float seed[16] = {};
  return require_kernel(is_f32 ? selected().kernels.peak_f32 : selected().kernels.peak_bf16)(rounds, seed);
}

void linear(const LinearArgs& args, bool is_f32) {
  const Kernels& k = selected().kernels;
  require_kernel(is_f32 ? k.linear_f32 : k.linear_bf16)(args);
}

void add(const void* x, int64_t count, void* into, bool is_f32) {
  const Kernels& k = selected().kernels;
  if (is_f32) return require_kernel(k.add_f32)(static_cast<const float*>(x), count, static_cast<float*>(into));
  require_kernel(k.add_bf16)(static_cast<const uint16_t*>(x), count, static_cast<uint16_t*>(into));
}

void attention(const AttentionArgs& args, bool is_f32) {
  const Kernels& k = selected().kernels;
  require_kernel(is_f32 ? k.attention_f32 : k.attention_bf16)(args);
}

void gumbel(const uint32_t* bits, int64_t count, float* out) {
  require_kernel(selected().kernels.gumbel)(bits, count, out);
}

void gumbel_rows(uint64_t seed, uint32_t stream, const int32_t* positions, int64_t rows, uint32_t first,
                 int64_t count, float* out) {
  const auto kernel = require_kernel(selected().kernels.gumbel_row);
  for (int64_t row = 0; row < rows; ++row) {
    kernel(noise::row_key(seed, stream, static_cast<uint32_t>(positions[row])), first, count, out + row * count);
  }
}

void gumbel_keyed(const uint32_t* keys, int64_t rows, uint32_t first, int64_t count, float* out) {
  const auto kernel = require_kernel(selected().kernels.gumbel_row);
  for (int64_t row = 0; row < rows; ++row) kernel(keys[row], first, count, out + row * count);
}

void draw(const ScoreArgs& args, int64_t* tokens, float* values) {
  require_kernel(selected().kernels.draw)(args, tokens, values);
}

void children(const ScoreArgs& args, int64_t k, int64_t* tokens, float* values, float* totals) {
  require_kernel(selected().kernels.children)(args, k, tokens, values, totals);
}

void log_probs(const ScoreArgs& args, const int64_t* tokens, float* out) {
  require_kernel(selected().kernels.log_probs)(args, tokens, out);
}

void draw_keyed(const ScoreArgs& args, const uint32_t* keys, int64_t* tokens, float* log_probs) {
  require_kernel(selected().kernels.draw_keyed)(args, keys, tokens, log_probs);
}

int64_t draw_residual(const ScoreArgs& p, const ScoreArgs& q, uint32_t key) {
  return require_kernel(selected().kernels.draw_residual)(p, q, key);
}

}  // namespace swiftspec::host
