// Asks for one answer and streams it: as a conversation where the model has a chat template, else as text that goes on.

import { ask, events, ServerError } from "./api.js";

const FIELDS = ["temperature", "top_p", "top_k", "seed", "max_tokens", "verify_batch", "draft_steps"]; // of a request

export class Chat {
  constructor() {
    this.talks = null; // whether the model has a chat template; null: not known yet
    this.turns = []; // of the conversation
    this.abort = null;
  }

  /** What the settings say. Throws ServerError on what is no number. */
  settings() {
    const asked = {};
    for (const name of FIELDS) {
      const field = document.getElementById(name);
      const text = field.value.trim().replace(",", ".");
      const value = Number(text);
      field.classList.toggle("wrong", !Number.isFinite(value));
      if (text === "") continue;
      if (!Number.isFinite(value)) throw new ServerError(`Settings: “${field.value}” is no number.`);
      asked[name] = value;
    }
    asked.seed ??= Math.floor(Math.random() * 2 ** 48);
    return asked;
  }

  /**
   * Streams an answer to `text`; `said` gets each piece of it. Returns the whole. `more`: fields of the request beside
   * the settings. `alone`: the conversation so far is left out, and this turn too is not kept.
   */
  async answer(text, settings, said, { more = {}, alone = false } = {}) {
    const turn = { role: "user", content: text };
    const body = { stream: true, ...settings, ...more };
    if (this.talks) body.messages = alone ? [turn] : [...this.turns, turn];
    else body.prompt = text;
    this.abort = new AbortController();
    let whole = "";
    try {
      const path = this.talks ? "/v1/chat/completions" : "/v1/completions";
      const answer = await ask(path, { body, signal: this.abort.signal });
      for await (const { data } of events(answer)) {
        if (data === "[DONE]") break;
        const piece = pieceOf(JSON.parse(data));
        whole += piece;
        if (piece !== "") said(piece);
      }
    } catch (error) {
      if (error.name !== "AbortError") throw error;
    } finally {
      this.abort = null;
    }
    if (this.talks && !alone) this.turns.push(turn, { role: "assistant", content: whole });
    return whole;
  }

  stop() {
    this.abort?.abort();
  }
}

/** The text of one chunk; what the model thinks is text, too. Throws ServerError where the chunk tells of trouble. */
export function pieceOf(chunk) {
  if (chunk.error) throw new ServerError(chunk.error.message ?? "The answer broke off.");
  const choice = chunk.choices?.[0];
  if (choice === undefined) return "";
  return choice.text ?? (choice.delta?.reasoning_content ?? "") + (choice.delta?.content ?? "");
}
