// Draws docs/page.svg: half a minute of the page's tree, as an animated SVG.
//
//     node tools/page_picture.mjs
//
// The page's own modules draw the rounds of a recorded trace on a canvas context that writes SVG. The picture has its own
// background, so that it is readable on light and dark pages, and loads nothing. With reduced motion it is a still.

import { readFileSync, writeFileSync } from "node:fs";

import { TreeCanvas } from "../swiftspec/serve/page/draw.js";
import { parse } from "../swiftspec/serve/page/recording.js";
import { cut, visible } from "../swiftspec/serve/page/tokens.js";
import { Trees } from "../swiftspec/serve/page/tree.js";
import { caption } from "../swiftspec/serve/page/captions.js";

const HERE = new URL("../", import.meta.url);
const TRACE = new URL("swiftspec/serve/page/traces/large.jsonl", HERE);
const PICTURE = new URL("docs/page.svg", HERE);
const [FIRST, ROUNDS, SECONDS] = [3, 5, 3]; // first round and number of rounds; seconds per half round
const [WIDTH, HEIGHT, TOP, LEGEND] = [880, 500, 84, 28];
const COLOURS = {
  ink: "#e9ecea", paper: "#12161a", line: "#3a444a", soft: "#a2aca8", flight: "#f0b04a", verified: "#4ecb92",
  rejected: "#ff7d75", own: "#b79cff", kept: "#6db8ff", idle: "#7d8884", focus: "#7fb2ff",
};
const MONO = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace";
const SIGNS = [["flight", "?", "with the target now"], ["verified", "✓", "accepted"], ["rejected", "✕", "rejected"],
  ["own", "◆", "the target’s own"], ["kept", "●", "kept for later"], ["idle", "○", "drafted, not sent"]];

const escaped = (text) => text.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
const short = (value) => String(Math.round(value * 10) / 10);

/** The part of a canvas context that the page uses, writing SVG. */
class Pen {
  constructor() {
    this.texts = [];
    this.marks = new Map(); // path data by style; paths of one style are merged, since overlaps do not matter
    Object.assign(this, { filled: null, globalAlpha: 1, lineWidth: 1, dash: [], font: "12px", fillStyle: "", strokeStyle: "", path: "" });
  }

  setTransform() {}
  clearRect() {}
  beginPath() { this.path = ""; }
  moveTo(x, y) { this.path += `M${short(x)} ${short(y)}`; }
  lineTo(x, y) { this.path += `L${short(x)} ${short(y)}`; }
  bezierCurveTo(...points) { this.path += `C${points.map(short).join(" ")}`; }
  closePath() { this.path += "Z"; }
  setLineDash(dash) { this.dash = dash; }

  arc(x, y, radius) {
    const across = short(2 * radius);
    this.path += `M${short(x - radius)} ${short(y)}a${short(radius)} ${short(radius)} 0 1 0 ${across} 0`
      + `a${short(radius)} ${short(radius)} 0 1 0-${across} 0`;
  }

  roundRect(x, y, width, height, round) {
    const [r, w, h] = [Math.min(round, height / 2), width, height];
    this.path += `M${short(x + r)} ${short(y)}h${short(w - 2 * r)}a${r} ${r} 0 0 1 ${r} ${r}v${short(h - 2 * r)}`
      + `a${r} ${r} 0 0 1-${r} ${r}h${short(2 * r - w)}a${r} ${r} 0 0 1-${r}-${r}v${short(2 * r - h)}a${r} ${r} 0 0 1 ${r}-${r}`;
  }

  fill() { this.filled = this.path; } // every filled path is also stroked

  stroke() {
    const dash = this.dash.length > 0 ? ` stroke-dasharray="${this.dash.join(" ")}"` : "";
    const pale = this.globalAlpha < 1 ? ` opacity="${short(this.globalAlpha)}"` : "";
    const fill = this.filled === this.path ? this.fillStyle : "none";
    const wide = Math.round(this.lineWidth * 2) / 2;
    const how = `fill="${fill}" stroke="${this.strokeStyle}" stroke-width="${wide}"${dash}${pale}`;
    this.marks.set(how, (this.marks.get(how) ?? "") + this.path);
  }

