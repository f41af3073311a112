// Puts the page together: which recording is shown, what a person asks for, and what the server says.

import { ServerError } from "./api.js";
import { Chat } from "./chat.js";
import { Claims } from "./claims.js";
import { LARGE, wireControls } from "./controls.js";
import { Host } from "./host.js";
import { isPlain, parse, Recording } from "./recording.js";
import { Race } from "./race.js";
import { Stage } from "./stage.js";
import { safe, visible } from "./tokens.js";
import { Message, transcribe } from "./transcript.js";

const $ = (id) => document.getElementById(id);
const MUTE = "The events of the race did not come; try it again.";

class App {
  constructor() {
    this.live = new Recording();
    this.shown = null;
    this.messages = new Map(); // of the recording that is shown
    this.mine = []; // the conversation's elements, while a recording is shown
    this.chat = new Chat();
    this.claims = new Claims();
    this.stage = new Stage();
    this.race = new Race();
    this.race.told = (text) => this.announce(text);
    this.host = new Host(this);
    this.stage.listeners.add((request, round) => this.messages.get(request)?.until(round, this.shown !== this.live));
    wireControls(this);
  }

  async start() {
    let health = null;
    try {
      health = await (await fetch("/health", { cache: "no-store" })).json();
    } catch {
      this.host.connection("gone", "no server");
    }
    if (health?.status === "replay") return this.replay(health.trace);
    this.load("/page/traces/large.jsonl", LARGE);
    this.host.start();
  }

  /** A server without a model: it has one trace, and nobody to ask. */
  async replay(name) {
    this.host.connection("", "a recording");
    document.body.dataset.mode = "replay";
    $("composer").hidden = true;
    document.querySelector(".skip").hidden = true;
    $("race-run").hidden = true;
    await this.load("/replay.jsonl", name);
  }

  /** A line of the engine: of a request of this page, or of somebody else's. */
  line(line) {
    const request = this.live.add(line);
    if (line.swiftspec_trace) this.host.named();
    if (request === null) return;
    if (line.begin) {
      const own = this.claims.begun(request);
      const follows = this.shown === this.live && (!this.stage.request || $("live").dataset.wanted === "true");
      if (own || follows) this.showRequest(request, this.live);
      else this.list();
    }
    if (line.end) {
      this.claims.ended(request);
      this.list();
    }
    if (request === this.stage.request) this.stage.changed();
  }

  announce(text) {
    $("announce").textContent = text;
  }

  hint(text, wrong = false) {
    $("hint").textContent = safe(text);
    $("hint").classList.toggle("error", wrong);
  }

  /** Shows a trace that is at an address of this server. */
  async load(path, name) {
    try {
      const answer = await fetch(path, { cache: "no-store" });
      if (!answer.ok) throw new ServerError("it is not there");
      this.showRecording(parse(await answer.text()), name);
    } catch (error) {
      this.hint(`${name}: ${error.message}`, true);
      $("note").textContent = `${name} cannot be shown: ${error.message}`;
    }
  }

  showRecording(recording, name) {
    if (this.shown === this.live) this.mine = [...$("messages").children];
    this.shown = recording;
    this.name = name;
    const replays = document.body.dataset.mode === "replay";
    $("back-live").hidden = replays;
    $("talk-title").textContent = `A recording: ${name}.${replays ? "" : " Ask below, and you see your own."}`;
    this.messages = transcribe($("messages"), recording);
    const best = recording.requests.findLast((request) => request.rounds.length > 0 && !isPlain(request));
    this.showRequest(best ?? recording.requests[0] ?? null, recording);
    this.race.show(recording, false);
  }

  /** The conversation again. */
  showLive() {
    if (this.shown === this.live) return;
    this.shown = this.live;
    this.name = "";
    $("back-live").hidden = true;
    $("talk-title").textContent = "";
    $("messages").replaceChildren(...this.mine);
    this.messages = new Map();
    this.race.show(this.live, true);
    this.showRequest(this.live.requests.at(-1) ?? null, this.live);
  }

  showRequest(request, recording) {
    if (recording === this.live) this.showLive();
    const following = $("live").dataset.wanted === "true" && request !== null && !request.end;
    this.stage.show(recording, request, { following, live: recording === this.live });
    if (recording !== this.live) this.messages.get(request)?.shown();
    this.list();
  }

  /** The requests to choose from. */
  list() {
    const options = (this.shown?.requests ?? []).map((request, at) => {
      const option = document.createElement("option");
      const prompt = (request.begin.prompt ?? []).slice(-12).map((token) => this.shown.text(token)).join("");
      const kind = isPlain(request) ? " (plain)" : "";
      option.value = String(at);
      option.textContent = `${at + 1}${kind}: ${visible(prompt)}`;
      option.selected = request === this.stage.request;
      return option;
    });
    $("request").replaceChildren(...options);
    $("request").disabled = options.length === 0;
  }

  /** Asks for an answer to what is written. */
  async send() {
    const text = $("composer-text").value;
    if (text.trim() === "" || this.busy) return;
    let message = null;
    await this.working(async () => {
      const settings = this.chat.settings();
      this.showLive();
      message = new Message($("messages"), text);
      $("composer-text").value = "";
      const claim = this.claims.expect(settings.seed);
      await this.chat.answer(text, settings, (piece) => message.add(piece));
      const request = await this.claims.done(claim, this.host.connected);
      if (request === null) return;
      message.tell(this.live, request);
      message.sum(request);
      this.messages.set(request, message);
      this.announce(`The answer is complete. ${message.cost.textContent}`);
    }, (why) => (message ? message.fail(why) : this.hint(why, true)));
  }

  /** The race on this server: plainly, with speculation, then both side by side. */
  async runRace() {
    const text = $("composer-text").value || this.lastAsked();
    if (this.busy) return;
    if (text === "") return this.hint("Write a prompt first: the race runs it twice.", true);
    this.tab("race");
    await this.working(async () => {
      const settings = this.chat.settings();
      this.showLive();
      const run = async (said, more) => {
        this.race.waiting(said);
        const claim = this.claims.expect(settings.seed);
        await this.chat.answer(text, settings, () => {}, { more, alone: true });
        return this.claims.done(claim, this.host.connected);
      };
      const plain = await run("1 of 2: plain decoding runs, one token a pass …", { verify_batch: 1 });
      const fast = await run("2 of 2: the same with speculation …", {});
      if (!plain?.rounds.length || !fast?.rounds.length) throw new ServerError(MUTE);
      this.race.play(this.live, { plain, fast });
    }, (why) => this.race.waiting(why));
  }

  lastAsked() {
    return this.mineLast ?? "";
  }

  /** Does some work, with the buttons as they are meanwhile. */
  async working(work, failed) {
    this.busy = true;
    this.mineLast = $("composer-text").value || this.mineLast;
    this.hint("");
    for (const id of ["send", "race-this"]) $(id).hidden = true;
    $("race-run").disabled = true;
    $("stop").hidden = false;
    try {
      await work();
    } catch (error) {
      failed(error.message);
      this.announce(error.message);
      if (error.status === 401) this.host.wantKey();
    } finally {
      this.busy = false;
      for (const id of ["send", "race-this"]) $(id).hidden = false;
      $("race-run").disabled = false;
      $("stop").hidden = true;
    }
  }

  tab(name) {
    for (const one of ["tree", "race"]) {
      const chosen = one === name;
      $(`tab-${one}`).setAttribute("aria-selected", String(chosen));
      $(`tab-${one}`).tabIndex = chosen ? 0 : -1;
      $(`panel-${one}`).hidden = !chosen;
    }
  }
}

new App().start();
