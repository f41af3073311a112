// Sampling with min-p, top-k and top-p filters. Included inside the namespace of an ISA level.

// The filters of swiftspec/sampling/filters.py on one row of scores: all three keep the scores from a threshold on.
class RowFilter {
 public:
  // `scores`: a multiple of 16, -inf beyond the vocabulary. `top`: the highest score, which is finite.
  RowFilter(const float* scores, int64_t vocab, float top) : scores_(scores), vocab_(vocab), top_(top) {}

  // The smallest score that the filters keep; -inf keeps all.
  float threshold(const FilterArgs& f) {
    float limit = -std::numeric_limits<float>::infinity();
    if (f.min_p > 0.0f) limit = top_ + std::log(f.min_p);
    if (f.top_k > 0 && f.top_k < vocab_) limit = std::max(limit, kth_largest(f.top_k));
    return f.top_p < 1.0f ? top_p_threshold(limit, f.top_p) : limit;
  }

 private:
  static constexpr float kNear = 10.0f;  // scores this far below the highest one hold nearly all probability

  template <class Body>
  void for_each_from(float limit, const Body& body) const {
    const F lowest = broadcast(limit);
    for (int64_t v = 0; v < vocab_; v += kLanes) {
      unsigned kept = ~greater(lowest, load(scores_ + v)) & lane_mask(vocab_ - v);
      for (; kept != 0; kept &= kept - 1) body(scores_[v + __builtin_ctz(kept)]);
    }
  }

  // A min-heap holds the k largest scores so far.
  float kth_largest(int64_t k) {
    std::vector<float>& heap = buffer();
    heap.assign(scores_, scores_ + k);
    std::make_heap(heap.begin(), heap.end(), std::greater<float>());
    for (int64_t v = k / kLanes * kLanes; v < vocab_; v += kLanes) {
      unsigned better = greater(load(scores_ + v), broadcast(heap.front())) & lane_mask(vocab_ - v);
      if (v < k) better &= ~lane_mask(k - v);  // already in the heap
      for (; better != 0; better &= better - 1) {
        const float score = scores_[v + __builtin_ctz(better)];
        if (score <= heap.front()) continue;
        std::pop_heap(heap.begin(), heap.end(), std::greater<float>());
        heap.back() = score;
        std::push_heap(heap.begin(), heap.end(), std::greater<float>());
      }
    }
    return heap.front();
  }

  // The score of the last token of the smallest set whose probability is at least `p`, among the scores from `limit` on.
  float top_p_threshold(float limit, float p) {
    constexpr float kNegInf = -std::numeric_limits<float>::infinity();
    const double mass = p * (limit == kNegInf ? total() : total_from(limit));
    const float near = std::max(limit, top_ - kNear);
    float last = top_;
    return descend(near, mass, last) || (near > limit && descend(limit, mass, last)) ? last : limit;
  }

  // Adds the probabilities of the scores from `limit` on, highest first, until they reach `mass`. Returns whether they
  // do; `last` is the last score added.
  bool descend(float limit, double mass, float& last) {
    std::vector<float>& heap = buffer();
    heap.clear();
    for_each_from(limit, [&](float score) { heap.push_back(score); });
    std::make_heap(heap.begin(), heap.end());
    double before = 0.0;
    while (before < mass && !heap.empty()) {
      std::pop_heap(heap.begin(), heap.end());
      last = heap.back();
      heap.pop_back();
      before += std::exp(static_cast<double>(last) - top_);
    }
    return before >= mass;
  }

  double total() const {
    F sum = zeros();
    for (int64_t v = 0; v < vocab_; v += kLanes) sum = add(sum, exponential(sub(load(scores_ + v), broadcast(top_))));
    return reduce_add(sum);
  }

  double total_from(float limit) const {
    double sum = 0.0;
    for_each_from(limit, [&](float score) { sum += std::exp(static_cast<double>(score) - top_); });
    return sum;
  }

  static std::vector<float>& buffer() {
    thread_local std::vector<float> scores;
    return scores;
  }

  const float* scores_;
  int64_t vocab_;
  float top_;
};

// The token of the highest score plus noise among the scores from `limit` on; the first of equal ones wins. Noise is
// computed for these tokens only.
inline int64_t draw_from(const float* scores, int64_t vocab, float limit, uint32_t key) {
  thread_local std::vector<uint32_t> bits;
  thread_local std::vector<int64_t> tokens;
  thread_local std::vector<float> noise;
  bits.clear();
  tokens.clear();
  for (int64_t v = 0; v < vocab; v += kLanes) {
    unsigned kept = ~greater(broadcast(limit), load(scores + v)) & lane_mask(vocab - v);
    for (; kept != 0; kept &= kept - 1) {
      tokens.push_back(v + __builtin_ctz(kept));
      bits.push_back(noise::bits(key, static_cast<uint32_t>(tokens.back())));
    }
  }
  noise.resize(bits.size());
  gumbel(bits.data(), static_cast<int64_t>(bits.size()), noise.data());
  int64_t best = -1;
  float value = -std::numeric_limits<float>::infinity();
  for (size_t i = 0; i < tokens.size(); ++i) {
    const float score = scores[tokens[i]] + noise[i];
    if (score > value) {
      value = score;
      best = tokens[i];
    }
  }
  return best;
}

// The scores of a row without noise, in the thread's buffer, and the smallest score that the filters keep. That is NaN
// if a score is NaN or the highest one is not finite: then there is no token to draw.
struct FilteredRow {
  const float* scores;
  float limit;
};

inline FilteredRow filtered_row(const ScoreArgs& a, const FilterArgs& filter, int64_t row) {
  ScoreRow score_row{score_buffer(a.vocab)};
  unsigned nan_lanes = 0;
  for (int64_t v = 0; v < a.vocab; v += kLanes) {
    const F score = scores_at(a, a.logits + row * a.stride, nullptr, v);
    nan_lanes |= not_less_equal(score, score) & lane_mask(a.vocab - v);
    score_row.set(score, v, a.vocab);
  }
  const float top = reduce_max(score_row.best);
  if (nan_lanes != 0 || !std::isfinite(top)) return {score_row.scores, std::numeric_limits<float>::quiet_NaN()};
  return {score_row.scores, RowFilter(score_row.scores, a.vocab, top).threshold(filter)};
}

inline void draw_filtered(const ScoreArgs& a, const FilterArgs& filter, const uint32_t* keys, int64_t* tokens) {
  for_each_row(a, [&](int64_t row) {
    const FilteredRow found = filtered_row(a, filter, row);
    tokens[row] = std::isnan(found.limit) ? -1 : draw_from(found.scores, a.vocab, found.limit, keys[row]);
  });
}

inline void filter_scores(const ScoreArgs& a, const FilterArgs& filter, float* out) {
  for_each_row(a, [&](int64_t row) {
    const FilteredRow found = filtered_row(a, filter, row);
    float* kept = out + row * a.stride;
    for (int64_t v = 0; v < a.vocab; ++v) {  // a comparison with NaN is false: the scores stay
      kept[v] = found.scores[v] < found.limit ? -std::numeric_limits<float>::infinity() : found.scores[v];
    }
  });
}
