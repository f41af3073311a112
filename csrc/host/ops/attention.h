// Tree attention: RoPE, KV append, then masked attention of each row. Included inside the namespace of an ISA level.
//
// Rows are processed in tiles. The leading slots that every row of a tile sees (`base`) are scored for all its queries
// in one product. The other visible slots of a row are gathered in slot order and appended without a gap. Visible slots
// ascend with their positions, so the key at position p is summand p of every sum, independent of the tile boundaries
// and of the slot that holds the key.

constexpr int64_t kMaxAttentionRows = 32;  // of a tile
constexpr int64_t kKeyBlocks = 8;          // blocks of 16 keys transposed at a time

// Rows of a tile. Every tile transposes the keys that it sees, so large tiles suit prompts. The few rows of a tree are
// divided into small ones, for more tasks that run in parallel.
inline int64_t attention_rows(int64_t rows) { return rows >= 2 * kMaxAttentionRows ? kMaxAttentionRows : 8; }

// T is the type of queries, keys, values and outputs of a forward, S that of the cache.
template <class S>
#ifdef SWIFTSPEC_TILES
using Query = S;
#else
using Query = std::conditional_t<std::is_same_v<S, float>, float, Packed16>;  // the type that `product` reads
#endif

// x cos + half_rotation(x) sin, rounded to S. `sin` contains the sign of the rotation.
template <class S, class T, class X>
void rotate(const T* x, const T* cos, const T* sin, int64_t dim, X* out) {
  T rotated[kMaxHeadDim];
  const size_t half = static_cast<size_t>(dim / 2);
  std::memcpy(rotated, x + half, half * sizeof(T));
  std::memcpy(rotated + half, x, half * sizeof(T));
  for (int64_t i = 0; i < dim; i += kLanes) {
    const F straight = rounded<T>(mul(load_as(x + i), load_as(cos + i)));
    store_as(out + i, rounded<S>(fma(load_as(rotated + i), load_as(sin + i), straight)));
  }
}

// The RMSNorm of head number `head` of a row, or its values `x` if the layer has no norm.
template <class T>
const T* norm_head(const AttentionArgs& a, const T* x, int64_t row, int64_t head, T* normed) {
  const HeadNorm& norm = a.norm;
  if (norm.weight == nullptr) return x;
  const float* weight = norm.weight + head * a.dim;
  if (norm.sums == nullptr) {
    rms_norm(x, weight, norm.eps, a.dim, normed);
  } else {
    const bool key = head >= a.heads;
    apply_norm(x, weight, norm_scale(norm.sums[2 * row + key], key ? norm.k_size : norm.q_size, norm.eps), a.dim, normed);
  }
  return normed;
}

// Query or key head number `head` of a row after RoPE and its norm, rounded to S. `x`: the head.
template <class S, class T, class X>
void rotate_head(const AttentionArgs& a, const T* x, int64_t row, int64_t head, X* out) {
  const T *cos = static_cast<const T*>(a.cos) + row * a.dim, *sin = static_cast<const T*>(a.sin) + row * a.dim;
  T normed[kMaxHeadDim];
  if (!a.options.norm_after_rope) return rotate<S>(norm_head(a, x, row, head, normed), cos, sin, a.dim, out);
  T rotated[kMaxHeadDim];
  rotate<T>(x, cos, sin, a.dim, rotated);
  const T* of = norm_head(a, rotated, row, head, normed);
  for (int64_t i = 0; i < a.dim; i += kLanes) store_as(out + i, rounded<S>(load_as(of + i)));
}

template <class T>
void projection_sums(const T* qkv, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, const uint8_t* counted,
                     float* sums) {
  for (int64_t row = 0; row < rows; ++row, qkv += (heads + 2 * kv_heads) * dim, sums += 2) {
    sums[0] = sum_of_squares(qkv, heads * dim), sums[1] = 0.0f;
    for (int64_t g = 0; g < kv_heads; ++g) {
      if (counted == nullptr || counted[g] != 0) sums[1] += sum_of_squares(qkv + (heads + g) * dim, dim);
    }
  }
}

