// Builds the draft tree of a round: nodes with a fate, and with names that stay the same from round to round.

// The fates of a node, which are also the classes of the legend.
export const FATES = ["flight", "verified", "rejected", "own", "kept", "idle"];

let names = 0; // number of names given; names are unique

const MAX_CACHED_TREES = 64; // per request

/** The trees of a request's rounds, built on demand. */
export class Trees {
  constructor(request) {
    this.request = request;
    this.made = new Map();
  }

  at(index) {
    if (!this.made.has(index)) {
      const before = index > 0 ? (this.made.get(index - 1) ?? grown(this.request, index - 1, null)) : null;
      this.made.set(index, grown(this.request, index, before));
      if (this.made.size > MAX_CACHED_TREES) this.made.delete(this.made.keys().next().value);
    }
    return this.made.get(index);
  }
}

/**
 * Builds the tree of one round. `before`: the tree of the previous round, or null.
 *
 * `nodes` has parents before children, each node as {name, token, parent, children, depth, q, p, sent, fate, survives,
 * old}. `sent`: the node was in the proposal. `survives`: it is also in the tree of the next round. `old`: it was also
 * in the tree of the previous round. `accepted`, `proposed`: numbers of draft tokens. `next`: root of the next round.
 * `kept`: number of nodes below it.
 */
function grown(request, index, before) {
  const round = request.rounds[index];
  if (round.population) return { index, nodes: [], accepted: 0, proposed: 0, next: null, kept: 0 }; // mode smc
  const nodes = whole(round);
  const sent = markSent(nodes, round);
  const path = (round.path ?? [0]).map((at) => sent[at]).filter((node) => node !== undefined);
  for (const node of path) node.fate = "verified";
  const last = path.at(-1) ?? nodes[0];
  const accepted = Math.max(path.length - 1, 0);
  const next = own(nodes, last, round.tokens.at(-1));
  const kept = surviving(next);
  nameAll(nodes, before);
  const proposed = Math.max((round.proposal?.tokens.length ?? 1) - 1, 0);
  return { index, nodes, accepted, proposed, next, kept };
}

/** Returns the nodes of the whole tree if the trace has it, else those of the proposal. */
function whole(round) {
  const tree = round.draft?.tree ?? round.proposal ?? { tokens: [0], parents: [-1] };
  const nodes = [];
  for (const [at, token] of tree.tokens.entries()) {
    const parent = nodes[tree.parents[at]] ?? null;
    if (at > 0 && parent === null) continue;
    const node = hang(nodes, parent, token);
    node.expanded = Boolean(tree.expanded?.[at]);
    node.logprob = tree.logprobs?.[at] ?? null;
    if (parent && node.logprob !== null) node.q = Math.exp(node.logprob - (parent.logprob ?? 0));
  }
  return nodes;
}

/** Adds a node below `parent` and returns it. */
function hang(nodes, parent, token) {
  const depth = parent ? parent.depth + 1 : 0;
  const facts = { name: 0, token, parent, depth, children: [], logprob: null, q: null, p: null };
  const node = { ...facts, sent: false, expanded: false, survives: false, old: false, added: false, fate: "idle" };
  parent?.children.push(node);
  nodes.push(node);
  return node;
}

function childOf(node, token) {
  return node.children.find((child) => child.token === token);
}

/** Marks the nodes of the proposal, which are found by their tokens from the root down. Returns them in its order. */
function markSent(nodes, round) {
  const proposal = round.proposal ?? { tokens: [nodes[0].token], parents: [-1] };
  const found = [];
  for (const [at, token] of proposal.tokens.entries()) {
    const parent = found[proposal.parents[at]];
    let node = at === 0 ? nodes[0] : parent && childOf(parent, token);
    if (node === undefined && parent) node = hang(nodes, parent, token); // the recorded tree does not contain this node
    found.push(node);
    if (node === undefined) continue;
    node.sent = true;
    node.fate = at === 0 ? "verified" : "rejected";
    node.p = proposal.p?.[at] ?? null;
  }
  return found;
}

/** Returns the node of the target's own token, after the last accepted node; adds it if the draft has not. */
function own(nodes, last, token) {
  let node = childOf(last, token);
  if (node === undefined) {
    node = hang(nodes, last, token);
    node.added = true; // it was not in the draft's tree
  }
  node.fate = "own";
  return node;
}

/** Marks the nodes below the next root as surviving. Returns their number. */
function surviving(next) {
  let count = 0;
  const look = (node) => {
    for (const child of node.children) {
      child.fate = "kept";
      child.survives = true;
      count += 1;
      look(child);
    }
  };
  next.survives = true;
  look(next);
  return count;
}

/** Gives nodes that existed in the previous round the same name. */
function nameAll(nodes, before) {
  const root = nodes[0];
  const was = before?.next?.token === root.token ? before.next : null;
  const give = (node, earlier) => {
    node.name = earlier?.name ?? ++names;
    node.old = Boolean(earlier);
    for (const child of node.children) give(child, earlier && childOf(earlier, child.token));
  };
  give(root, was);
}

/** Returns the fate of a node as far as it is known during the verification. */
export function fateInFlight(node) {
  if (node.parent === null) return "verified";
  if (node.sent) return "flight";
  return node.old ? "kept" : "idle";
}
