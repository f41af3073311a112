// Converts tokens and numbers to text that is readable and has no control characters.

const SIGNS = { " ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍", "\u00a0": "⍽" };
const HIDDEN = /[\p{Cc}\p{Cf}\p{Co}\p{Cs}\u2028\u2029]/u; // control, direction, joiners, lone surrogates

function code(sign) {
  return `⟨${sign.codePointAt(0).toString(16).toUpperCase()}⟩`;
}

/** Returns a token's text with signs for whitespace, and code points for invisible and bidirectional characters. */
export function visible(text) {
  let shown = "";
  for (const sign of text) {
    if (SIGNS[sign] !== undefined) shown += SIGNS[sign];
    else shown += HIDDEN.test(sign) ? code(sign) : sign;
  }
  return shown === "" ? "∅" : shown;
}

/** Returns a text with newlines and tabs unchanged, and code points for invisible and bidirectional characters. */
export function safe(text) {
  let shown = "";
  for (const sign of text) {
    shown += sign !== "\n" && sign !== "\t" && HIDDEN.test(sign) ? code(sign) : sign;
  }
  return shown;
}

/** Truncates a text to `most` characters. */
export function cut(text, most) {
  const signs = [...text];
  return signs.length <= most ? text : signs.slice(0, Math.max(most - 1, 1)).join("") + "…";
}

/** Formats a probability in percent. */
export function percent(probability) {
  if (probability === null || probability === undefined || Number.isNaN(probability)) return "not known";
  const hundredths = probability * 100;
  if (hundredths >= 99.95) return "100 %";
  if (hundredths >= 10) return `${hundredths.toFixed(0)} %`;
  if (hundredths >= 0.1) return `${hundredths.toFixed(1)} %`;
  return hundredths === 0 ? "0 %" : "< 0.1 %";
}

/** Formats a duration in seconds. */
export function seconds(value) {
  if (value >= 10) return `${value.toFixed(1)} s`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  return `${(value * 1e3).toFixed(value >= 0.01 ? 0 : 1)} ms`;
}

/** Formats a number with two or three significant digits; "–" if it is not finite. */
export function number(value) {
  if (!Number.isFinite(value)) return "–";
  return value >= 100 ? value.toFixed(0) : value.toFixed(value >= 10 ? 1 : 2);
}
