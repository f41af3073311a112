// The clock of a replay: determines which moment of a request is shown.

import { spanOf } from "./recording.js";

export const SLOW = 1.5; // seconds per round in slow motion
const VERDICT = 0.4; // share of a round's time in which the result of the previous round is still shown

export class Player {
  constructor() {
    this.request = null;
    this.time = 0; // the moment that is shown, in seconds on the clock of the trace
    this.playing = false;
    this.speed = "slow"; // or a number: 1 is true speed
    this.following = false; // shows the newest round of a request that still runs
  }

  show(request, { playing = true, following = false } = {}) {
    this.request = request;
    this.time = this.begin;
    this.playing = playing;
    this.following = following;
  }

  get rounds() {
    return this.request?.rounds.length ?? 0;
  }

  get begin() {
    return this.rounds === 0 ? 0 : spanOf(this.request, 0).begin;
  }

  /** Time of the end, after the result of the last round was shown. */
  get end() {
    if (this.rounds === 0) return 0;
    const last = spanOf(this.request, this.rounds - 1);
    return last.end + VERDICT * this.mean;
  }

  /** Mean duration of a round, in seconds. */
  get mean() {
    if (this.rounds === 0) return 1;
    return Math.max((spanOf(this.request, this.rounds - 1).end - this.begin) / this.rounds, 1e-6);
  }

  /** Seconds of the trace per real second. */
  get rate() {
    return this.speed === "slow" ? Math.min(this.mean / SLOW, 1) : this.speed;
  }

  /** Advances by real seconds. Returns whether the moment that is shown has changed. */
  tick(seconds) {
    if (this.rounds === 0) return false;
    if (this.following) {
      const moved = this.time !== this.end;
      this.time = this.end;
      if (this.request.end) this.following = this.playing = false;
      return moved;
    }
    if (!this.playing) return false;
    if (this.time === 0) this.time = this.begin;
    this.time = Math.min(this.time + Math.min(seconds, 0.25) * this.rate, this.end);
    if (this.time >= this.end && this.request.end) this.playing = false;
    return true;
  }

  toggle() {
    this.following = false;
    if (!this.playing && this.time >= this.end) this.time = this.begin;
    this.playing = !this.playing;
  }

  seek(share) {
    this.following = false;
    this.time = this.begin + (this.end - this.begin) * Math.min(Math.max(share, 0), 1);
  }

  get share() {
    return this.end > this.begin ? (this.time - this.begin) / (this.end - this.begin) : 0;
  }

  /** Steps `by` half rounds, forward or back: from a proposal to its result, or from there to the next proposal. */
  step(by) {
    this.following = this.playing = false;
    if (this.rounds === 0) return;
    const { index, answered } = this.moment();
    const half = Math.min(Math.max(2 * index + (answered ? 1 : 0) + by, 0), 2 * this.rounds - 1);
    const span = spanOf(this.request, half >> 1);
    this.time = half % 2 === 0 ? span.end - 0.05 * (span.end - span.begin) : this.answeredAt(half >> 1);
  }

  answeredAt(index) {
    const { end } = spanOf(this.request, index);
    if (index + 1 >= this.rounds) return this.end;
    return end + 0.5 * VERDICT * (spanOf(this.request, index + 1).end - end);
  }

  /**
   * Returns what is shown now: round `index`, and `answered`, whether its result is shown or its proposal. The result
   * of a round is also shown during the first part of the next round, see VERDICT.
   */
  moment() {
    const index = this.find();
    const span = spanOf(this.request, index);
    if (this.time >= span.end) return { index, answered: true };
    const inside = (this.time - span.begin) / Math.max(span.end - span.begin, 1e-9);
    return index > 0 && inside < VERDICT ? { index: index - 1, answered: true } : { index, answered: false };
  }

  /** Returns the first round that has not ended at `time`, or the last one. */
  find() {
    let low = 0;
    let high = this.rounds - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (spanOf(this.request, middle).end > this.time) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  /** Rounds per frame of a screen with 60 Hz; above 1, not every round can be shown. */
  get roundsPerFrame() {
    return (this.playing || this.following ? this.rate : 0) / this.mean / 60;
  }
}
