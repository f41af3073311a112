// Draws a tree on a canvas. Colour and shape show the fate of a node: a dashed frame, a tick, a cross, a diamond, a
// filled dot or an empty one.

import { isLarge, place } from "./layout.js";
import { cut, visible } from "./tokens.js";
import { fateInFlight } from "./tree.js";

const FONT = "12px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace";
const LETTER = 7.25; // width of a letter of FONT, pixels
const SMALL = FONT.replace("12px", "10px");
const SMALL_LETTER = 6.05;
const TALL = 20; // height of a node with a frame, pixels
const MARKS = { verified: "✓", rejected: "✕", own: "◆" };

export class TreeCanvas {
  constructor(canvas, textOf) {
    this.canvas = canvas;
    this.textOf = textOf;
    this.context = canvas.getContext("2d");
    this.spots = []; // nodes as last drawn: {node, x, y, width, ...}
    this.places = new WeakMap();
    this.colours = {};
    this.resize();
  }

  /** Adopts the current size of the canvas and the current colours of the page. */
  resize() {
    const { clientWidth, clientHeight } = this.canvas;
    const dots = window.devicePixelRatio || 1;
    this.width = clientWidth;
    this.height = clientHeight;
    this.canvas.width = Math.round(clientWidth * dots);
    this.canvas.height = Math.round(clientHeight * dots);
    this.context.setTransform(dots, 0, 0, dots, 0, 0);
    this.places = new WeakMap();
    const style = getComputedStyle(this.canvas);
    for (const name of ["flight", "verified", "rejected", "own", "kept", "idle", "ink", "paper", "line", "focus"]) {
      this.colours[name] = style.getPropertyValue(`--${name}`).trim();
    }
  }

  /** Returns the layout of a tree, see `place`. */
  placesOf(tree) {
    if (!this.places.has(tree)) this.places.set(tree, place(tree, this.width, this.height));
    return this.places.get(tree);
  }

  /**
   * Draws `tree`. `answered`: whether the target has verified the proposal. `from`: tree of the previous round during
   * the transition to this one; `share`: progress of the transition, 0 to 1. `beat`: time in seconds, which moves the
   * dashes of nodes that the target is verifying. `chosen`: node that is outlined.
   */
  draw({ tree, answered, from = null, share = 1, beat = 0, chosen = null }) {
    this.spots = [];
    this.context.clearRect(0, 0, this.width, this.height);
    if (tree.nodes.length === 0) return;
    const { places, deeper } = this.placesOf(tree);
    const past = from === null ? null : this.placesOf(from).places;
    const nodes = tree.nodes.filter((node) => answered || !node.added);
    const eased = share < 0.5 ? 2 * share * share : 1 - (2 - 2 * share) ** 2 / 2;
    const spots = nodes.map((node) => this.spot(node, answered, past, places, eased));
    if (past !== null && share < 1) this.leave(from, tree, past, eased);
    const byNode = new Map(spots.map((spot) => [spot.node, spot]));
    const fate = (node) => (answered ? node.fate : fateInFlight(node));
    for (const spot of spots) if (spot.node.parent) this.edge(byNode.get(spot.node.parent), spot, fate(spot.node));
    for (const spot of spots) this.node(spot, fate(spot.node), beat, spot.node === chosen);
    this.context.globalAlpha = 1;
    if (deeper > 0) this.note(`${deeper} more to the right`);
    this.spots = spots;
  }

  /**
   * Returns a node as it is drawn: its text and its current position, which moves from its place in the previous tree
   * to its place in this tree. A new node starts at its parent. `share`: progress of the move, 0 to 1.
   */
  spot(node, answered, past, places, share) {
    const to = places.get(node.name);
    const above = node.parent?.name;
    const start = past === null ? to : (past.get(node.name) ?? past.get(above) ?? places.get(above) ?? to);
    const fresh = past !== null && !past.has(node.name);
    const x = start.x + (to.x - start.x) * share;
    const y = start.y + (to.y - start.y) * share;
    const large = isLarge(node) && (answered || node.fate !== "own"); // the target's own token is not known before
    return { node, x, y, alpha: fresh ? share : 1, ...this.lettered(node, to, large) };
  }

  /** Returns the text of a node, either `label` in its frame or `small` next to its dot, and its width in pixels. */
  lettered(node, place, large) {
    const written = (letter) => cut(visible(this.textOf(node.token)), Math.max(Math.floor(place.room / letter) - 2, 2));
    if (large) {
      const label = written(LETTER);
      return { label, small: "", width: [...label].length * LETTER + 26 };
    }
    const small = node.expanded && place.scale > 0.6 ? written(SMALL_LETTER) : "";
    return { label: "", small, width: small === "" ? 9 : 13 + [...small].length * SMALL_LETTER };
  }

