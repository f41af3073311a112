// The server behind the page: its model, the connection to it, and the API key.

import { ask, key, listen, setKey } from "./api.js";

const $ = (id) => document.getElementById(id);
const EMBEDDED = "swiftspec-demo"; // the demo model; its chat template only joins the turns to one source text
export const MAX_TOKENS = 256; // default of a race, and of a model without a chat template, which may never end
const EXAMPLES = {
  text: ["def read_lines(path):\n", "class Stack:\n    def __init__(self", "def main(argv=None):\n"],
  talk: [
    "Repeat after me: The cat sits on the wall and the birds sit in the tree. The cat looks at the birds, and the birds"
    + " look at the cat.", // the answer copies the prompt, which suffix lookup decodes fast
    "Explain in three sentences how a hash table works.", "Write a Python function that merges two sorted lists.",
  ],
};

const LABEL_LENGTH = 60; // characters of an example on its button

export class Server {
  constructor(app) {
    this.app = app;
    this.connected = false; // whether the page receives the engine's events
    this.model = null; // its name; null: not known yet
  }

  start() {
    this.hear();
    this.meet();
  }

  /** Asks the server for its model until the model is loaded, then adapts the page to it. */
  async meet() {
    for (;;) {
      try {
        const { data } = await (await ask("v1/models")).json();
        if (data[0].chat_template !== null) return this.met(data[0]);
        this.app.hint("The models are loading.");
      } catch (error) {
        if (error.status === 401) return this.wantKey();
      }
      await new Promise((wake) => setTimeout(wake, 700));
    }
  }

  met(model) {
    this.app.requests.chat.talks = model.chat_template && model.id !== EMBEDDED;
    const { talks } = this.app.requests.chat;
    const embedded = model.id === EMBEDDED;
    $("composer-text").placeholder = talks ? "Ask the model something"
      : `Begin a text, for example: ${embedded ? "def area(r):" : "Once upon a time"}`;
    const why = embedded ? "Small models: they continue Python code; it is not a chat."
      : `${model.id} has no chat template: it continues your text; it is not a chat.`;
    this.app.hint(talks ? "" : why);
    this.app.race.small = embedded;
    const often = embedded ? "; with models as small as these it is often slower" : "";
    $("race-this").title = `The same prompt without, then with speculation${often}`;
    if (this.app.shown === this.app.live) this.app.race.show(this.app.live, true);
    if (!talks) {
      $("temperature").value ||= "0.6";
      $("max_tokens").value ||= String(MAX_TOKENS);
    }
    const examples = EXAMPLES[talks ? "talk" : "text"].map((text) => {
      const button = document.createElement("button");
      button.type = "button";
      const line = text.split("\n")[0];
      button.textContent = line.length > LABEL_LENGTH ? `${line.slice(0, LABEL_LENGTH - 1)}…` : line;
      button.addEventListener("click", () => this.app.requests.send(text));
      return button;
    });
    $("examples").replaceChildren(...examples);
    this.model = model.id;
    this.named();
  }

  hear() {
    const states = {
      live: ["live", "connected"], gone: ["gone", "server lost, reconnecting"], none: ["", "no events"],
    };
    listen((line) => this.app.line(line), (state) => {
      if (state === "key") return this.wantKey();
      this.connected = state === "live";
      this.connection(...states[state]);
      if (state === "live") this.app.answers();
      if (state === "live" && this.wasGone) this.meet();
      this.wasGone = state === "gone";
    });
  }

  /** Shows model and mode once both are known. */
  named() {
    const { head } = this.app.live;
    const length = head?.synthetic_acceptance_length;
    const synthetic = length ? `, synthetic acceptance length ${length}` : "";
    if (this.model && head && this.connected) this.connection("live", `${this.model}, mode ${head.mode}${synthetic}`);
  }

  wantKey() {
    const dialog = $("key-dialog");
    $("key-why").textContent = key() === "" ? "It was started with --api-key. The key is kept until this tab is closed."
      : "This server does not accept that key. Try another one.";
    this.connection("gone", "an API key is required");
    if (dialog.open) return;
    $("key").value = "";
    dialog.showModal();
    dialog.addEventListener("close", () => {
      if (dialog.returnValue !== "ok" || $("key").value === "") return this.app.raceLarge();
      setKey($("key").value.trim());
      this.start();
    }, { once: true });
  }

  /** Shows the state of the connection. */
  connection(kind, text) {
    $("connection").className = `connection ${kind}`;
    $("connection").textContent = text;
  }
}
