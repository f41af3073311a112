// Verification of chains: draft tokens in a row against the target, for a batch of requests (swiftspec/chains). All but
// the launch; host code too.
//
// A cluster of 8 blocks, or a block where there are no clusters, reads a position of a request. Whichever cluster of a
// request ends last sees what the others have marked, and says how many tokens stay; by rejection it then reads the
// position behind them again, for the token that follows. Nothing of the size of a vocabulary is written.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/bfloat16.h"
#include "common/gumbel.h"
#include "common/ieee.h"
#include "cuda/sampling/sampling.h"
#include "kernels_cuda.h"

namespace swiftspec::chains {

using best::Entry;
using cuda::Logits;
using cuda::PositionMark;
using cuda::VerifyArgs;
using sampling::LogSum;

constexpr int kWarps = sampling::kWarps, kThreads = sampling::kThreads, kBlocks = sampling::kBlocks;
constexpr int kAhead = sampling::kAhead;
constexpr float kTiny = 1e-30f;  // TINY of swiftspec/chains

// Of some columns: the best score, or the sums of exponentials.
struct Part {
  Entry<float> best;
  LogSum target, draft;
};

struct Found {
  Part warps[kWarps];
  Part block;
  // of the cluster's first block, which says it to the others
  uint32_t last;
  int32_t count;
  float target, draft;  // as in PositionMark, of the position behind the tokens that stay
};

SWIFTSPEC_HD Part nothing() { return {{-INFINITY, best::kNobody}, {-INFINITY, 0}, {-INFINITY, 0}}; }

SWIFTSPEC_HD Part joined(const Part& a, const Part& b) {
  const bool other = best::better(b.best.value, b.best.index, a.best.value, a.best.index);
  return {other ? b.best : a.best, sampling::add(a.target, b.target), sampling::add(a.draft, b.draft)};
}

// How many positions of a request clusters read: by rejection not the last one, which counts only if all tokens stay.
SWIFTSPEC_HD int64_t positions(const VerifyArgs& a) {
  return a.draft.data == nullptr ? a.steps + 1 : a.steps > 0 ? a.steps : 1;
}

template <class T>
SWIFTSPEC_HD float logit(const Logits& logits, int64_t request, int64_t position, int64_t column) {
  const int64_t at = request * logits.request + position * logits.position + column;
  if constexpr (sizeof(T) == 2) return bf16::widen(static_cast<const uint16_t*>(logits.data)[at]);
  return static_cast<const float*>(logits.data)[at];
}

// Calls `use(lane, scores, first column)` for a warp's share of the vocabulary, kAhead columns of a lane at a time.
template <class Score, class Use>
SWIFTSPEC_HD void each_run(int64_t vocab, int block, int warp_index, Score score, Use use) {
  for (int64_t base = (block * kWarps + warp_index) * sampling::kRun; base < vocab; base += sampling::kStep) {
    SWIFTSPEC_EACH_LANE(lane) {
      warp::Regs<kAhead, float> x;
      SWIFTSPEC_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        const int64_t column = base + 32 * i + lane;
        x.r[i] = column < vocab ? score(column) : -INFINITY;
      }
      use(lane, x, base + lane);
    }
  }
}

// The best of a warp's columns, of equal ones the first. NaN and -inf are none.
template <class Score>
SWIFTSPEC_HD Entry<float> best_of(int64_t vocab, int block, int warp_index, Score score) {
  warp::PerLane<float> value;
  warp::PerLane<int32_t> index;
  SWIFTSPEC_EACH_LANE(lane) {
    value(lane) = -INFINITY;
    index(lane) = best::kNobody;
  }
  each_run(vocab, block, warp_index, score, [&](int lane, const warp::Regs<kAhead, float>& x, int64_t first) {
    SWIFTSPEC_UNROLL
    for (int i = 0; i < kAhead; ++i) {  // columns ascend
      const bool more = x.r[i] > value(lane);
      value(lane) = more ? x.r[i] : value(lane);
      index(lane) = more ? static_cast<int32_t>(first + 32 * i) : index(lane);
    }
  });
  for (int step = 16; step > 0; step /= 2) {
    const auto values = warp::exchanged(value, step);
    const auto indices = warp::exchanged(index, step);
    SWIFTSPEC_EACH_LANE(lane) {
      if (best::better(values(lane), indices(lane), value(lane), index(lane))) {
        value(lane) = values(lane);
        index(lane) = indices(lane);
      }
    }
  }
  return {warp::from_lane(value, 0), warp::from_lane(index, 0)};
}

template <class T>
SWIFTSPEC_HD LogSum sum_of(int64_t vocab, int block, int warp_index, const Logits& of, int64_t request,
                           int64_t position) {
  warp::PerLane<LogSum> sum;
  SWIFTSPEC_EACH_LANE(lane) { sum(lane) = {-INFINITY, 0}; }
  each_run(
      vocab, block, warp_index, [&](int64_t column) { return logit<T>(of, request, position, column); },
      [&](int lane, const warp::Regs<kAhead, float>& x, int64_t) { sampling::take(sum(lane), x); });
  sum = sampling::joined(sum);
  return sum(0);
}

SWIFTSPEC_HD void put_down(const Part& part, int warp_index, Found& found) {
  SWIFTSPEC_EACH_LANE(lane) {
    if (lane == 0) found.warps[warp_index] = part;
  }
}

SWIFTSPEC_HD uint32_t key_of(const VerifyArgs& a, int64_t request, int64_t position) {
  return a.keys == nullptr ? 0 : a.keys[request * (a.steps + 1) + position];
}