// kProbStep: values that an instruction sums. A value's place in these sums is that of its position.
#if defined(SWIFTSPEC_TILES)  // both operands of a tile are bfloat16
using Prob = uint16_t;
constexpr int64_t kProbStep = kBf16TileInputs;
#elif defined(SWIFTSPEC_DOT_BF16)  // the same
using Prob = uint16_t;
constexpr int64_t kProbStep = 2;
#else
using Prob = float;
constexpr int64_t kProbStep = 1;
#endif

template <class T, class S>
void append(const AttentionArgs& a) {
  for (int64_t row = 0; row < a.rows; ++row) {
    const T* k = static_cast<const T*>(a.qkv) + row * a.stride + a.heads * a.dim;
    for (int64_t g = 0; g < a.kv_heads; ++g) {
      const int64_t at = (g * a.capacity + a.slots[row]) * a.dim;
      rotate_head<S>(a, k + g * a.dim, row, a.heads + g, static_cast<S*>(a.keys) + at);
      T normed[kMaxHeadDim];
      const T* value = k + (a.kv_heads + g) * a.dim;
      if (a.norm.values) value = norm_head(a, value, row, a.heads + a.kv_heads + g, normed);
      S* to = static_cast<S*>(a.values) + at;
      for (int64_t i = 0; i < a.dim; i += kLanes) store_as(to + i, load_as(value + i));
    }
  }
}

constexpr int64_t kBeginStep = std::max(kLanes, kProbStep);

// The slots that the rows of one tile see: slots `begin` to `base`, and a list of further slots per row. Without
// sliding windows all rows see the slots before `base`, so each of these slots is the position of its key.
struct VisibleSlots {
  int64_t begin = 0;  // a multiple of kBeginStep: a key is in the same lane of every sum, whatever the tile
  int64_t base = 0;
  std::vector<int32_t> slots;    // of all rows, one after the other
  int64_t first[kMaxAttentionRows + 1];  // index of each row's first entry in `slots`
  int64_t before[kMaxAttentionRows];     // positions from `begin` on that lie before each row's window
  int64_t shared() const { return base - begin; }
  const int32_t* slots_of(int64_t row) const { return slots.data() + first[row]; }
  int64_t count(int64_t row) const { return first[row + 1] - first[row]; }
};

// Moves `begin` to the first position in the sliding window of any row. Returns the number of entries that the list of
// each row loses.
inline int64_t limit_to_window(const AttentionArgs& a, const uint8_t* mask, int64_t rows, VisibleSlots& visible) {
  int64_t starts[kMaxAttentionRows], least = std::numeric_limits<int64_t>::max();
  for (int64_t r = 0; r < rows; ++r) {
    int64_t count = a.length - a.width;
    for (int64_t i = 0; i < a.width; ++i) count += mask[r * a.width + i] != 0;
    starts[r] = std::max<int64_t>(count - a.options.window, 0);
    least = std::min(least, starts[r]);
  }
  visible.begin = least / kBeginStep * kBeginStep;
  for (int64_t r = 0; r < rows; ++r) visible.before[r] = starts[r] - visible.begin;
  const int64_t skipped = std::max<int64_t>(visible.begin - visible.base, 0);
  return skipped;
}

inline void find_visible(const AttentionArgs& a, int64_t row, int64_t rows, VisibleSlots& visible) {
  const int64_t window = a.length - a.width;
  const uint8_t* mask = a.mask + row * a.width;
  int64_t run = a.width;
  for (int64_t r = 0; r < rows && run > 0; ++r) {
    const void* hidden = std::memchr(mask + r * a.width, 0, static_cast<size_t>(run));
    if (hidden != nullptr) run = static_cast<const uint8_t*>(hidden) - (mask + r * a.width);
  }
  const int64_t base = (window + run) / kProbStep * kProbStep;
  visible.base = base, visible.begin = 0;
  std::fill(visible.before, visible.before + kMaxAttentionRows, 0);
  const int64_t skipped = a.options.window > 0 ? limit_to_window(a, mask, rows, visible) : 0;
  visible.base += skipped;
  visible.slots.clear();
  for (int64_t r = 0; r < rows; ++r) {
    visible.first[r] = static_cast<int64_t>(visible.slots.size());
    int64_t left = skipped;
    for (int64_t slot = base; slot < a.length; ++slot) {
      if (slot >= window && mask[r * a.width + slot - window] == 0) continue;
      if (left-- > 0) continue;
      visible.slots.push_back(static_cast<int32_t>(slot));
    }
  }
  visible.first[rows] = static_cast<int64_t>(visible.slots.size());
}

