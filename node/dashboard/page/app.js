// The run's page: redraws what changed in the view, and updates ages every second.

import { Chart } from "./chart.js";
import { byId, element, styled } from "./dom.js";
import * as format from "./format.js";
import { Operator } from "./operator.js";
import { abreast, legend, pipeline } from "./pipeline.js";
import { Stream } from "./stream.js";

const FEW_EVENTS = 12;
const SILENT_SECONDS = 60;
const LOST_SECONDS = 5;
// Kinds of events that are folded, in singular and plural.
const ROUTINE = { "held-out": ["held-out loss", "held-out losses"], snapshot: ["snapshot", "snapshots"], planned: ["plan", "plans"] };
const FOLDED = "important";
const ALL = "all";
const ACTIVE = ["starting", "waiting for nodes", "restoring", "training"];

let connection = "connecting";
let allEvents = false;
const unfolded = new Set();

const stream = new Stream(changed, connected);
const now = () => stream.now();
const operator = new Operator();
const lossChart = new Chart(byId("loss-chart"), { label: "loss", format: format.loss, fromZero: false, now });
const speedChart = new Chart(byId("speed-chart"), { label: "speed", format: (value) => `${format.count(value)} tokens/s`, fromZero: true, now });
const lrChart = new Chart(byId("lr-chart"), { label: "learning rate", format: (value) => value.toExponential(2), fromZero: true, now });
const gradNormChart = new Chart(byId("grad-norm-chart"), { label: "gradient norm", format: (value) => String(Number(value.toPrecision(3))), fromZero: true, now });

byId("event-filter").addEventListener("change", () => drawEvents(stream.view));
byId("sample-step").addEventListener("change", () => drawSamples(stream.view));
byId("more-events").addEventListener("click", () => {
  allEvents = true;
  drawEvents(stream.view);
});
setInterval(() => stream.view && drawTimes(stream.view), 1000);

function changed(view, names) {
  byId("main").hidden = false;
  const any = (...wanted) => wanted.some((name) => names.has(name));
  drawHead(view);
  drawTimes(view);
  if (any("state")) drawConnection();
  if (any("bottleneck", "state", "ended")) drawBottleneck(view);
  if (any("loss_curve", "held_out_curve", "held_out")) drawLoss(view);
  if (any("lr_curve")) lrChart.set(view.lr_curve);
  if (any("grad_norm_curve")) gradNormChart.set(view.grad_norm_curve);
  if (any("speed_curve")) speedChart.set(view.speed_curve);
  if (any("samples")) drawSamples(view);
  if (any("stages", "links", "state")) drawPipeline(view);
  if (any("members", "spares", "replaced")) drawNodes(view);
  if (any("dropped")) drawDropped(view.dropped || {});
  if (any("events")) drawEvents(view);
}

function connected(state) {
  connection = state;
  drawConnection();
  if (stream && stream.view) drawTimes(stream.view);
}

const isOver = (view) => !ACTIVE.includes(view.state);

// The page of a finished run is complete and needs no connection.
function drawConnection() {
  const view = stream?.view;
  const ended = view && isOver(view) ? { finished: "the run is finished", stopped: "the run has stopped", failed: "the run has failed" }[view.state] : null;
  const words = { live: "live", lost: "connection lost, trying again", over: "the coordinator has stopped" };
  byId("connection").textContent = ended ?? words[connection] ?? connection;
  byId("connection").className = `connection ${ended ? "over" : connection}`;
}

function drawLoss(view) {
  const { steps, values } = view.held_out_curve;
  const { best, best_step: bestStep } = view.held_out ?? {};
  const marks = steps.map((step, i) => ({ step, value: values[i], best: false })).filter((mark) => mark.value !== null && mark.step !== bestStep);
  if (best != null) marks.push({ step: bestStep, value: best, best: true });
  marks.sort((a, b) => a.step - b.step);
  lossChart.set(view.loss_curve, marks);
  const kinds = [["trained", "training"], ["held-out", "held out"], ["best", best == null ? "" : `best held out: ${format.loss(best)} at step ${format.integer(bestStep)}`]];
  byId("loss-legend").replaceChildren(...kinds.filter(([, words]) => words).map(([kind, words]) => element("li", {}, element("i", { class: kind }), words)));
  byId("loss-legend").hidden = !marks.length;
}

