// Session storage of the conversation and the unsent text: survives a reload, ends with the tab.

const TALK = "swiftspec talk";
const WRITTEN = "swiftspec written";
const MAX_MESSAGES = 50;

/** Returns the stored conversation: {turns, messages: [{asked, text, cost, labels}]}; null: none. */
export function recall() {
  try {
    const kept = JSON.parse(sessionStorage.getItem(TALK));
    return kept?.messages?.length > 0 ? kept : null;
  } catch {
    return null;
  }
}

export function keep(turns, messages) {
  const kept = messages.slice(-MAX_MESSAGES).map(({ asked, text, cost, labels }) => ({
    asked, text, labels, cost: cost.textContent,
  }));
  put(TALK, JSON.stringify({ turns: turns.slice(-2 * MAX_MESSAGES), messages: kept }));
}

export function written() {
  return sessionStorage.getItem(WRITTEN) ?? "";
}

export function keepWritten(text) {
  put(WRITTEN, text);
}

/** Stores a value. If the storage is full, removes the previous value instead. */
function put(name, value) {
  try {
    sessionStorage.setItem(name, value);
  } catch {
    sessionStorage.removeItem(name);
  }
}
