// Shows one request of a recording at one moment: its tree, the two timelines and statistics.

import { TreeCanvas } from "./draw.js";
import { TimelinesCanvas } from "./timelines.js";
import { Player } from "./player.js";
import { drawHistogram, statsOf } from "./stats.js";
import { isEmulated } from "./recording.js";
import { number, percent, visible } from "./tokens.js";
import { Trees } from "./tree.js";
import { about, caption } from "./captions.js";

const CONTEXT = 48; // tokens of the text before the root that are shown
const HURRY = 0.08; // minimum seconds that a round is shown; if rounds are faster, some are skipped
const MOVE = 0.3; // seconds of the transition to the next tree, at any speed
const $ = (id) => document.getElementById(id);

export class TreeView {
  constructor() {
    this.recording = null;
    this.request = null;
    this.trees = null;
    this.player = new Player();
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.canvas = new TreeCanvas($("tree"), (token) => this.recording.text(token));
    this.timelines = new TimelinesCanvas($("lanes"));
    this.chosen = null;
    this.dirty = true;
    this.said = -1; // the half round that the texts describe: 2 * index + answered; -1: none
    this.saidAt = 0; // time when the texts were set, seconds
    this.movedAt = -1; // time when the transition began, seconds; -1: there is none
    this.now = null;
    this.nothing = "Send a prompt or choose an example. The draft tree of each round is drawn here. "
      + "The menu Recordings has a race of a 70B target.";
    this.frames = { count: 0, spent: 0 };
    this.listeners = new Set(); // called when the moment shown changes
    this.wire();
    let last = performance.now();
    const frame = (at) => {
      this.frame((at - last) / 1000, at / 1000);
      last = at;
      requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  wire() {
    const resized = () => {
      this.canvas.resize();
      this.timelines.resize();
      this.dirty = true;
    };
    new ResizeObserver(resized).observe($("tree"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => requestAnimationFrame(resized));
    const tree = $("tree");
    const under = (event) => this.point(this.canvas.hit(event.offsetX, event.offsetY)?.node ?? null);
    tree.addEventListener("pointermove", under);
    tree.addEventListener("pointerdown", under);
    tree.addEventListener("pointerleave", () => this.point(null));
    tree.addEventListener("blur", () => this.point(null));
    tree.addEventListener("keydown", (event) => this.walk(event));
  }

  /** Shows a request of a recording; null: none. */
  show(recording, request, how = {}) {
    this.live = Boolean(how.live);
    this.recording = recording;
    this.request = request;
    this.trees = request && new Trees(request);
    this.now = null;
    $("panel-tree").dataset.empty = String(request === null);
    $("panel-tree").dataset.early = "true";
    this.timelines.resize(); // it may have been hidden
    if (request === null) {
      $("caption").textContent = "\u00a0";
      for (const id of ["so-far", "note"]) $(id).replaceChildren();
    }
    this.player.show(request, { following: Boolean(how.following), playing: !this.still.matches });
    this.point(null);
    this.changed();
  }

  changed() {
    this.dirty = true;
    this.said = -1;
  }

  frame(seconds, beat) {
    const moved = this.player.tick(seconds);
    const waiting = this.now !== null && !this.now.answered && this.player.playing && !this.still.matches;
    if (!moved && !this.dirty && !waiting) return;
    const began = performance.now();
    this.dirty = false;
    this.draw(beat);
    this.frames.count += 1;
    this.frames.spent += performance.now() - began;
    $("tree").dataset.ms = (this.frames.spent / this.frames.count).toFixed(2);
  }

  draw(beat) {
    const { player } = this;
    const nothing = player.rounds === 0;
    $("empty").hidden = !nothing;
    this.buttons();
    if (nothing) {
      $("tree").dataset.nodes = "0";
      const missed = Boolean(this.request?.missed);
      const waiting = this.request === null ? this.nothing : "Waiting for the first round.";
      $("empty").textContent = missed ? "The rounds of this request were missed." : waiting;
      this.canvas.context.clearRect(0, 0, this.canvas.width, this.canvas.height);
      this.timelines.context.clearRect(0, 0, this.timelines.width, this.timelines.height);
      this.now = null;
      return;
    }
    const fast = player.roundsPerFrame > 0.08; // too fast for transitions
    let { index, answered } = player.moment();
    if (fast && !answered && index > 0) [index, answered] = [index - 1, true];
    const hurried = fast && this.said >= 0 && player.playing && beat - this.saidAt < HURRY;
    if (hurried && this.now) ({ index, answered } = this.now); // keep the picture until its texts can change
    const share = fast ? 1 : this.share(index, answered, beat);
    const tree = this.trees.at(index);
    const from = share < 1 && index > 0 ? this.trees.at(index - 1) : null;
    $("empty").hidden = tree.nodes.length > 0;
    if (tree.nodes.length === 0) $("empty").textContent = "Mode smc has particles instead of a tree.";
    const moves = this.still.matches || !player.playing ? 0 : beat;
    this.canvas.draw({ tree, answered, from, share, beat: moves, chosen: this.chosen });
    this.timelines.draw(this.request, player);
    this.now = { index, answered, tree };
    $("scrub").value = String(Math.round(player.share * 1000));
    const half = 2 * index + (answered ? 1 : 0);
    if (half !== this.said) {
      this.saidAt = beat;
      this.say(half);
    }
  }

  /** Returns the progress of the transition from the previous tree, 0 to 1; 1 at rest and after a jump. */
  share(index, answered, beat) {
    if (!this.player.playing || this.still.matches || answered) this.movedAt = -1;
    else if (this.now?.answered && this.now.index === index - 1) this.movedAt = beat;
    else if (this.now?.index !== index) this.movedAt = -1;
    return this.movedAt < 0 ? 1 : Math.min((beat - this.movedAt) / MOVE, 1);
  }

  /** Sets the texts, which change once per half round. */
  say(half) {
    this.said = half;
    const { index, answered, tree } = this.now;
    const round = this.request.rounds[index];
    const textOf = (token) => this.recording.text(token);
    const parts = caption(tree, answered, round, textOf).map(([text, strong]) => {
      const part = document.createElement(strong ? "b" : "span");
      part.textContent = text;
      return part;
    });
    $("caption").setAttribute("aria-live", this.player.playing || this.player.following ? "off" : "polite");
    $("caption").replaceChildren(...parts);
    $("round").textContent = `round ${index + 1} of ${this.request.rounds.length}`;
    $("scrub").setAttribute("aria-valuetext", $("round").textContent);
    this.numbers(answered ? index : index - 1);
    this.soFar(answered ? index + 1 : index);
    const canvas = $("tree");
    canvas.dataset.nodes = String(tree.nodes.length);
    canvas.dataset.proposed = String(tree.proposed);
    canvas.dataset.accepted = String(tree.accepted);
    canvas.setAttribute("aria-label", `The draft tree: ${tree.nodes.length} nodes, ${tree.proposed} of them proposed`
      + (answered ? `, ${tree.accepted} accepted` : ""));
    if (this.chosen && !tree.nodes.includes(this.chosen)) this.point(null);
    else if (this.chosen) this.tip();
    this.pace();
    for (const listener of this.listeners) listener(this.request, answered ? index : index - 1);
  }

  /** Shows statistics of the rounds up to `last`; -1: none yet. */
  numbers(last) {
    $("panel-tree").dataset.early = String(last < 0);
    if (last < 0) return;
    const stats = statsOf(this.request, last);
    $("per-round").textContent = number(stats.perRound);
    $("speed-now").textContent = number(stats.speed);
    $("tokens-now").textContent = String(stats.tokens);
    $("speed-kind").textContent = isEmulated(this.recording) ? "(emulated)" : "";
    $("target-busy").textContent = `busy ${percent(stats.targetBusy)}`;
    $("draft-busy").textContent = `busy ${percent(stats.draftBusy)}`;
    drawHistogram($("held"), stats.held);
  }

  /** Shows the end of the text before the tree's root. `rounds`: number of rounds that belong to the text. */
  soFar(rounds) {
    const tokens = [];
    for (let at = rounds - 1; at >= 0 && tokens.length < CONTEXT; at -= 1) {
      const added = this.request.rounds[at].tokens;
      tokens.unshift(...added.map((token, nth) => [token, nth === added.length - 1 ? "drawn" : "guessed"]));
    }
    if (tokens.length < CONTEXT) {
      const prompt = (this.request.begin.prompt ?? []).slice(tokens.length - CONTEXT);
      tokens.unshift(...prompt.map((token) => [token, "prompt"]));
    }
    const pieces = this.recording.pieces(tokens.map(([token]) => token), { special: true });
    const line = $("so-far");
    line.replaceChildren(...tokens.map(([, kind], at) => {
      const piece = document.createElement("span");
      piece.className = kind;
      piece.textContent = pieces[at] === "" ? "" : visible(pieces[at]);
      return piece;
    }));
    const excess = line.scrollWidth - line.clientWidth;
    if (excess <= 0) return;
    const start = line.firstChild.offsetLeft; // the line begins with a whole piece
    for (const piece of [...line.children].filter((each) => each.offsetLeft - start < excess)) piece.remove();
  }

  pace() {
    const { player } = this;
    const each = player.roundsPerFrame > 0.08 ? 60 * HURRY : 1; // screen frames for which a round is shown
    const every = Math.ceil(player.roundsPerFrame * each);
    const slowed = player.rate < 0.995 ? `Shown ${number(1 / player.rate)} times slower than it ran. ` : "";
    const skipped = every > 1 ? `Too fast for a screen: about one in ${every} rounds is shown. ` : "";
    const missed = this.request.missed ? `${this.request.missed} events were missed. ` : "";
    const { draft } = this.request.rounds[0];
    const trees = draft && !draft.tree ? "This trace has only the proposals, not the whole trees. " : "";
    $("note").textContent = slowed + skipped + missed + trees;
  }

  buttons() {
    const { player } = this;
    const state = player.playing ? "Pause" : "Play";
    if ($("play").getAttribute("aria-label") !== state) {
      $("play").setAttribute("aria-label", state);
      $("play").classList.toggle("on", player.playing);
    }
    $("live").setAttribute("aria-pressed", String(player.following));
    $("live").hidden = !this.live;
  }

  point(node) {
    if (node === this.chosen) return;
    this.chosen = node;
    this.dirty = true;
    $("tree").style.cursor = node ? "help" : "";
    this.tip();
  }

  tip() {
    const tip = $("tip");
    const spot = this.chosen && this.canvas.spotOf(this.chosen);
    tip.hidden = !spot;
    if (!spot) return;
    tip.textContent = about(this.chosen, this.now.answered, (token) => this.recording.text(token));
    const { width, height } = this.canvas;
    tip.style.left = `${Math.max(Math.min(spot.x, width - tip.offsetWidth - 4), 0)}px`;
    const below = spot.y + 18;
    tip.style.top = `${below + tip.offsetHeight < height ? below : Math.max(spot.y - 18 - tip.offsetHeight, 0)}px`;
  }

  /** Handles arrow keys: selects the parent, the most likely child, or the sibling above or below. */
  walk(event) {
    if (!this.now || !event.key.startsWith("Arrow") && event.key !== "Escape") return;
    event.preventDefault();
    if (event.key === "Escape") return this.point(null);
    this.player.playing = this.player.following = false;
    const node = this.chosen;
    if (!node) return this.point(this.now.tree.nodes[0]);
    const row = (node.parent?.children ?? []).filter((child) => this.canvas.spotOf(child));
    row.sort((one, other) => this.canvas.spotOf(one).y - this.canvas.spotOf(other).y);
    const at = row.indexOf(node);
    const below = node.children.filter((child) => this.canvas.spotOf(child));
    const [best] = below.sort((one, other) => (other.q ?? 0) - (one.q ?? 0));
    const next = { ArrowLeft: node.parent, ArrowRight: best, ArrowUp: row[at - 1], ArrowDown: row[at + 1] }[event.key];
    if (next) this.point(next);
  }
}
