// Fast reply of the draft: if the tree already contains the next proposal, decodes a packed VerifyResult and encodes
// the Proposal (format: swiftspec/distributed/transport/codec.py) without Python, whose code is cold in the CPU caches
// after a forward.
#pragma once

#include <cstdint>
#include <vector>

#include "host/decoder/tree.h"

namespace swiftspec::host {

using Words = std::vector<int32_t>;

// The state from which a draft can reply, and the rule that decides whether it does (see LookaheadDrafter in
// swiftspec/runtime/lookahead_drafter.py).
struct FastReply {
  const Tree& tree;
  int32_t request, prefix_len;  // the current request; number of tokens up to the root (node 0)
  int64_t bs, w, steps;
  double expansion_yield;  // tokens per round that an expansion adds, per probability of its leaves; 0: never pays
};

// Returns the packed proposal that follows a packed VerifyResult. Empty if the caller must handle the result: fewer
// than bs nodes are left, an expansion pays off, the result is malformed or belongs to another request or prefix, or
// its last token is not in the tree.
Words fast_reply(const FastReply& state, const Words& result);

}  // namespace swiftspec::host