function drawHead(view) {
  document.title = `${view.steps ? `${Math.floor((100 * view.step) / view.steps)} % · ` : ""}${view.name || "thinwire"}`;
  byId("name").textContent = view.name || "a run";
  byId("run-id").textContent = view.run_id;
  const bar = byId("bar");
  bar.setAttribute("aria-valuemax", view.steps);
  bar.setAttribute("aria-valuenow", view.step);
  styled(bar.firstElementChild, { width: `${view.steps ? (100 * view.step) / view.steps : 0}%` });
  const codecs = view.forward_codec ? `activations ${view.forward_codec}, gradients ${view.backward_codec}` : "";
  byId("pipeline-note").textContent = [view.stages.length ? `epoch ${view.epoch}` : "", codecs].filter(Boolean).join(" · ");
  const troubles = [
    [view.lost, "node lost in a step", "nodes lost in steps"],
    [view.aborted, "step aborted", "steps aborted"],
    [view.recoveries, "recovery", "recoveries"],
    [view.replayed, "step replayed", "steps replayed"],
    [view.coordinator_starts - 1, "restart", "restarts"],
  ];
  const counts = troubles.filter(([count]) => count > 0).map(([count, singular, plural]) => `${count} ${count > 1 ? plural : singular}`);
  if (view.goodput !== null && view.goodput < 1) counts.push(`goodput ${(100 * view.goodput).toFixed(1)} %`);
  byId("counts").textContent = counts.join(", ");
}

