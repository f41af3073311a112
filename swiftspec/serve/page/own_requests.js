// Recognises this page's requests among the engine's: by the seed, which the event of the request's begin contains.

const EVENTS_TIMEOUT_MS = 5000; // for events that arrive after the answer

export class OwnRequests {
  constructor() {
    this.open = [];
  }

  /** Claims the next request with this seed, an answer to `text`. */
  expect(seed, text = "") {
    const claim = { seed, text, request: null, over: null };
    claim.ended = new Promise((resolve) => (claim.over = resolve));
    this.open.push(claim);
    return claim;
  }

  /** Whether a request that begins is this page's. Events omit the default seed 0. */
  begun(request) {
    const seed = request.begin.sampling?.seed ?? 0;
    const claim = this.open.find((one) => one.request === null && one.seed === seed);
    if (claim) claim.request = request;
    return claim !== undefined;
  }

  /** The prompt of a running request of this page. */
  textOf(request) {
    return this.open.find((one) => one.request === request)?.text ?? "";
  }

  ended(request) {
    this.open.find((one) => one.request === request)?.over();
  }

  /** The request of a claim after its last event or the timeout; null: no event arrived. */
  async done(claim, connected) {
    let timer = 0;
    const late = new Promise((resolve) => (timer = setTimeout(resolve, connected ? EVENTS_TIMEOUT_MS : 0)));
    await Promise.race([claim.ended, late]);
    clearTimeout(timer);
    this.open = this.open.filter((one) => one !== claim);
    return claim.request;
  }
}
