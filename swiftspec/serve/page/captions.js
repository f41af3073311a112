// Captions: plain sentences about a round and about a node.

import { percent, visible } from "./tokens.js";
import { fateInFlight } from "./tree.js";

const plural = (count, one, many) => (count === 1 ? one : many.replace("#", String(count)));

/**
 * Returns the caption above the tree as pieces [text, whether it is bold]. `answered`: whether the target has verified
 * the proposal. `textOf`: returns the text of a token.
 */
export function caption(tree, answered, round, textOf) {
  const name = [`Round ${tree.index + 1}. `, true];
  if (round.population) {
    const shared = plural(round.tokens.length, "one token", "# tokens");
    return [name, [`All particles of the population agree on ${shared}; this mode has no tree.`, false]];
  }
  if (tree.proposed === 0) {
    const drawn = visible(textOf(round.tokens.at(-1)));
    return answered
      ? [name, [`Without a draft, one pass of the target gives one token: “${drawn}”.`, false]]
      : [name, ["The draft proposed no tokens: the target continues alone.", false]];
  }
  if (!answered) {
    const sent = plural(tree.proposed, "its likeliest token goes", "its # likeliest tokens go");
    return [name, [`The draft has grown the tree; ${sent} to the target, which verifies `, false],
      [plural(tree.proposed, "it in one pass.", "all of them in one pass."), true]];
  }
  const own = visible(textOf(round.tokens.at(-1)));
  const gained = round.tokens.length;
  const held = plural(tree.accepted, "One draft token was accepted",
    `${tree.accepted || "No"} draft tokens were accepted`);
  const below = plural(tree.kept, "One node below it stays", "# nodes below it stay");
  const kept = tree.kept > 0 ? ` ${below} for the next round.` : "";
  return [name, [`${held}, and the target adds its own, “${own}”: `, false],
    [plural(gained, "one token from one pass.", "# tokens from one pass."), true], [kept, false]];
}

const MEANING = {
  flight: "with the target now",
  verified: "accepted: the target generates the same token",
  rejected: "rejected: the target generates another token here",
  fallen: "rejected with its parent",
  own: "the target’s own token",
  kept: "stays for the next round",
  idle: "drafted, not sent: not likely enough",
};

function likely(who, share, letter) {
  return share === null ? `its probability for ${who} is not in this trace (${letter})`
    : `${who} found it ${percent(share)} likely (${letter})`;
}

/** Describes a node in a few lines, for its tooltip. The parameters are those of `caption`. */
export function about(node, answered, textOf) {
  const fate = answered ? node.fate : fateInFlight(node);
  let meaning = MEANING[fate];
  if (node.parent === null) meaning = "the last verified token";
  else if (fate === "kept" && !answered) meaning = "kept from the round before, not sent";
  else if (fate === "own" && node.added) meaning += "; it was not in the draft’s tree";
  else if (fate === "own") meaning += "; it was in the draft’s tree";
  else if (fate === "rejected" && node.parent.fate === "rejected") meaning = MEANING.fallen;
  const lines = [`“${visible(textOf(node.token))}”, ${meaning}`];
  if (node.parent !== null) {
    if (!node.added) lines.push(likely("the draft", node.q, "q"));
    if (node.sent && !answered && node.p !== null) lines.push("the target is verifying it");
    else if (node.sent) lines.push(likely("the target", node.p, "p"));
    lines.push(plural(node.depth, "the first token of its path", "token # of its path"));
  }
  return lines.join("\n");
}
