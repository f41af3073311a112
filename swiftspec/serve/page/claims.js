// Which of the engine's requests are this page's: each is sent with a seed, which the engine's line of its begin says.

const PATIENCE = 5000; // milliseconds that events may come after the answer

export class Claims {
  constructor() {
    this.open = [];
  }

  /** The next request with this seed will be ours, an answer to `text`. */
  expect(seed, text = "") {
    const claim = { seed, text, request: null, over: null };
    claim.ended = new Promise((resolve) => (claim.over = resolve));
    this.open.push(claim);
    return claim;
  }

  /** Whether a request that begins is ours. A seed of 0 is the usual one, which lines leave out. */
  begun(request) {
    const seed = request.begin.sampling?.seed ?? 0;
    const claim = this.open.find((one) => one.request === null && one.seed === seed);
    if (claim) claim.request = request;
    return claim !== undefined;
  }

  /** What a request of ours was asked, while it runs. */
  textOf(request) {
    return this.open.find((one) => one.request === request)?.text ?? "";
  }

  ended(request) {
    this.open.find((one) => one.request === request)?.over();
  }

  /** The request of a claim once all of it was heard, or as much as came in time; null: nothing of it came. */
  async done(claim, connected) {
    let timer = 0;
    const late = new Promise((resolve) => (timer = setTimeout(resolve, connected ? PATIENCE : 0)));
    await Promise.race([claim.ended, late]);
    clearTimeout(timer);
    this.open = this.open.filter((one) => one !== claim);
    return claim.request;
  }
}
