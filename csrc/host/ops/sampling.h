// Sampling: from logits to tokens, in one or two passes over the vocabulary. Included inside the namespace of an ISA
// level.

// Gumbel noise -ln(-ln(1 - v)) with v as in common/noise.h. ln(1 - v) is computed as ln u, where u is 1 - v rounded,
// plus a correction for the rounding error.
inline F gumbel_lanes(I bits) {
  const F v = min(mul(add(unsigned_to_float(bits), broadcast(0.5f)), broadcast(0x1p-32f)), broadcast(1.0f - 0x1p-24f));
  const F u = sub(broadcast(1.0f), v);
  const F left_out = div(sub(sub(broadcast(1.0f), u), v), u);
  return sub(zeros(), logarithm(sub(sub(zeros(), logarithm(u)), left_out)));
}

inline void gumbel(const uint32_t* bits, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += kLanes) {
    uint32_t some[kLanes] = {};
    std::memcpy(some, bits + i, static_cast<size_t>(std::min(kLanes, count - i)) * sizeof(uint32_t));
    store_partial(out + i, gumbel_lanes(load_int(some)), count - i);
  }
}

inline I mix(I x) {  // noise::mix
  x = mul(bit_xor(x, shift_right<16>(x)), broadcast_int(0x7feb352d));
  x = mul(bit_xor(x, shift_right<15>(x)), broadcast_int(0x846ca68b));
  return bit_xor(x, shift_right<16>(x));
}

// The counters of sixteen tokens from `first` on. Each following vector of sixteen is larger by 16 kGolden.
inline I counters(uint32_t key, uint32_t first) {
  alignas(64) uint32_t lanes[kLanes];
  for (uint32_t i = 0; i < kLanes; ++i) lanes[i] = key + (first + i) * noise::kGolden;
  return load_int(lanes);
}

// noise::bits(key, token) of sixteen tokens.
inline I noise_bits(uint32_t key, I counters) { return mix(bit_xor(mix(counters), broadcast_int(key))); }

// Gumbel noise of `count` tokens from `first` on.
inline void gumbel_row(uint32_t key, uint32_t first, int64_t count, float* out) {
  I at = counters(key, first);
  for (int64_t v = 0; v < count; v += kLanes) {
    store_partial(out + v, gumbel_lanes(noise_bits(key, at)), count - v);
    at = add(at, broadcast_int(noise::kGolden * static_cast<uint32_t>(kLanes)));
  }
}

// The scores of sixteen columns of a row, before tau.
inline F scores_at(const ScoreArgs& a, const float* logits, const float* noise, int64_t column) {
  const int64_t count = a.vocab - column;
  F x = load_partial(logits + column, count);
  if (a.bias != nullptr) x = add(x, load_partial(a.bias + column, count));
  if (a.temperature != 1.0f) x = div(x, broadcast(a.temperature));
  return noise == nullptr ? x : add(x, load_partial(noise + column, count));
}

inline const float* noise_row(const ScoreArgs& a, int64_t row) {
  return a.noise == nullptr ? nullptr : a.noise + a.rows_of_noise[row] * a.vocab;
}

// Bit mask of the lanes inside the vocabulary.
inline unsigned lane_mask(int64_t count) { return count >= kLanes ? 0xffffu : (1u << count) - 1; }

// Running argmax of a row's scores; the first of equal ones wins. If any score is NaN or the best is infinite, the
// token is -1 and the value is infinite, so that the maximum over the ranks of a group is -1 too.
struct ArgMax {
  static constexpr float kInfinite = std::numeric_limits<float>::infinity();
  float value = -kInfinite;
  int64_t at = -1;

  void update(F part, int64_t v, int64_t vocab) {
    unsigned better = not_less_equal(part, broadcast(value)) & lane_mask(vocab - v);
    if (better == 0) return;
    float lanes[kLanes];
    store(lanes, part);
    for (; better != 0; better &= better - 1) {
      const int lane = __builtin_ctz(better);
      if (lanes[lane] <= value) continue;
      value = std::isnan(lanes[lane]) ? kInfinite : lanes[lane];
      at = v + lane;
    }
  }

  int64_t token() const { return std::isfinite(value) ? at : -1; }
};