function drawBottleneck(view) {
  const words = view.ended ? [view.ended] : view.bottleneck;
  const [first, ...others] = words.length ? words : [quiet(view)];
  byId("bottleneck-title").textContent = view.ended ? "How it ended" : view.state === "training" ? "What limits the speed" : "What the run is waiting for";
  byId("bottleneck").replaceChildren(
    element("p", { class: `verdict${view.state === "failed" ? " failed" : ""}` }, ...marked(first)),
    ...others.map((line) => element("p", { class: "muted" }, ...marked(line))),
  );
  operator.propose(words.map((line) => line.match(/`thinwire set RUN_DIR ([^`]+)`/)?.[1]).find(Boolean) ?? "");
}

// Text between backquotes is code.
function marked(line) {
  return line.split("`").map((part, i) => (i % 2 ? element("code", {}, part) : part));
}

function quiet(view) {
  return { training: "nothing stands out yet", restoring: "stages are fetching their state", starting: "the coordinator is starting" }[view.state] ?? view.state;
}

function drawTimes(view) {
  const over = isOver(view);
  const age = now() - view.updated;
  const [doubt, notice] = (!over && doubts(view, age)) || [];
  set(byId("state"), doubt ? `${view.state}, ${doubt}` : view.state);
  byId("state").className = `pill ${doubt ? "doubtful" : view.state.replaceAll(" ", "-")}`;
  byId("silence").hidden = !doubt;
  if (doubt) byId("silence").replaceChildren(...marked(notice));
  const parts = [`step ${format.integer(view.step)} of ${format.integer(view.steps)}`];
  if (!over && view.eta_seconds != null) parts.push(`${format.duration(view.eta_seconds)} to go`);
  if (view.started) parts.push(`${over ? "took" : "started"} ${format.age((over ? view.updated : now()) - view.started)}${over ? "" : " ago"}`);
  byId("progress-text").textContent = parts.join(" · ");
  const spares = view.spares ? ` + ${view.spares} spare${view.spares > 1 ? "s" : ""}` : "";
  const figures = [
    ["loss", "Loss", view.step && view.loss == null ? "no labels" : format.loss(view.loss), heldOut(view.held_out) || (view.lr == null ? "" : `learning rate ${view.lr.toExponential(2)}`)],
    ["speed", "Tokens per second", format.count(view.tokens_per_second), view.tokens_per_step ? `${format.count(view.tokens_per_step)} per step` : ""],
    ["step-time", "Time per step", format.duration(view.step_seconds), view.microbatches ? `${view.microbatches} microbatches${view.slices > 1 ? ` in ${view.slices} slices each` : ""}` : ""],
    over ? ["eta", "Ended", format.clock(view.updated, now()), view.state] : ["eta", "Time to go", format.duration(view.eta_seconds), view.eta_seconds == null ? "" : `until ${format.clock(view.updated + view.eta_seconds, now())}`],
    ["snapshot", "Newest snapshot", view.snapshot ? format.age(now() - view.snapshot.at) : "none yet", view.snapshot ? `step ${format.integer(view.snapshot.step)}, ${format.bytes(view.snapshot.bytes)}` : ""],
    ["nodes-here", "Nodes", `${view.members.length - view.spares}${spares}`, `for ${view.stages_wanted} stage${view.stages_wanted === 1 ? "" : "s"}`],
  ];
  const place = byId("figures");
  if (place.childElementCount !== figures.length) {
    place.replaceChildren(...figures.map(([id, title]) => element("div", { class: "figure panel", id: `figure-${id}` }, element("h3", {}, title), element("p", { class: "value" }), element("p", { class: "muted small" }))));
  }
  figures.forEach(([, title, value, note], i) => {
    const [heading, first, second] = place.children[i].children;
    set(heading, title);
    set(first, value);
    set(second, note);
  });
  set(byId("footer"), `${view.run_id ? `run ${view.run_id} · ` : ""}last event ${format.age(age)} ago${over || connection === "live" ? "" : " · not live"}`);
}

// Documents that were left out of the training data, by reason.
function drawDropped(reasons) {
  const parts = Object.entries(reasons).sort((a, b) => b[1] - a[1]).map(([reason, count]) => `${format.integer(count)} (${reason})`);
  byId("dropped").textContent = `left out of the training data so far: ${parts.join(", ")}`;
  byId("dropped").hidden = !parts.length;
}

// The newest held-out loss and the best one.
function heldOut(measured) {
  if (!measured) return "";
  const trained = measured.loss == null ? "" : `, ${format.loss(measured.loss)} as trained`;
  const best = measured.best == null ? "" : ` · best ${format.loss(measured.best)} at step ${format.integer(measured.best_step)}`;
  const newest = measured.samples ? format.loss(measured.uncompressed) : "no labels";
  return `held-out ${newest}${trained}${best}`;
}

// Why the shown state may be out of date: a word and a sentence; null if it is not.
function doubts(view, age) {
  const after = "`thinwire status` shows whether the coordinator is alive; `thinwire resume` continues the run.";
  // A server that announced its end is gone, but a broken connection may return.
  if (stream.lostAt !== null && (connection === "over" || now() - stream.lostAt > LOST_SECONDS)) return ["connection lost", `No answer for ${format.age(now() - stream.lostAt)}; this page shows the state of that time. ${after}`];
  if (age <= Math.max(SILENT_SECONDS, 5 * (view.step_seconds ?? 0))) return null;
  if (!stream.coordinated) return ["no news", `No events for ${format.age(age)}: the coordinator may have stopped. ${after}`];
  // There are no events while the run waits for nodes, and a first step may take long.
  if (view.state === "waiting for nodes" || view.step_seconds == null) return null;
  return ["no progress", `No events for ${format.age(age)}; a step takes ${format.duration(view.step_seconds)}. The coordinator is running: look at the nodes and the events.`];
}

// Unchanged text is left alone, so that a selection in it survives.
function set(node, words) {
  if (node.textContent !== words) node.textContent = words;
}

function drawPipeline(view) {
  const place = byId("pipeline");
  place.classList.toggle("abreast", abreast(view));
  place.classList.toggle("two", abreast(view) && view.stages.length === 2);
  if (view.stages.length) place.replaceChildren(...pipeline(view));
  else place.replaceChildren(element("li", { class: "muted" }, view.state === "waiting for nodes" ? `No stage has a node yet: ${view.members.length} of ${view.stages_wanted} nodes have joined.` : "No stage has a node."));
  byId("legend").replaceChildren(...legend(view));
}

// The continuations of each prompt by one snapshot's model: the newest, unless another step is chosen.
function drawSamples(view) {
  const samples = view.samples ?? [];
  const steps = [...new Set(samples.map((sample) => sample.step))].sort((a, b) => b - a);
  const select = byId("sample-step"), wanted = Number(select.value);
  const chosen = steps.slice(1).includes(wanted) && select.selectedIndex > 0 ? wanted : steps[0];
  select.replaceChildren(...steps.map((step) => element("option", { value: step, selected: step === chosen }, `step ${format.integer(step)}`)));
  byId("samples").replaceChildren(...samples.filter((sample) => sample.step === chosen).map((sample) => element("li", { dir: "auto" }, element("strong", {}, sample.prompt), ` ${sample.text}`)));
  byId("samples-panel").hidden = !samples.length;
}

function drawNodes(view) {
  byId("nodes-note").textContent = view.members.length ? "" : "no node is connected";
  const members = [...view.members].sort((a, b) => (a.stage ?? 1e9) - (b.stage ?? 1e9) || a.joined - b.joined);
  byId("nodes").replaceChildren(
    ...members.map((member) => element("li", {}, element("span", { class: "mono" }, member.node_id), member.name ? element("span", { class: "owner" }, member.name) : null, element("span", { class: "muted device" }, member.device), element("span", { class: member.stage == null ? "stage-of spare" : "stage-of" }, member.stage == null ? (view.spares ? "spare" : "waiting") : `stage ${view.groups.length > 1 ? `${member.replica}/` : ""}${member.stage}`))),
  );
  byId("replaced").replaceChildren(...view.replaced.map((line) => element("li", { class: "trouble" }, line)));
  byId("replaced").hidden = !view.replaced.length;
  operator.nodes(members);
}

function drawEvents(view) {
  drawFilter(view);
  const filter = byId("event-filter").value;
  const wanted = view.events.filter((event) => [FOLDED, ALL, event.kind].includes(filter)).reverse();
  const rows = filter === FOLDED ? folded(wanted) : wanted.map((event) => [event]);
  const shown = allEvents ? rows : rows.slice(0, FEW_EVENTS);
  byId("events").replaceChildren(...shown.map((row) => (row.length > 1 ? foldedRow(row) : eventRow(row[0]))));
  byId("more-events").hidden = shown.length === rows.length;
  byId("more-events").textContent = `Show all ${rows.length}`;
}

// Updates the kinds of events to choose from, and keeps the choice.
function drawFilter(view) {
  const select = byId("event-filter"), chosen = select.value || FOLDED;
  const kinds = [...new Set([...view.events.map((event) => event.kind), chosen])].filter((kind) => kind !== FOLDED && kind !== ALL).sort();
  const words = { [FOLDED]: "routine events folded", [ALL]: "all" };
  const options = [FOLDED, ALL, ...kinds];
  if (options.join() === [...select.options].map((option) => option.value).join()) return;
  select.replaceChildren(...options.map((kind) => element("option", { value: kind, selected: kind === chosen }, words[kind] ?? `only ${kind}`)));
}

// Rows of events. Adjacent routine events share a row, except the newest event and rows that were opened.
function folded(newestFirst) {
  const rows = [];
  let open = null;
  newestFirst.forEach((event, i) => {
    if (i === 0 || event.level !== "info" || !(event.kind in ROUTINE)) {
      open = null;
      rows.push([event]);
    } else if (open) open.push(event);
    else rows.push((open = [event]));
  });
  return rows.flatMap((row) => (row.length > 1 && unfolded.has(foldKey(row)) ? row.map((event) => [event]) : [row]));
}

// A row grows at its newest end.
const foldKey = (row) => row[row.length - 1].at;

function foldedRow(row) {
  const counts = new Map();
  for (const event of row) counts.set(event.kind, (counts.get(event.kind) ?? 0) + 1);
  const words = [...counts].map(([kind, many]) => `${many} ${ROUTINE[kind][many > 1 ? 1 : 0]}`).join(", ");
  const button = element("button", { type: "button", class: "quiet", "aria-expanded": "false" }, words);
  button.addEventListener("click", () => {
    unfolded.add(foldKey(row));
    drawEvents(stream.view);
  });
  return element("li", { class: "folded" }, eventTime(row[0]), button);
}

const eventTime = (event) => element("time", { datetime: new Date(1000 * event.at).toISOString() }, format.clock(event.at, now()));

function eventRow(event) {
  return element("li", { class: event.level }, eventTime(event), element("span", { class: "what" }, event.kind), element("span", { class: "text" }, event.text));
}
