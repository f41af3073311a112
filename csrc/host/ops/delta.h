// Delta layers: convolution, gated delta rule, norm of each head and gate. Included inside the namespace of an ISA
// level.
//
// For a row n with key k, value v, query q and update rate b, S the state at its fold point, a its ancestors since
// then, G(n, a) the sum of the decays of the rows after a up to n, and G(n) the sum of all since the fold point:
//   u_n = b (v - e^G(n) S'k - sum over a of e^G(n, a) (k . k_a) u_a)
//   o_n = e^G(n) S'q + sum over a, and n itself, of e^G(n, a) (q . k_a) u_a
// A task has one key head and its value heads. For the rows of one fold point it multiplies queries and keys with the
// keys that any of them sees, and with the state, in one product each. Then it solves the rows in order, so that the
// updates of a row's ancestors are known.

constexpr float kDeltaNormEps = 1e-6f;        // of the L2 norm of queries and keys
constexpr int64_t kDeltaRows = kRowTile / 2;  // tile of `multiply_add`: rows, blocks of sixteen columns
constexpr int64_t kDeltaBlocks = kBlocks / 2;

// An operand of `multiply_add`: element (row, step) is at[row * row_stride + step * step_stride].
struct Factors {
  const float* at;
  int64_t row_stride, step_stride;
};

// out = scale out + x y for R rows and B blocks of columns. y is [steps, stride].
template <int64_t R, int64_t B>
void multiply_add_tile(const Factors& x, int64_t steps, const float* y, int64_t stride, float scale, float* out) {
  F sums[R][B];
#pragma GCC unroll 8
  for (int64_t r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int64_t b = 0; b < B; ++b) {
      sums[r][b] = scale == 0.0f ? zeros() : mul(load(out + r * stride + b * kLanes), broadcast(scale));
    }
  }
  for (int64_t i = 0; i < steps; ++i) {
    F row[B];
#pragma GCC unroll 8
    for (int64_t b = 0; b < B; ++b) row[b] = load(y + i * stride + b * kLanes);
#pragma GCC unroll 8
    for (int64_t r = 0; r < R; ++r) {
      const F factor = broadcast(x.at[r * x.row_stride + i * x.step_stride]);
#pragma GCC unroll 8
      for (int64_t b = 0; b < B; ++b) sums[r][b] = fma(factor, row[b], sums[r][b]);
    }
  }
#pragma GCC unroll 8
  for (int64_t r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int64_t b = 0; b < B; ++b) store(out + r * stride + b * kLanes, sums[r][b]);
  }
}

template <int64_t B>
void multiply_add_columns(Factors x, int64_t rows, int64_t steps, const float* y, int64_t stride, float scale,
                          float* out) {
  int64_t row = 0;
  for (; row + kDeltaRows <= rows; row += kDeltaRows, out += kDeltaRows * stride) {
    multiply_add_tile<kDeltaRows, B>(x, steps, y, stride, scale, out);
    x.at += kDeltaRows * x.row_stride;
  }
  for (; row < rows; row += 2, out += 2 * stride, x.at += 2 * x.row_stride) {
    multiply_add_tile<2, B>(x, steps, y, stride, scale, out);
  }
}

// out [rows, columns] = scale out + x y [steps, columns], for an even number of rows. Sums are in the order of the
// steps, whatever the tiles.
inline void multiply_add(const Factors& x, int64_t rows, int64_t steps, const float* y, int64_t columns, float scale,
                         float* out) {
  int64_t column = 0;
  for (; column + kDeltaBlocks * kLanes <= columns; column += kDeltaBlocks * kLanes) {
    multiply_add_columns<kDeltaBlocks>(x, rows, steps, y + column, columns, scale, out + column);
  }
  for (; column < columns; column += kLanes) {
    multiply_add_columns<1>(x, rows, steps, y + column, columns, scale, out + column);
  }
}

// Buffers of one task; they grow to the largest forward once.
struct DeltaScratch {
  std::vector<float> rows;     // [rows, 2, k_dim], key and query of each row
  std::vector<float> values;   // [rows, group, v_dim]
  std::vector<float> keys;     // [k_dim, columns], of the slots of a group, padded to whole blocks
  std::vector<float> scores;   // [rows of the group, 2, columns], products with these keys
  std::vector<float> reads;    // [rows of the group, 2, v_dim], products with the state
  std::vector<float> states;   // [group, k_dim, v_dim], folded further than those of the cache
  std::vector<float> updates;  // [columns, v_dim], of the slots of a group or of those to fold
  std::vector<float> decays;   // [columns], the same
  std::vector<float> factors;  // [slots of a row, padded]: e^G(n, a)
};

