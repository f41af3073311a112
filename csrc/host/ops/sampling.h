// From logits to tokens, a pass or two over a vocabulary. Read inside a level's namespace.

// -ln(-ln(1 - v)), v as common/noise.h has it. ln(1 - v) is ln u for the u next to 1 - v, and what u leaves out.
inline F gumbel_lanes(I bits) {
  const F v = smallest(mul(add(unsigned_to_float(bits), all(0.5f)), all(0x1p-32f)), all(1.0f - 0x1p-24f));
  const F u = sub(all(1.0f), v);
  const F left_out = div(sub(sub(all(1.0f), u), v), u);
  return sub(zeros(), logarithm(sub(sub(zeros(), logarithm(u)), left_out)));
}

inline void gumbel(const uint32_t* bits, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += kLanes) {
    uint32_t some[kLanes] = {};
    std::memcpy(some, bits + i, static_cast<size_t>(std::min(kLanes, count - i)) * sizeof(uint32_t));
    store_some(out + i, gumbel_lanes(load_int(some)), count - i);
  }
}

inline I mix(I x) {  // noise::mix
  x = mul(flip(x, right<16>(x)), all_int(0x7feb352d));
  x = mul(flip(x, right<15>(x)), all_int(0x846ca68b));
  return flip(x, right<16>(x));
}

// What `noise_bits` takes for sixteen tokens from `first` on. The next sixteen are kGolden times as many further.
inline I counters(uint32_t key, uint32_t first) {
  alignas(64) uint32_t lanes[kLanes];
  for (uint32_t i = 0; i < kLanes; ++i) lanes[i] = key + (first + i) * noise::kGolden;
  return load_int(lanes);
}

// Of sixteen tokens of a row: noise::bits(key, token).
inline I noise_bits(uint32_t key, I counters) { return mix(flip(mix(counters), all_int(key))); }

// That of `count` tokens from `first` on.
inline void gumbel_row(uint32_t key, uint32_t first, int64_t count, float* out) {
  I at = counters(key, first);
  for (int64_t v = 0; v < count; v += kLanes) {
    store_some(out + v, gumbel_lanes(noise_bits(key, at)), count - v);
    at = add(at, all_int(noise::kGolden * static_cast<uint32_t>(kLanes)));
  }
}

// The scores of sixteen columns of a row, before tau.
inline F scores_at(const ScoreArgs& a, const float* logits, const float* noise, int64_t column) {
  const int64_t count = a.vocab - column;
  F x = load_some(logits + column, count);
  if (a.bias != nullptr) x = add(x, load_some(a.bias + column, count));
  if (a.temperature != 1.0f) x = div(x, all(a.temperature));
  return noise == nullptr ? x : add(x, load_some(noise + column, count));
}

inline const float* noise_of(const ScoreArgs& a, int64_t row) {
  return a.noise == nullptr ? nullptr : a.noise + a.rows_of_noise[row] * a.vocab;
}

// Columns beyond the vocabulary do not count.
inline unsigned lanes_in(int64_t count) { return count >= kLanes ? 0xffffu : (1u << count) - 1; }

// The highest score of a row so far, of equal ones the first. Without a token (-1) where a score is NaN, which no other
// beats, or the best is infinite. The value is then infinite, so that a group's ranks, who take the best of theirs, have
// none either.
struct Highest {
  static constexpr float kInfinite = std::numeric_limits<float>::infinity();
  float value = -kInfinite;
  int64_t at = -1;

  void take(F part, int64_t v, int64_t vocab, unsigned among = 0xffff) {
    unsigned better = not_at_most(part, all(value)) & lanes_in(vocab - v) & among;
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
    const float *logits = a.logits + row * a.stride, *noise = noise_of(a, row);
    Highest best;
    for (int64_t v = 0; v < a.vocab; v += kLanes) best.take(scores_at(a, logits, noise, v), v, a.vocab);
    tokens[row] = best.token();
    if (values != nullptr) values[row] = best.value;
  }
}

// Puts a candidate in its place among the best so far, largest first; of equal ones the earlier token stays
// in front.
inline void insert(float value, int64_t token, int64_t k, float* values, int64_t* tokens) {
  int64_t at = k - 1;
  for (; at > 0 && values[at - 1] < value; --at) {
    values[at] = values[at - 1];
    tokens[at] = tokens[at - 1];
  }
  values[at] = value;
  tokens[at] = token;
}

