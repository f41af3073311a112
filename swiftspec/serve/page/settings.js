// The settings of a request: read from their fields, and a field is pointed at where something is wrong with it.

import { ServerError } from "./api.js";
import { safe } from "./tokens.js";

// The fields of a request, by what a person reads above them.
const LABELS = {
  temperature: "Temperature", top_p: "Top-p", top_k: "Top-k", seed: "Seed", max_tokens: "Most tokens",
  verify_batch: "Nodes a pass", draft_steps: "Growth a round",
};
const field = (name) => document.getElementById(name);

/** What the settings say. Throws ServerError on what is no number. */
export function settings() {
  const asked = {};
  field("settings-trouble").textContent = "";
  for (const name of Object.keys(LABELS)) point(name, false);
  for (const name of Object.keys(LABELS)) {
    const text = field(name).value.trim().replace(",", ".");
    const value = Number(text);
    if (text === "") continue;
    if (!Number.isFinite(value)) throw new ServerError(`${name}: “${field(name).value}” is no number.`, 400);
    asked[name] = value;
  }
  asked.seed ??= Math.floor(Math.random() * 2 ** 48);
  return asked;
}

/** An error's words with the label of the field that it names; that field is marked, and the settings are opened. */
export function blamed(message) {
  const name = Object.keys(LABELS).find((one) => new RegExp(`\\b${one}\\b`).test(message));
  if (name === undefined) return message;
  document.getElementById("settings").open = true;
  point(name, true);
  field(name).focus();
  const said = message.replace(name, LABELS[name]);
  field("settings-trouble").textContent = safe(said);
  return said;
}

function point(name, wrong) {
  field(name).classList.toggle("wrong", wrong);
  field(name).setAttribute("aria-invalid", String(wrong));
}
