// Mixtures of experts. Included inside the namespace of an ISA level.
//
// An expert's input rows are adjacent, so that its weights are read once for all of them. A place is one input row of
// one expert: places are sorted by expert, then by row.

struct ActiveExpert {
  int64_t expert, first, rows;  // `first`: its first place
};

// Which experts compute which rows. The experts of a row ascend.
struct Routing {
  std::vector<int64_t> experts;      // [rows, experts_per_token]
  std::vector<float> weights;        // [rows, experts_per_token]
  std::vector<int64_t> places;       // [rows, experts_per_token]
  std::vector<int64_t> counts;       // rows of each expert
  std::vector<ActiveExpert> active;  // the experts that have rows
};

// Chooses the `count` largest values, in descending order, the first one of equal ones. NaN counts as the largest value.
inline void choose_largest(const float* values, int64_t size, int64_t count, int64_t* chosen) {
  const auto exceeds = [values](int64_t a, int64_t b) {
    return values[a] > values[b] || (std::isnan(values[a]) && !std::isnan(values[b]));
  };
  int64_t found = 0;
  for (int64_t i = 0; i < size; ++i) {
    if (found == count && !exceeds(i, chosen[count - 1])) continue;
    int64_t at = found < count ? found++ : count - 1;
    for (; at > 0 && exceeds(i, chosen[at - 1]); --at) chosen[at] = chosen[at - 1];
    chosen[at] = i;
  }
}

// Chooses the experts with the largest logits, and computes their weights.
inline void choose_experts(const Mlp& mlp, const float* logits, int64_t* chosen, float* weights) {
  const int64_t experts = mlp.experts(), count = mlp.experts_per_token;
  choose_largest(logits, experts, count, chosen);
  const float highest = logits[chosen[0]];
  std::sort(chosen, chosen + count);
  float total = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    weights[i] = std::exp(logits[chosen[i]] - highest);
    total += weights[i];
  }
  if (!mlp.norm_topk_prob) {
    total = 0.0f;
    for (int64_t expert = 0; expert < experts; ++expert) total += std::exp(logits[expert] - highest);
  }
  for (int64_t i = 0; i < count; ++i) weights[i] /= total;
}

// Sets the ranks of the experts in the groups that a row does not use to minus infinity.
inline void limit_to_groups(const Mlp& mlp, std::vector<float>& ranks) {
  const int64_t size = static_cast<int64_t>(ranks.size()) / mlp.groups;
  std::vector<float> sums(static_cast<size_t>(mlp.groups));
  std::vector<int64_t> used(static_cast<size_t>(mlp.groups_per_token));
  for (int64_t group = 0; group < mlp.groups; ++group) {
    const float* own = ranks.data() + group * size;
    int64_t largest[2];
    choose_largest(own, size, 2, largest);
    sums[static_cast<size_t>(group)] = own[largest[0]] + own[largest[1]];
  }
  choose_largest(sums.data(), mlp.groups, mlp.groups_per_token, used.data());
  for (int64_t group = 0; group < mlp.groups; ++group) {
    if (std::find(used.begin(), used.end(), group) != used.end()) continue;
    std::fill_n(ranks.begin() + group * size, size, -std::numeric_limits<float>::infinity());
  }
}

// Chooses experts by their sigmoid scores, and computes their weights; see Mlp.
inline void choose_by_sigmoid(const Mlp& mlp, const float* logits, int64_t* chosen, float* weights) {
  const int64_t experts = mlp.experts(), count = mlp.experts_per_token;
  const auto score = [logits](int64_t expert) { return 1.0f / (1.0f + std::exp(-logits[expert])); };
  std::vector<float> ranks(static_cast<size_t>(experts));
  for (int64_t i = 0; i < experts; ++i) ranks[static_cast<size_t>(i)] = score(i) + mlp.correction[i];
  if (mlp.groups_per_token < mlp.groups) limit_to_groups(mlp, ranks);
  choose_largest(ranks.data(), experts, count, chosen);
  std::sort(chosen, chosen + count);
  float total = mlp.norm_topk_prob ? 1e-20f : 1.0f;  // as in transformers
  for (int64_t i = 0; i < count; ++i) {
    weights[i] = score(chosen[i]);
    if (mlp.norm_topk_prob) total += weights[i];
  }
  for (int64_t i = 0; i < count; ++i) weights[i] = weights[i] / total * mlp.multiplier;
}

