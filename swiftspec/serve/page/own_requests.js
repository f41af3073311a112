// Recognises this page's requests among those of all clients by their seed, which is in the event `begin` of a request.

const EVENTS_TIMEOUT_MS = 5000; // longest wait for events that arrive after the answer

export class OwnRequests {
  constructor() {
    this.open = [];
  }

  /** Registers that this page is about to send the prompt `text` with this seed. Returns a claim, see `done`. */
  expect(seed, text = "") {
    const claim = { seed, text, request: null, over: null };
    claim.ended = new Promise((resolve) => (claim.over = resolve));
    this.open.push(claim);
    return claim;
  }

  /** Returns whether this page has sent a request that begins, and assigns it to its claim. Events omit the seed 0. */
  begun(request) {
    const seed = request.begin.sampling?.seed ?? 0;
    const claim = this.open.find((one) => one.request === null && one.seed === seed);
    if (claim) claim.request = request;
    return claim !== undefined;
  }

  /** Returns the prompt of a running request of this page; empty for other requests. */
  textOf(request) {
    return this.open.find((one) => one.request === request)?.text ?? "";
  }

  ended(request) {
    this.open.find((one) => one.request === request)?.over();
  }

  /** Waits for the last event of a claimed request, or a timeout. Returns the request; null: no event arrived. */
  async done(claim, connected) {
    let timer = 0;
    const late = new Promise((resolve) => (timer = setTimeout(resolve, connected ? EVENTS_TIMEOUT_MS : 0)));
    await Promise.race([claim.ended, late]);
    clearTimeout(timer);
    this.open = this.open.filter((one) => one !== claim);
    return claim.request;
  }
}
