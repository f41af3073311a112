// The settings of a request: read from their fields; fields with errors are marked.

import { ServerError } from "./api.js";
import { safe } from "./tokens.js";

// Labels of the input fields, by the field's name in the request.
const LABELS = {
  temperature: "Temperature", top_p: "Top-p", top_k: "Top-k", seed: "Seed", max_tokens: "Max tokens",
  verify_batch: "Nodes per round", draft_steps: "Expansions per round",
};
const field = (name) => document.getElementById(name);

/** Returns the values of the settings, with a random seed by default. Throws ServerError if one is not a number. */
export function settings() {
  const asked = {};
  field("settings-trouble").textContent = "";
  for (const name of Object.keys(LABELS)) point(name, false);
  for (const name of Object.keys(LABELS)) {
    const text = field(name).value.trim().replace(",", ".");
    const value = Number(text);
    if (text === "") continue;
    if (!Number.isFinite(value)) throw new ServerError(`${name}: “${field(name).value}” is not a number.`, 400);
    asked[name] = value;
  }
  asked.seed ??= Math.floor(Math.random() * 2 ** 48);
  return asked;
}

/**
 * Marks the field that an error message names, and opens the settings. Returns the message with the field's label
 * instead of its name.
 */
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
