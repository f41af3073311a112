// The left side's messages: what was asked and answered, with the guesses that held underlined.

import { answerOf } from "./recording.js";
import { number, safe, seconds } from "./tokens.js";
import { statsOf } from "./stats.js";

function element(name, kind, text = "") {
  const made = document.createElement(name);
  made.className = kind;
  made.textContent = text;
  return made;
}

/** One question and its answer. */
export class Message {
  constructor(log, asked) {
    this.request = null;
    this.text = "";
    this.pieces = []; // {element, round}
    this.now = null; // the round pointed at; null: none was yet
    this.element = element("article", "message");
    this.answer = element("pre", "answer");
    this.answer.dir = "auto";
    this.cost = element("p", "cost");
    const question = element("pre", "asked", safe(asked));
    question.dir = "auto";
    this.element.append(element("h2", "", "Asked"), question, element("h2", "", "Answer"), this.answer, this.cost);
    log.append(this.element);
    log.parentElement.scrollTop = log.parentElement.scrollHeight;
  }

  /** More text as it comes. */
  add(text) {
    const area = this.element.parentElement?.parentElement;
    const atEnd = area && area.scrollHeight - area.scrollTop - area.clientHeight < 60;
    this.text += text;
    this.answer.append(safe(text));
    if (atEnd) area.scrollTop = area.scrollHeight;
  }

  fail(why) {
    this.cost.className = "cost error";
    this.cost.textContent = why;
  }

  /** The answer token by token, from what was recorded of it, unless that spells another text than was streamed. */
  tell(recording, request) {
    this.request = request;
    const most = answerOf(request).length;
    const pieces = [];
    for (const [round, { tokens }] of request.rounds.entries()) {
      for (const [at, token] of tokens.entries()) {
        if (pieces.length < most) pieces.push({ token, round, guessed: at + 1 < tokens.length });
      }
    }
    const spelled = pieces.map(({ token }) => recording.text(token));
    if (this.text !== "" && spelled.join("").trimEnd() !== this.text.trimEnd()) return;
    this.answer.replaceChildren();
    this.pieces = pieces.map(({ round, guessed }, at) => {
      const span = element("span", guessed ? "guessed" : "", safe(spelled[at]));
      this.answer.append(span);
      return { span, round };
    });
    this.now = null;
  }

  /** What it cost. */
  sum(request) {
    if (request.rounds.length === 0) return;
    const { tokens, seconds: took, speed, perRound } = statsOf(request, request.rounds.length - 1);
    const each = `${number(speed)} tokens a second, ${number(perRound)} a pass of the target`;
    this.cost.textContent = `${tokens} tokens in ${seconds(took)}: ${each}`;
  }

  /** Comes into view. */
  shown() {
    const area = this.element.parentElement.parentElement;
    area.scrollTop += this.element.getBoundingClientRect().top - area.getBoundingClientRect().top - 12;
  }

  /** Points at what a round has added. `dim`: what comes later is not read yet. */
  until(round, dim) {
    if (round === this.now) return;
    const [from, to] = this.now === null ? [-1, Infinity] : [Math.min(round, this.now), Math.max(round, this.now)];
    for (let at = this.first(from); at < this.pieces.length && this.pieces[at].round <= to; at += 1) {
      const piece = this.pieces[at];
      piece.span.classList.toggle("now", piece.round === round);
      piece.span.classList.toggle("later", dim && piece.round > round);
    }
    this.now = round;
  }

  /** The first piece of a round or one after it. */
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

/** A recording's requests as messages, by request. */
export function transcribe(log, recording) {
  log.replaceChildren();
  const messages = new Map();
  for (const request of recording.requests) {
    const prompt = request.begin.prompt?.map((token) => recording.text(token)).join("");
    const message = new Message(log, prompt ?? "(this trace does not say)");
    message.tell(recording, request);
    message.sum(request);
    messages.set(request, message);
  }
  log.parentElement.scrollTop = 0;
  return messages;
}
