// Unit tests of the page's modules, without a browser.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

const PAGE = new URL("../../../swiftspec/serve/page/", import.meta.url);
const { eventOf } = await import(new URL("api.js", PAGE));
const { pieceOf } = await import(new URL("chat.js", PAGE));
const { OwnRequests } = await import(new URL("own_requests.js", PAGE));
const { busy } = await import(new URL("timelines.js", PAGE));
const { place } = await import(new URL("layout.js", PAGE));
const { Player } = await import(new URL("player.js", PAGE));
const { difference, findRace, runOf } = await import(new URL("race.js", PAGE));
const { answerOf, BadTrace, parse, Recording, spanOf } = await import(new URL("recording.js", PAGE));
const { statsOf } = await import(new URL("stats.js", PAGE));
const { percent, safe, visible } = await import(new URL("tokens.js", PAGE));
const { about, caption } = await import(new URL("captions.js", PAGE));
const { fateInFlight, Trees } = await import(new URL("tree.js", PAGE));

const HEAD = { swiftspec_trace: 1, texts: { 1: "a", 2: "b", 3: " c", 4: "\n" } };
const ROUNDS = [
  {
    request: 1, round: 0, target: { open: [0, 1], verify: [2, 3] }, wait: [1, 2], path: [0, 1], tokens: [2, 3],
    proposal: { tokens: [1, 2, 4], parents: [-1, 0, 0], p: [null, 0.5, 0.25] },
    draft: { forwards: [[1, 2, 4]], tree: {
      tokens: [1, 2, 4, 3, 4, 2], parents: [-1, 0, 0, 1, 1, 3], logprobs: [0, -0.5, -1, -1, -2, -3], expanded: [1, 1, 0, 1, 0, 0],
    } },
  },
  {
    request: 1, round: 1, target: { verify: [4, 5] }, wait: [3, 4], path: [0], tokens: [1],
    proposal: { tokens: [3, 2], parents: [-1, 0] }, draft: { tree: { tokens: [3, 2], parents: [-1, 0], logprobs: [0, -1], expanded: [1, 0] } },
  },
];

function recorded(lines = ROUNDS, prompt = [1], id = 1) {
  const recording = new Recording();
  for (const line of [HEAD, { request: id, begin: { prompt, sampling: { seed: 7 } } }, ...lines]) recording.add(line);
  recording.add({ request: id, end: { reason: "length", tokens: 3 } });
  return recording;
}

test("a trace is read, and written as it was", () => {
  const recording = recorded();
  const again = parse(recording.lines().join(""));
  assert.deepEqual(again.requests, recording.requests);
  assert.equal(again.text(3), " c");
  assert.equal(again.text(9), "⟨9⟩");
  assert.deepEqual(answerOf(again.requests[0]), [2, 3, 1]);
});

test("characters of several tokens are put together, and special tokens are no text", () => {
  const recording = new Recording();
  recording.add({ ...HEAD, texts: { 1: "a", 5: "\ufffd", 6: "\ufffd", 9: "<|end|>" }, bytes: { 5: "e288", 6: "9a" }, special: [9] });
  assert.deepEqual(recording.pieces([1, 5, 6, 1, 9]), ["a", "", "√", "a", ""]);
  assert.deepEqual(recording.pieces([1, 9], { special: true }), ["a", "<|end|>"]);
  assert.deepEqual(recording.pieces([1, 5]), ["a", ""]);
  assert.deepEqual(recording.pieces([1, 5], { whole: true }), ["a", "\ufffd"]);
  assert.deepEqual(recording.pieces([5, 1]), ["", "\ufffda"]);
  assert.deepEqual(recording.pieces([], { whole: true }), []);
  assert.equal(recording.text(5), "⟨E288⟩");
  const again = parse(recording.lines().join(""));
  assert.deepEqual(again.pieces([5, 6, 9]), ["", "√", ""]);
});

test("a last line that was cut off is left out", () => {
  const whole = '{"swiftspec_trace":1}\n{"request":1,"begin":{"at":0,"prompt":[1],"sampling":{}}}\n';
  assert.equal(parse(`${whole}{"request":1,"rou`).requests.length, 1);
});

