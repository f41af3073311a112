// The race: the same prompt without and with speculation, one after the other on one engine, then side by side.

import { answerOf, isEmulated, isPlain, spanOf } from "./recording.js";
import { number, safe, seconds } from "./tokens.js";

const CLOCKS = "The clocks begin after the prefill.";
const WHY_SLOWER = "With models this small, a pass over a tree costs more than one over a token;"
  + " with large ones it hardly does, as the recording of the 70B target shows. ";
const NO_RACE = "Write a text and press Race: the engine answers it without, then with speculation;"
  + " both are played side by side.";
const SMALL = " Speculation often loses with models as small as the demo models: for them a pass over a tree"
  + " costs more than one over a token. The 70B recording shows the other case.";
const SHORT = 1; // seconds; a shorter race is played in slow motion
const WATCHED = 3; // seconds that its slow motion takes
const $ = (id) => document.getElementById(id);

/** Returns the last two successive requests with the same prompt, one without a draft: {plain, fast}; null: none. */
export function findRace(recording) {
  const done = recording.requests.filter((request) => request.rounds.length > 0);
  for (let at = done.length - 1; at > 0; at -= 1) {
    const [one, other] = [done[at - 1], done[at]];
    const same = one.begin.prompt && JSON.stringify(one.begin.prompt) === JSON.stringify(other.begin.prompt);
    if (!same || isPlain(one) === isPlain(other)) continue;
    return isPlain(one) ? { plain: one, fast: other } : { plain: other, fast: one };
  }
  return null;
}

/** Returns an answer as {tokens, times, took}: `times` in seconds after the prefill, `took` is the last of them. */
export function runOf(request) {
  const tokens = answerOf(request);
  const times = [];
  const { begin } = spanOf(request, 0);
  for (const [at, round] of request.rounds.entries()) {
    for (const _ of round.tokens) if (times.length < tokens.length) times.push(spanOf(request, at).end - begin);
  }
  return { tokens, times, took: times.at(-1) ?? 0 };
}

/** Returns the first position at which two answers differ; -1: they are the same. */
export function difference(one, other) {
  const longest = Math.max(one.length, other.length);
  for (let at = 0; at < longest; at += 1) if (one[at] !== other[at]) return at;
  return -1;
}

export class Race {
  constructor() {
    this.timer = 0;
    this.small = false; // whether this server runs the demo models
    this.told = () => {};
    $("race-again").addEventListener("click", () => this.pair && this.play(this.recording, this.pair));
    $("race-speed").addEventListener("change", () => this.pair && this.play(this.recording, this.pair));
  }

  /** Shows the end of the last race of a recording, or that there is none. `live`: it is that of this server. */
  show(recording, live) {
    cancelAnimationFrame(this.timer);
    this.recording = recording;
    this.pair = recording && findRace(recording);
    $("race-again").disabled = !this.pair;
    this.judge("", "");
    if (this.pair) {
      $("race-caption").textContent = `The same prompt twice on one engine, here side by side. ${CLOCKS}`;
      this.draw(Infinity);
      this.finish();
      return;
    }
    $("race-caption").textContent = live
      ? NO_RACE + (this.small ? SMALL : "")
      : "There is no race in this recording: it needs the same prompt twice, once without a draft.";
    for (const side of ["plain", "fast"]) {
      $(`${side}-clock`).textContent = "–";
      $(`${side}-text`).textContent = "";
      $(`${side}-progress`).value = 0;
    }
  }

  waiting(text) {
    cancelAnimationFrame(this.timer);
    this.pair = null;
    $("race-again").disabled = true;
    this.judge("", "");
    $("race-caption").textContent = text;
  }

  play(recording, pair) {
    cancelAnimationFrame(this.timer);
    this.recording = recording;
    this.pair = pair;
    $("race-again").disabled = false;
    this.judge("", "");
    const slowest = Math.max(runOf(pair.plain).took, runOf(pair.fast).took);
    const rate = rateOf($("race-speed").value, slowest);
    const pace = isEmulated(recording) ? "At the emulated pace." : "At true speed, as it was measured.";
    const slowed = `Played ${number(1 / rate)} times slower than it ran; the clocks show its own time.`;
    $("race-caption").textContent = `${rate === 1 ? pace : slowed} ${CLOCKS}`;
    const began = performance.now();
    const frame = () => {
      const time = ((performance.now() - began) / 1000) * rate;
      this.draw(time);
      if (time < slowest) this.timer = requestAnimationFrame(frame);
      else this.finish();
    };
    this.timer = requestAnimationFrame(frame);
  }

  draw(time) {
    for (const side of ["plain", "fast"]) {
      const { tokens, times, took } = runOf(this.pair[side]);
      const count = upTo(times, time);
      const clock = Math.min(time, took);
      const small = document.createElement("small");
      small.textContent = ` ${count} tokens, ${number(clock > 0 ? count / clock : NaN)} per second`;
      $(`${side}-clock`).replaceChildren(seconds(clock), small);
      $(`${side}-progress`).value = count / Math.max(tokens.length, 1);
      const pre = $(`${side}-text`);
      pre.textContent = safe(this.recording.pieces(tokens.slice(0, count)).join(""));
      pre.scrollTop = pre.scrollHeight;
    }
  }

  finish() {
    const [plain, fast] = [runOf(this.pair.plain), runOf(this.pair.fast)];
    const gain = plain.took / fast.took;
    const emulated = isEmulated(this.recording) ? " (emulated)" : "";
    const times = `${seconds(fast.took)} against ${seconds(plain.took)}${emulated}.`;
    const winner = gain >= 1.02 ? "fast" : gain <= 0.98 ? "plain" : "";
    const how = { fast: `Speculation was ${number(gain)} times as fast`, plain: "Speculation was slower here" };
    const speed = `${how[winner] ?? "Both took as long"}: ${times}`;
    const why = winner === "plain" && !emulated ? WHY_SLOWER : "";
    const at = difference(plain.tokens, fast.tokens);
    let same = `The text is the same: all ${plain.tokens.length} tokens compared, one by one.`;
    if (this.pair.fast.missed || this.pair.plain.missed) same = "Events were missed: the texts cannot be compared.";
    else if (this.recording.head?.synthetic_acceptance_length) same = "With synthetic acceptance the texts differ.";
    else if (at >= 0) same = `The texts differ from token ${at + 1} on.`;
    this.judge(speed, why + same, winner);
    $("race-result").dataset.equal = String(at < 0);
    this.told(`${speed} ${why}${same}`);
  }

  /** Shows the result: its first line, the rest, and in colour the winner, "plain" or "fast". */
  judge(first, rest, winner = "") {
    const strong = document.createElement("b");
    strong.textContent = first;
    $("race-result").replaceChildren(...(first === "" ? [] : [strong, document.createElement("br"), rest]));
    $("panel-race").dataset.winner = winner;
  }
}

/** Returns the seconds of the race per real second. `chosen`: menu value. `slowest`: seconds of the slower run. */
function rateOf(chosen, slowest) {
  if (chosen !== "auto") return Number(chosen);
  return slowest > 0 && slowest < SHORT ? slowest / WATCHED : 1;
}

/** Returns how many of the ascending `times` are at most `time`. */
function upTo(times, time) {
  let low = 0;
  let high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] <= time) low = middle + 1;
    else high = middle;
  }
  return low;
}