// e^G below this one counts as 0, since subnormal products would take a hundred times as long.
constexpr float kSmallestDecay = -60.0f;

// out[i] = e^(sum of the decays after i) for i < count, out[count] = e^(sum of all), where decay(i) <= 0 is that of slot
// i. Returns the first i whose factor is not 0, and zeroes those before.
template <class Decay>
int64_t decay_factors(int64_t count, const Decay& decay, std::vector<float>& out) {
  const int64_t padded = (count + kLanes) / kLanes * kLanes;  // at least one more, for the sum of all
  out.assign(static_cast<size_t>(padded), 0.0f);
  float sum = 0.0f;
  int64_t first = count;
  while (first > 0 && !(sum < kSmallestDecay)) {
    out[static_cast<size_t>(--first)] = sum;
    sum += decay(first);
  }
  const bool all = first == 0 && !(sum < kSmallestDecay);
  out[static_cast<size_t>(count)] = sum;
  for (int64_t i = first / kLanes * kLanes; i < padded; i += kLanes) {
    store(out.data() + i, exponential(load(out.data() + i)));
  }
  std::fill_n(out.begin(), first, 0.0f);
  if (!all) out[static_cast<size_t>(count)] = 0.0f;
  return first;
}

// Folds the kFoldPositions slots in `path` into the state [k_dim, v_dim] of one value head. Reads copies of keys and
// updates, because those of consecutive slots lie a power of two apart and compete for the same places in a CPU cache.
inline void fold_head(const DeltaShape& shape, const DeltaSlots& slots, const int64_t* path, int64_t head, float* state,
                      DeltaScratch& s) {
  const int64_t k_head = head / (shape.v_heads / shape.k_heads), columns = shape.v_dim;
  decay_factors(kFoldPositions, [&](int64_t i) { return slots.decays[path[i] * shape.v_heads + head]; }, s.factors);
  s.updates.resize(static_cast<size_t>(kFoldPositions * columns));
  for (int64_t i = 0; i < kFoldPositions; ++i) {
    const float* update = slots.updates + (path[i] * shape.v_heads + head) * columns;
    const F factor = broadcast(s.factors[static_cast<size_t>(i)]);
    for (int64_t c = 0; c < columns; c += kLanes) {
      store(s.updates.data() + i * columns + c, mul(load(update + c), factor));
    }
  }
  s.keys.resize(static_cast<size_t>(kFoldPositions * shape.k_dim));
  for (int64_t i = 0; i < kFoldPositions; ++i) {
    std::copy_n(slots.keys + (path[i] * shape.k_heads + k_head) * shape.k_dim, shape.k_dim,
                s.keys.data() + i * shape.k_dim);
  }
  multiply_add({s.keys.data(), 1, shape.k_dim}, shape.k_dim, kFoldPositions, s.updates.data(), columns,
               s.factors[kFoldPositions], state);
}

inline void fold_delta(const DeltaShape& shape, const DeltaSlots& slots) {
  const int64_t size = shape.k_dim * shape.v_dim;
  int64_t path[kFoldPositions];
  std::iota(path, path + kFoldPositions, 0);
  run_tasks(shape.v_heads, shape.v_heads * size * kFoldPositions, [&](int64_t head) {
    thread_local DeltaScratch scratch;
    fold_head(shape, slots, path, head, slots.state + head * size, scratch);
  });
}

// The slot of entry i of the slots that a row sees. `group`: its group.
inline int64_t slot_of(const DeltaArgs& a, const DeltaGroup& group, const DeltaRow& row, int64_t i) {
  return a.plan->slots[static_cast<size_t>(group.begin_slot + a.plan->visible[static_cast<size_t>(row.begin + i)])];
}

// The convolution of `count` channels from `channel` on at one row, then SiLU, rounded to T.
template <class T>
void convolve(const DeltaArgs& a, const DeltaGroup& group, const DeltaRow& row, int64_t channel, int64_t count,
              float* out) {
  const int64_t width = a.shape.conv_width, size = a.shape.conv_size(), taps = std::min(width, row.count);
  int64_t last[kFoldPositions];
  for (int64_t t = 0; t < taps; ++t) last[t] = slot_of(a, group, row, row.count - taps + t);
  const T* inputs = static_cast<const T*>(a.slots.inputs) + channel;
  const float* weights = a.conv + (width - taps) * size + channel;
  for (int64_t i = 0; i < count; i += kLanes) {
    F sum = zeros();
    for (int64_t t = 0; t < taps; ++t) {
      sum = fma(load_as(inputs + last[t] * size + i), load(weights + t * size + i), sum);
    }
    store(out + i, rounded<T>(silu(sum)));
  }
}

