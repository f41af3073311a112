// Asks: for an answer, or for a race. What was written and said is kept, whatever becomes of it.

import { ServerError } from "./api.js";
import { Chat } from "./chat.js";
import { Claims } from "./claims.js";
import { keep } from "./memory.js";
import { blamed, settings } from "./settings.js";
import { CONTINUES, Message, TALKS } from "./transcript.js";

const MUTE = "The events of the race did not come; try it again.";
const $ = (id) => document.getElementById(id);

export class Asker {
  constructor(app) {
    this.app = app;
    this.chat = new Chat();
    this.claims = new Claims();
    this.talk = []; // the conversation's messages
    this.told = new Map(); // those whose rounds are known, by request
    this.asked = new WeakMap(); // what requests of this page were asked
    this.busy = false;
  }

  /** A request begins. Returns whether it is one of this page. */
  begun(request) {
    const own = this.claims.begun(request);
    if (own) this.asked.set(request, this.claims.textOf(request));
    return own;
  }

  /** Asks for an answer to what is written, or to an example. */
  async send(example = null) {
    const text = example ?? $("composer-text").value;
    if (!this.ready(text, "Write a text first, or choose an example.")) return;
    this.app.tab("tree");
    let message = null;
    await this.working(async () => {
      const asked = settings();
      this.app.showLive();
      document.body.dataset.asked = "true";
      message = new Message($("messages"), text, this.chat.talks ? TALKS : CONTINUES);
      if (example === null) this.app.write("");
      scrollTo(0, 0); // on a phone the answer is above
      const claim = this.claims.expect(asked.seed, text);
      const ended = await this.chat.answer(text, asked, (piece) => message.add(piece));
      const request = await this.claims.done(claim, this.app.host.connected);
      if (request !== null) {
        message.tell(this.app.live, request);
        this.told.set(request, message);
      }
      message.sum(request, ended);
      this.keep(message);
      this.app.announce(`The answer is complete. ${message.cost.textContent}`);
    }, (error) => this.failed(error, text, message));
  }

  /** Nothing that was written is lost: it is in the box again, and what came of an answer stays. */
  failed(error, text, message) {
    if ($("composer-text").value === "") this.app.write(text);
    if (message !== null && message.text !== "") {
      message.fail(error.gone ? "Broken off: the server is gone." : error.message);
      return this.keep(message);
    }
    message?.element.remove();
    this.app.mine = this.app.mine.filter((one) => one !== message?.element);
    this.app.trouble(blamed(error.message), error.gone);
  }

  /** The race on this server: plainly, with speculation, then both side by side. */
  async runRace() {
    const text = $("composer-text").value;
    if (!this.ready(text, "Write a text first: the race runs it twice.")) return;
    this.app.tab("race");
    await this.working(async () => {
      const asked = settings();
      this.app.showLive();
      const run = async (said, more) => {
        this.app.race.waiting(said);
        const claim = this.claims.expect(asked.seed, text);
        const ended = await this.chat.answer(text, asked, () => {}, { more, alone: true });
        if (ended === "stopped") throw new ServerError("The race was stopped by you.");
        return this.claims.done(claim, this.app.host.connected);
      };
      const plain = await run("1 of 2: plain decoding runs, one token a pass …", { verify_batch: 1 });
      const fast = await run("2 of 2: the same with speculation …", {});
      if (!plain?.rounds.length || !fast?.rounds.length) throw new ServerError(MUTE);
      this.app.race.play(this.app.live, { plain, fast });
    }, (error) => {
      this.app.race.show(this.app.live, true);
      this.app.trouble(blamed(error.message), error.gone);
    });
  }

  /** Whether something can be asked now; else says what to do. */
  ready(text, wanted) {
    if (this.busy) this.app.trouble("An answer is being written; Stop ends it.");
    else if (text.trim() === "") {
      this.app.trouble(wanted);
      $("composer-text").focus();
    } else return true;
    return false;
  }

  /** Does some work, with the buttons as they are meanwhile. */
  async working(work, failed) {
    this.busy = true;
    this.app.trouble("");
    for (const id of ["send", "race-this"]) $(id).hidden = true;
    $("race-run").disabled = true;
    $("stop").hidden = false;
    try {
      await work();
      this.app.trouble("");
    } catch (error) {
      failed(error);
      if (error.status === 401) this.app.host.wantKey();
    } finally {
      this.busy = false;
      this.claims.open = []; // of what failed
      for (const id of ["send", "race-this"]) $(id).hidden = false;
      $("race-run").disabled = false;
      $("stop").hidden = true;
    }
  }

  keep(message) {
    this.talk.push(message);
    keep(this.chat.turns, this.talk);
  }

  /** The conversation that this tab had before it was loaded again. Its trees are not kept. */
  restore({ turns, messages }) {
    this.chat.turns = turns;
    for (const { asked, text, cost, labels } of messages) {
      const message = new Message($("messages"), asked, labels);
      message.add(text);
      message.cost.textContent = cost;
      this.talk.push(message);
    }
    this.app.mine = [...$("messages").children];
    this.app.stage.nothing = "The trees of earlier answers went with the reload. Ask on, or open a recording.";
    document.body.dataset.asked = "true";
    this.app.showLive();
    $("talk").scrollTop = $("talk").scrollHeight;
  }
}
