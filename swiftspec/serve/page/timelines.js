// The timelines of target and draft around the moment shown, and when one of them waited for the other.

import { spanOf } from "./recording.js";

const TALL = 22; // height of a timeline, pixels
const GAP = 10; // between the two timelines, pixels
const ROUNDS = 5; // rounds in view

/** Returns the spans in rounds `from` to `to`: {target: [[begin, end]], draft: [...], wait: [...]}. */
export function timelinesOf(request, from, to) {
  const lanes = { target: [], draft: [], wait: [] };
  for (let at = Math.max(from, 0); at <= Math.min(to, request.rounds.length - 1); at += 1) {
    const round = request.rounds[at];
    if (round.target?.verify) lanes.target.push(round.target.verify);
    for (const span of round.target?.forwards ?? []) lanes.target.push(span);
    for (const span of round.draft?.forwards ?? []) lanes.draft.push(span);
    if (round.wait) lanes.wait.push(round.wait);
  }
  return lanes;
}

/** Returns the share of the time from `begin` to `end` that the spans cover. */
export function busy(spans, begin, end) {
  const inside = spans.reduce((sum, [from, to]) => sum + Math.max(Math.min(to, end) - Math.max(from, begin), 0), 0);
  return end > begin ? Math.min(inside / (end - begin), 1) : 0;
}

export class TimelinesCanvas {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.resize();
  }

  resize() {
    const dots = window.devicePixelRatio || 1;
    this.width = this.canvas.clientWidth;
    this.height = this.canvas.clientHeight;
    this.canvas.width = Math.round(this.width * dots);
    this.canvas.height = Math.round(this.height * dots);
    this.context.setTransform(dots, 0, 0, dots, 0, 0);
    const style = getComputedStyle(this.canvas);
    this.colours = {};
    for (const name of ["target", "draft", "ink", "line", "paper"]) {
      this.colours[name] = style.getPropertyValue(`--${name}`).trim();
    }
  }

  draw(request, player) {
    const context = this.context;
    context.clearRect(0, 0, this.width, this.height);
    const wide = player.mean * ROUNDS;
    const from = player.time - 0.6 * wide;
    const at = player.find();
    const lanes = timelinesOf(request, at - 2 * ROUNDS, at + ROUNDS);
    const x = (time) => ((time - from) / wide) * this.width;
    const rows = [4, 4 + TALL + GAP];
    for (const top of rows) this.bar(0, this.width, top, this.colours.line, 0.25);
    for (const [begin, end] of lanes.wait) this.hatch(x(begin), x(end), rows[0], this.colours.target);
    for (const [begin, end] of lanes.target) this.bar(x(begin), x(end), rows[0], this.colours.target, 1);
    const pauses = idle(lanes.draft, player.mean * 0.02);
    for (const [begin, end] of pauses) this.hatch(x(begin), x(end), rows[1], this.colours.draft);
    for (const [begin, end] of lanes.draft) this.bar(x(begin), x(end), rows[1], this.colours.draft, 1);
    this.ends(request, at, x, rows);
    context.fillStyle = this.colours.ink;
    context.globalAlpha = 1;
    context.fillRect(x(player.time) - 1, 0, 2, rows[1] + TALL + 4);
  }

  /** Draws a vertical line at the end of each round. */
  ends(request, at, x, rows) {
    const context = this.context;
    context.strokeStyle = this.colours.ink;
    context.globalAlpha = 0.35;
    context.setLineDash([2, 3]);
    context.lineWidth = 1;
    for (let round = Math.max(at - ROUNDS, 0); round <= Math.min(at + ROUNDS, request.rounds.length - 1); round += 1) {
      const where = Math.round(x(spanOf(request, round).end)) + 0.5;
      context.beginPath();
      context.moveTo(where, 0);
      context.lineTo(where, rows[1] + TALL + 4);
      context.stroke();
    }
    context.setLineDash([]);
    context.globalAlpha = 1;
  }

  bar(from, to, top, colour, alpha) {
    if (to < 0 || from > this.width) return;
    this.context.globalAlpha = alpha;
    this.context.fillStyle = colour;
    this.context.fillRect(from, top, Math.max(to - from - 1, 1), TALL);
    this.context.globalAlpha = 1;
  }

  /** Draws a wait as thin slanted lines. */
  hatch(from, to, top, colour) {
    const left = Math.max(from, 0);
    const right = Math.min(to, this.width);
    if (right - left < 3) return;
    const context = this.context;
    context.save();
    context.beginPath();
    context.rect(left, top, right - left, TALL);
    context.clip();
    context.strokeStyle = colour;
    context.globalAlpha = 0.5;
    context.lineWidth = 1;
    context.beginPath();
    for (let x = left - TALL; x < right; x += 6) {
      context.moveTo(x, top + TALL);
      context.lineTo(x + TALL, top);
    }
    context.stroke();
    context.restore();
    if (right - left > 44) this.word("waits", (left + right) / 2, top);
  }

  word(text, x, top) {
    const context = this.context;
    context.font = "11px system-ui, sans-serif";
    const wide = context.measureText(text).width + 8;
    context.fillStyle = this.colours.paper;
    context.fillRect(x - wide / 2, top + 4, wide, TALL - 8);
    context.fillStyle = this.colours.ink;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(text, x, top + TALL / 2 + 0.5);
    context.textAlign = "left";
  }
}

/** Returns the pauses between spans that are longer than `least` seconds. */
function idle(spans, least) {
  const sorted = [...spans].sort((one, other) => one[0] - other[0]);
  const pauses = [];
  for (let at = 1; at < sorted.length; at += 1) {
    if (sorted[at][0] - sorted[at - 1][1] > least) pauses.push([sorted[at - 1][1], sorted[at][0]]);
  }
  return pauses;
}