// The k best scores of a row; all its scores stay in `scores`, which has room for a multiple of 16.
inline void best_scores(const ScoreArgs& a, int64_t row, int64_t k, float* scores, int64_t* tokens,
                        float* values) {
  const float *logits = a.logits + row * a.stride, *noise = noise_of(a, row);
  for (int64_t i = 0; i < k; ++i) {
    values[i] = -std::numeric_limits<float>::infinity();
    tokens[i] = i;
  }
  for (int64_t v = 0; v < a.vocab; v += kLanes) {
    F part = scores_at(a, logits, noise, v);
    if (noise != nullptr && a.tau != 1.0f) part = div(part, all(a.tau));
    store(scores + v, part);
    unsigned better = greater(part, all(values[k - 1])) & lanes_in(a.vocab - v);
    for (; better != 0; better &= better - 1) {
      const int lane = __builtin_ctz(better);
      if (scores[v + lane] > values[k - 1]) insert(scores[v + lane], v + lane, k, values, tokens);
    }
  }
}

// Room for a row's scores, a multiple of 16; it grows to the largest vocabulary once.
inline float* room_for_scores(int64_t vocab) {
  thread_local std::vector<float> scores;
  scores.resize(static_cast<size_t>((vocab + kLanes - 1) / kLanes * kLanes));
  return scores.data();
}

inline void children(const ScoreArgs& a, int64_t k, int64_t* tokens, float* values, float* totals) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const int64_t room = (a.vocab + kLanes - 1) / kLanes * kLanes;
  float* scores = room_for_scores(a.vocab);
  for (int64_t row = 0; row < a.rows; ++row, tokens += k, values += k) {
    best_scores(a, row, k, scores, tokens, values);
    std::fill(scores + a.vocab, scores + room, kNone);
    const F top = all(values[0]);
    F total = zeros();
    for (int64_t v = 0; v < a.vocab; v += kLanes) {
      const F part = load(scores + v);
      const F weight = exponential(sub(part, top));
      total = add(total, weight);
    }
    // where nothing may follow there is no sum, and NaN would spoil that of a group's other ranks
    const float normaliser = values[0] == kNone ? kNone : values[0] + std::log(sum(total));
    if (totals != nullptr) {
      totals[row] = normaliser;
      continue;
    }
    for (int64_t i = 0; i < k; ++i) values[i] = log_probability(values[i], normaliser);
  }
}

// Near those of scores_at, without noise: a quotient takes longer than all else that is done with a score.
inline F near_at(const ScoreArgs& a, const float* logits, int64_t column, F inverse) {
  const int64_t count = a.vocab - column;
  const F x = load_some(logits + column, count);
  return mul(a.bias == nullptr ? x : add(x, load_some(a.bias + column, count)), inverse);
}

// The scores of a row without noise, and the highest of each lane.
struct Kept {
  float* scores;
  F best = all(-std::numeric_limits<float>::infinity());

  void take(F part, int64_t v, int64_t vocab) {
    store(scores + v, part);
    if (vocab - v < kLanes) std::fill(scores + vocab, scores + v + kLanes, -std::numeric_limits<float>::infinity());
    best = largest(best, load(scores + v));
  }

  float log_prob(int64_t token, int64_t vocab) const {
    const float top = highest(best);
    F total = zeros();
    unsigned unknown = 0;  // NaN: neither `largest` nor `exponential` keeps it
    for (int64_t v = 0; v < vocab; v += kLanes) {
      const F score = load(scores + v);
      unknown |= not_at_most(score, score);
      total = add(total, exponential(sub(score, all(top))));
    }
    return unknown != 0 ? std::numeric_limits<float>::quiet_NaN() : scores[token] - top - std::log(sum(total));
  }

  // Makes them their softmax. False where one of them is NaN.
  bool normalise(int64_t vocab) {
    const F top = all(highest(best));
    F total = zeros();
    unsigned unknown = 0;
    for (int64_t v = 0; v < vocab; v += kLanes) {
      const F score = load(scores + v), weight = exponential(sub(score, top));
      unknown |= not_at_most(score, score);
      total = add(total, weight);
      store(scores + v, weight);
    }
    const F inverse = all(1.0f / sum(total));
    for (int64_t v = 0; v < vocab; v += kLanes) store(scores + v, mul(load(scores + v), inverse));
    return unknown == 0;
  }
};

constexpr int64_t kScore = 16;  // products of two numbers that a score, its noise and its exponential take as long as

