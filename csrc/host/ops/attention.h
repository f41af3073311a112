// Tree attention: RoPE, KV append, then each row against the keys it may see. Read inside a level's
// namespace.
//
// Rows go in tiles. The leading slots that every row of a tile sees are done for all its queries at once;
// what else a row sees is gathered, in the order of the slots, and follows without a gap. So the key at
// position p is number p in every sum (visible slots ascend with their positions), wherever the tile ends and
// wherever the key lies.

constexpr int64_t kMaxDim = 256;    // widest head
constexpr int64_t kAttendRows = 8;  // rows of a tile
constexpr int64_t kKeyBlocks = 8;   // blocks of 16 keys laid out at a time

template <class T>
using Query = std::conditional_t<std::is_same_v<T, float>, float, Packed16>;  // what `product` reads

// x cos + half_rotation(x) sin, the sign of the rotation being in `sin`; rounded to T.
template <class T, class X>
void rotate(const T* x, const T* cos, const T* sin, int64_t dim, X* out) {
  T turned[kMaxDim];
  const size_t half = static_cast<size_t>(dim / 2);
  std::memcpy(turned, x + half, half * sizeof(T));
  std::memcpy(turned + half, x, half * sizeof(T));
  for (int64_t i = 0; i < dim; i += kLanes) {
    const F straight = rounded<T>(mul(load_as(x + i), load_as(cos + i)));
    store_as(out + i, rounded<T>(fma(load_as(turned + i), load_as(sin + i), straight)));
  }
}

#ifdef SWIFTSPEC_DOT_BF16  // two values at a time, so shares are bfloat16 too
using Share = uint16_t;
constexpr int64_t kTogether = 2;
#else
using Share = float;
constexpr int64_t kTogether = 1;
#endif

template <class T>
void append(const AttentionArgs& a) {
  const int64_t width = (a.heads + 2 * a.kv_heads) * a.dim;
  for (int64_t row = 0; row < a.rows; ++row) {
    const T* k = static_cast<const T*>(a.qkv) + row * width + a.heads * a.dim;
    const T *cos = static_cast<const T*>(a.cos) + row * a.dim,
            *sin = static_cast<const T*>(a.sin) + row * a.dim;
    for (int64_t g = 0; g < a.kv_heads; ++g) {
      const int64_t at = (g * a.capacity + a.slots[row]) * a.dim;
      rotate(k + g * a.dim, cos, sin, a.dim, static_cast<T*>(a.keys) + at);
      std::memcpy(static_cast<T*>(a.values) + at, k + (a.kv_heads + g) * a.dim,
                  static_cast<size_t>(a.dim) * sizeof(T));
    }
  }
}

// What the rows of one tile see: the first `base` slots, and of the others those listed.
struct Sight {
  int64_t base = 0;
  std::vector<int32_t> slots;      // of all rows, one after the other
  int64_t first[kAttendRows + 1];  // where each row's begin
  const int32_t* list(int64_t row) const { return slots.data() + first[row]; }
  int64_t rest(int64_t row) const { return first[row + 1] - first[row]; }
};

inline void look(const AttentionArgs& a, int64_t row, int64_t rows, Sight& sight) {
  const int64_t window = a.length - a.width;
  const uint8_t* mask = a.mask + row * a.width;
  int64_t run = a.width;
  for (int64_t r = 0; r < rows && run > 0; ++r) {
    const void* hidden = std::memchr(mask + r * a.width, 0, static_cast<size_t>(run));
    if (hidden != nullptr) run = static_cast<const uint8_t*>(hidden) - (mask + r * a.width);
  }
  sight.base = (window + run) / kTogether * kTogether;
  sight.slots.clear();
  for (int64_t r = 0; r < rows; ++r) {
    sight.first[r] = static_cast<int64_t>(sight.slots.size());
    for (int64_t slot = sight.base; slot < a.length; ++slot) {
      if (slot < window || mask[r * a.width + slot - window] != 0)
        sight.slots.push_back(static_cast<int32_t>(slot));
    }
  }
  sight.first[rows] = static_cast<int64_t>(sight.slots.size());
}