  fillText(text, x, y) {
    const size = parseInt(this.font, 10);
    this.texts.push(`<text x="${short(x)}" y="${short(y + size * 0.34)}" fill="${this.fillStyle}"`
      + `${size === 12 ? "" : ` font-size="${size}"`}>${escaped(text)}</text>`);
  }

  get svg() {
    const paths = [...this.marks].map(([how, path]) => `<path d="${path}" ${how}/>`);
    return `<g font-size="12" font-family="${MONO}">${paths.join("")}${this.texts.join("")}</g>`;
  }
}

function words(text, x, y, colour, size, font = "system-ui, sans-serif", more = "") {
  return `<text x="${short(x)}" y="${short(y)}" fill="${colour}" font-size="${size}" font-family="${font}"${more}>`
    + `${escaped(text)}</text>`;
}

/** One half round: the sentence, the end of the text, and the tree. */
function scene(recording, request, trees, index, answered) {
  const textOf = (token) => recording.text(token);
  const pen = new Pen();
  const canvas = { clientWidth: WIDTH - 40, clientHeight: HEIGHT - TOP - LEGEND - 16, getContext: () => pen };
  new TreeCanvas(canvas, textOf).draw({ tree: trees.at(index), answered });
  const sentence = caption(trees.at(index), answered, request.rounds[index], textOf).slice(0, 3);
  const spans = sentence.map(([text, strong]) => `<tspan${strong ? ' font-weight="700"' : ""}>${escaped(text)}</tspan>`);
  const verified = request.rounds.slice(0, answered ? index + 1 : index).flatMap((round) => round.tokens);
  const soFar = visible([...request.begin.prompt, ...verified].map(textOf).join("")).slice(-100);
  return `<text x="20" y="36" fill="${COLOURS.ink}" font-size="14.5" font-family="system-ui, sans-serif">${spans.join("")}</text>`
    + words(cut(soFar, 100), 20, 64, COLOURS.soft, 13, MONO)
    + `<g transform="translate(20, ${TOP})">${pen.svg}</g>`;
}

function legend() {
  return SIGNS.map(([fate, sign, text], at) =>
    words(sign, 20 + at * 143, HEIGHT - 16, COLOURS[fate], 13, MONO, ' font-weight="700"')
    + words(text, 34 + at * 143, HEIGHT - 16, COLOURS.soft, 11.5)).join("");
}

function draw() {
  globalThis.window = { devicePixelRatio: 1 };
  globalThis.getComputedStyle = () => ({ getPropertyValue: (name) => COLOURS[name.slice(2)] });
  const recording = parse(readFileSync(TRACE, "utf8"));
  const request = recording.requests.findLast((one) => one.rounds.some((round) => round.proposal.tokens.length > 1));
  const trees = new Trees(request);
  const halves = Array.from({ length: 2 * ROUNDS }, (_, at) => [FIRST + (at >> 1), at % 2 === 1]);
  const [share, whole] = [100 / halves.length, halves.length * SECONDS];
  const scenes = halves.map(([index, answered], at) =>
    `<g class="s" style="animation-delay:${at * SECONDS - whole}s">${scene(recording, request, trees, index, answered)}</g>`);
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${WIDTH} ${HEIGHT}" role="img">
<title>Five rounds: the draft grows a tree, the target verifies the likeliest tokens in one pass and accepts some of them</title>
<style>text{white-space:pre}.s{opacity:0;animation:s ${whole}s infinite}.s:nth-of-type(2){opacity:1}
@keyframes s{0%,${short(share - 0.6)}%{opacity:1}${short(share)}%,99.400%{opacity:0}100%{opacity:1}}
@media(prefers-reduced-motion:reduce){.s{animation:none}}</style>
<rect width="100%" height="100%" rx="10" fill="${COLOURS.paper}"/>
${scenes.join("\n")}
<g>${legend()}</g>
</svg>
`;
}

const picture = draw();
writeFileSync(PICTURE, picture);
console.log(`wrote docs/page.svg, ${Buffer.byteLength(picture)} bytes`);