// Routes rows with the logits [rows, outputs of the router].
inline void route(const Mlp& mlp, const float* logits, int64_t rows, Routing& to) {
  const int64_t experts = mlp.experts(), outputs = mlp.router->n, count = mlp.experts_per_token;
  const auto places = static_cast<size_t>(rows * count);
  const auto choose = mlp.correction == nullptr ? choose_experts : choose_by_sigmoid;
  to.experts.resize(places), to.weights.resize(places), to.places.resize(places);
  to.counts.assign(static_cast<size_t>(experts), 0);
  for (int64_t row = 0; row < rows; ++row) {
    int64_t* chosen = to.experts.data() + row * count;
    choose(mlp, logits + row * outputs, chosen, to.weights.data() + row * count);
    for (int64_t i = 0; i < count; ++i) ++to.counts[static_cast<size_t>(chosen[i])];
  }
  to.active.clear();
  int64_t next = 0;
  for (int64_t expert = 0; expert < experts; ++expert) {
    int64_t& here = to.counts[static_cast<size_t>(expert)];
    if (here > 0) to.active.push_back({expert, next, here});
    next += std::exchange(here, next);  // from here on the next place of the expert
  }
  for (size_t i = 0; i < places; ++i) to.places[i] = to.counts[static_cast<size_t>(to.experts[i])]++;
}

// The weights of one expert out of those of `experts` experts.
inline Weights expert_weights(const Weights& all, int64_t expert, int64_t experts) {
  Weights w = all;
  w.n = all.n / experts;
  const Operand at = advance(operand_of(all), expert * w.n / kLanes);
  w.data = at.data, w.scales = at.scales, w.zeros = at.zeros, w.minima = at.minima;
  w.super_scales = at.super_scales, w.super_minima = at.super_minima;
  if (all.bias != nullptr) w.bias = all.bias + expert * w.n;
  return w;
}

// The same projection of all active experts, each with its own rows.
template <class T>
struct ExpertProjections {
  std::vector<Weights> weights;         // by active expert
  std::vector<LinearArgs> args;         // the same
  std::vector<PreparedRows<T>> inputs;  // the same, and those of forwards with more active experts

  // `x` and `out` or `logits`: of all places; see LinearArgs.
  void prepare(const Routing& routing, const Weights& all, int64_t experts, const T* x, T* out, float* logits,
               Gate gate) {
    const auto count = static_cast<int64_t>(routing.active.size());
    const int64_t n = all.n / experts, width = gate == Gate::none ? n : n / 2;
    weights.clear(), args.clear();
    for (const ActiveExpert& each : routing.active) weights.push_back(expert_weights(all, each.expert, experts));
    for (int64_t i = 0; i < count; ++i) {
      const ActiveExpert& each = routing.active[static_cast<size_t>(i)];
      args.push_back({.weights = &weights[static_cast<size_t>(i)], .x = x + each.first * all.k,
                      .out = out == nullptr ? nullptr : out + each.first * width,
                      .logits = logits == nullptr ? nullptr : logits + each.first * width, .gate = gate,
                      .rows = each.rows});
    }
    if (inputs.size() < args.size()) inputs.resize(args.size());
    run_tasks(count, static_cast<int64_t>(routing.experts.size()) * all.k,
              [&](int64_t i) { inputs[static_cast<size_t>(i)].prepare(args[static_cast<size_t>(i)]); });
  }

  void compute_strip(size_t i, int64_t strip) const { inputs[i].compute_strip(args[i], strip); }
};

// A projection of the shared expert, whose inputs are all rows.
template <class T>
struct SharedProjection {
  LinearArgs args;
  PreparedRows<T> inputs;

  void prepare(const LinearArgs& of) { args = of, inputs.prepare(args); }
  void compute_strip(int64_t strip) const { inputs.compute_strip(args, strip); }
};

template <class T>
struct MixtureBuffers {
  std::vector<T> normed, inputs, gated;  // [rows, hidden]; [places, hidden]; [places, inner]
  std::vector<float> logits, outputs;    // [rows, outputs of the router]; [places, hidden]
  Routing routing;
  ExpertProjections<T> gate_up, down;
  std::vector<T> shared_gated;        // [rows, inner of the shared expert]
  std::vector<float> shared_outputs;  // [rows, hidden]
  SharedProjection<T> shared_gate_up, shared_down;
};

// Returns norm(x), or x without a norm.
template <class T>
const T* normed_rows(const MixtureArgs& a, int64_t hidden, std::vector<T>& to) {
  const T* x = static_cast<const T*>(a.x);
  if (a.norm == nullptr) return x;
  to.resize(static_cast<size_t>(a.rows * hidden));
  for (int64_t row = 0; row < a.rows; ++row) {
    rms_norm(x + row * hidden, a.norm, a.eps, hidden, to.data() + row * hidden);
  }
  return to.data();
}

