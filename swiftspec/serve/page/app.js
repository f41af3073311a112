// The page: connects the server, the requests of the user, the recording that is shown and the controls.

import { ServerError } from "./api.js";
import { Requests } from "./requests.js";
import { LARGE, wireControls } from "./controls.js";
import { Server } from "./server.js";
import { keepWritten, recall, written } from "./storage.js";
import { Race } from "./race.js";
import { isEmulated, isPlain, parse, Recording } from "./recording.js";
import { TreeView } from "./tree_view.js";
import { cut, safe } from "./tokens.js";
import { transcribe } from "./transcript.js";

const $ = (id) => document.getElementById(id);
const NAMED = 34; // maximum length of a request's name in the list, characters

class App {
  constructor() {
    this.live = new Recording();
    this.shown = null;
    this.messages = new Map(); // request -> Message, of the recording that is shown
    this.mine = []; // elements of the live conversation, while a recording is shown instead
    this.treeView = new TreeView();
    this.race = new Race();
    this.race.told = (text) => this.announce(text);
    this.requests = new Requests(this);
    this.server = new Server(this);
    this.treeView.listeners.add((request, round) => this.messages.get(request)?.until(round, this.shown !== this.live));
    wireControls(this);
  }

  async start() {
    let health = null;
    try {
      health = await (await fetch("health", { cache: "no-store" })).json();
    } catch {
      this.server.connection("gone", "no server");
    }
    if (health?.status === "replay") return this.replay(health.trace);
    this.write(written());
    const kept = recall();
    if (kept) this.requests.restore(kept);
    else this.showLive();
    this.server.start();
  }

  /** Sets the page up for a replay server, which has one trace, called `name`, and no model. */
  async replay(name) {
    this.server.connection("", "a recording");
    document.body.dataset.mode = "replay";
    $("composer").hidden = true;
    document.querySelector(".skip").hidden = true;
    $("race-run").hidden = $("race-large").hidden = true;
    await this.load("replay.jsonl", name);
  }

  /** Handles an event of the engine. It belongs to a request of this page or of another client. */
  line(line) {
    const request = this.live.add(line);
    if (line.swiftspec_trace) this.server.named();
    if (request === null) return;
    if (line.begin) {
      const own = this.requests.begun(request);
      const follows = this.shown === this.live && (!this.treeView.request || $("live").dataset.wanted === "true");
      if (own || follows) this.showRequest(request, this.live);
      else this.list();
    }
    if (line.end) {
      this.requests.ownRequests.ended(request);
      this.list();
    }
    if (request === this.treeView.request) this.treeView.changed();
  }

  announce(text) {
    $("announce").textContent = text;
  }

  /** Shows a permanent hint about the model. */
  hint(text) {
    $("hint").textContent = safe(text);
  }

  /** Shows an error or an instruction. `gone`: it disappears when the server answers again. */
  trouble(text, gone = false) {
    $("trouble").textContent = safe(text);
    this.gone = gone;
  }

  /** Hides the message that the server is gone. */
  answers() {
    if (this.gone) this.trouble("");
  }

  /** Loads the trace at `path` of this server and shows it under `name`. */
  async load(path, name) {
    try {
      const answer = await fetch(path, { cache: "no-store" });
      if (!answer.ok) throw new ServerError("file not found");
      this.showRecording(parse(await answer.text()), name);
    } catch (error) {
      this.trouble(`${name} cannot be shown: ${error.message}`);
    }
  }

  showRecording(recording, name) {
    if (this.shown === this.live) this.mine = [...$("messages").children];
    this.shown = recording;
    this.name = name;
    const replays = document.body.dataset.mode === "replay";
    $("back-live").hidden = replays;
    $("talk-title").textContent = `A recording: ${name}.${replays ? "" : " Send a prompt below to see your own."}`;
    $("strip").hidden = false;
    $("strip-text").textContent = `Recording: ${safe(name)}${isEmulated(recording) ? ", step times emulated" : ""}`;
    document.body.dataset.shown = "recording";
    this.messages = transcribe($("messages"), recording);
    const best = recording.requests.findLast((request) => request.rounds.length > 0 && !isPlain(request));
    this.showRequest(best ?? recording.requests[0] ?? null, recording);
    this.race.show(recording, false);
  }

  /** Shows the live conversation. */
  showLive() {
    if (this.shown === this.live) return;
    this.shown = this.live;
    this.name = "";
    $("back-live").hidden = $("strip").hidden = true;
    document.body.dataset.shown = "live";
    $("talk-title").textContent = "";
    $("messages").replaceChildren(...this.mine);
    this.messages = this.requests.told;
    this.race.show(this.live, true);
    this.showRequest(this.live.requests.at(-1) ?? null, this.live);
  }

  showRequest(request, recording) {
    if (recording === this.live) this.showLive();
    const following = $("live").dataset.wanted === "true" && request !== null && !request.end;
    this.treeView.show(recording, request, { following, live: recording === this.live });
    if (recording !== this.live) this.messages.get(request)?.shown();
    this.list();
  }

  /** Updates the list of requests. */
  list() {
    const options = (this.shown?.requests ?? []).map((request, at) => {
      const option = document.createElement("option");
      option.value = String(at);
      option.textContent = `${at + 1}${this.kind(request)}: ${this.nameOf(request)}`;
      option.selected = request === this.treeView.request;
      return option;
    });
    $("request").replaceChildren(...options);
    $("request").disabled = options.length === 0;
    $("strip-back").hidden = document.body.dataset.mode === "replay"
      || this.live.requests.length + this.requests.talk.length === 0;
    const own = this.requests.talk.length > 0 || this.live.requests.some((one) => this.requests.asked.has(one));
    $("strip-back").textContent = own ? "Back to yours" : "To this server’s";
  }

  /** Returns the label for the kind of a request in the list: without a draft, or of another client. */
  kind(request) {
    const others = this.shown === this.live && !this.requests.asked.has(request) ? ", another client’s" : "";
    return `${isPlain(request) ? ", plain" : ""}${others}`;
  }

  /** Returns the name of a request in the list: the beginning of its prompt. */
  nameOf(request) {
    const prompt = this.shown.pieces((request.begin.prompt ?? []).slice(0, NAMED), { special: true }).join("");
    return cut(safe(this.requests.asked.get(request) ?? prompt).replace(/\s+/g, " "), NAMED);
  }

  write(text) {
    $("composer-text").value = text;
    keepWritten(text);
  }

  /** Loads and plays the recorded race with a large target. */
  async raceLarge() {
    await this.load("page/traces/large.jsonl", LARGE);
    if (this.race.pair) this.race.play(this.race.recording, this.race.pair);
  }

  tab(name) {
    document.body.dataset.tab = name;
    for (const one of ["tree", "race"]) {
      const chosen = one === name;
      $(`tab-${one}`).setAttribute("aria-selected", String(chosen));
      $(`tab-${one}`).tabIndex = chosen ? 0 : -1;
      $(`panel-${one}`).hidden = !chosen;
    }
  }
}

new App().start();
