// Layout of packed proposals and results: a header, then columns of kCount 32-bit words each. Made by
// `python -m tools.message_layout` from swiftspec/distributed/transport/codec.py and swiftspec/drafter_kinds.py.
#pragma once

#include <cstdint>

namespace swiftspec::host {

enum HeaderWord : uint8_t { kRequest, kRound, kPrefixLen, kCount, kHeaderWords };
enum ProposalColumn : uint8_t { kProposalTokens, kProposalParents, kProposalWeights, kProposalSources, kProposalColumns };
enum ResultColumn : uint8_t { kResultPath, kResultTokens, kResultColumns };

// What added a node to a proposal.
enum class NodeSource : int32_t { kRoot = 0, kDraftModel = 1, kSuffix = 2, kDraftHead = 3 };

}  // namespace swiftspec::host