// Sums the weighted outputs of each row's experts, in the columns from `column` to `end`.
template <class T>
void sum_experts(const MixtureArgs& a, const MixtureBuffers<T>& b, int64_t hidden, int64_t column, int64_t end) {
  const int64_t count = a.mlp.experts_per_token, logits = a.mlp.router->n;
  const bool shared = a.mlp.shared_down != nullptr;
  T* out = static_cast<T*>(a.out);
  for (int64_t row = 0; row < a.rows; ++row) {
    const float* weights = b.routing.weights.data() + row * count;
    const int64_t* places = b.routing.places.data() + row * count;
    const float gate = shared ? 1.0f / (1.0f + std::exp(-b.logits[static_cast<size_t>((row + 1) * logits - 1)])) : 0.0f;
    for (int64_t i = column; i < end; i += kLanes) {
      F sum = zeros();
      for (int64_t j = 0; j < count; ++j) {
        sum = fma(broadcast(weights[j]), load(b.outputs.data() + places[j] * hidden + i), sum);
      }
      if (shared) sum = fma(broadcast(gate), load(b.shared_outputs.data() + row * hidden + i), sum);
      store_as(out + row * hidden + i, sum);
    }
  }
}

[[maybe_unused]] inline bool has_products(const Mlp& mlp) {
  return has_product(mlp.router) && has_product(mlp.gate_up) && has_product(mlp.down) &&
         has_product(mlp.shared_gate_up) && has_product(mlp.shared_down);
}

template <class T>
void mixture(const MixtureArgs& a) {
  thread_local MixtureBuffers<T> own;  // grows to the largest forward once
  MixtureBuffers<T>& b = own;          // that of the calling thread in all tasks
  const Mlp& mlp = a.mlp;
  const bool shared = mlp.shared_down != nullptr;
  const int64_t hidden = mlp.router->k, experts = mlp.experts(), inner = mlp.down->k;
  const int64_t shared_inner = shared ? mlp.shared_down->k : 0;
  const int64_t places = a.rows * mlp.experts_per_token;
  const T* x = normed_rows(a, hidden, b.normed);
  b.logits.resize(static_cast<size_t>(a.rows * mlp.router->n));
  linear<T>({.weights = mlp.router, .x = x, .logits = b.logits.data(), .rows = a.rows});
  route(mlp, b.logits.data(), a.rows, b.routing);

  b.inputs.resize(static_cast<size_t>(places * hidden));
  for (int64_t i = 0; i < places; ++i) {
    std::copy_n(x + i / mlp.experts_per_token * hidden, hidden,
                b.inputs.data() + b.routing.places[static_cast<size_t>(i)] * hidden);
  }
  b.gated.resize(static_cast<size_t>(places * inner));
  b.gate_up.prepare(b.routing, *mlp.gate_up, experts, b.inputs.data(), b.gated.data(), nullptr, mlp.gate);
  if (shared) {
    b.shared_gated.resize(static_cast<size_t>(a.rows * shared_inner));
    b.shared_gate_up.prepare(
        {.weights = mlp.shared_gate_up, .x = x, .out = b.shared_gated.data(), .gate = mlp.gate, .rows = a.rows});
  }
  const int64_t active = static_cast<int64_t>(b.routing.active.size()), strips = count_strips(b.gate_up.args[0]);
  const int64_t all = active * strips, shared_strips = shared ? count_strips(b.shared_gate_up.args) : 0;
  const int64_t inner_products = (places * inner + a.rows * shared_inner) * hidden;
  run_tasks(all + shared_strips, 2 * inner_products, [&](int64_t task) {
    if (task >= all) return b.shared_gate_up.compute_strip(task - all);
    b.gate_up.compute_strip(static_cast<size_t>(task / strips), task % strips);
  });

  b.outputs.resize(static_cast<size_t>(places * hidden));
  b.down.prepare(b.routing, *mlp.down, experts, b.gated.data(), nullptr, b.outputs.data(), Gate::none);
  if (shared) {
    b.shared_outputs.resize(static_cast<size_t>(a.rows * hidden));
    b.shared_down.prepare({.weights = mlp.shared_down, .x = b.shared_gated.data(), .logits = b.shared_outputs.data(),
                           .rows = a.rows});
  }
  run_tasks(count_strips(b.down.args[0]), inner_products, [&](int64_t strip) {
    for (int64_t i = 0; i < active; ++i) b.down.compute_strip(static_cast<size_t>(i), strip);
    if (shared) b.shared_down.compute_strip(strip);
    const int64_t width = kStripBlocks * kLanes, column = strip * width;
    sum_experts<T>(a, b, hidden, column, std::min(hidden, column + width));
  });
}
