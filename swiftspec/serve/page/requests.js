// Sends requests of the user: for an answer or for a race. Prompt and answer are kept even if the request fails.

import { ServerError } from "./api.js";
import { Chat } from "./chat.js";
import { OwnRequests } from "./own_requests.js";
import { keep } from "./storage.js";
import { MAX_TOKENS } from "./server.js";
import { blamed, settings } from "./settings.js";
import { CONTINUES, Message, TALKS } from "./transcript.js";

const NO_EVENTS = "The events of the race did not arrive; try again.";
const $ = (id) => document.getElementById(id);

export class Requests {
  constructor(app) {
    this.app = app;
    this.chat = new Chat();
    this.ownRequests = new OwnRequests();
    this.talk = []; // the conversation's messages
    this.told = new Map(); // request -> Message, of requests whose rounds are known
    this.asked = new WeakMap(); // request -> prompt, of this page's requests
    this.busy = false;
  }

  /** Handles the begin of a request. Returns whether this page has sent it. */
  begun(request) {
    const own = this.ownRequests.begun(request);
    if (own) this.asked.set(request, this.ownRequests.textOf(request));
    return own;
  }

  /** Requests an answer to the text in the box, or to an example. */
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
      const claim = this.ownRequests.expect(asked.seed, text);
      const ended = await this.chat.answer(text, asked, (piece) => message.add(piece));
      const request = await this.ownRequests.done(claim, this.app.server.connected);
      if (request !== null) {
        message.tell(this.app.live, request);
        this.told.set(request, message);
      }
      message.sum(request, ended);
      this.keep(message);
      this.app.announce(`The answer is complete. ${message.cost.textContent}`);
    }, (error) => this.failed(error, text, message));
  }

  /** Handles an error of a request: restores the prompt to the box, and keeps a partial answer. */
  failed(error, text, message) {
    if ($("composer-text").value === "") this.app.write(text);
    if (message !== null && message.text !== "") {
      message.fail(error.gone ? "Aborted: the server disconnected." : error.message);
      return this.keep(message);
    }
    message?.element.remove();
    this.app.mine = this.app.mine.filter((one) => one !== message?.element);
    this.app.trouble(blamed(error.message), error.gone);
  }

  /** Runs a race on this server: decodes without a draft, then with speculation, and replays both side by side. */
  async runRace() {
    const text = $("composer-text").value;
    if (!this.ready(text, "Write a text first: the race runs it twice.")) return;
    this.app.tab("race");
    await this.working(async () => {
      // suffix lookup would copy an earlier answer to the same text, which would make speculation look too fast
      const asked = { max_tokens: MAX_TOKENS, ...settings(), suffix_memory: false };
      this.app.showLive();
      const run = async (said, more) => {
        this.app.race.waiting(said);
        const claim = this.ownRequests.expect(asked.seed, text);
        const ended = await this.chat.answer(text, asked, () => {}, { more, alone: true });
        if (ended === "stopped") throw new ServerError("You stopped the race.");
        return this.ownRequests.done(claim, this.app.server.connected);
      };
      const plain = await run("1 of 2: plain decoding, one token per pass …", { verify_batch: 1 });
      const fast = await run("2 of 2: the same with speculation …", {});
      if (!plain?.rounds.length || !fast?.rounds.length) throw new ServerError(NO_EVENTS);
      this.app.race.play(this.app.live, { plain, fast });
    }, (error) => {
      this.app.race.show(this.app.live, true);
      this.app.trouble(blamed(error.message), error.gone);
    });
  }

  /** Returns whether a request can be sent now; if not, shows why. `wanted`: message if `text` is empty. */
  ready(text, wanted) {
    if (this.busy) this.app.trouble("An answer is being generated; Stop ends it.");
    else if (text.trim() === "") {
      this.app.trouble(wanted);
      $("composer-text").focus();
    } else return true;
    return false;
  }

  /** Runs `work` while Stop is shown instead of the buttons that send. `failed`: called with an error of `work`. */
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
      if (error.status === 401) this.app.server.wantKey();
    } finally {
      this.busy = false;
      this.ownRequests.open = []; // also after a failure
      for (const id of ["send", "race-this"]) $(id).hidden = false;
      $("race-run").disabled = false;
      $("stop").hidden = true;
    }
  }

  keep(message) {
    this.talk.push(message);
    keep(this.chat.turns, this.talk);
  }

  /** Restores the conversation of this tab after a reload, without its trees. */
  restore({ turns, messages }) {
    this.chat.turns = turns;
    for (const { asked, text, cost, labels } of messages) {
      const message = new Message($("messages"), asked, labels);
      message.add(text);
      message.cost.textContent = cost;
      this.talk.push(message);
    }
    this.app.mine = [...$("messages").children];
    this.app.treeView.nothing = "The trees of earlier answers are lost. Send a prompt, or open a recording.";
    document.body.dataset.asked = "true";
    this.app.showLive();
    $("talk").scrollTop = $("talk").scrollHeight;
  }
}