// Multiplier: what a task multiplies with; tiles are configured once for several products.
#ifdef SWIFTSPEC_TILES

using Multiplier = ExactTiles;

template <class S>
void score_blocks(Multiplier& tiles, const S* x, int64_t queries, const Operand& keys, int64_t blocks, float* scores,
                  int64_t stride) {
  tiles.product<false>({x, keys.k, kBf16TileInputs}, keys, queries, blocks, scores, stride);
}

#else

struct Multiplier {};

template <class S>
void score_blocks(Multiplier&, const Query<S>* x, int64_t queries, const Operand& keys, int64_t blocks, float* scores,
                  int64_t stride) {
  constexpr Format kFormat = std::is_same_v<S, float> ? Format::f32 : Format::bf16;
  for (int64_t q = 0; q < queries; q += kRowTile) {
    const Inputs<Query<S>> in{x + q * keys.k, nullptr};
    product<kFormat>(in, keys, std::min<int64_t>(kRowTile, queries - q), blocks, scores + q * stride, stride);
  }
}

#endif

// Transposes keys start .. start + count into blocks of sixteen keys. Key i is slot i, or slot list[i] if `list` is
// given; the last one, of index `last`, is repeated as padding.
template <class S>
void transpose_keys(const S* keys, const int32_t* list, int64_t start, int64_t count, int64_t last, int64_t dim,
                    uint8_t* blocks) {
  const int64_t bytes = dim * static_cast<int64_t>(sizeof(S));
  for (int64_t b = 0; b < count; b += kLanes, blocks += bytes * kLanes) {
    const uint8_t* rows[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) {
      const int64_t key = std::min(start + b + i, last);
      rows[i] = reinterpret_cast<const uint8_t*>(keys + (list == nullptr ? key : list[key]) * dim);
    }
    for (int64_t at = 0; at < bytes; at += 4 * kTransposeWords)
      transpose_block(rows, at, bytes - at, blocks + at * kLanes);
  }
}

// scores[q][i] = x[q] . key i for `count` keys, as in `transpose_keys`. `scores` has space for a multiple of 16 columns.
template <class S>
void score(Multiplier& tiles, const Query<S>* x, int64_t queries, const S* keys, const int32_t* list, int64_t count,
           int64_t dim, float* scores, int64_t stride) {
  const int64_t bytes = dim * static_cast<int64_t>(sizeof(S));
  constexpr int64_t kValues = kKeyBlocks * kLanes * kMaxHeadDim;
  thread_local AlignedVector<uint8_t> key_blocks(static_cast<size_t>(kValues) * sizeof(S));
  for (int64_t start = 0; start < count; start += kKeyBlocks * kLanes) {
    const int64_t here = std::min(kKeyBlocks * kLanes, count - start), blocks = (here + kLanes - 1) / kLanes;
    transpose_keys(keys, list, start, here, count - 1, dim, key_blocks.data());
    const Operand operand{key_blocks.data(), bytes * kLanes, dim};
    score_blocks<S>(tiles, x, queries, operand, blocks, scores + start, stride);
  }
}