test("an invalid trace is refused with its line", () => {
  for (const [text, said] of [["{}", "line 1: this is not a trace"], ["", "the file is empty"], ['{"swiftspec_trace":2}', "version 2"],
    ['{"swiftspec_trace":1}\nx\n', "line 2: not JSON"], ['{"swiftspec_trace":1}\n[]', "line 2: a line is not a JSON object"]]) {
    assert.throws(() => parse(text), (error) => error instanceof BadTrace && error.message.includes(said), text);
  }
});

test("the oldest requests of a long recording go", () => {
  const recording = new Recording();
  for (let id = 1; id <= 3; id += 1) for (let at = 0; at < 4500; at += 1) recording.add({ request: id, round: at, tokens: [1] });
  assert.deepEqual(recording.requests.map((request) => request.id), [2, 3]);
});

test("every node has its fate, its name through the rounds, p and q", () => {
  const trees = new Trees(recorded().requests[0]);
  const first = trees.at(0);
  const fates = Object.fromEntries(first.nodes.map((node, at) => [at, node.fate]));
  assert.deepEqual(fates, { 0: "verified", 1: "verified", 2: "rejected", 3: "own", 4: "idle", 5: "kept" });
  assert.equal(first.accepted, 1);
  assert.match(about(first.nodes[1], true, String), /the draft found it 61 % likely \(q\)\nthe target found it 50 % likely \(p\)/);
  assert.equal(first.kept, 1);
  assert.deepEqual(first.nodes.map(fateInFlight), ["verified", "flight", "flight", "idle", "idle", "idle"]);
  assert.equal(first.nodes[1].p, 0.5);
  assert.equal(percent(first.nodes[1].q), percent(Math.exp(-0.5)));
  const second = trees.at(1);
  assert.equal(second.nodes[0].name, first.nodes[3].name);
  assert.equal(second.nodes[1].name, first.nodes[5].name);
  assert.ok(second.nodes[2].added && second.nodes[2].fate === "own");
});

test("without whole trees the proposal is shown", () => {
  const bare = ROUNDS.map(({ draft, ...round }) => round);
  assert.equal(new Trees(recorded(bare).requests[0]).at(0).nodes.length, 4);
});

test("a population has rounds and no tree", () => {
  const smc = [0, 1].map((round) => ({ request: 1, round, population: [round, round + 1], tokens: round ? [1, 2] : [] }));
  const { requests: [request] } = recorded(smc);
  const tree = new Trees(request).at(1);
  assert.deepEqual([tree.nodes, caption(tree, true, smc[1], String)[1][0].includes("2 tokens")], [[], true]);
  assert.deepEqual(statsOf(request, 1).held, []);
});

test("no node stands on another, and all stand inside", () => {
  const tree = new Trees(recorded().requests[0]).at(0);
  const { places, deeper } = place(tree, 800, 300);
  const seen = new Set([...places.values()].map(({ x, y }) => `${x.toFixed(1)} ${y.toFixed(1)}`));
  assert.equal(seen.size, tree.nodes.length);
  assert.equal(deeper, 0);
  assert.ok([...places.values()].every(({ y }) => y > 0 && y < 300));
});

test("the clock plays, seeks, and steps by half rounds", () => {
  const player = new Player();
  player.show(recorded().requests[0]);
  assert.deepEqual([player.begin, player.mean, spanOf(player.request, 1).begin], [1, 2, 3]);
  const steps = [];
  player.seek(0);
  for (let at = 0; at < 4; at += 1) {
    const { index, answered } = player.moment();
    steps.push([index, answered]);
    player.step(1);
  }
  assert.deepEqual(steps, [[0, false], [0, true], [1, false], [1, true]]);
  player.step(-3);
  assert.deepEqual([player.moment().index, player.moment().answered], [0, false]);
  player.speed = 1;
  player.toggle();
  const before = player.time;
  player.tick(0.1);
  assert.ok(Math.abs(player.time - before - 0.1) < 1e-9);
  for (let at = 0; at < 100; at += 1) player.tick(0.2);
  assert.deepEqual([player.playing, player.share], [false, 1]);
});

