// HTTP client of the server: sends the API key, reads event streams, and reports errors in one line.

const KEY = "swiftspec key"; // entry of the session storage

export class ServerError extends Error {
  constructor(message, status = 0, gone = false) {
    super(message);
    this.status = status;
    this.gone = gone; // the server cannot be reached, or the connection was lost during the answer
  }
}

const GONE = "The server does not answer. Is it still running? The page keeps trying.";

export function key() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setKey(value) {
  sessionStorage.setItem(KEY, value);
}

/** Sends a request, a POST if it has a body, and returns the response. Throws ServerError with the server's message. */
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
  let said = `The server returned status ${answer.status}.`;
  try {
    said = (await answer.json()).error.message ?? said;
  } catch {
    // not JSON: keep the status
  }
  throw new ServerError(said, answer.status);
}

/** Yields the events of a text/event-stream response as {id, event, data}, with the data as text. */
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
    throw new ServerError("The connection to the server was lost during its answer.", 0, true);
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Parses one event of an event stream. Returns null if it has no data, such as a comment. */
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
 * Subscribes to the engine's events while the page is open. `line` is called with each event, `state` with the state of
 * the connection: "live"; "gone", while it reconnects; "key" if the server requires an API key; "none" if it has no
 * events. The last two end the subscription. After a reconnection the stream continues after the last received event.
 */
export async function listen(line, state) {
  let last = null;
  let pause = 500;
  for (;;) {
    try {
      const answer = await ask(`v1/spec/events${last === null ? "" : `?after=${encodeURIComponent(last)}`}`);
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
