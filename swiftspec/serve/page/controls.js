// Event handlers of buttons, keys and files.

import { keepWritten } from "./storage.js";
import { parse } from "./recording.js";

const $ = (id) => document.getElementById(id);
export const LARGE = "70B target";
const MAX_TRACE_BYTES = 256 * 2 ** 20;

export function wireControls(app) {
  wirePlayer(app);
  wireTabs(app);
  wireComposer(app);
  wireFiles(app);
  document.addEventListener("keydown", (event) => shortcut(app, event));
}

function wirePlayer(app) {
  const { treeView } = app;
  const click = (id, act) => $(id).addEventListener("click", () => {
    act(treeView.player);
    treeView.changed();
  });
  click("play", (player) => player.toggle());
  click("back", (player) => player.step(-1));
  click("on", (player) => player.step(1));
  click("live", (player) => {
    const wanted = !player.following;
    $("live").dataset.wanted = String(wanted);
    player.following = wanted;
  });
  $("scrub").addEventListener("input", () => {
    treeView.player.playing = false;
    treeView.player.seek(Number($("scrub").value) / 1000);
    treeView.changed();
  });
  $("speed").addEventListener("change", () => {
    const { value } = $("speed");
    treeView.player.speed = value === "slow" ? value : Number(value);
    treeView.changed();
  });
  $("request").addEventListener("change", () => {
    app.showRequest(app.shown.requests[Number($("request").value)], app.shown);
  });
}

function wireTabs(app) {
  for (const name of ["tree", "race"]) {
    $(`tab-${name}`).addEventListener("click", () => app.tab(name));
    $(`tab-${name}`).addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = name === "tree" ? "race" : "tree";
      app.tab(other);
      $(`tab-${other}`).focus();
    });
  }
  $("race-run").addEventListener("click", () => app.requests.runRace());
  $("race-this").addEventListener("click", () => app.requests.runRace());
  $("race-large").addEventListener("click", () => app.raceLarge());
}

function wireComposer(app) {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    app.requests.send();
  });
  $("composer-text").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    app.requests.send();
  });
  $("composer-text").addEventListener("input", () => {
    keepWritten($("composer-text").value);
    if (!app.gone) app.trouble("");
  });
  stayAtEnd($("talk"));
  $("stop").addEventListener("click", () => app.requests.chat.stop());
}

/** Keeps an area scrolled to its end when its size changes. */
function stayAtEnd(area) {
  let atEnd = false;
  area.addEventListener("scroll", () => (atEnd = area.scrollHeight - area.scrollTop - area.clientHeight < 30));
  new ResizeObserver(() => {
    if (atEnd) area.scrollTop = area.scrollHeight;
  }).observe(area);
}

function wireFiles(app) {
  const click = (id, act) => $(id).addEventListener("click", () => {
    $("files").open = false;
    act();
  });
  click("open-pair", () => app.load("page/traces/pair.jsonl", "the bundled demo models"));
  click("open-large", () => app.load("page/traces/large.jsonl", LARGE));
  click("open-file", () => $("file").click());
  click("back-live", () => app.showLive());
  $("strip-back").addEventListener("click", () => app.showLive());
  click("save", () => save(app.shown ?? app.live));
  $("file").addEventListener("change", async () => {
    const [file] = $("file").files;
    $("file").value = "";
    if (file) await open(app, file);
  });
  for (const menu of document.querySelectorAll("details.menu")) {
    document.addEventListener("pointerdown", (event) => {
      if (!menu.contains(event.target)) menu.open = false;
    });
    menu.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      menu.open = false;
      menu.querySelector("summary").focus();
    });
  }
}

async function open(app, file) {
  try {
    if (file.size > MAX_TRACE_BYTES) throw new Error("it is too large for a browser");
    app.showRecording(parse(await file.text()), file.name);
    app.trouble("");
  } catch (error) {
    app.trouble(`${file.name} cannot be shown: ${error.message}`);
  }
}

function save(recording) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob(recording.lines(), { type: "application/jsonl" }));
  link.download = "swiftspec-trace.jsonl";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** Handles keys outside of text fields: space plays or pauses, comma and full stop step. */
function shortcut(app, event) {
  const typing = event.target.closest?.("input, textarea, select, button, summary, dialog");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || $("panel-tree").hidden) return;
  const { player } = app.treeView;
  const act = { " ": () => player.toggle(), ",": () => player.step(-1), ".": () => player.step(1) }[event.key];
  if (!act) return;
  event.preventDefault();
  act();
  app.treeView.changed();
}