  /** Fades out the nodes that do not survive. */
  leave(from, tree, past, share) {
    const stays = new Set(tree.nodes.map((node) => node.name));
    const shift = (past.get(from.next.name)?.x ?? 4) - 4;
    for (const node of from.nodes) {
      const at = past.get(node.name);
      if (stays.has(node.name) || at === undefined) continue;
      const look = this.lettered(node, at, isLarge(node));
      this.node({ node, x: at.x - shift * share, y: at.y, alpha: (1 - share) ** 2, ...look }, node.fate, 0, false);
    }
  }

  edge(parent, spot, fate) {
    const context = this.context;
    const strong = fate === "verified" || fate === "own";
    context.globalAlpha = spot.alpha * (spot.label ? 1 : 0.55);
    context.strokeStyle = this.colours[strong || spot.label ? fate : "line"];
    context.lineWidth = strong ? 2.5 : 0.8 + 1.6 * (spot.node.q ?? 0.2);
    context.setLineDash(fate === "rejected" ? [3, 3] : []);
    const x = parent.x + parent.width;
    const bend = Math.max((spot.x - x) / 2, 6);
    context.beginPath();
    context.moveTo(x, parent.y);
    context.bezierCurveTo(x + bend, parent.y, spot.x - bend, spot.y, spot.x, spot.y);
    context.stroke();
    context.setLineDash([]);
  }

  node(spot, fate, beat, chosen) {
    const context = this.context;
    context.globalAlpha = spot.alpha;
    if (spot.label === "") this.dot(spot, fate);
    else this.chip(spot, fate, beat);
    if (!chosen) return;
    context.globalAlpha = 1;
    context.strokeStyle = this.colours.focus;
    context.lineWidth = 2;
    const tall = spot.label === "" ? 12 : TALL + 8;
    this.outline(spot.x - 4, spot.y - tall / 2, spot.width + 8, tall, 8);
    context.stroke();
  }

  dot(spot, fate) {
    const context = this.context;
    const radius = spot.node.expanded ? 3.2 : 1.8;
    context.beginPath();
    context.arc(spot.x + 4, spot.y, radius, 0, 2 * Math.PI);
    context.fillStyle = this.colours[fate === "kept" ? "kept" : "paper"];
    context.strokeStyle = this.colours[fate];
    context.lineWidth = 1.2;
    context.fill();
    context.stroke();
    if (spot.small === "") return;
    context.font = SMALL;
    context.textBaseline = "middle";
    context.fillStyle = this.colours[fate === "kept" ? "kept" : "idle"];
    context.fillText(spot.small, spot.x + 11, spot.y + 0.5);
  }

  chip(spot, fate, beat) {
    const context = this.context;
    const colour = this.colours[fate];
    const solid = fate === "verified" || fate === "own";
    const top = spot.y - TALL / 2;
    if (fate === "own") this.pointed(spot.x, top, spot.width, TALL);
    else this.outline(spot.x, top, spot.width, TALL, fate === "kept" ? 4 : TALL / 2);
    context.fillStyle = solid ? colour : this.colours.paper;
    context.fill();
    context.strokeStyle = colour;
    context.lineWidth = fate === "kept" ? 2.5 : 1.5;
    context.setLineDash(fate === "flight" ? [5, 3] : fate === "rejected" ? [2, 3] : []);
    context.lineDashOffset = -beat * 16;
    context.stroke();
    context.setLineDash([]);
    context.lineDashOffset = 0; // the edges are not animated
    context.font = FONT;
    context.textBaseline = "middle";
    context.fillStyle = solid ? this.colours.paper : fate === "rejected" ? colour : this.colours.ink;
    const mark = spot.node.parent === null ? "▸" : (MARKS[fate] ?? (fate === "flight" ? "?" : "●"));
    context.fillText(mark, spot.x + 7, spot.y + 0.5, 12);
    context.fillText(spot.label, spot.x + 19, spot.y + 0.5, spot.width - 22);
  }

  outline(x, y, width, height, round) {
    this.context.beginPath();
    this.context.roundRect(x, y, width, height, round);
  }

  pointed(x, y, width, height) {
    const context = this.context;
    context.beginPath();
    context.moveTo(x + 6, y);
    context.lineTo(x + width - 6, y);
    context.lineTo(x + width, y + height / 2);
    context.lineTo(x + width - 6, y + height);
    context.lineTo(x + 6, y + height);
    context.lineTo(x, y + height / 2);
    context.closePath();
  }

  note(text) {
    const context = this.context;
    context.font = FONT;
    context.textAlign = "right";
    context.fillStyle = this.colours.idle;
    context.fillText(`${text} →`, this.width - 4, this.height - 8);
    context.textAlign = "left";
  }

  /** Returns the drawn node at a point, or the nearest one within 13 pixels; null: none. */
  hit(x, y) {
    let best = null;
    let least = 13;
    for (const spot of this.spots) {
      const across = Math.max(spot.x - x, x - spot.x - spot.width, 0);
      const away = Math.hypot(across, Math.max(Math.abs(y - spot.y) - (spot.label ? TALL / 2 : 0), 0));
      if (away < least) [best, least] = [spot, away];
    }
    return best;
  }

  spotOf(node) {
    return this.spots.find((spot) => spot.node === node) ?? null;
  }
}
