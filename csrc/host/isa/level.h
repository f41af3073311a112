// Runtime ISA dispatch: one table of kernels per ISA level. The first call selects the best level of the CPU.
#pragma once

#include <cstdint>
#include <span>

#include "kernels_host.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define SWIFTSPEC_X86 1
#endif
#if defined(__AARCH64EL__) && (defined(__GNUC__) || defined(__clang__))
#define SWIFTSPEC_NEON 1
#endif

// Functions between these two macros may use the instructions of an ISA level. Library headers are included before, so
// that inline functions shared with other files are not compiled for the level.
#define SWIFTSPEC_STRING(x) #x
#if defined(__clang__)
#define SWIFTSPEC_BEGIN_TARGET(features) \
  _Pragma(SWIFTSPEC_STRING(clang attribute push(__attribute__((target(features))), apply_to = function)))
#define SWIFTSPEC_END_TARGET _Pragma("clang attribute pop")
#else
#define SWIFTSPEC_BEGIN_TARGET(features) \
  _Pragma("GCC push_options") _Pragma(SWIFTSPEC_STRING(GCC target(features)))
#define SWIFTSPEC_END_TARGET _Pragma("GCC pop_options")
#endif

namespace swiftspec::host {

struct Kernels {
  int64_t (*peak_f32)(int64_t rounds, float* seed);
  int64_t (*peak_bf16)(int64_t rounds, float* seed);
  void (*linear_f32)(const LinearArgs&);
  void (*linear_bf16)(const LinearArgs&);
  void (*mixture_f32)(const MixtureArgs&);
  void (*mixture_bf16)(const MixtureArgs&);
  void (*add_f32)(const float* x, int64_t count, float* into);
  void (*add_bf16)(const uint16_t* x, int64_t count, uint16_t* into);
  void (*norm_add_f32)(const float* x, int64_t rows, int64_t n, const float* norm, float eps, float scale, float* into);
  void (*norm_add_bf16)(const uint16_t* x, int64_t rows, int64_t n, const float* norm, float eps, float scale,
                        uint16_t* into);
  void (*apply_gates_f32)(const float* x, int64_t stride, int64_t rows, int64_t n, Gate gate, float* gates);
  void (*apply_gates_bf16)(const uint16_t* x, int64_t stride, int64_t rows, int64_t n, Gate gate, uint16_t* gates);
  void (*multiply_f32)(float* x, int64_t count, float factor);
  void (*multiply_bf16)(uint16_t* x, int64_t count, float factor);
  void (*attention_f32)(const AttentionArgs&);
  void (*attention_bf16)(const AttentionArgs&);
  void (*attention_mixed)(const AttentionArgs&);  // of float32 states with a bfloat16 cache
  void (*projection_sums_f32)(const float* qkv, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim,
                              const uint8_t* counted, float* sums);
  void (*projection_sums_bf16)(const uint16_t* qkv, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim,
                               const uint8_t* counted, float* sums);
  void (*multiply_sigmoid_f32)(const float* gate, int64_t stride, int64_t rows, int64_t n, float* into);
  void (*multiply_sigmoid_bf16)(const uint16_t* gate, int64_t stride, int64_t rows, int64_t n, uint16_t* into);
  void (*gated_delta_f32)(const DeltaArgs&);
  void (*gated_delta_bf16)(const DeltaArgs&);
  void (*fold_delta)(const DeltaShape&, const DeltaSlots&);
  void (*gumbel)(const uint32_t* bits, int64_t count, float* out);
  void (*gumbel_row)(uint32_t key, uint32_t first, int64_t count, float* out);
  void (*draw)(const ScoreArgs&, int64_t* tokens, float* values);
  void (*children)(const ScoreArgs&, int64_t k, int64_t* tokens, float* values, float* totals);
  void (*log_probs)(const ScoreArgs&, const int64_t* tokens, float* out);
  void (*draw_keyed)(const ScoreArgs&, const uint32_t* keys, int64_t* tokens, float* log_probs);
  void (*draw_filtered)(const ScoreArgs&, const FilterArgs&, const uint32_t* keys, int64_t* tokens);
  void (*filter_scores)(const ScoreArgs&, const FilterArgs&, float* out);
};

struct Level {
  const char* name;
  bool (*supported)();   // whether this CPU supports the level
  Kernels (*kernels)();  // may be called only if it does
};

// All levels, the preferred one first; the last one is always supported. Defined in cpu_levels.cpp.
std::span<const Level> levels();

// Defined in level_<name>.cpp.
Kernels avx2_kernels();
Kernels avx_vnni_kernels();
Kernels avx512_kernels();
Kernels avx512_vnni_kernels();
Kernels avx512_bf16_kernels();
Kernels amx_kernels();
Kernels neon_kernels();
Kernels neon_dotprod_kernels();

// Bits of one weight.
constexpr int64_t bits_of(Format format) {
  return format == Format::f32 ? 32 : format == Format::bf16 ? 16 : format == Format::int8 ? 8 : 4;
}

}  // namespace swiftspec::host
