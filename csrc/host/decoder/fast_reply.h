// The fast reply: where the draft's tree holds a proposal that answers the target's result already, the two messages of
// swiftspec/distributed/transport/codec.py are read and written here. After a forward the interpreter is cold in the caches, so
// Python would be slow.
#pragma once

#include <cstdint>
#include <vector>

#include "host/decoder/tree.h"

namespace swiftspec::host {

using Words = std::vector<int32_t>;

// What a draft is ready to reply, and by which rule (AheadDrafter in swiftspec/runtime/ahead_drafter.py).
struct FastReply {
  const Tree& tree;
  int32_t request, prefix_len;  // what the draft works on, and from where; the root is node 0
  int64_t bs, w, steps;
  double worth;  // what an expansion adds to a round's tokens, per probability of its leaves; 0: nothing
};

// The proposal that follows from a packed VerifyResult. Empty where it takes an expansion, or is for Python to find:
// the result is none, or of another request or prefix, or its last token is not in the tree.
Words fast_reply(const FastReply& ready, const Words& result);

}  // namespace swiftspec::host
