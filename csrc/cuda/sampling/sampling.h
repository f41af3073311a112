// Sampling and top-k of logits, without the launches; for host code and device code. A cluster of 8 blocks (without
// clusters: one block) processes a row: each warp keeps the top k of its columns and the sum of their exponentials,
// then blocks and cluster reduce them in a fixed order.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/top_k.h"
#include "common/gumbel.h"
#include "common/ieee.h"
#include "common/noise.h"
#include "common/warp.h"
#include "cuda/arch.h"
#include "cuda/device/device.h"
#include "kernels_cuda.h"

namespace swiftspec::sampling {

using top_k::TopK;
using top_k::Entry;

constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocks = ptx::kClusters ? 8 : 1;  // per cluster; launchers use `cluster_blocks`
constexpr int kPrefetch = 8;    // columns of a lane that are loaded before the first is used
constexpr int kWarpSpan = 32 * kPrefetch;  // columns that a warp loads at a time
constexpr int kClusterSpan = kWarpSpan * kWarps * kBlocks;

// Blocks per cluster (kBlocks) of the kernels that run on `device`.
SWIFTSPEC_HD int cluster_blocks(const cuda::Device& device) { return device.has_clusters() ? 8 : 1; }

// A log-sum-exp: top + ln(total).
struct LogSum {
  float top, total;
};

// Each operation is rounded separately: with a contraction to FMA the result would depend on the order of a and b.
SWIFTSPEC_HD LogSum add(const LogSum& a, const LogSum& b) {
  const float top = fmaxf(a.top, b.top);
  if (top == -INFINITY) return {top, a.total + b.total};
  return {top, ieee::add(ieee::mul(a.total, expf(a.top - top)), ieee::mul(b.total, expf(b.top - top)))};
}

// Adds the exponentials of more scores to the sum of a lane.
SWIFTSPEC_HD void accumulate(LogSum& sum, const warp::Regs<kPrefetch, float>& x) {
  float top = sum.top;
  SWIFTSPEC_UNROLL
  for (int i = 0; i < kPrefetch; ++i) top = fmaxf(top, x.r[i]);
  if (top == -INFINITY) {  // or all scores are NaN, which must propagate
    SWIFTSPEC_UNROLL
    for (int i = 0; i < kPrefetch; ++i) sum.total = x.r[i] != x.r[i] ? x.r[i] : sum.total;
    return;
  }
  float total = sum.total * expf(sum.top - top);
  SWIFTSPEC_UNROLL
  for (int i = 0; i < kPrefetch; ++i) total += expf(x.r[i] - top);
  sum = {top, total};
}

// Butterfly reduction over all lanes; it is deterministic because `add` is commutative.
SWIFTSPEC_HD warp::PerLane<LogSum> all_reduce(warp::PerLane<LogSum> sum) {
  for (int step = 16; step > 0; step /= 2) {
    warp::PerLane<float> top, total;
    SWIFTSPEC_EACH_LANE(lane) {
      top(lane) = sum(lane).top;
      total(lane) = sum(lane).total;
    }
    top = warp::shuffle_xor(top, step);
    total = warp::shuffle_xor(total, step);
    SWIFTSPEC_EACH_LANE(lane) { sum(lane) = add(sum(lane), {top(lane), total(lane)}); }
  }
  return sum;
}

// Top k and log-sum-exp of the columns of each warp, and then of the block.
struct BlockResult {
  Entry<float> warps[kWarps][top_k::kMaxK];
  LogSum warp_sums[kWarps];
  Entry<float> best[top_k::kMaxK];
  LogSum sum;
};

// Temperatures of the scores, and whether they have noise: from `scalars`, or else from the arguments themselves.
struct Scale {
  float temperature, tau;
  bool noisy;
};

SWIFTSPEC_HD Scale scale_of(const ScoreArgs& a) {
  if (a.scalars == nullptr) return {a.temperature, a.tau, a.noise != nullptr};
  return {static_cast<float>(a.scalars[0]), static_cast<float>(a.scalars[1]),
          a.noise != nullptr && a.scalars[2] != 0.0};
}

SWIFTSPEC_HD float score(const ScoreArgs& a, const Scale& scale, int64_t row, int64_t column) {
  float x = a.logits[row * a.stride + column];
  if (a.bias != nullptr) x = ieee::add(x, a.bias[column]);
  if (scale.temperature != 1.0f) x = ieee::div(x, scale.temperature);
  if (!scale.noisy) return x;
  x = ieee::add(x, a.noise[a.rows_of_noise[row] * a.vocab + column]);
  return scale.tau == 1.0f ? x : ieee::div(x, scale.tau);
}

// Scans a warp's columns of a row for the top k scores and, if `sums`, their log-sum-exp. Without `sums` this is a
// draw, and a NaN counts as infinite, so that it is detected.
SWIFTSPEC_HD void scan_columns(const ScoreArgs& a, int64_t row, int k, int block, int warp_index, bool sums,
                               BlockResult& found) {
  TopK<float> best(k);
  warp::PerLane<LogSum> sum;
  SWIFTSPEC_EACH_LANE(lane) { sum(lane) = {-INFINITY, 0}; }
  for (int64_t base = (block * kWarps + warp_index) * kWarpSpan; base < a.vocab; base += kClusterSpan) {
    const Scale scale = scale_of(a);  // again for each span: in registers across spans it would be spilled
    warp::PerLane<warp::Regs<kPrefetch, float>> x;
    SWIFTSPEC_EACH_LANE(lane) {
      SWIFTSPEC_UNROLL
      for (int i = 0; i < kPrefetch; ++i) {
        const int64_t column = base + 32 * i + lane;
        const float value = column < a.vocab ? score(a, scale, row, column) : -INFINITY;
        x(lane).r[i] = !sums && value != value ? INFINITY : value;
      }
      if (sums) accumulate(sum(lane), x(lane));
    }
    SWIFTSPEC_UNROLL
    for (int i = 0; i < kPrefetch; ++i) {
      warp::PerLane<float> value;
      warp::PerLane<int32_t> column;
      SWIFTSPEC_EACH_LANE(lane) {
        const int64_t at = base + 32 * i + lane;
        value(lane) = x(lane).r[i];
        column(lane) = at < a.vocab ? static_cast<int32_t>(at) : top_k::kNoIndex;
      }
      best.offer(value, column);
    }
  }
  best.store(found.warps[warp_index]);
  if (sums) sum = all_reduce(sum);
  SWIFTSPEC_EACH_LANE(lane) {
    if (lane == 0) found.warp_sums[warp_index] = sum(lane);
  }
}

// The temperature of a row and the start of its bias, from its set if there are several.
struct RowScale {
  float temperature;
  int32_t bias;  // offset in ScoreArgs::bias: a pointer would take another register, and be spilled
};

SWIFTSPEC_HD RowScale row_scale(const ScoreArgs& a, int64_t row) {
  const int32_t set = a.rows_per_set == 0 ? 0 : static_cast<int32_t>(row) / static_cast<int32_t>(a.rows_per_set);
  return {a.scalars == nullptr ? a.temperature : static_cast<float>(a.scalars[3 * set]),
          set * static_cast<int32_t>(a.vocab)};
}

// The score without noise.
SWIFTSPEC_HD float score(const ScoreArgs& a, const RowScale& scale, int64_t row, int64_t column) {
  float x = a.logits[row * a.stride + column];
  if (a.bias != nullptr) x = ieee::add(x, a.bias[scale.bias + column]);
  return scale.temperature == 1.0f ? x : ieee::div(x, scale.temperature);
}

// Scans a warp's columns of a row for the log-sum-exp of the scores and, unless `key` is null, for the largest score
// plus the Gumbel noise of that key; there a NaN counts as infinite.
SWIFTSPEC_HD void scan_keyed(const ScoreArgs& a, int64_t row, const uint32_t* key, int block, int warp_index,
                             BlockResult& found) {
  TopK<float> best(1);
  warp::PerLane<LogSum> sum;
  SWIFTSPEC_EACH_LANE(lane) { sum(lane) = {-INFINITY, 0}; }
  for (int64_t base = (block * kWarps + warp_index) * kWarpSpan; base < a.vocab; base += kClusterSpan) {
    const RowScale scale = row_scale(a, row);  // again for each span, as in scan_columns
    warp::PerLane<warp::Regs<kPrefetch, float>> x;
    SWIFTSPEC_EACH_LANE(lane) {
      SWIFTSPEC_UNROLL
      for (int i = 0; i < kPrefetch; ++i) {
        const int64_t column = base + 32 * i + lane;
        x(lane).r[i] = column < a.vocab ? score(a, scale, row, column) : -INFINITY;
      }
      accumulate(sum(lane), x(lane));
    }
    if (key == nullptr) continue;
    SWIFTSPEC_UNROLL
    for (int i = 0; i < kPrefetch; ++i) {
      warp::PerLane<float> value;
      warp::PerLane<int32_t> column;
      SWIFTSPEC_EACH_LANE(lane) {
        const int64_t at = base + 32 * i + lane;
        const float noise = noise::gumbel_exact(noise::bits(*key, static_cast<uint32_t>(at)));
        const float noisy = ieee::add(x(lane).r[i], noise);
        value(lane) = noisy != noisy ? INFINITY : noisy;
        column(lane) = at < a.vocab ? static_cast<int32_t>(at) : top_k::kNoIndex;
      }
      best.offer(value, column);
    }
  }
  best.store(found.warps[warp_index]);
  sum = all_reduce(sum);
  SWIFTSPEC_EACH_LANE(lane) {
    if (lane == 0) found.warp_sums[warp_index] = sum(lane);
  }
}

// Reduces the results of the warps of a block; the first warp of the block runs this.
SWIFTSPEC_HD void reduce_warps(int k, BlockResult& found) {
  TopK<float> best(k);
  for (int i = 0; i < kWarps; ++i) best.merge(found.warps[i]);
  best.store(found.best);
  SWIFTSPEC_EACH_LANE(lane) {
    if (lane == 0) {
      found.sum = found.warp_sums[0];
      for (int i = 1; i < kWarps; ++i) found.sum = add(found.sum, found.warp_sums[i]);
    }
  }
}

// The log-probability of a score, clamped to at most 0, since a child's weight must not exceed its parent's; -inf
// instead of NaN.
SWIFTSPEC_HD float log_prob(float score, const LogSum& all) {
  const float value = score - (all.top + logf(all.total));
  return value <= 0.0f ? value : value > 0.0f ? 0.0f : -INFINITY;
}

// Writes the token of a rank and, unless `values` is null, its log-probability. Without a candidate (kNoIndex) the token
// is the rank itself. Without `values` this is a draw: the token is -1 if a score was NaN or the largest is infinite.
SWIFTSPEC_HD void write_child(int rank, float value, int32_t token, const LogSum& all, int64_t* tokens, float* values) {
  tokens[rank] = token == top_k::kNoIndex ? rank : token;
  if (values != nullptr) {
    values[rank] = log_prob(value, all);
  } else if (!(fabsf(value) < INFINITY)) {
    tokens[rank] = -1;
  }
}

// Reduces the results of the blocks of a cluster, and writes them with `write_child`; the first warp of the first block
// runs this. `block(i)` is the memory of block i.
template <class Blocks>
SWIFTSPEC_HD void reduce_blocks(int k, Blocks block, int64_t* tokens, float* values) {
  TopK<float> best(k);
  LogSum all = block(0)->sum;
  for (int i = 0; i < kBlocks; ++i) {
    best.merge(block(i)->best);
    if (i > 0) all = add(all, block(i)->sum);
  }
  SWIFTSPEC_EACH_LANE(lane) {
    for (int half = 0; half < 2; ++half) {
      const int rank = lane + 32 * half;
      if (rank < k) write_child(rank, best.value[half](lane), best.index[half](lane), all, tokens, values);
    }
  }
}

// reduce_blocks after scan_keyed: writes the token, if `drawn`, and its log-probability; -1 and NaN if no token could
// be drawn.
template <class Blocks>
SWIFTSPEC_HD void reduce_keyed(const ScoreArgs& a, int64_t row, bool drawn, Blocks block, int64_t* token,
                             float* log_prob) {
  TopK<float> best(1);
  LogSum all = block(0)->sum;
  for (int i = 0; i < kBlocks; ++i) {
    best.merge(block(i)->best);
    if (i > 0) all = add(all, block(i)->sum);
  }
  SWIFTSPEC_EACH_LANE(lane) {
    if (lane == 0) {
      if (drawn) *token = fabsf(best.value[0](lane)) < INFINITY ? best.index[0](lane) : -1;
      *log_prob = *token < 0 ? NAN : score(a, row_scale(a, row), row, *token) - (all.top + logf(all.total));
    }
  }
}

}  // namespace swiftspec::sampling