inline void draw(const ScoreArgs& a, int64_t* tokens, float* values) {
  for (int64_t row = 0; row < a.rows; ++row) {
    const float *logits = a.logits + row * a.stride, *noise = noise_row(a, row);
    ArgMax best;
    for (int64_t v = 0; v < a.vocab; v += kLanes) best.update(scores_at(a, logits, noise, v), v, a.vocab);
    tokens[row] = best.token();
    if (values != nullptr) values[row] = best.value;
  }
}

// Inserts a candidate into the k best so far, largest first. Of equal values the earlier token stays in front.
inline void insert(float value, int64_t token, int64_t k, float* values, int64_t* tokens) {
  int64_t at = k - 1;
  for (; at > 0 && values[at - 1] < value; --at) {
    values[at] = values[at - 1];
    tokens[at] = tokens[at - 1];
  }
  values[at] = value;
  tokens[at] = token;
}

// The k best scores of a row. All its scores are stored in `scores`, which has space for a multiple of 16.
inline void best_scores(const ScoreArgs& a, int64_t row, int64_t k, float* scores, int64_t* tokens,
                        float* values) {
  const float *logits = a.logits + row * a.stride, *noise = noise_row(a, row);
  for (int64_t i = 0; i < k; ++i) {
    values[i] = -std::numeric_limits<float>::infinity();
    tokens[i] = i;
  }
  for (int64_t v = 0; v < a.vocab; v += kLanes) {
    F part = scores_at(a, logits, noise, v);
    if (noise != nullptr && a.tau != 1.0f) part = div(part, broadcast(a.tau));
    store(scores + v, part);
    unsigned better = greater(part, broadcast(values[k - 1])) & lane_mask(a.vocab - v);
    for (; better != 0; better &= better - 1) {
      const int lane = __builtin_ctz(better);
      if (scores[v + lane] > values[k - 1]) insert(scores[v + lane], v + lane, k, values, tokens);
    }
  }
}

// Thread-local buffer for a row's scores, a multiple of 16. It grows to the largest vocabulary once.
inline float* score_buffer(int64_t vocab) {
  thread_local std::vector<float> scores;
  scores.resize(static_cast<size_t>((vocab + kLanes - 1) / kLanes * kLanes));
  return scores.data();
}

inline void children(const ScoreArgs& a, int64_t k, int64_t* tokens, float* values, float* totals) {
  constexpr float kNegInf = -std::numeric_limits<float>::infinity();
  const int64_t padded = (a.vocab + kLanes - 1) / kLanes * kLanes;
  float* scores = score_buffer(a.vocab);
  for (int64_t row = 0; row < a.rows; ++row, tokens += k, values += k) {
    best_scores(a, row, k, scores, tokens, values);
    std::fill(scores + a.vocab, scores + padded, kNegInf);
    const F top = broadcast(values[0]);
    F total = zeros();
    for (int64_t v = 0; v < a.vocab; v += kLanes) {
      const F part = load(scores + v);
      const F weight = exponential(sub(part, top));
      total = add(total, weight);
    }
    // if all scores are -inf the total is -inf, since NaN would corrupt the totals of the group's other ranks
    const float normaliser = values[0] == kNegInf ? kNegInf : values[0] + std::log(reduce_add(total));
    if (totals != nullptr) {
      totals[row] = normaliser;
      continue;
    }
    for (int64_t i = 0; i < k; ++i) values[i] = log_probability(values[i], normaliser);
  }
}

// Approximates scores_at without noise: multiplies by the inverse temperature, since a division would dominate.
inline F approximate_scores_at(const ScoreArgs& a, const float* logits, int64_t column, F inverse) {
  const int64_t count = a.vocab - column;
  const F x = load_partial(logits + column, count);
  return mul(a.bias == nullptr ? x : add(x, load_partial(a.bias + column, count)), inverse);
}

// The scores of a row without noise, and the maximum of each lane.
struct ScoreRow {
  float* scores;
  F best = broadcast(-std::numeric_limits<float>::infinity());