// Softmax numerators: probs[i] = e^(scale (score[i] - max)), padded with zeros to a multiple of 16 and of kProbStep.
// Returns the denominator: their sum, plus e^(sink - scale max) if there is a sink. The first `before` scores are those
// of masked keys. `softcap`: c > 0: scores s become c tanh(scale s / c). `sink`: null without one.
inline float softmax(float* scores, int64_t before, int64_t count, float scale, float softcap, const float* sink,
                     Prob* probs) {
  const int64_t end = (count + kLanes - 1) / kLanes * kLanes;
  if (softcap > 0.0f) {
    for (int64_t i = 0; i < end; i += kLanes) {
      store(scores + i, soft_cap(mul(load(scores + i), broadcast(scale)), softcap));
    }
    scale = 1.0f;
  }
  std::fill(scores, scores + before, -std::numeric_limits<float>::infinity());
  std::fill(scores + count, scores + end, -std::numeric_limits<float>::infinity());
  F top = broadcast(-std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < end; i += kLanes) top = max(top, load(scores + i));
  const float highest = reduce_max(top);
  const F max_score = broadcast(highest), factor = broadcast(scale);
  F total = zeros();
  for (int64_t i = 0; i < end; i += kLanes) {
    F prob = rounded<Prob>(exponential(mul(sub(load(scores + i), max_score), factor)));
    if (count - i < kLanes || before > i) {
      float some[kLanes];
      store(some, prob);
      std::fill(some, some + std::clamp<int64_t>(before - i, 0, kLanes), 0.0f);
      std::fill(some + std::min(count - i, kLanes), some + kLanes, 0.0f);
      prob = load(some);
    }
    store_as(probs + i, prob);
    total = add(total, prob);
  }
  if (end % kProbStep != 0 && kProbStep > kLanes) store_as(probs + end, zeros());
  return reduce_add(total) + (sink == nullptr ? 0.0f : std::exp(*sink - scale * highest));
}

constexpr int64_t kColumnStep = 2 * kLanes;  // columns per iteration

#ifdef SWIFTSPEC_TILES

// Keys whose values are interleaved at a time, at most; their number of elements, which bounds them for large heads.
constexpr int64_t kValueKeys = 64, kValueElements = 1 << 14;

// Writes values start .. start + count as a matrix of `count` inputs, a multiple of 32, in the layout of bfloat16 weights
// (product.h). The columns of each 32 stay interleaved until `deinterleave`.
inline void interleave_values(const uint16_t* values, const int32_t* list, int64_t start, int64_t count, int64_t last,
                              int64_t dim, uint16_t* blocks) {
  for (int64_t i = 0; i < count; i += 2, blocks += 2 * kLanes) {
    const int64_t keys[2] = {std::min(start + i, last), std::min(start + i + 1, last)};
    const uint16_t* first = values + (list == nullptr ? keys[0] : list[keys[0]]) * dim;
    const uint16_t* second = values + (list == nullptr ? keys[1] : list[keys[1]]) * dim;
    for (int64_t c = 0; c < dim; c += kColumnStep) {
      const I x = load_int(first + c), y = load_int(second + c);
      store_int(blocks + c * count, unpack_low_words(x, y));
      store_int(blocks + (c + kLanes) * count, unpack_high_words(x, y));
    }
  }
}

// out[q] += sum over i of probs[q][i] value[i]: 32 at a time, in that order.
inline void accumulate_values(Multiplier& tiles, const Prob* probs, int64_t queries, int64_t stride,
                              const uint16_t* values, const int32_t* list, int64_t count, int64_t dim, float* out,
                              int64_t out_stride) {
  alignas(64) uint16_t blocks[kValueElements];
  const int64_t keys = std::min(kValueKeys, kValueElements / dim / kProbStep * kProbStep);
  for (int64_t start = 0; start < count; start += keys) {
    const int64_t here = std::min(keys, (count - start + kProbStep - 1) / kProbStep * kProbStep);
    interleave_values(values, list, start, here, count - 1, dim, blocks);
    const Operand operand{reinterpret_cast<const uint8_t*>(blocks), here * kLanes * 2, here};
    tiles.product<true>({probs + start, stride, kBf16TileInputs}, operand, queries, dim / kLanes, out, out_stride);
  }
}

inline void deinterleave(float* columns) {  // quarters 0 2 4 6, 1 3 5 7 -> 0 1 2 3, 4 5 6 7
  float before[kColumnStep];
  std::memcpy(before, columns, sizeof before);
  for (int quarter = 0; quarter < 8; ++quarter) {
    std::memcpy(columns + 4 * quarter, before + 4 * (quarter / 2 + 4 * (quarter % 2)), 4 * sizeof(float));
  }
}

#elif defined(SWIFTSPEC_DOT_BF16)

