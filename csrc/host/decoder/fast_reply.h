// The draft's answer to the target's result where its tree holds one already: the two messages of swiftspec/batch.py,
// read and written without Python, whose code a forward has just pushed out of every cache.
#pragma once

#include <cstdint>
#include <vector>

#include "host/decoder/tree.h"

namespace swiftspec::host {

using Words = std::vector<int32_t>;

// What a draft is ready to answer, and by which rule (AheadDrafter in swiftspec/worker/local_drafter.py).
struct Offer {
  const Tree& tree;
  int32_t request, prefix_len;  // where the draft stands; the root is node 0
  int64_t bs, w, steps;
  double worth;  // what an expansion adds to a round's tokens, per probability of its leaves; 0: nothing
};

// The proposal that follows from a packed VerifyResult. Empty where it takes an expansion, or is for Python to find:
// the result is none, or of another request or place, or its last token is not in the tree.
Words answer(const Offer& offer, const Words& result);

}  // namespace swiftspec::host
