// Small-M linear layers with fused prologue (RMSNorm) and epilogue (bias, scale, residual or activation(gate) * up).
// Included inside the namespace of an ISA level.

// Runs body(i) for every i in [0, tasks), on several threads if the job has enough multiply-adds.
template <class Body>
void run_tasks(int64_t tasks, int64_t multiply_adds, const Body& body) {
  if (multiply_adds >= kMinParallelWork) return parallel_for(tasks, body);
  for (int64_t i = 0; i < tasks; ++i) body(i);
}

template <class T>
float sum_of_squares(const T* x, int64_t k) {
  F square = zeros();
  for (int64_t i = 0; i < k; i += kLanes) {
    const F v = load_partial(x + i, k - i);
    square = fma(v, v, square);
  }
  return reduce_add(square);
}

// The factor of an RMSNorm over `count` elements.
inline float norm_scale(float squares, float count, float eps) { return 1.0f / __builtin_sqrtf(squares / count + eps); }

// Applies an RMSNorm with the factor `by` to k elements, rounded to T before the weight is applied, as transformers does,
// and to R after it.
template <class T, class R = T, class X>
void apply_norm(const T* x, const float* weight, float by, int64_t k, X* out) {
  const F scale = broadcast(by);
  for (int64_t i = 0; i < k; i += kLanes) {
    const F v = rounded<T>(mul(load_partial(x + i, k - i), scale));
    store_partial(out + i, rounded<R>(mul(v, load_partial(weight + i, k - i))), k - i);
  }
}

// RMSNorm of one row of k.
template <class T, class R = T, class X>
void rms_norm(const T* x, const float* weight, float eps, int64_t k, X* out) {
  apply_norm<T, R>(x, weight, norm_scale(sum_of_squares(x, k), static_cast<float>(k), eps), k, out);
}

// Reorders the k values of a row: value i becomes value order[i].
template <class X>
void reorder_row(const int32_t* order, int64_t k, X* row) {
  thread_local std::vector<X> before;
  before.assign(row, row + k);
  for (int64_t i = 0; i < k; ++i) row[i] = before[static_cast<size_t>(order[i])];
}

// Returns the input rows as values of type X, rounded to R: normalised if there is a norm, in the order of the matrix,
// and padded with zeros to a multiple of 8 inputs. Returns `a.x` itself if it has this form already.
template <class T, class R, class X>
const X* prepare_rows(const LinearArgs& a, AlignedVector<X>& scratch) {
  const Weights& w = *a.weights;
  const int64_t padded = (w.k + 7) / 8 * 8;
  const T* rows = static_cast<const T*>(a.x);
  const X* x = reinterpret_cast<const X*>(rows);
  if (!std::is_same_v<T, X> || !std::is_same_v<T, R> || a.norm != nullptr || w.order != nullptr || padded != w.k) {
    scratch.resize(static_cast<size_t>(a.rows * padded));
    run_tasks(a.rows, a.rows * w.k, [&, to = scratch.data()](int64_t r) {
      X* out = to + r * padded;
      if (a.norm != nullptr) {
        rms_norm<T, R>(rows + r * w.k, a.norm, a.eps, w.k, out);
      } else {
        for (int64_t i = 0; i < w.k; i += kLanes)
          store_partial(out + i, rounded<R>(load_partial(rows + r * w.k + i, w.k - i)), w.k - i);
      }
      if (w.order != nullptr) reorder_row(w.order, w.k, out);
      std::fill(out + w.k, out + padded, X{});
    });
    x = scratch.data();
  }
  return x;
}

template <class X>
Inputs<X> with_group_sums(const LinearArgs& a, const X* x, std::vector<float>& sums) {
  const Weights& w = *a.weights;
  if (w.group == 0) return {x, nullptr};
  const int64_t groups = w.k / w.group;
  sums.resize(static_cast<size_t>(a.rows * groups));
  for (int64_t i = 0; i < a.rows * groups; ++i) {
    F total = zeros();
    for (int64_t k = 0; k < w.group; k += kLanes) total = add(total, load_as(x + i * w.group + k));
    sums[static_cast<size_t>(i)] = reduce_add(total);
  }
  return {x, sums.data()};
}

// Rows of the product for one input row: with two int8 numbers per input, the second ones are a row of their own.
inline int64_t rows_per_input(const Weights& w) { return w.int8_activations == 2 ? 2 : 1; }

// Quantises the input rows to int8. `place(row)`: the RowPlace of a row of the product.
template <class X, class Place>
void quantize_rows(const LinearArgs& a, const X* x, const Place& place) {
  const Weights& w = *a.weights;
  const int64_t parts = rows_per_input(w);
  run_tasks(a.rows, a.rows * w.k, [&](int64_t row) {
    RowPlace rest{};
    if (parts == 2) rest = place(2 * row + 1);
    quantize_row(x + row * w.k, w.k, w.group, place(parts * row), parts == 2 ? &rest : nullptr);
  });
}

