// Statistics of a request up to a round: speed, tokens per round, and the distribution of accepted draft tokens.

import { busy, timelinesOf } from "./timelines.js";
import { answerOf, spanOf } from "./recording.js";

/**
 * Returns statistics of the rounds 0 to `last`. `held[j]` is the number of rounds that accepted j draft tokens;
 * `perRound` counts all tokens of a last round that the answer's end cuts, as the server's statistics do; `targetBusy`
 * and `draftBusy` are shares of the time of the last 61 rounds.
 */
export function statsOf(request, last) {
  let verified = 0;
  const held = [];
  for (let at = 0; at <= last; at += 1) {
    const round = request.rounds[at];
    verified += round.tokens.length;
    if (!round.path) continue;
    const accepted = Math.max(round.path.length - 1, 0);
    held[accepted] = (held[accepted] ?? 0) + 1;
  }
  const tokens = Math.min(verified, answerOf(request).length);
  const begin = spanOf(request, 0).begin;
  const end = spanOf(request, last).end;
  const lanes = timelinesOf(request, last - 60, last);
  const since = spanOf(request, Math.max(last - 60, 0)).begin;
  return {
    tokens, rounds: last + 1, seconds: end - begin, held: Array.from(held, (count) => count ?? 0),
    speed: end > begin ? tokens / (end - begin) : NaN, perRound: verified / (last + 1),
    targetBusy: busy(lanes.target, since, end), draftBusy: busy(lanes.draft, since, end),
  };
}

/** Draws the histogram `held` as rows of a list. */
export function drawHistogram(list, held) {
  const most = Math.max(...held, 1);
  const rounds = held.reduce((sum, count) => sum + count, 0);
  while (list.children.length > held.length) list.lastChild.remove();
  while (list.children.length < held.length) {
    const row = document.createElement("li");
    for (const part of ["count", "bar", "share"]) {
      const span = document.createElement("span");
      span.className = part;
      row.append(span);
    }
    list.append(row);
  }
  for (const [accepted, count] of held.entries()) {
    const [label, bar, share] = list.children[accepted].children;
    label.textContent = String(accepted);
    bar.style.width = `${(60 * count) / most}%`;
    share.textContent = `${Math.round((100 * count) / Math.max(rounds, 1))} %`;
    list.children[accepted].setAttribute("aria-label", `${accepted} accepted in ${count} of ${rounds} rounds`);
  }
}