// out[q] += sum over i of probs[q][i] value[i] for M queries and min(columns, 32) columns. Values are consumed in pairs
// in that order. The columns in `out` stay interleaved until `deinterleave`.
template <int M>
void accumulate_columns(const uint16_t* probs, int64_t stride, const uint16_t* values, const int32_t* list,
                        int64_t count, int64_t dim, int64_t columns, float* out, int64_t out_stride) {
  const __mmask16 here = columns >= kColumnStep ? 0xffff : 0x00ff;  // pairs of columns
  F total[M][2];
  load_sums(total, out, out_stride);
  for (int64_t i = 0; i < count; i += 2) {
    const int64_t j = std::min(i + 1, count - 1);  // the probability after the last one is zero
    const __m512i first = _mm512_maskz_loadu_epi32(here, values + (list == nullptr ? i : list[i]) * dim);
    const __m512i second = _mm512_maskz_loadu_epi32(here, values + (list == nullptr ? j : list[j]) * dim);
    const Pair pairs[2] = {(Pair)_mm512_unpacklo_epi16(first, second),
                           (Pair)_mm512_unpackhi_epi16(first, second)};
    add_pair(total, pairs, probs + i, stride);
  }
  store_sums(total, out, out_stride);
}

inline void deinterleave(float* columns) {  // quarters 0 2 4 6, 1 3 5 7 -> 0 1 2 3, 4 5 6 7
  const F even = load(columns), odd = load(columns + kLanes);
  const F first = _mm512_shuffle_f32x4(even, odd, 0x44), last = _mm512_shuffle_f32x4(even, odd, 0xee);
  store(columns, _mm512_shuffle_f32x4(first, first, 0xd8));
  store(columns + kLanes, _mm512_shuffle_f32x4(last, last, 0xd8));
}

#else

template <int M, int B, class T>
void accumulate_blocks(const float* probs, int64_t stride, const T* values, const int32_t* list, int64_t count,
                       int64_t dim, float* out, int64_t out_stride) {
  F total[M][B];
  load_sums(total, out, out_stride);
  for (int64_t i = 0; i < count; ++i) {
    const T* value = values + (list == nullptr ? i : list[i]) * dim;
    F columns[B];
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) columns[b] = load_as(value + b * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const F prob = broadcast(probs[m * stride + i]);
#pragma GCC unroll 8
      for (int b = 0; b < B; ++b) total[m][b] = fma(prob, columns[b], total[m][b]);
    }
  }
  store_sums(total, out, out_stride);
}

// out[q] += sum over i of probs[q][i] value[i], in that order, for M queries and min(columns, 32) columns.
template <int M, class T>
void accumulate_columns(const float* probs, int64_t stride, const T* values, const int32_t* list, int64_t count,
                        int64_t dim, int64_t columns, float* out, int64_t out_stride) {
  if (columns >= kColumnStep && 2 * M <= kAccumulators) {
    accumulate_blocks<M, 2>(probs, stride, values, list, count, dim, out, out_stride);
    return;
  }
  for (int64_t c = 0; c < std::min(columns, kColumnStep); c += kLanes) {
    accumulate_blocks<M, 1>(probs, stride, values + c, list, count, dim, out + c, out_stride);
  }
}

inline void deinterleave(float*) {}

#endif

#ifndef SWIFTSPEC_TILES

template <int M = kRowTile, class T>
void accumulate_values(Multiplier& tiles, const Prob* probs, int64_t queries, int64_t stride, const T* values, const int32_t* list,
                       int64_t count, int64_t dim, float* out, int64_t out_stride) {
  for (; queries >= M; queries -= M, probs += M * stride, out += M * out_stride) {
    for (int64_t c = 0; c < dim; c += kColumnStep) {
      accumulate_columns<M>(probs, stride, values + c, list, count, dim, dim - c, out + c, out_stride);
    }
  }
  if constexpr (M > 1) {
    if (queries > 0) accumulate_values<M / 2>(tiles, probs, queries, stride, values, list, count, dim, out, out_stride);
  }
}

#endif