// Buffers of quantised rows; thread-local ones grow to the largest input once.
struct QuantizedBuffers {
  AlignedVector<uint32_t> words;
  std::vector<float> scales, sums;

  void resize(int64_t rows, int64_t row_words, int64_t groups, int64_t extra_words) {
    words.resize(static_cast<size_t>(rows * row_words + extra_words));
    scales.resize(static_cast<size_t>(rows * groups));
    sums.resize(static_cast<size_t>(rows * groups));
  }
};

// Returns the input rows quantised and interleaved in tiles.
template <class X>
QuantizedRows interleaved_rows(const LinearArgs& a, const X* x, QuantizedBuffers& to) {
  const int64_t row_words = a.weights->k / 4, groups = a.weights->k / a.weights->group;
  const int64_t rows = a.rows * rows_per_input(*a.weights);
  to.resize(rows, row_words, groups, 0);
  quantize_rows(a, x, [&, words = to.words.data(), scales = to.scales.data(), sums = to.sums.data()](int64_t row) {
    const int64_t first = row / kRowTile * kRowTile, tile_rows = std::min<int64_t>(kRowTile, rows - first);
    const int64_t scale = first * groups + row - first;
    return RowPlace{words + first * row_words + row - first, tile_rows,    row_words, 0,
                    scales + scale,                          sums + scale, tile_rows};
  });
  return {to.words.data(), to.scales.data(), to.sums.data()};
}

#ifdef SWIFTSPEC_TILES

// Returns the input rows quantised, in the order of tiles.
template <class X>
TileRows rows_for_tiles(const LinearArgs& a, const X* x, QuantizedBuffers& to) {
  const int64_t row_words = a.weights->k / 4, groups = a.weights->k / a.weights->group;
  const int64_t inputs = tile_inputs(a.weights->group), rows = a.rows * rows_per_input(*a.weights);
  to.resize(rows, row_words, groups, (kMaxTileRows - 1) * inputs / 4);
  quantize_rows(a, x, [&, words = to.words.data(), scales = to.scales.data(), sums = to.sums.data()](int64_t row) {
    return RowPlace{words + row * inputs / 4, 1,          inputs / 4, rows * inputs / 4,
                    scales + row,             sums + row, rows};
  });
  return {reinterpret_cast<const int8_t*>(to.words.data()), to.scales.data(), to.sums.data(), rows};
}

// Returns the input rows in the order of tiles.
template <class X>
Bf16TileRows bf16_rows_for_tiles(const LinearArgs& a, const X* x, AlignedVector<uint16_t>& to) {
  const int64_t k = a.weights->k;
  to.resize(static_cast<size_t>(a.rows * k + (kMaxTileRows - 1) * kBf16TileInputs));
  run_tasks(a.rows, a.rows * k, [&, out = to.data()](int64_t row) {
    for (int64_t i = 0; i < k; i += kLanes) {
      const int64_t tile = i / kBf16TileInputs * kBf16TileInputs;
      store_as(out + tile * a.rows + row * kBf16TileInputs + i - tile, load_as(x + row * k + i));
    }
  });
  return {to.data(), kBf16TileInputs, a.rows * kBf16TileInputs};
}

#endif

inline F add_bias(F x, const float* bias, int64_t column, int64_t count) {
  return bias == nullptr ? x : add(x, load_partial(bias + column, count));
}

// soft_cap, except that the logits of masked outputs, which are -inf, stay -inf.
inline F soft_cap_logits(F x, float c) {
  return add(soft_cap(x, c), sub(x, max(x, broadcast(std::numeric_limits<float>::lowest()))));
}

// Adds the bias and the residual to one row's sums and stores them; columns from `end` on are not stored.
template <class T>
void store_outputs(const LinearArgs& a, const float* sums, int64_t row, int64_t column, int64_t end) {
  const int64_t n = a.weights->n;
  for (; column < end; column += kLanes, sums += kLanes) {
    const int64_t at = row * n + column, count = end - column;
    F value = add_bias(load(sums), a.weights->bias, column, count);
    if (a.scale != 1.0f) value = mul(value, broadcast(a.scale));
    if (a.logits != nullptr) {
      store_partial(a.logits + at, a.softcap > 0.0f ? soft_cap_logits(value, a.softcap) : value, count);
    } else if (a.residual != nullptr) {
      const F before = load_partial(static_cast<const T*>(a.residual) + at, count);
      store_partial(static_cast<T*>(a.out) + at, add(rounded<T>(value), before), count);
    } else {
      store_partial(static_cast<T*>(a.out) + at, value, count);
    }
  }
}

