// Requests to the server: with the API key, as streams, and with errors as one line.

const KEY = "swiftspec key"; // in the session storage

export class ServerError extends Error {
  constructor(message, status = 0, gone = false) {
    super(message);
    this.status = status;
    this.gone = gone; // the server was unreachable, or was lost during the answer
  }
}

const GONE = "The server does not answer. Is it still running? The page keeps trying.";

export function key() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setKey(value) {
  sessionStorage.setItem(KEY, value);
}

/** Sends a request. Throws ServerError with the server's message if it fails. */
export async function ask(path, { body = null, signal = null } = {}) {
  const headers = {};
  if (key() !== "") headers.authorization = `Bearer ${key()}`;
  if (body !== null) headers["content-type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, {
      method: body === null ? "GET" : "POST", headers, signal, body: body === null ? undefined : JSON.stringify(body),
      cache: "no-store", credentials: "omit", redirect: "error",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(GONE, 0, true);
  }
  if (answer.ok) return answer;
  let said = `The server answered ${answer.status}.`;
  try {
    said = (await answer.json()).error.message ?? said;
  } catch {
    // not JSON: keep the status
  }
  throw new ServerError(said, answer.status);
}

/** The events of a text/event-stream, as {id, event, data} with the data as text. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const read = eventOf(block);
        if (read !== null) yield read;
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server was lost in the middle of its answer.", 0, true);
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** One block of lines; null for a comment. */
export function eventOf(block) {
  const event = { id: null, event: "message", data: [] };
  for (const line of block.split(/\r?\n/)) {
    const [, name, value] = /^([^:]*):? ?(.*)$/s.exec(line);
    if (name === "data") event.data.push(value);
    else if (name === "id" || name === "event") event[name] = value;
  }
  return event.data.length === 0 ? null : { ...event, data: event.data.join("\n") };
}

/**
 * Subscribes to the engine's events while the page is open: `line` gets each event, `state` the connection ("live",
 * "gone", "key", or "none" if the server has no such stream). After a loss it continues where it stopped.
 */
export async function listen(line, state) {
  let last = null;
  let pause = 500;
  for (;;) {
    try {
      const answer = await ask(`/v1/spec/events${last === null ? "" : `?after=${encodeURIComponent(last)}`}`);
      state("live");
      pause = 500;
      for await (const { id, data } of events(answer)) {
        last = id ?? last;
        line(JSON.parse(data));
      }
      state("gone");
    } catch (error) {
      if (error.status === 401) return state("key");
      if (error.status === 404) return state("none");
      state("gone");
    }
    await new Promise((wake) => setTimeout(wake, pause));
    pause = Math.min(2 * pause, 5000);
  }
}