// Divides x by its L2 norm and multiplies it by `scale`.
inline void normalise(float* x, int64_t count, float scale) {
  const F factor = broadcast(scale / __builtin_sqrtf(sum_of_squares(x, count) + kDeltaNormEps));
  for (int64_t i = 0; i < count; i += kLanes) store(x + i, mul(load(x + i), factor));
}

template <class T>
float widen_value(const T* x) {
  if constexpr (sizeof(T) == sizeof(float)) return *x;
  else return widen_one(*x);
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Writes the convolution's inputs, keys and decays of one key head to the slots of the rows, and computes the queries
// and values.
template <class T>
void prepare_head(const DeltaArgs& a, int64_t k_head, DeltaScratch& s) {
  const DeltaShape& shape = a.shape;
  const int64_t group = shape.v_heads / shape.k_heads, conv = shape.conv_size(), k_size = shape.k_heads * shape.k_dim;
  const int64_t width = conv + shape.v_size(), first_head = k_head * group;
  const int64_t query = k_head * shape.k_dim, key = k_size + query, value = 2 * k_size + first_head * shape.v_dim;
  const auto count = static_cast<int64_t>(a.plan->rows.size());
  for (const DeltaRow& row : a.plan->rows) {
    const T* from = static_cast<const T*>(a.projected) + row.row * width;
    T* to = static_cast<T*>(a.slots.inputs) + row.slot * conv;
    std::copy_n(from + query, shape.k_dim, to + query);
    std::copy_n(from + key, shape.k_dim, to + key);
    std::copy_n(from + value, group * shape.v_dim, to + value);
    const T* rates = static_cast<const T*>(a.rates) + row.row * 2 * shape.v_heads + shape.v_heads;
    for (int64_t head = first_head; head < first_head + group; ++head) {
      a.slots.decays[row.slot * shape.v_heads + head] =
          softplus(widen_value(rates + head) + a.decay_bias[head]) * a.decay_factor[head];
    }
  }
  s.rows.resize(static_cast<size_t>(count * 2 * shape.k_dim));
  s.values.resize(static_cast<size_t>(count * group * shape.v_dim));
  for (const DeltaGroup& rows : a.plan->groups) {
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const DeltaRow& row = a.plan->rows[static_cast<size_t>(r)];
      float *k = s.rows.data() + r * 2 * shape.k_dim, *q = k + shape.k_dim;
      convolve<T>(a, rows, row, key, shape.k_dim, k);
      convolve<T>(a, rows, row, query, shape.k_dim, q);
      normalise(k, shape.k_dim, 1.0f);
      normalise(q, shape.k_dim, 1.0f / __builtin_sqrtf(static_cast<float>(shape.k_dim)));
      convolve<T>(a, rows, row, value, group * shape.v_dim, s.values.data() + r * group * shape.v_dim);
      std::copy_n(k, shape.k_dim, a.slots.keys + row.slot * k_size + query);
    }
  }
}

// Transposes the keys of a group's slots to s.keys. Returns the number of columns.
inline int64_t transpose_keys(const DeltaArgs& a, const DeltaGroup& group, int64_t k_head, DeltaScratch& s) {
  const int64_t dim = a.shape.k_dim, columns = (group.columns + kLanes - 1) / kLanes * kLanes;
  s.keys.resize(static_cast<size_t>(dim * columns));
  float block[kTransposeWords * kLanes];
  for (int64_t column = 0; column < columns; column += kLanes) {
    const uint8_t* rows[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) {  // the last block repeats the last slot
      const int64_t at = group.begin_slot + std::min(column + i, group.columns - 1);
      const int64_t key = a.plan->slots[static_cast<size_t>(at)] * a.shape.k_heads + k_head;
      rows[i] = reinterpret_cast<const uint8_t*>(a.slots.keys + key * dim);
    }
    for (int64_t d = 0; d < dim; d += kTransposeWords) {
      transpose_block(rows, d * static_cast<int64_t>(sizeof(float)), 64, reinterpret_cast<uint8_t*>(block));
      for (int64_t i = 0; i < kTransposeWords; ++i) {
        store(s.keys.data() + (d + i) * columns + column, load(block + i * kLanes));
      }
    }
  }
  return columns;
}

// Multiplies keys and queries of a group's rows with the keys of its slots. Returns the number of columns.
inline int64_t score_keys(const DeltaArgs& a, const DeltaGroup& group, int64_t k_head, DeltaScratch& s) {
  const int64_t dim = a.shape.k_dim, columns = transpose_keys(a, group, k_head, s), rows = 2 * (group.end - group.begin);
  s.scores.resize(static_cast<size_t>(rows * columns));
  multiply_add({s.rows.data() + group.begin * 2 * dim, dim, 1}, rows, dim, s.keys.data(), columns, 0.0f,
               s.scores.data());
  return columns;
}