// Attention of one key-value head for `rows` rows from `row` on.
template <class T, class S>
void attend(const AttentionArgs& a, int64_t row, int64_t rows, int64_t g, const VisibleSlots& visible) {
  using X = Query<S>;
  const int64_t group = a.heads / a.kv_heads, queries = rows * group, dim = a.dim;
  const int64_t stride = (a.length + 2 * kBeginStep) / kBeginStep * kBeginStep,
                out_stride = (dim + kColumnStep - 1) / kColumnStep * kColumnStep;
  thread_local AlignedVector<X> x;  // thread-local buffers grow to the largest tile once
  thread_local AlignedVector<Prob> probs;
  thread_local AlignedVector<float> scores, out;
  thread_local std::vector<float> totals;
  x.resize(static_cast<size_t>(queries * dim));
  scores.resize(static_cast<size_t>(queries * stride));
  probs.resize(scores.size());
  totals.resize(static_cast<size_t>(queries));
  out.assign(static_cast<size_t>(queries * out_stride), 0.0f);
  for (int64_t q = 0; q < queries; ++q) {
    const int64_t r = row + q / group, head = g * group + q % group;
    rotate_head<S>(a, static_cast<const T*>(a.qkv) + r * a.stride + head * dim, r, head, x.data() + q * dim);
  }
  const S* keys = static_cast<const S*>(a.keys) + g * a.capacity * dim;
  const S* values = static_cast<const S*>(a.values) + g * a.capacity * dim;
  const AttentionOptions& options = a.options;
  const float plain_scale = options.scale > 0.0f ? options.scale : 1.0f / __builtin_sqrtf(static_cast<float>(dim));
  const int64_t shared = visible.shared(), skipped = visible.begin * dim;
  Multiplier tiles;
  score<S>(tiles, x.data(), queries, keys + skipped, nullptr, shared, dim, scores.data(), stride);
  for (int64_t q = 0; q < queries; q += group) {
    const int64_t r = q / group;
    float* row_values = scores.data() + q * stride;
    score<S>(tiles, x.data() + q * dim, group, keys, visible.slots_of(r), visible.count(r), dim, row_values + shared, stride);
    const float scale = options.query_scale == nullptr ? plain_scale : plain_scale * options.query_scale[row + r];
    for (int64_t h = 0; h < group; ++h, row_values += stride) {
      totals[static_cast<size_t>(q + h)] =
          softmax(row_values, visible.before[r], shared + visible.count(r), scale, options.softcap,
                  a.sinks == nullptr ? nullptr : a.sinks + g * group + h, probs.data() + (q + h) * stride);
    }
  }
  accumulate_values(tiles, probs.data(), queries, stride, values + skipped, nullptr, shared, dim, out.data(), out_stride);
  for (int64_t q = 0; q < queries; ++q) {
    const int64_t r = q / group;
    float* row_values = out.data() + q * out_stride;
    if (q % group == 0) {
      const Prob* rest = probs.data() + q * stride + shared;
      accumulate_values(tiles, rest, group, stride, values, visible.slots_of(r), visible.count(r), dim, row_values,
                        out_stride);
    }
    T* row_out = static_cast<T*>(a.out) + ((row + r) * a.heads + g * group + q % group) * dim;
    for (int64_t c = 0; c < dim; c += kColumnStep) deinterleave(row_values + c);
    for (int64_t c = 0; c < dim; c += kLanes) {
      store_as(row_out + c, div(load(row_values + c), broadcast(totals[static_cast<size_t>(q)])));
    }
  }
}

template <class T, class S = T>
void attention(const AttentionArgs& a) {
  if (!a.shares_kv) append<T, S>(a);
  const int64_t tile_rows = attention_rows(a.rows);
  const auto body = [&](int64_t task) {
    thread_local VisibleSlots visible;
    const int64_t row = task / a.kv_heads * tile_rows, rows = std::min(tile_rows, a.rows - row);
    find_visible(a, row, rows, visible);
    attend<T, S>(a, row, rows, task % a.kv_heads, visible);
  };
  const int64_t tasks = (a.rows + tile_rows - 1) / tile_rows * a.kv_heads;
  if (a.rows * a.length * a.heads * a.dim >= kMinParallelWork) return parallel_for(tasks, body);
  for (int64_t task = 0; task < tasks; ++task) body(task);
}