// SiLU(x) = x / (1 + e^-x).
inline F silu(F x) { return div(x, add(broadcast(1.0f), exponential(sub(zeros(), x)))); }

// GELU in its approximation by tanh: x / (1 + e^(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
inline F gelu_tanh(F x) {
  const F cubic = mul(mul(x, x), mul(x, broadcast(0.044715f)));
  const F u = mul(add(x, cubic), broadcast(-2.0f * 0.7978845608f));
  return div(x, add(broadcast(1.0f), exponential(u)));
}

// Returns activation(gate) * up.
template <class T>
F apply_gate(Gate kind, F gate, F up) {
  if (kind != Gate::clamped_swiglu) return mul(rounded<T>(kind == Gate::silu ? silu(gate) : gelu_tanh(gate)), up);
  const F limit = broadcast(kSwigluLimit), one = broadcast(1.0f);  // NaN stays NaN as second operand of min and max
  const F low = min(limit, gate), shift = max(broadcast(-kSwigluLimit), min(limit, up));
  const F activated = div(low, add(one, exponential(mul(low, broadcast(-kSwigluAlpha)))));
  return mul(rounded<T>(activated), add(shift, one));
}

// Stores activation(gate) * up of one row. Gates start at `column`, the corresponding ups in the second half of the
// outputs.
template <class T>
void store_gated(const LinearArgs& a, const float* gates, const float* ups, int64_t row, int64_t column,
                  int64_t end) {
  const int64_t half = a.weights->n / 2;
  for (; column < end; column += kLanes, gates += kLanes, ups += kLanes) {
    const int64_t count = end - column;
    const F gate = rounded<T>(add_bias(load(gates), a.weights->bias, column, count));
    const F up = rounded<T>(add_bias(load(ups), a.weights->bias, half + column, count));
    store_partial(static_cast<T*>(a.out) + row * half + column, apply_gate<T>(a.gate, gate, up), count);
  }
}

inline Operand operand_of(const Weights& w) {
  const int64_t k = (w.k + 7) / 8 * 8;
  return {static_cast<const uint8_t*>(w.data), k * kLanes * bits_of(w.format) / 8, k,
          static_cast<const uint8_t*>(w.scales), w.scale_type, w.zeros,
          static_cast<const uint8_t*>(w.minima), static_cast<const uint8_t*>(w.super_scales),
          static_cast<const uint8_t*>(w.super_minima), w.group};
}

template <class T>
void add_to(const T* x, int64_t count, T* into) {
  for (int64_t i = 0; i < count; i += kLanes) {
    store_partial(into + i, add(load_partial(x + i, count - i), load_partial(into + i, count - i)), count - i);
  }
}

// Blocks of outputs computed for all rows before the next ones, so that their weights stay in the CPU cache.
constexpr int64_t kStripBlocks = 8;

// Computes the outputs of strip number `strip` for all rows. With a gate a strip has half as many gates, and their ups.
template <class T, class In>
void linear_strip(const LinearArgs& a, const In& in, int64_t strip) {
  const Weights& w = *a.weights;
  const Operand whole = operand_of(w);
  constexpr int64_t kStride = (kStripBlocks + 1) * kLanes;
  alignas(64) float sums[In::kMaxRows * kStride];
  alignas(64) float ups[In::kMaxRows * kStride];
  const bool gated = a.gate != Gate::none;
  const int64_t half = w.n / 2, outputs = gated ? half : w.n,
                width = (gated ? kStripBlocks / 2 : kStripBlocks) * kLanes;
  const int64_t column = strip * width, end = std::min(outputs, column + width);
  const int64_t blocks = (end - column + kLanes - 1) / kLanes;
  const int64_t up_block = (half + column) / kLanes, up_shift = (half + column) % kLanes;
  const int64_t up_blocks = (up_shift + end - column + kLanes - 1) / kLanes;
  const int64_t parts = rows_per_input(w), all_rows = a.rows * parts;
  for (int64_t row = 0; row < all_rows; row += In::kMaxRows) {  // kMaxRows is even
    const int64_t rows = std::min<int64_t>(In::kMaxRows, all_rows - row);
    const In tile = in.from(row, whole);
    dispatch_product(w.format, tile, advance(whole, column / kLanes), rows, blocks, sums, kStride);
    if (gated) dispatch_product(w.format, tile, advance(whole, up_block), rows, up_blocks, ups, kStride);
    for (int64_t r = 0; r < rows; r += parts) {
      float *row_sums = sums + r * kStride, *row_ups = ups + r * kStride;
      const int64_t out_row = (row + r) / parts;
      if (parts == 2) {
        add_to(row_sums + kStride, blocks * kLanes, row_sums);
        if (gated) add_to(row_ups + kStride, up_blocks * kLanes, row_ups);
      }
      if (gated) {
        store_gated<T>(a, row_sums, row_ups + up_shift, out_row, column, end);
      } else {
        store_outputs<T>(a, row_sums, out_row, column, end);
      }
    }
  }
}

