// The choice of a level, and the way from every launch to it.
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
  bool (*here)();
  Kernels (*kernels)();
};

#ifdef SWIFTSPEC_X86

#define SWIFTSPEC_HAS(feature) (__builtin_cpu_supports(feature) != 0)

// of leaf 7.1 of cpuid, which older compilers' __builtin_cpu_supports does not know
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

struct InUse {
  const char* name;
  Kernels kernels;
};

InUse best() {
  const Level* level = kLevels;
  while (!level->here()) ++level;
  return {level->name, level->kernels()};
}

InUse& in_use() {
  static InUse chosen = best();
  return chosen;
}

template <class F>
F known(F kernel) {
  if (kernel == nullptr) throw std::runtime_error("this CPU has no instructions that the native kernels use");
  return kernel;
}

}  // namespace

const char* level() { return in_use().name; }

bool use_level(const std::string& name) {
  for (const Level& level : kLevels) {
    if (name != level.name || !level.here()) continue;
    in_use() = {level.name, level.kernels()};
    return true;
  }
  return false;
}

int64_t peak(int64_t rounds, bool wide) {
  float seed[16] = {};
  return known(wide ? in_use().kernels.peak_f32 : in_use().kernels.peak_bf16)(rounds, seed);
}

void linear(const LinearArgs& args, bool wide) {
  const Kernels& k = in_use().kernels;
  known(wide ? k.linear_f32 : k.linear_bf16)(args);
}

void add(const void* x, int64_t count, void* into, bool wide) {
  const Kernels& k = in_use().kernels;
  if (wide) return known(k.add_f32)(static_cast<const float*>(x), count, static_cast<float*>(into));
  known(k.add_bf16)(static_cast<const uint16_t*>(x), count, static_cast<uint16_t*>(into));
}

void attention(const AttentionArgs& args, bool wide) {
  const Kernels& k = in_use().kernels;
  known(wide ? k.attention_f32 : k.attention_bf16)(args);
}

void gumbel(const uint32_t* bits, int64_t count, float* out) {
  known(in_use().kernels.gumbel)(bits, count, out);
}

void gumbel_rows(uint64_t seed, uint32_t stream, const int32_t* positions, int64_t rows, uint32_t first,
                 int64_t count, float* out) {
  const auto kernel = known(in_use().kernels.gumbel_row);
  for (int64_t row = 0; row < rows; ++row) {
    kernel(noise::row_key(seed, stream, static_cast<uint32_t>(positions[row])), first, count, out + row * count);
  }
}

void gumbel_keyed(const uint32_t* keys, int64_t rows, uint32_t first, int64_t count, float* out) {
  const auto kernel = known(in_use().kernels.gumbel_row);
  for (int64_t row = 0; row < rows; ++row) kernel(keys[row], first, count, out + row * count);
}

void draw(const ScoreArgs& args, int64_t* tokens, float* values) { known(in_use().kernels.draw)(args, tokens, values); }

void children(const ScoreArgs& args, int64_t k, int64_t* tokens, float* values, float* totals) {
  known(in_use().kernels.children)(args, k, tokens, values, totals);
}

void log_probs(const ScoreArgs& args, const int64_t* tokens, float* out) {
  known(in_use().kernels.log_probs)(args, tokens, out);
}

void draw_keyed(const ScoreArgs& args, const uint32_t* keys, int64_t* tokens, float* log_probs) {
  known(in_use().kernels.draw_keyed)(args, keys, tokens, log_probs);
}

int64_t draw_residual(const ScoreArgs& p, const ScoreArgs& q, uint32_t key) {
  return known(in_use().kernels.draw_residual)(p, q, key);
}

}  // namespace swiftspec::host