  void set(F part, int64_t v, int64_t vocab) {
    store(scores + v, part);
    if (vocab - v < kLanes) std::fill(scores + vocab, scores + v + kLanes, -std::numeric_limits<float>::infinity());
    best = max(best, load(scores + v));
  }

  float log_prob(int64_t token, int64_t vocab) const {
    const float top = reduce_max(best);
    F total = zeros();
    unsigned nan_lanes = 0;  // `max` and `exponential` do not propagate NaN
    for (int64_t v = 0; v < vocab; v += kLanes) {
      const F score = load(scores + v);
      nan_lanes |= not_less_equal(score, score);
      total = add(total, exponential(sub(score, broadcast(top))));
    }
    return nan_lanes != 0 ? std::numeric_limits<float>::quiet_NaN() : scores[token] - top - std::log(reduce_add(total));
  }
};

constexpr int64_t kWorkPerScore = 16;  // cost of a score, its noise and its exponential, in multiply-adds

template <class Body>
inline void for_each_row(const ScoreArgs& a, const Body& body) {
  if (a.rows * a.vocab * kWorkPerScore >= kMinParallelWork) return parallel_for(a.rows, body);
  for (int64_t row = 0; row < a.rows; ++row) body(row);
}

inline void log_probs(const ScoreArgs& a, const int64_t* tokens, float* out) {
  const F inverse = broadcast(1.0f / a.temperature);
  for_each_row(a, [&](int64_t row) {
    ScoreRow score_row{score_buffer(a.vocab)};
    for (int64_t v = 0; v < a.vocab; v += kLanes) {
      score_row.set(approximate_scores_at(a, a.logits + row * a.stride, v, inverse), v, a.vocab);
    }
    out[row] = score_row.log_prob(tokens[row], a.vocab);
  });
}

// Bit mask of the sixteen tokens whose noisy score may exceed `best`. Their noise g = -ln(-ln(1 - v)) is at most -ln v,
// so only tokens with v <= e^(score - best) can win. e^x is bounded from above by a line through 2^n and 2^(n + 1). NaN
// and infinite scores are included. `score` may be approximate.
inline unsigned may_win(F score, float best, I bits) {
  constexpr float kLog2e = 1.44269504f, kMantissa = 0x1p23f;
  constexpr float kSlack = 1.0001f, kNear = 0x1p-21f;  // margins for rounding errors
  const F v = mul(unsigned_to_float(bits), broadcast(0x1p-32f));
  const F size = as_float(bit_and(as_int(score), broadcast_int(0x7fffffff)));
  const F x = min(max(fma(size, broadcast(kNear), sub(score, broadcast(best))), broadcast(-80.0f)), broadcast(80.0f));
  const F line = as_float(to_int(fma(x, broadcast(kLog2e * kMantissa), broadcast(127.0f * kMantissa))));
  return greater(mul(line, broadcast(kSlack)), v) | not_less_equal(score, broadcast(std::numeric_limits<float>::max()));
}

inline void draw_keyed(const ScoreArgs& a, const uint32_t* keys, int64_t* tokens, float* log_probs) {
  const F inverse = broadcast(1.0f / a.temperature);
  for_each_row(a, [&](int64_t row) {
    const float* logits = a.logits + row * a.stride;
    const uint32_t key = keys[row];
    ArgMax best;
    ScoreRow score_row{log_probs == nullptr ? nullptr : score_buffer(a.vocab)};
    I at = counters(key, 0);
    for (int64_t v = 0; v < a.vocab; v += kLanes) {
      const F part = approximate_scores_at(a, logits, v, inverse);
      if (log_probs != nullptr) score_row.set(part, v, a.vocab);
      const I bits = noise_bits(key, at);
      if ((may_win(part, best.value, bits) & lane_mask(a.vocab - v)) != 0) {
        best.update(add(scores_at(a, logits, nullptr, v), gumbel_lanes(bits)), v, a.vocab);
      }
      at = add(at, broadcast_int(noise::kGolden * static_cast<uint32_t>(kLanes)));
    }
    tokens[row] = best.token();
    if (log_probs == nullptr) return;
    log_probs[row] =
        tokens[row] < 0 ? std::numeric_limits<float>::quiet_NaN() : score_row.log_prob(tokens[row], a.vocab);
  });
}
