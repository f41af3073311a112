// The messages of the conversation: prompts and answers, with accepted draft tokens underlined.

import { answerOf, isEmulated } from "./recording.js";
import { number, safe, seconds } from "./tokens.js";
import { statsOf } from "./stats.js";

function element(name, kind, text = "") {
  const made = document.createElement(name);
  made.className = kind;
  made.textContent = text;
  return made;
}

export const TALKS = ["Asked", "Answer"];
export const CONTINUES = ["Your text", "Continued"]; // for a model without a chat template
const ENDS = {
  stop: "Ended by itself.", length: "The length limit was reached.", stopped: "Stopped by you.",
  abort: "Aborted: the client disconnected.", error: "Aborted by an error.",
};

/** A prompt and its answer in the conversation. */
export class Message {
  constructor(log, asked, labels = TALKS) {
    this.asked = asked;
    this.labels = labels;
    this.request = null;
    this.emulated = false; // whether the step times of the request were emulated
    this.text = "";
    this.pieces = []; // a {span, round} for each token of the answer; span: its element
    this.now = null; // the highlighted round; null: none was yet
    this.element = element("article", "message");
    this.answer = element("pre", "answer");
    this.answer.dir = "auto";
    this.cost = element("p", "cost");
    const question = element("pre", "asked", safe(asked));
    question.dir = "auto";
    const [above, below] = labels.map((label) => element("h2", "", label));
    this.element.append(above, question, below, this.answer, this.cost);
    log.append(this.element);
    log.parentElement.scrollTop = log.parentElement.scrollHeight;
  }

  /** Calls `change`, which adds text, and stays scrolled to the end. */
  grow(change) {
    const area = this.element.parentElement?.parentElement;
    const atEnd = area && area.scrollHeight - area.scrollTop - area.clientHeight < 60;
    change();
    if (atEnd) area.scrollTop = area.scrollHeight;
  }

  /** Adds streamed text. */
  add(text) {
    this.text += text;
    this.grow(() => this.answer.append(safe(text)));
  }

  fail(why) {
    this.cost.className = "cost error";
    this.grow(() => (this.cost.textContent = why));
  }

  /** Replaces the streamed text by the tokens of the recording, unless their text differs. */
  tell(recording, request) {
    this.request = request;
    this.emulated = isEmulated(recording);
    const most = answerOf(request).length;
    const pieces = [];
    for (const [round, { tokens }] of request.rounds.entries()) {
      for (const [at, token] of tokens.entries()) {
        if (pieces.length < most) pieces.push({ token, round, guessed: at + 1 < tokens.length });
      }
    }
    const spelled = recording.pieces(pieces.map(({ token }) => token), { whole: true });
    if (this.text !== "" && spelled.join("").trimEnd() !== this.text.trimEnd()) return;
    this.answer.replaceChildren();
    this.pieces = pieces.map(({ round, guessed }, at) => {
      const span = element("span", guessed ? "guessed" : "", safe(spelled[at]));
      this.answer.append(span);
      return { span, round };
    });
    this.now = null;
  }

  /** Shows the statistics of the request and its finish reason. */
  sum(request, ended = request?.end?.reason) {
    this.grow(() => (this.cost.textContent = [this.spent(request), ENDS[ended]].filter(Boolean).join(" ")));
  }

  spent(request) {
    if (!request?.rounds.length) return "";
    const { tokens, seconds: took, speed, perRound } = statsOf(request, request.rounds.length - 1);
    const each = `${number(speed)} tokens per second, ${number(perRound)} per pass of the target`;
    return `${tokens} tokens in ${seconds(took)}${this.emulated ? " of emulated step times" : ""}: ${each}.`;
  }

  /** Scrolls the message into view. */
  shown() {
    const area = this.element.parentElement.parentElement;
    area.scrollTop += this.element.getBoundingClientRect().top - area.getBoundingClientRect().top - 12;
  }

  /** Highlights the tokens of a round. `dim`: later tokens are dimmed. */
  until(round, dim) {
    if (round === this.now) return;
    const [from, to] = this.now === null ? [-1, Infinity] : [Math.min(round, this.now), Math.max(round, this.now)];
    for (let at = this.first(from); at < this.pieces.length && this.pieces[at].round <= to; at += 1) {
      const piece = this.pieces[at];
      piece.span.classList.toggle("now", piece.round === round);
      piece.span.classList.toggle("later", dim && piece.round > round);
    }
    this.now = round;
    if (dim) this.follow();
  }

  /** Keeps the highlighted piece in view. */
  follow() {
    const piece = this.pieces[this.first(this.now)];
    const area = this.element.parentElement?.parentElement;
    if (!piece || !area) return;
    const [inner, outer] = [piece.span.getBoundingClientRect(), area.getBoundingClientRect()];
    const below = inner.bottom - outer.bottom + 40;
    const above = inner.top - outer.top - 8;
    if (below > 0 || above < 0) area.scrollTop += below > 0 ? below : above;
  }

  /** Returns the position of the first piece of `round` or of a later round. */
  first(round) {
    let low = 0;
    let high = this.pieces.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.pieces[middle].round < round) low = middle + 1;
      else high = middle;
    }
    return low;
  }
}

/** Shows the requests of a recording in the element `log`. Returns their messages as a Map, by request. */
export function transcribe(log, recording) {
  log.replaceChildren();
  const messages = new Map();
  for (const request of recording.requests) {
    const prompt = request.begin.prompt && recording.pieces(request.begin.prompt, { special: true }).join("");
    const message = new Message(log, prompt ?? "(not in this trace)", ["Prompt", "Continued"]);
    message.tell(recording, request);
    message.sum(request);
    messages.set(request, message);
  }
  log.parentElement.scrollTop = 0;
  return messages;
}