// One row and value head; see the top of the file. `by_key` and `by_query` are the factors of the updates of the slots
// that the row sees, its own last.
struct DeltaSolve {
  const int64_t* visible;  // entries of `updates`
  int64_t first, count;  // entries before the first one have factors of 0
  const float *by_key, *by_query;
  float all, rate;  // e^G(n), b
  float* updates;   // [columns, v_dim]
  int64_t v_dim;
};

// Solves B blocks of columns. `reads` [2, v_dim], `value` and `out` [v_dim].
template <int64_t B>
void solve_columns(const DeltaSolve& a, int64_t column, const float* reads, const float* value, float* out) {
  F update[B], mixed[B];
  const F all = broadcast(a.all);
#pragma GCC unroll 8
  for (int64_t b = 0; b < B; ++b) {
    update[b] = mul(load(reads + column + b * kLanes), all);
    mixed[b] = mul(load(reads + a.v_dim + column + b * kLanes), all);
  }
  for (int64_t i = a.first; i + 1 < a.count; ++i) {
    const float* other = a.updates + a.visible[i] * a.v_dim + column;
    const F by_key = broadcast(a.by_key[i]), by_query = broadcast(a.by_query[i]);
#pragma GCC unroll 8
    for (int64_t b = 0; b < B; ++b) {
      const F x = load(other + b * kLanes);
      update[b] = fma(by_key, x, update[b]);
      mixed[b] = fma(by_query, x, mixed[b]);
    }
  }
  float* own = a.updates + a.visible[a.count - 1] * a.v_dim + column;
  const F rate = broadcast(a.rate), by_query = broadcast(a.by_query[a.count - 1]);
#pragma GCC unroll 8
  for (int64_t b = 0; b < B; ++b) {
    const F u = mul(rate, sub(load(value + column + b * kLanes), update[b]));
    store(own + b * kLanes, u);
    store(out + column + b * kLanes, fma(by_query, u, mixed[b]));
  }
}

// RMSNorm of a head and the gate: out = norm(x) silu(gate), where x is rounded to T before the norm.
template <class T>
void store_head(const DeltaArgs& a, int64_t row, int64_t head, const float* x) {
  const int64_t dim = a.shape.v_dim, conv = a.shape.conv_size(), size = a.shape.v_size();
  thread_local std::vector<T> mixed, normed;  // grow to the widest head once
  mixed.resize(static_cast<size_t>(dim)), normed.resize(static_cast<size_t>(dim));
  for (int64_t i = 0; i < dim; i += kLanes) store_as(mixed.data() + i, load(x + i));
  rms_norm(mixed.data(), a.norm, a.eps, dim, normed.data());
  const T* gate = static_cast<const T*>(a.projected) + row * (conv + size) + conv + head * dim;
  T* out = static_cast<T*>(a.out) + row * size + head * dim;
  for (int64_t i = 0; i < dim; i += kLanes) {
    store_as(out + i, mul(load_as(normed.data() + i), silu(load_as(gate + i))));
  }
}

// Copies updates and decays of a group's slots to s.updates and s.decays. Updates of its rows are not known yet.
inline void gather_slots(const DeltaArgs& a, const DeltaGroup& group, int64_t head, DeltaScratch& s) {
  const int64_t v_dim = a.shape.v_dim;
  s.updates.resize(static_cast<size_t>(group.columns * v_dim));
  s.decays.resize(static_cast<size_t>(group.columns));
  for (int64_t i = 0; i < group.columns; ++i) {
    const int64_t place = a.plan->slots[static_cast<size_t>(group.begin_slot + i)] * a.shape.v_heads + head;
    std::copy_n(a.slots.updates + place * v_dim, v_dim, s.updates.data() + i * v_dim);
    s.decays[static_cast<size_t>(i)] = a.slots.decays[place];
  }
}