// scores[q][i] = x[q] . key i for `count` keys: slot i, or with a list the slot it names. There is room for a
// multiple of 16.
template <class T>
void score(const Query<T>* x, int64_t queries, const T* keys, const int32_t* list, int64_t count, int64_t dim,
           float* scores, int64_t stride) {
  constexpr Format kFormat = std::is_same_v<T, float> ? Format::f32 : Format::bf16;
  const int64_t bytes = dim * static_cast<int64_t>(sizeof(T));
  thread_local std::vector<uint8_t> laid_out(static_cast<size_t>(kKeyBlocks * kLanes * kMaxDim) * sizeof(T));
  for (int64_t start = 0; start < count; start += kKeyBlocks * kLanes) {
    const int64_t here = std::min(kKeyBlocks * kLanes, count - start), blocks = (here + kLanes - 1) / kLanes;
    for (int64_t b = 0; b < blocks; ++b) {
      const uint8_t* rows[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        const int64_t key =
            std::min(start + b * kLanes + i, count - 1);  // the last one again, where there are no more
        rows[i] = reinterpret_cast<const uint8_t*>(keys + (list == nullptr ? key : list[key]) * dim);
      }
      uint8_t* block = laid_out.data() + b * bytes * kLanes;
      for (int64_t at = 0; at < bytes; at += 4 * kSquare)
        transpose_square(rows, at, bytes - at, block + at * kLanes);
    }
    const Operand operand{laid_out.data(), bytes * kLanes, dim};
    for (int64_t q = 0; q < queries; q += kRowTile) {
      const Inputs<Query<T>> in{x + q * dim, nullptr};
      product<kFormat>(in, operand, std::min<int64_t>(kRowTile, queries - q), blocks,
                       scores + q * stride + start, stride);
    }
  }
}

// Scores become shares[i] = e^(scale (score - highest)), zero up to a multiple of 16. Returns the sum of the
// shares.
inline float soften(float* scores, int64_t count, float scale, Share* shares) {
  const int64_t end = (count + kLanes - 1) / kLanes * kLanes;
  std::fill(scores + count, scores + end, -std::numeric_limits<float>::infinity());
  F top = all(-std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < end; i += kLanes) top = largest(top, load(scores + i));
  const F least = all(highest(top)), factor = all(scale);
  F total = zeros();
  for (int64_t i = 0; i < end; i += kLanes) {
    F share = rounded<Share>(exponential(mul(sub(load(scores + i), least), factor)));
    if (count - i < kLanes) {
      float some[kLanes];
      store(some, share);
      std::fill(some + (count - i), some + kLanes, 0.0f);
      share = load(some);
    }
    store_as(shares + i, share);
    total = add(total, share);
  }
  return sum(total);
}

constexpr int64_t kWide = 2 * kLanes;  // columns at a time

#ifdef SWIFTSPEC_DOT_BF16

// out[q] += sum over i of shares[q][i] value i, two at a time in that order, for M queries and the `columns`
// that are left, at most 32. They stand in `out` as interleaving leaves them, until `in_order`.
template <int M>
void gather_columns(const uint16_t* shares, int64_t stride, const uint16_t* values, const int32_t* list,
                    int64_t count, int64_t dim, int64_t columns, float* out, int64_t out_stride) {
  const __mmask16 here = columns >= kWide ? 0xffff : 0x00ff;  // pairs of columns
  F total[M][2];
  read(total, out, out_stride);
  for (int64_t i = 0; i < count; i += 2) {
    const int64_t j = std::min(i + 1, count - 1);  // the share beyond the last is zero
    const __m512i first = _mm512_maskz_loadu_epi32(here, values + (list == nullptr ? i : list[i]) * dim);
    const __m512i second = _mm512_maskz_loadu_epi32(here, values + (list == nullptr ? j : list[j]) * dim);
    const Pair pairs[2] = {(Pair)_mm512_unpacklo_epi16(first, second),
                           (Pair)_mm512_unpackhi_epi16(first, second)};
    add_pair(total, pairs, shares + i, stride);
  }
  write(total, out, out_stride);
}

inline void in_order(float* columns) {  // quarters 0 2 4 6, 1 3 5 7 -> 0 1 2 3, 4 5 6 7
  const F even = load(columns), odd = load(columns + kLanes);
  const F first = _mm512_shuffle_f32x4(even, odd, 0x44), last = _mm512_shuffle_f32x4(even, odd, 0xee);
  store(columns, _mm512_shuffle_f32x4(first, first, 0xd8));
  store(columns + kLanes, _mm512_shuffle_f32x4(last, last, 0xd8));
}

#else

template <int M, int B, class T>
void gather_blocks(const float* shares, int64_t stride, const T* values, const int32_t* list, int64_t count,
                   int64_t dim, float* out, int64_t out_stride) {
  F total[M][B];
  read(total, out, out_stride);
  for (int64_t i = 0; i < count; ++i) {
    const T* value = values + (list == nullptr ? i : list[i]) * dim;
    F columns[B];
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) columns[b] = load_as(value + b * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const F share = all(shares[m * stride + i]);
#pragma GCC unroll 8
      for (int b = 0; b < B; ++b) total[m][b] = fma(share, columns[b], total[m][b]);
    }
  }
  write(total, out, out_stride);
}