test("numbers of a request", () => {
  const stats = statsOf(recorded().requests[0], 1);
  assert.deepEqual([stats.tokens, stats.rounds, stats.seconds, stats.perRound, stats.held], [3, 2, 4, 1.5, [1, 1]]);
  const cut = recorded();
  cut.requests[0].end.tokens = 2; // the last token is after the end of the answer
  assert.deepEqual([statsOf(cut.requests[0], 1).tokens, statsOf(cut.requests[0], 1).perRound], [2, 1.5]);
  assert.equal(busy([[0, 1], [2, 4]], 0, 4), 0.75);
});

test("a race is found and judged", () => {
  const recording = recorded();
  assert.equal(findRace(recording), null);
  recording.add({ request: 2, begin: { prompt: [1] } });
  for (const [at, token] of [2, 3, 1].entries()) {
    recording.add({ request: 2, round: at, target: { open: [9, 10], verify: [10 + at, 11 + at] }, proposal: { tokens: [1], parents: [-1] }, path: [0], tokens: [token] });
  }
  const { plain, fast } = findRace(recording);
  assert.deepEqual([plain.id, fast.id], [2, 1]);
  assert.deepEqual(runOf(plain).times, [1, 2, 3]);
  assert.equal(difference(runOf(plain).tokens, runOf(fast).tokens), -1);
  assert.equal(difference([1, 2], [1, 3]), 1);
  assert.equal(difference([1, 2], [1]), 1);
});

test("a request of this page is known by its seed", async () => {
  const ownRequests = new OwnRequests();
  const claim = ownRequests.expect(7);
  assert.equal(ownRequests.begun({ begin: { sampling: { seed: 8 } } }), false);
  const request = { begin: { sampling: { seed: 7 } } };
  assert.equal(ownRequests.begun(request), true);
  ownRequests.ended(request);
  assert.equal(await ownRequests.done(claim, true), request);
  assert.equal(await ownRequests.done(ownRequests.expect(9), false), null);
});

test("tokens are shown so that nothing is hidden or turned around", () => {
  assert.equal(visible(" a\n\t"), "·a⏎⇥");
  assert.equal(visible(""), "∅");
  assert.equal(visible("\u202ea\u0000"), "⟨202E⟩a⟨0⟩");
  assert.equal(safe("a\n\tb\u2066"), "a\n\tb⟨2066⟩");
  assert.deepEqual([percent(1), percent(0.1234), percent(0.0123), percent(1e-9), percent(null)], ["100 %", "12 %", "1.2 %", "< 0.1 %", "not known"]);
});

test("events of a stream", () => {
  assert.deepEqual(eventOf("id: 4\nevent: round\ndata: {}"), { id: "4", event: "round", data: "{}" });
  assert.equal(eventOf(": still here"), null);
  assert.equal(pieceOf({ choices: [{ delta: { content: "x" } }] }), "x");
  assert.equal(pieceOf({ choices: [{ text: "y" }] }), "y");
  assert.equal(pieceOf({ choices: [] }), "");
  assert.throws(() => pieceOf({ error: { message: "broken" } }), /broken/);
});

test("the recorded races that come along are whole, and prove the text equal", () => {
  for (const name of ["pair", "large"]) {
    const recording = parse(readFileSync(new URL(`traces/${name}.jsonl`, PAGE), "utf8"));
    const { plain, fast } = findRace(recording);
    assert.equal(difference(runOf(plain).tokens, runOf(fast).tokens), -1);
    const trees = new Trees(fast);
    for (const [at, round] of fast.rounds.entries()) {
      const tree = trees.at(at);
      assert.equal(tree.accepted + 1, round.tokens.length);
      assert.ok(tree.nodes.every((node) => recording.texts.has(node.token)));
      for (const node of tree.nodes.filter(({ fate }) => fate === "rejected")) {
        assert.equal(about(node, true, String).includes("rejected with its parent"), node.parent.fate === "rejected");
      }
    }
  }
});
