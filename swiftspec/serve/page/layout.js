// Layout of a tree: levels from left to right, the most likely path straight through the middle.

// Heights of nodes and widths of levels, in pixels.
const ROW = 27; // a node with a frame and text
const BRANCH = 15; // a node that was expanded, but is not in the proposal: a dot and small letters
const DOT = 3.8; // any other node
const NARROWEST = 62; // the narrowest level
const COMFORTABLE = 92; // a level whose texts can be read
const WIDEST = 190; // the widest level

/** Returns whether a node is drawn with a frame and text. */
export function isLarge(node) {
  return node.sent || node.parent === null || node.fate === "own";
}

/** Returns the height of a node without its children. The target's own token has its place before it is known. */
function size(node) {
  if (isLarge(node)) return ROW;
  return node.expanded ? BRANCH : DOT;
}

/**
 * Lays out a tree in `width` x `height` pixels. Returns {places, deeper}. `places` is a Map from the name of a node to
 * {x, y, room, scale}: its left end, its middle, the width for its text, and the factor by which heights are scaled.
 * `deeper` is the number of nodes beyond the right edge.
 */
export function place(tree, width, height) {
  const { nodes } = tree;
  const levels = 1 + Math.max(...nodes.map((node) => (isLarge(node) ? node.depth : node.depth - 0.6)));
  const readable = 1 + Math.max(...nodes.map((node) => (isLarge(node) ? node.depth : 0)));
  const least = Math.max(NARROWEST, Math.min(COMFORTABLE, (width - 8) / readable)); // deeper levels may be outside
  const step = Math.min(WIDEST, Math.max(least, (width - 8) / levels));
  const heights = new Map();
  const measure = (node) => {
    const below = node.children.reduce((sum, child) => sum + measure(child), 0);
    heights.set(node, Math.max(size(node), below));
    return heights.get(node);
  };
  const total = measure(tree.nodes[0]);
  const scale = Math.min((height - ROW) / total, 1.35);
  const places = new Map();
  const put = (node, top) => {
    const all = heights.get(node);
    const children = fanned(node.children);
    let at = top + (all - children.reduce((sum, child) => sum + heights.get(child), 0)) / 2;
    for (const child of children) {
      put(child, at);
      at += heights.get(child);
    }
    const y = middle(children, places) ?? (top + all / 2) * scale;
    places.set(node, { x: 4 + node.depth * step, y, room: step - 22, scale });
  };
  put(tree.nodes[0], 0);
  centre(places, height);
  const named = new Map();
  let deeper = 0;
  for (const [node, spot] of places) {
    if (spot.x + 12 > width) deeper += 1;
    named.set(node.name, spot);
  }
  return { places: named, deeper };
}

/** Returns the children in the order of drawing: the most likely in the middle, the others alternately around it. */
function fanned(children) {
  const sorted = [...children].sort((one, other) => (other.q ?? 0) - (one.q ?? 0));
  const row = [];
  for (const [at, child] of sorted.entries()) at % 2 === 0 ? row.push(child) : row.unshift(child);
  return row;
}

/** Returns the y of the most likely child, so that its path is a straight line; null if there are no children. */
function middle(children, places) {
  if (children.length === 0) return null;
  const first = children.reduce((best, child) => ((child.q ?? 0) > (best.q ?? 0) ? child : best));
  return places.get(first).y;
}

function centre(places, height) {
  const spots = [...places.values()];
  const low = Math.min(...spots.map((spot) => spot.y));
  const high = Math.max(...spots.map((spot) => spot.y));
  const shift = (height - low - high) / 2;
  for (const spot of spots) spot.y += shift;
}
