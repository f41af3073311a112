// A trace in memory: its header, and requests with their rounds. The format is documented in
// docs/reference/trace.md; unknown lines and fields are ignored.

const MAX_ROUNDS = 10000; // with more rounds than this, a recording drops its oldest requests

export class BadTrace extends Error {}

export class Recording {
  constructor() {
    this.head = null;
    this.texts = new Map(); // token id -> text
    this.bytes = new Map(); // token id -> bytes in hexadecimal, of tokens that are not whole characters
    this.special = new Set(); // ids of tokens that are no part of the text
    this.requests = []; // {id, begin, rounds, end, missed}
    this.byId = new Map();
    this.count = 0; // rounds of all requests
  }

  /** Adds one line of a trace. Returns the request that it belongs to, or null. Throws BadTrace if it is invalid. */
  add(line) {
    const isObject = line !== null && typeof line === "object" && !Array.isArray(line);
    if (!isObject) throw new BadTrace("a line is not a JSON object");
    for (const [id, text] of Object.entries(line.texts ?? {})) this.texts.set(Number(id), String(text));
    for (const [id, hex] of Object.entries(line.bytes ?? {})) this.bytes.set(Number(id), String(hex));
    for (const id of line.special ?? []) this.special.add(id);
    if (line.swiftspec_trace !== undefined) {
      const version = line.swiftspec_trace;
      if (version !== 1) throw new BadTrace(`trace version ${version} is not supported`);
      this.head = line;
      return null;
    }
    if (line.missed !== undefined) {
      for (const request of this.requests) if (!request.end) request.missed += line.missed;
      return null;
    }
    if (typeof line.request !== "number") return null;
    if (line.begin) return this.open(line);
    const request = this.byId.get(line.request) ?? this.open({ request: line.request, begin: {} });
    if (line.end) request.end = line.end;
    else if (Array.isArray(line.tokens)) this.addRound(request, line);
    return request;
  }

  open(line) {
    const request = { id: line.request, begin: line.begin, rounds: [], end: null, missed: 0 };
    this.requests.push(request);
    this.byId.set(line.request, request); // a restarted engine numbers its requests from 1 again
    return request;
  }

  addRound(request, line) {
    request.rounds.push(line);
    this.count += 1;
    while (this.count > MAX_ROUNDS && this.requests.length > 1) {
      const oldest = this.requests.shift();
      this.count -= oldest.rounds.length;
      if (this.byId.get(oldest.id) === oldest) this.byId.delete(oldest.id);
    }
  }

  /** Returns the label of a single token. */
  text(token) {
    const hex = this.bytes.get(token);
    return hex === undefined ? this.texts.get(token) ?? `⟨${token}⟩` : `⟨${hex.toUpperCase()}⟩`;
  }

  /**
   * Returns the text that each of successive tokens adds. A character of several tokens belongs to the last of them.
   * `special`: keep the text of special tokens. `whole`: nothing follows, so that an incomplete character is shown.
   */
  pieces(tokens, { special = false, whole = false } = {}) {
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    const pieces = tokens.map((token) => {
      const hex = this.bytes.get(token);
      if (hex !== undefined) return decoder.decode(bytesOf(hex), { stream: true });
      return decoder.decode() + (this.special.has(token) && !special ? "" : this.text(token));
    });
    if (whole && pieces.length > 0) pieces[pieces.length - 1] += decoder.decode();
    return pieces;
  }

  /** Returns the recording as the lines of a trace file. */
  lines() {
    const bare = (line) => {
      const { texts, bytes, special, ...rest } = line;
      return rest;
    };
    const named = {
      texts: Object.fromEntries(this.texts), bytes: Object.fromEntries(this.bytes), special: [...this.special],
    };
    const head = { swiftspec_trace: 1, ...bare(this.head ?? {}), ...named };
    const lines = [head];
    for (const { id, begin, rounds, end } of this.requests) {
      lines.push({ request: id, begin }, ...rounds.map(bare));
      if (end) lines.push({ request: id, end });
    }
    return lines.map((line) => JSON.stringify(line) + "\n");
  }
}

function bytesOf(hex) {
  return Uint8Array.from(hex.match(/../g) ?? [], (pair) => Number.parseInt(pair, 16));
}

/** Parses the text of a trace file into a recording; a last line that was cut off is left out. Throws BadTrace, which
 * names the invalid line. */
export function parse(text) {
  const recording = new Recording();
  const lines = text.split("\n");
  for (const [at, line] of lines.entries()) {
    if (line.trim() === "") continue;
    const cutOff = at > 0 && at === lines.length - 1;
    try {
      const read = JSON.parse(line);
      if (recording.head === null && read?.swiftspec_trace === undefined) {
        throw new BadTrace("this is not a trace: its first line has no “swiftspec_trace”");
      }
      recording.add(read);
    } catch (error) {
      if (cutOff && error instanceof SyntaxError) continue;
      const why = error instanceof BadTrace ? error.message : "not JSON";
      throw new BadTrace(`line ${at + 1}: ${why}`);
    }
  }
  if (recording.head === null) throw new BadTrace("the file is empty");
  return recording;
}

/** Returns the times of a round in seconds: {begin, sent, end}. `sent`: when the target received the proposal. */
export function spanOf(request, at) {
  const round = request.rounds[at];
  const before = at > 0 ? endOf(request.rounds[at - 1]) : firstOf(round);
  const end = Math.max(endOf(round), before);
  const sent = round.target?.verify?.[0] ?? before;
  return { begin: before, sent: Math.min(Math.max(sent, before), end), end };
}

function endOf(round) {
  return round.target?.verify?.[1] ?? round.population?.[1] ?? round.wait?.[1] ?? 0;
}

/** Returns the time when the first round of a request began: after the prefill. */
function firstOf(round) {
  return round.target?.open?.[1] ?? round.wait?.[0] ?? round.target?.verify?.[0] ?? round.population?.[0] ?? 0;
}

/** Returns whether a request had no draft: no round proposed more than the root. */
export function isPlain(request) {
  return request.rounds.length > 0 && request.rounds.every((round) => (round.proposal?.tokens.length ?? 2) === 1);
}

/** Returns whether the step times were emulated, not measured. */
export function isEmulated(recording) {
  const { target, draft } = recording.head?.emulate ?? {};
  return Boolean(target || draft);
}

/** Returns all tokens of a request's answer. The last round may have more: the answer is cut at the length in `end`. */
export function answerOf(request) {
  const tokens = request.rounds.flatMap((round) => round.tokens);
  return request.end?.tokens === undefined ? tokens : tokens.slice(0, request.end.tokens);
}