// out[q] += sum over i of shares[q][i] value i, in that order, for M queries and the `columns` that are left,
// at most 32.
template <int M, class T>
void gather_columns(const float* shares, int64_t stride, const T* values, const int32_t* list, int64_t count,
                    int64_t dim, int64_t columns, float* out, int64_t out_stride) {
  if (columns >= kWide && 2 * M <= kChains) {
    gather_blocks<M, 2>(shares, stride, values, list, count, dim, out, out_stride);
    return;
  }
  for (int64_t c = 0; c < std::min(columns, kWide); c += kLanes) {
    gather_blocks<M, 1>(shares, stride, values + c, list, count, dim, out + c, out_stride);
  }
}

inline void in_order(float*) {}

#endif

template <int M = kRowTile, class T>
void gather(const Share* shares, int64_t queries, int64_t stride, const T* values, const int32_t* list,
            int64_t count, int64_t dim, float* out, int64_t out_stride) {
  for (; queries >= M; queries -= M, shares += M * stride, out += M * out_stride) {
    for (int64_t c = 0; c < dim; c += kWide) {
      gather_columns<M>(shares, stride, values + c, list, count, dim, dim - c, out + c, out_stride);
    }
  }
  if constexpr (M > 1) {
    if (queries > 0) gather<M / 2>(shares, queries, stride, values, list, count, dim, out, out_stride);
  }
}

// One key-value head for the rows from `row` on, which see what `sight` says.
template <class T>
void attend(const AttentionArgs& a, int64_t row, int64_t rows, int64_t g, const Sight& sight) {
  using X = Query<T>;
  const int64_t group = a.heads / a.kv_heads, queries = rows * group, dim = a.dim;
  const int64_t stride = (a.length + 2 * kLanes) / kLanes * kLanes,
                out_stride = (dim + kWide - 1) / kWide * kWide;
  thread_local std::vector<X> x;  // they grow to the largest tile once
  thread_local std::vector<Share> shares;
  thread_local std::vector<float> scores, totals, out;
  x.resize(static_cast<size_t>(queries * dim));
  scores.resize(static_cast<size_t>(queries * stride));
  shares.resize(scores.size());
  totals.resize(static_cast<size_t>(queries));
  out.assign(static_cast<size_t>(queries * out_stride), 0.0f);
  const int64_t width = (a.heads + 2 * a.kv_heads) * dim;
  for (int64_t q = 0; q < queries; ++q) {
    const int64_t r = row + q / group, head = g * group + q % group;
    rotate(static_cast<const T*>(a.qkv) + r * width + head * dim, static_cast<const T*>(a.cos) + r * dim,
           static_cast<const T*>(a.sin) + r * dim, dim, x.data() + q * dim);
  }
  const T* keys = static_cast<const T*>(a.keys) + g * a.capacity * dim;
  const T* values = static_cast<const T*>(a.values) + g * a.capacity * dim;
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(dim));
  score<T>(x.data(), queries, keys, nullptr, sight.base, dim, scores.data(), stride);
  for (int64_t q = 0; q < queries; q += group) {
    const int64_t r = q / group;
    float* mine = scores.data() + q * stride;
    score<T>(x.data() + q * dim, group, keys, sight.list(r), sight.rest(r), dim, mine + sight.base, stride);
    for (int64_t h = 0; h < group; ++h, mine += stride) {
      totals[static_cast<size_t>(q + h)] =
          soften(mine, sight.base + sight.rest(r), scale, shares.data() + (q + h) * stride);
    }
  }
  gather(shares.data(), queries, stride, values, nullptr, sight.base, dim, out.data(), out_stride);
  for (int64_t q = 0; q < queries; ++q) {
    const int64_t r = q / group;
    float* mine = out.data() + q * out_stride;
    if (q % group == 0) {
      const Share* rest = shares.data() + q * stride + sight.base;
      gather(rest, group, stride, values, sight.list(r), sight.rest(r), dim, mine, out_stride);
    }
    T* to = static_cast<T*>(a.out) + ((row + r) * a.heads + g * group + q % group) * dim;
    for (int64_t c = 0; c < dim; c += kWide) in_order(mine + c);
    for (int64_t c = 0; c < dim; c += kLanes) {
      store_as(to + c, div(load(mine + c), all(totals[static_cast<size_t>(q)])));
    }
  }
}

template <class T>
void attention(const AttentionArgs& a) {
  append<T>(a);
  const auto one = [&](int64_t piece) {
    thread_local Sight sight;
    const int64_t row = piece / a.kv_heads * kAttendRows, rows = std::min(kAttendRows, a.rows - row);
    look(a, row, rows, sight);
    attend<T>(a, row, rows, piece % a.kv_heads, sight);
  };
  const int64_t pieces = (a.rows + kAttendRows - 1) / kAttendRows * a.kv_heads;
  if (a.rows * a.length * a.heads * a.dim >= kWorthSharing) return share(pieces, one);
  for (int64_t piece = 0; piece < pieces; ++piece) one(piece);
}
