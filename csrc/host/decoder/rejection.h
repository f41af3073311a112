// Rejection sampling of the children of one node, which were drawn from q without replacement; the reference is
// swiftspec/tree/rejection.py.
#pragma once

#include <cstdint>
#include <vector>

namespace swiftspec::host {

// Noise streams of swiftspec/sampling/noise.py: acceptance of sampled children, and the token after the accepted path.
constexpr uint32_t kCoinStream = 2, kResidualStream = 3;

struct SiblingVerdict {
  int64_t accepted = -1;  // index of the accepted child among its siblings; -1: all were rejected
  double overlap = 0.0;   // 1 - TV(p, q)
  double outside = 0.0;   // log of the factor by which the probabilities of tokens outside q have changed
};

// Tests the children of a node in the order drawn. `p`, `q` [width]: target and draft probabilities of the tokens that q
// covers; p becomes their residual probabilities, and q is overwritten. `columns`: those of the children in q. `key`: of
// the uniform random numbers of this node.
SiblingVerdict verify_siblings(std::vector<double>& p, std::vector<double>& q, const std::vector<int64_t>& columns,
                               uint32_t key);

}  // namespace swiftspec::host
