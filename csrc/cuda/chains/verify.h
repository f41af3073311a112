// Verification of chains of draft tokens against the target, for a batch of requests; all but the launch, for host code
// and device code. The reference is swiftspec/backends/reference/chains.py.
//
// A cluster of 8 blocks (without clusters: one block) reads a position of a request. The cluster of a request that
// finishes last reads the marks of all positions and counts the accepted tokens. With rejection sampling it then reads
// the logits of the position after them again, to draw the next token. Nothing of the size of a vocabulary is written.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/bfloat16.h"
#include "common/gumbel.h"
#include "common/ieee.h"
#include "cuda/sampling/sampling.h"
#include "kernels_cuda.h"

namespace swiftspec::chains {

using cuda::ChainLogits;
using cuda::PositionMark;
using cuda::VerifyChainsArgs;
using sampling::LogSum;
using top_k::Entry;

constexpr int kWarps = sampling::kWarps, kThreads = sampling::kThreads, kBlocks = sampling::kBlocks;
constexpr int kPrefetch = sampling::kPrefetch;
constexpr float kResidualFloor = 1e-30f;  // RESIDUAL_FLOOR of the reference

// Of some columns: the largest score, or the sums of exponentials.
struct Partial {
  Entry<float> best;
  LogSum target, draft;
};

// In the shared memory of a block.
struct ClusterResult {
  Partial warps[kWarps];
  Partial block;
  // of the first block of the cluster, for the others
  uint32_t last;
  int32_t count;
  float target, draft;  // as in PositionMark, of the position after the accepted tokens
};

SWIFTSPEC_HD Partial empty() { return {{-INFINITY, top_k::kNoIndex}, {-INFINITY, 0}, {-INFINITY, 0}}; }

SWIFTSPEC_HD Partial merge(const Partial& a, const Partial& b) {
  const bool other = top_k::ranks_before(b.best.value, b.best.index, a.best.value, a.best.index);
  return {other ? b.best : a.best, sampling::add(a.target, b.target), sampling::add(a.draft, b.draft)};
}

// Number of positions of a request that clusters read. With rejection sampling the last one is not read, because it
// only counts if all tokens are accepted.
SWIFTSPEC_HD int64_t positions(const VerifyChainsArgs& a) {
  return a.draft.data == nullptr ? a.steps + 1 : a.steps > 0 ? a.steps : 1;
}

template <class T>
SWIFTSPEC_HD float logit(const ChainLogits& logits, int64_t request, int64_t position, int64_t column) {
  const int64_t at = request * logits.request + position * logits.position + column;
  if constexpr (sizeof(T) == 2) return bf16::widen(static_cast<const uint16_t*>(logits.data)[at]);
  return static_cast<const float*>(logits.data)[at];
}

// The target's score without noise, as sampling::score computes it.
template <class T>
SWIFTSPEC_HD float score(const VerifyChainsArgs& a, int64_t request, int64_t position, int64_t column) {
  float x = logit<T>(a.target, request, position, column);
  if (a.bias != nullptr) x = ieee::add(x, a.bias[column]);
  return a.temperature == 1.0f ? x : ieee::div(x, a.temperature);
}

// Calls `use(lane, scores, first column)` for a warp's share of the vocabulary, kPrefetch columns of a lane at a time.
template <class Score, class Use>
SWIFTSPEC_HD void for_each_span(int64_t vocab, int block, int warp_index, Score score, Use use) {
  for (int64_t base = (block * kWarps + warp_index) * sampling::kWarpSpan; base < vocab;
       base += sampling::kClusterSpan) {
    SWIFTSPEC_EACH_LANE(lane) {
      warp::Regs<kPrefetch, float> x;
      SWIFTSPEC_UNROLL
      for (int i = 0; i < kPrefetch; ++i) {
        const int64_t column = base + 32 * i + lane;
        x.r[i] = column < vocab ? score(column) : -INFINITY;
      }
      use(lane, x, base + lane);
    }
  }
}

// The largest score of a warp's columns, ties by the lower column. A NaN counts as infinite, so that it is detected.
template <class Score>
SWIFTSPEC_HD Entry<float> best_of(int64_t vocab, int block, int warp_index, Score score) {
  warp::PerLane<float> value;
  warp::PerLane<int32_t> index;
  SWIFTSPEC_EACH_LANE(lane) {
    value(lane) = -INFINITY;
    index(lane) = top_k::kNoIndex;
  }
  for_each_span(vocab, block, warp_index, score, [&](int lane, const warp::Regs<kPrefetch, float>& x, int64_t first) {
    SWIFTSPEC_UNROLL
    for (int i = 0; i < kPrefetch; ++i) {  // columns ascend
      const float given = x.r[i] != x.r[i] ? INFINITY : x.r[i];
      const bool more = given > value(lane);
      value(lane) = more ? given : value(lane);
      index(lane) = more ? static_cast<int32_t>(first + 32 * i) : index(lane);
    }
  });
  for (int step = 16; step > 0; step /= 2) {
    const auto values = warp::shuffle_xor(value, step);
    const auto indices = warp::shuffle_xor(index, step);
    SWIFTSPEC_EACH_LANE(lane) {
      if (top_k::ranks_before(values(lane), indices(lane), value(lane), index(lane))) {
        value(lane) = values(lane);
        index(lane) = indices(lane);
      }
    }
  }
  return {warp::shuffle(value, 0), warp::shuffle(index, 0)};
}

template <class T>
SWIFTSPEC_HD LogSum log_sum_of(int64_t vocab, int block, int warp_index, const ChainLogits& of, int64_t request,
                               int64_t position) {
  warp::PerLane<LogSum> sum;
  SWIFTSPEC_EACH_LANE(lane) { sum(lane) = {-INFINITY, 0}; }
  for_each_span(
      vocab, block, warp_index, [&](int64_t column) { return logit<T>(of, request, position, column); },
      [&](int lane, const warp::Regs<kPrefetch, float>& x, int64_t) { sampling::accumulate(sum(lane), x); });
  sum = sampling::all_reduce(sum);
  return sum(0);
}

SWIFTSPEC_HD void store(const Partial& part, int warp_index, ClusterResult& found) {
  SWIFTSPEC_EACH_LANE(lane) {
    if (lane == 0) found.warps[warp_index] = part;
  }
}

SWIFTSPEC_HD uint32_t key_of(const VerifyChainsArgs& a, int64_t request, int64_t position) {
  return a.keys == nullptr ? 0 : a.keys[request * (a.steps + 1) + position];
}

SWIFTSPEC_HD float add_noise(const VerifyChainsArgs& a, uint32_t key, int64_t column, float score) {
  if (a.keys == nullptr) return score;
  return ieee::add(score, noise::gumbel_exact(noise::bits(key, static_cast<uint32_t>(column))));
}

// Scans a warp's share of a position.
template <class T>
SWIFTSPEC_HD void scan(const VerifyChainsArgs& a, int64_t request, int64_t position, int block, int warp_index,
                       ClusterResult& found) {
  Partial part = empty();
  if (a.draft.data == nullptr) {
    const uint32_t key = key_of(a, request, position);
    part.best = best_of(a.vocab, block, warp_index, [&](int64_t column) {
      return add_noise(a, key, column, score<T>(a, request, position, column));
    });
  } else if (position < a.steps) {
    part.target = log_sum_of<T>(a.vocab, block, warp_index, a.target, request, position);
    part.draft = log_sum_of<T>(a.vocab, block, warp_index, a.draft, request, position);
  }
  store(part, warp_index, found);
}

// Reduces the results of the warps of a block; one thread of the block runs this.
SWIFTSPEC_HD void reduce_warps(ClusterResult& found) {
  Partial all = found.warps[0];
  for (int i = 1; i < kWarps; ++i) all = merge(all, found.warps[i]);
  found.block = all;
}

// Reduces the results of the blocks of a cluster; one thread of the cluster runs this. `block(i)` is the memory of
// block i.
template <class Blocks>
SWIFTSPEC_HD Partial reduce_blocks(Blocks block) {
  Partial all = block(0)->block;
  for (int i = 1; i < kBlocks; ++i) all = merge(all, block(i)->block);
  return all;
}

// The token of the largest score; -1 if a score is NaN or the largest is infinite.
SWIFTSPEC_HD int32_t token_of(const Entry<float>& best) { return fabsf(best.value) < INFINITY ? best.index : -1; }

// With rejection sampling a token is accepted with probability min(1, p / q). Where p is 0 the difference of the
// logarithms may be NaN, and the token is rejected.
template <class T>
SWIFTSPEC_HD PositionMark mark(const VerifyChainsArgs& a, int64_t request, int64_t position, const Partial& all) {
  const int32_t choice = token_of(all.best);
  if (position == a.steps) return {0, 0, choice, 0};
  const int64_t at = request * a.steps + position, token = a.tokens[at];
  if (a.draft.data == nullptr) return {0, 0, choice, choice == token};
  const float target = all.target.top + logf(all.target.total), draft = all.draft.top + logf(all.draft.total);
  const float log_p = logit<T>(a.target, request, position, token) - target;
  const float log_q = logit<T>(a.draft, request, position, token) - draft;
  return {target, draft, 0, log_p > -INFINITY && logf(a.uniforms[at]) < log_p - log_q};
}

// Reads a mark that another cluster has written in this launch.
SWIFTSPEC_HD PositionMark load_mark(const PositionMark* at) {
#ifdef __CUDA_ARCH__
  const int4 words = __ldcg(reinterpret_cast<const int4*>(at));
  return {__int_as_float(words.x), __int_as_float(words.y), words.z, words.w};
#else
  return *at;
#endif
}

// Counts the accepted tokens once all positions of a request are marked; one warp runs this.
SWIFTSPEC_HD void count_accepted(const VerifyChainsArgs& a, int64_t request, ClusterResult& found) {
  const PositionMark* marks = a.marks + request * (a.steps + 1);
  int32_t count = 0;
  bool all = true;  // so far
  for (int64_t base = 0; base < a.steps; base += 32) {
    warp::PerLane<bool> ends;
    SWIFTSPEC_EACH_LANE(lane) { ends(lane) = base + lane < a.steps && load_mark(marks + base + lane).accepted == 0; }
    const uint32_t word = warp::ballot(ends);
    const int many = a.steps - base < 32 ? static_cast<int>(a.steps - base) : 32;
    const int here = !all ? 0 : word != 0 ? warp::lowest_bit(word) : many;
    SWIFTSPEC_EACH_LANE(lane) {
      if (base + lane < a.steps) a.accepted[request * a.steps + base + lane] = lane < here;
    }
    count += here;
    all = all && word == 0;
  }
  const bool marked = a.draft.data == nullptr || !all;
  const PositionMark next = marked ? load_mark(marks + count) : PositionMark{};
  SWIFTSPEC_EACH_LANE(lane) {
    if (lane == 0) {
      a.count[request] = count;
      if (a.draft.data == nullptr) a.bonus[request] = next.choice;
      found.count = count;
      found.target = next.target;
      found.draft = next.draft;
    }
  }
}

// ln(max(0, p - q) + kResidualFloor p), where p and q are given by their logarithms.
SWIFTSPEC_HD float log_residual(float log_p, float log_q) {
  if (log_p == -INFINITY) return -INFINITY;
  return log_p + logf(fmaxf(-expm1f(log_q - log_p), 0.0f) + kResidualFloor);
}

// Scans a warp's share of the position after the accepted tokens. `verdict` is in the memory of the first block.
template <class T>
SWIFTSPEC_HD void scan_bonus(const VerifyChainsArgs& a, int64_t request, const ClusterResult& verdict, int block,
                             int warp_index, ClusterResult& found) {
  const int64_t position = verdict.count;
  const float target = verdict.target, draft = verdict.draft;
  const uint32_t key = key_of(a, request, position);
  const bool rejected = position < a.steps;
  Partial part = empty();
  part.best = best_of(a.vocab, block, warp_index, [&](int64_t column) {
    const float log_p = logit<T>(a.target, request, position, column) - target;
    return add_noise(a, key, column,
                     rejected ? log_residual(log_p, logit<T>(a.draft, request, position, column) - draft) : log_p);
  });
  store(part, warp_index, found);
}

}  // namespace swiftspec::chains
