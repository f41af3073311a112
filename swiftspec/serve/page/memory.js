// What a reload must not lose: the conversation and what is being written. The tab's storage has it, and ends with it.

const TALK = "swiftspec talk";
const WRITTEN = "swiftspec written";
const MOST = 50; // messages

/** The conversation: {turns, messages: [{asked, text, cost, labels}]}; null: there is none. */
export function recall() {
  try {
    const kept = JSON.parse(sessionStorage.getItem(TALK));
    return kept?.messages?.length > 0 ? kept : null;
  } catch {
    return null;
  }
}

export function keep(turns, messages) {
  const kept = messages.slice(-MOST).map(({ asked, text, cost, labels }) => ({
    asked, text, labels, cost: cost.textContent,
  }));
  put(TALK, JSON.stringify({ turns: turns.slice(-2 * MOST), messages: kept }));
}

export function written() {
  return sessionStorage.getItem(WRITTEN) ?? "";
}

export function keepWritten(text) {
  put(WRITTEN, text);
}

/** A full storage is no reason to stop. */
function put(name, value) {
  try {
    sessionStorage.setItem(name, value);
  } catch {
    sessionStorage.removeItem(name);
  }
}