// The number of strips of outputs.
inline int64_t count_strips(const LinearArgs& a) {
  const bool gated = a.gate != Gate::none;
  const int64_t width = (gated ? kStripBlocks / 2 : kStripBlocks) * kLanes;
  return ((gated ? a.weights->n / 2 : a.weights->n) + width - 1) / width;
}

// The input rows of a projection in the form that its product reads. Products with bfloat16 weights round them to
// bfloat16. The buffers grow to the largest input.
template <class T>
class PreparedRows {
 public:
  void prepare(const LinearArgs& a) {
    if (a.weights->format == Format::bf16) {
      const Packed16* halves = prepare_rows<T, uint16_t>(a, halves_);
#ifdef SWIFTSPEC_TILES
      if (bf16_suits_tiles(a.weights->k)) {
        in_ = bf16_rows_for_tiles(a, halves, tiles_);
        return;
      }
#endif
      in_ = Inputs<Packed16>{halves, nullptr};
      return;
    }
    const X* x = prepare_rows<T, T>(a, scratch_);
#ifdef SWIFTSPEC_TILES
    if (a.weights->int8_activations != 0 && suits_tiles(a.rows * rows_per_input(*a.weights), a.weights->group)) {
      in_ = rows_for_tiles(a, x, quantized_);
      return;
    }
#endif
    if (a.weights->int8_activations != 0) {
      in_ = interleaved_rows(a, x, quantized_);
    } else if constexpr (std::is_same_v<X, Packed16>) {  // see `has_product`
      in_ = with_group_sums(a, x, sums_);
    }
  }

  // Computes the outputs of strip number `strip` of the prepared projection for all rows.
  void compute_strip(const LinearArgs& a, int64_t strip) const {
    std::visit([&](const auto& in) { linear_strip<T>(a, in, strip); }, in_);
  }

 private:
  using X = std::conditional_t<std::is_same_v<T, float>, float, Packed16>;

  AlignedVector<X> scratch_;
  AlignedVector<Packed16> halves_;
  std::vector<float> sums_;
  QuantizedBuffers quantized_;
#ifdef SWIFTSPEC_TILES
  AlignedVector<uint16_t> tiles_;
  std::variant<Inputs<Packed16>, QuantizedRows, TileRows, Bf16TileRows> in_;
#else
  std::variant<Inputs<Packed16>, QuantizedRows> in_;
#endif
};

// Whether this level has the product of float32 rows with these weights. Levels with products of bfloat16 pairs leave
// those with float32 weights, and with codes that are multiplied by float32 rows, to another level.
[[maybe_unused]] inline bool has_product([[maybe_unused]] const Weights* w) {
#ifdef SWIFTSPEC_DOT_BF16
  return w == nullptr || w->format == Format::bf16 || w->int8_activations != 0;
#else
  return true;
#endif
}

template <class T>
void linear(const LinearArgs& a) {
  thread_local PreparedRows<T> own;  // thread-local buffers grow to the largest input once
  PreparedRows<T>& rows = own;       // that of the calling thread in all tasks
  rows.prepare(a);
  run_tasks(count_strips(a), a.rows * a.weights->n * a.weights->k,
            [&](int64_t strip) { rows.compute_strip(a, strip); });
}

template <class T>
void norm_add(const T* x, int64_t rows, int64_t n, const float* norm, float eps, float scale, T* into) {
  thread_local std::vector<T> normed;  // grows to the longest row once
  normed.resize(static_cast<size_t>(n));
  const F factor = broadcast(scale);
  for (int64_t row = 0; row < rows; ++row, x += n, into += n) {
    if (norm != nullptr) rms_norm(x, norm, eps, n, normed.data());
    const T* from = norm == nullptr ? x : normed.data();
    for (int64_t i = 0; i < n; i += kLanes) {
      const F value = rounded<T>(mul(load_partial(from + i, n - i), factor));
      store_partial(into + i, add(value, load_partial(into + i, n - i)), n - i);
    }
  }
}

template <class T>
void apply_gates(const T* x, int64_t stride, int64_t rows, int64_t n, Gate kind, T* gates) {
  for (int64_t row = 0; row < rows; ++row, x += stride, gates += n) {
    for (int64_t i = 0; i < n; i += kLanes) {
      const F gate = load_partial(gates + i, n - i);
      store_partial(gates + i, apply_gate<T>(kind, gate, load_partial(x + i, n - i)), n - i);
    }
  }
}

template <class T>
void multiply(T* x, int64_t count, float factor) {
  for (int64_t i = 0; i < count; i += kLanes) {
    store_partial(x + i, mul(load_partial(x + i, count - i), broadcast(factor)), count - i);
  }
}