// Solves the rows of a group for one value head. `columns`: those of s.scores.
template <class T>
void solve_rows(const DeltaArgs& a, const DeltaGroup& group, int64_t head, int64_t columns, const float* state,
                DeltaScratch& s) {
  const DeltaShape& shape = a.shape;
  const int64_t heads = shape.v_heads / shape.k_heads, v_dim = shape.v_dim, rows = group.end - group.begin;
  s.reads.resize(static_cast<size_t>(rows * 2 * v_dim));
  multiply_add({s.rows.data() + group.begin * 2 * shape.k_dim, shape.k_dim, 1}, 2 * rows, shape.k_dim, state, v_dim,
               0.0f, s.reads.data());
  // grow to the largest forward once
  thread_local std::vector<float> out, by_key, by_query;
  out.resize(static_cast<size_t>(v_dim));
  gather_slots(a, group, head, s);
  for (int64_t r = group.begin; r < group.end; ++r) {
    const DeltaRow& row = a.plan->rows[static_cast<size_t>(r)];
    const int64_t* visible = a.plan->visible.data() + row.begin;
    const int64_t first =
        decay_factors(row.count, [&](int64_t i) { return s.decays[static_cast<size_t>(visible[i])]; }, s.factors);
    const float *key_scores = s.scores.data() + (r - group.begin) * 2 * columns, *query_scores = key_scores + columns;
    for (std::vector<float>* each : {&by_key, &by_query}) each->resize(static_cast<size_t>(row.count));
    for (int64_t i = first; i < row.count; ++i) {
      const auto at = static_cast<size_t>(i);
      by_key[at] = key_scores[visible[i]] * s.factors[at];
      by_query[at] = query_scores[visible[i]] * s.factors[at];
    }
    const float rate = widen_value(static_cast<const T*>(a.rates) + row.row * 2 * shape.v_heads + head);
    const DeltaSolve solve{visible, first, row.count, by_key.data(), by_query.data(),
                           s.factors[static_cast<size_t>(row.count)],
                           1.0f / (1.0f + std::exp(-rate)), s.updates.data(), v_dim};
    const float* reads = s.reads.data() + (r - group.begin) * 2 * v_dim;
    const float* value = s.values.data() + (r * heads + head % heads) * v_dim;
    int64_t column = 0;
    for (; column + kDeltaBlocks * kLanes <= v_dim; column += kDeltaBlocks * kLanes) {
      solve_columns<kDeltaBlocks>(solve, column, reads, value, out.data());
    }
    for (; column < v_dim; column += kLanes) solve_columns<1>(solve, column, reads, value, out.data());
    std::copy_n(s.updates.data() + visible[row.count - 1] * v_dim, v_dim,
                a.slots.updates + row.slot * shape.v_size() + head * v_dim);
    store_head<T>(a, row.row, head, out.data());
  }
}

template <class T>
void delta_head(const DeltaArgs& a, int64_t k_head) {
  thread_local DeltaScratch own;
  DeltaScratch& s = own;
  const DeltaShape& shape = a.shape;
  prepare_head<T>(a, k_head, s);
  const int64_t heads = shape.v_heads / shape.k_heads, size = shape.k_dim * shape.v_dim, first_head = k_head * heads;
  const float *initial = a.slots.state + first_head * size, *states = initial;
  const int64_t* folded = nullptr;  // the slots that `states` has folded beyond those of the cache
  int64_t count = 0;
  for (const DeltaGroup& group : a.plan->groups) {
    const int64_t* path = a.plan->folds.data() + group.begin_fold;
    if (count > 0 && !std::equal(folded, folded + count, path)) states = initial, count = 0;  // another branch
    if (count == 0 && group.folds > 0) {
      s.states.assign(initial, initial + heads * size);
      states = s.states.data();
    }
    for (folded = path; count < group.folds; count += kFoldPositions) {
      for (int64_t i = 0; i < heads; ++i) {
        fold_head(shape, a.slots, path + count, first_head + i, s.states.data() + i * size, s);
      }
    }
    const int64_t columns = score_keys(a, group, k_head, s);
    for (int64_t i = 0; i < heads; ++i) solve_rows<T>(a, group, first_head + i, columns, states + i * size, s);
  }
}

template <class T>
void gated_delta(const DeltaArgs& a) {
  const DeltaShape& shape = a.shape;
  const auto rows = static_cast<int64_t>(a.plan->rows.size());
  run_tasks(shape.k_heads, rows * shape.v_heads * 3 * shape.k_dim * shape.v_dim,
            [&](int64_t k_head) { delta_head<T>(a, k_head); });
}

template <class T>
void multiply_sigmoid(const T* gate, int64_t stride, int64_t rows, int64_t n, T* into) {
  for (int64_t row = 0; row < rows; ++row, gate += stride, into += n) {
    for (int64_t i = 0; i < n; i += kLanes) {
      const F x = load_partial(gate + i, n - i);
      const F sigmoid = rounded<T>(div(broadcast(1.0f), add(broadcast(1.0f), exponential(sub(zeros(), x)))));
      store_partial(into + i, mul(load_partial(into + i, n - i), sigmoid), n - i);
    }
  }
}