template <class One>
inline void each_row(const ScoreArgs& a, const One& one) {
  if (a.rows * a.vocab * kScore >= kWorthSharing) return share(a.rows, one);
  for (int64_t row = 0; row < a.rows; ++row) one(row);
}

inline void log_probs(const ScoreArgs& a, const int64_t* tokens, float* out) {
  const F inverse = all(1.0f / a.temperature);
  each_row(a, [&](int64_t row) {
    Kept kept{room_for_scores(a.vocab)};
    for (int64_t v = 0; v < a.vocab; v += kLanes) {
      kept.take(near_at(a, a.logits + row * a.stride, v, inverse), v, a.vocab);
    }
    out[row] = kept.log_prob(tokens[row], a.vocab);
  });
}

// Which of sixteen tokens may beat `best` with their noise g = -ln(-ln(1 - v)): g <= -ln v, so only those whose
// v <= e^(score - best). That is held against a line through 2^n and 2^(n + 1), which lies above e^x; where a score is no
// number, or infinite, the token may. `score`: near it.
inline unsigned may_win(F score, float best, I bits) {
  constexpr float kLog2e = 1.44269504f, kMantissa = 0x1p23f, kRoom = 1.0001f, kNear = 0x1p-21f;  // for rounding
  const F v = mul(unsigned_to_float(bits), all(0x1p-32f));
  const F size = as_float(both(as_int(score), all_int(0x7fffffff)));
  const F x = smallest(largest(fma(size, all(kNear), sub(score, all(best))), all(-80.0f)), all(80.0f));
  const F line = as_float(to_int(fma(x, all(kLog2e * kMantissa), all(127.0f * kMantissa))));
  return greater(mul(line, all(kRoom)), v) | not_at_most(score, all(std::numeric_limits<float>::max()));
}

inline void draw_keyed(const ScoreArgs& a, const uint32_t* keys, int64_t* tokens, float* log_probs) {
  const F inverse = all(1.0f / a.temperature);
  each_row(a, [&](int64_t row) {
    const float* logits = a.logits + row * a.stride;
    const uint32_t key = keys[row];
    Highest highest;
    Kept kept{log_probs == nullptr ? nullptr : room_for_scores(a.vocab)};
    I at = counters(key, 0);
    for (int64_t v = 0; v < a.vocab; v += kLanes) {
      const F part = near_at(a, logits, v, inverse);
      if (log_probs != nullptr) kept.take(part, v, a.vocab);
      const I bits = noise_bits(key, at);
      if ((may_win(part, highest.value, bits) & lanes_in(a.vocab - v)) != 0) {
        highest.take(add(scores_at(a, logits, nullptr, v), gumbel_lanes(bits)), v, a.vocab);
      }
      at = add(at, all_int(noise::kGolden * static_cast<uint32_t>(kLanes)));
    }
    tokens[row] = highest.token();
    if (log_probs == nullptr) return;
    log_probs[row] = tokens[row] < 0 ? std::numeric_limits<float>::quiet_NaN() : kept.log_prob(tokens[row], a.vocab);
  });
}

inline int64_t draw_residual(const ScoreArgs& p, const ScoreArgs& q, uint32_t key) {
  constexpr float kLeast = 1e-37f;  // what is below it is none: `exponential` ends there, and `logarithm`
  const int64_t room = (p.vocab + kLanes - 1) / kLanes * kLanes;
  Kept of_p{room_for_scores(2 * room)}, of_q{of_p.scores + room};
  for (int64_t v = 0; v < p.vocab; v += kLanes) {
    of_p.take(scores_at(p, p.logits, nullptr, v), v, p.vocab);
    of_q.take(scores_at(q, q.logits, nullptr, v), v, p.vocab);
  }
  if (!of_p.normalise(p.vocab) || !of_q.normalise(p.vocab)) return -1;
  Highest best;
  I at = counters(key, 0);
  for (int64_t v = 0; v < p.vocab; v += kLanes) {
    const F left = sub(load(of_p.scores + v), load(of_q.scores + v));
    const unsigned there = greater(left, all(kLeast)) & lanes_in(p.vocab - v);
    const I bits = noise_bits(key, at);
    at = add(at, all_int(noise::kGolden * static_cast<uint32_t>(kLanes)));
    if (there == 0) continue;
    const F score = logarithm(largest(left, all(kLeast)));
    if ((may_win(score, best.value, bits) & there) != 0) best.take(add(score, gumbel_lanes(bits)), v, p.vocab, there);
  }
  return best.token();
}