SWIFTSPEC_HD float noisy(const VerifyArgs& a, uint32_t key, int64_t column, float score) {
  if (a.keys == nullptr) return score;
  return ieee::add(score, noise::gumbel_exact(noise::bits(key, static_cast<uint32_t>(column))));
}

// A warp's share of a position.
template <class T>
SWIFTSPEC_HD void read(const VerifyArgs& a, int64_t request, int64_t position, int block, int warp_index,
                       Found& found) {
  Part part = nothing();
  if (a.draft.data == nullptr) {
    const uint32_t key = key_of(a, request, position);
    part.best = best_of(a.vocab, block, warp_index, [&](int64_t column) {
      return noisy(a, key, column, logit<T>(a.target, request, position, column));
    });
  } else if (position < a.steps) {
    part.target = sum_of<T>(a.vocab, block, warp_index, a.target, request, position);
    part.draft = sum_of<T>(a.vocab, block, warp_index, a.draft, request, position);
  }
  put_down(part, warp_index, found);
}

// One thread of a block, after its warps.
SWIFTSPEC_HD void join_warps(Found& found) {
  Part all = found.warps[0];
  for (int i = 1; i < kWarps; ++i) all = joined(all, found.warps[i]);
  found.block = all;
}

// One thread of a cluster, after its blocks; `block(i)` is block i's memory.
template <class Blocks>
SWIFTSPEC_HD Part join_blocks(Blocks block) {
  Part all = block(0)->block;
  for (int i = 1; i < kBlocks; ++i) all = joined(all, block(i)->block);
  return all;
}

// A token passes with min(1, p / q). Where q is 0 it was not drawn, and where p is 0 the difference may be NaN.
template <class T>
SWIFTSPEC_HD PositionMark mark(const VerifyArgs& a, int64_t request, int64_t position, const Part& all) {
  if (position == a.steps) return {0, 0, all.best.index, 0};
  const int64_t at = request * a.steps + position, token = a.tokens[at];
  if (a.draft.data == nullptr) return {0, 0, all.best.index, all.best.index == token};
  const float target = all.target.top + logf(all.target.total), draft = all.draft.top + logf(all.draft.total);
  const float log_p = logit<T>(a.target, request, position, token) - target;
  const float log_q = logit<T>(a.draft, request, position, token) - draft;
  return {target, draft, 0, log_p > -INFINITY && logf(a.coins[at]) < log_p - log_q};
}

// Other clusters have written it in this launch.
SWIFTSPEC_HD PositionMark fresh(const PositionMark* at) {
#ifdef __CUDA_ARCH__
  const int4 words = __ldcg(reinterpret_cast<const int4*>(at));
  return {__int_as_float(words.x), __int_as_float(words.y), words.z, words.w};
#else
  return *at;
#endif
}

SWIFTSPEC_HD int64_t token_of(int32_t index) { return index == best::kNobody ? 0 : index; }

// A warp, once all positions of a request are marked.
SWIFTSPEC_HD void decide(const VerifyArgs& a, int64_t request, Found& found) {
  const PositionMark* marks = a.marks + request * (a.steps + 1);
  int32_t count = 0;
  bool all = true;  // so far
  for (int64_t base = 0; base < a.steps; base += 32) {
    warp::PerLane<bool> ends;
    SWIFTSPEC_EACH_LANE(lane) { ends(lane) = base + lane < a.steps && fresh(marks + base + lane).stays == 0; }
    const uint32_t word = warp::ballot(ends);
    const int many = a.steps - base < 32 ? static_cast<int>(a.steps - base) : 32;
    const int here = !all ? 0 : word != 0 ? warp::lowest(word) : many;
    SWIFTSPEC_EACH_LANE(lane) {
      if (base + lane < a.steps) a.accepted[request * a.steps + base + lane] = lane < here;
    }
    count += here;
    all = all && word == 0;
  }
  const bool marked = a.draft.data == nullptr || !all;
  const PositionMark behind = marked ? fresh(marks + count) : PositionMark{};
  SWIFTSPEC_EACH_LANE(lane) {
    if (lane == 0) {
      a.count[request] = count;
      if (a.draft.data == nullptr) a.bonus[request] = token_of(behind.choice);
      found.count = count;
      found.target = behind.target;
      found.draft = behind.draft;
    }
  }
}

// ln(max(0, p - q) + kTiny p), where p and q are given by their logarithms.
SWIFTSPEC_HD float rest(float log_p, float log_q) {
  if (log_p == -INFINITY) return -INFINITY;
  return log_p + logf(fmaxf(-expm1f(log_q - log_p), 0.0f) + kTiny);
}

// A warp's share of the position behind the tokens that stay; `verdict` is the first block's.
template <class T>
SWIFTSPEC_HD void read_again(const VerifyArgs& a, int64_t request, const Found& verdict, int block, int warp_index,
                             Found& found) {
  const int64_t position = verdict.count;
  const float target = verdict.target, draft = verdict.draft;
  const uint32_t key = key_of(a, request, position);
  const bool rejected = position < a.steps;
  Part part = nothing();
  part.best = best_of(a.vocab, block, warp_index, [&](int64_t column) {
    const float log_p = logit<T>(a.target, request, position, column) - target;
    return noisy(a, key, column, rejected ? rest(log_p, logit<T>(a.draft, request, position, column) - draft) : log_p);
  });
  put_down(part, warp_index, found);
}

}  // namespace swiftspec::chains
