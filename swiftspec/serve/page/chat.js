// Requests one answer and streams it: as a chat if the model has a chat template, else as a continuation of the text.

import { ask, events, ServerError } from "./api.js";

export class Chat {
  constructor() {
    this.talks = null; // whether the model has a chat template; null: not known yet
    this.turns = []; // messages of the conversation: {role, content}
    this.abort = null;
  }

  /**
   * Streams an answer to `text` and calls `said` with each piece. Returns the finish reason: "stop", "length", or
   * "stopped" by the user. `more`: fields of the request in addition to `settings`. `alone`: the request does not
   * contain the conversation, and its prompt and answer are not added to it.
   */
  async answer(text, settings, said, { more = {}, alone = false } = {}) {
    const turn = { role: "user", content: text };
    const body = { stream: true, ...settings, ...more };
    if (this.talks) body.messages = alone ? [turn] : [...this.turns, turn];
    else body.prompt = text;
    this.abort = new AbortController();
    let whole = "";
    let ended = null;
    let done = false;
    try {
      const path = this.talks ? "v1/chat/completions" : "v1/completions";
      const answer = await ask(path, { body, signal: this.abort.signal });
      for await (const { data } of events(answer)) {
        done = data === "[DONE]";
        if (done) break;
        const chunk = JSON.parse(data);
        const piece = pieceOf(chunk);
        ended = chunk.choices?.[0]?.finish_reason ?? ended;
        whole += piece;
        if (piece !== "") said(piece);
      }
      if (!done) throw new ServerError("The server ended its answer early.", 0, true);
    } catch (error) {
      if (error.name !== "AbortError") throw error;
      ended = "stopped";
    } finally {
      this.abort = null;
    }
    if (this.talks && !alone) this.turns.push(turn, { role: "assistant", content: whole });
    return ended;
  }

  stop() {
    this.abort?.abort();
  }
}

/** Returns the text of one chunk, including reasoning. Throws ServerError if the chunk contains an error. */
export function pieceOf(chunk) {
  if (chunk.error) throw new ServerError(chunk.error.message ?? "The answer was interrupted.");
  const choice = chunk.choices?.[0];
  if (choice === undefined) return "";
  return choice.text ?? (choice.delta?.reasoning_content ?? "") + (choice.delta?.content ?? "");
}
