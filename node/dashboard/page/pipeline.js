// The pipeline: a card per stage with its time by kind, and both directions of each link.

import { element, styled } from "./dom.js";
import { bits, bytes, duration, integer, mbit, percent } from "./format.js";

export const KINDS = {
  forward: "forward",
  backward: "backward",
  encode: "encode",
  decode: "decode",
  optimizer: "optimizer",
  "wait-upstream": "waits for the previous stage",
  "wait-downstream": "waits for the next stage",
  "wait-votes": "waits for the other stages' votes",
  "wait-coordinator": "waits for the coordinator",
  sync: "sums gradient groups",
};
const BUSY = 0.7;
const MOST_ABREAST = 3;
const VISIBLE = 0.005; // of a bar

export function pipeline(view) {
  const parts = [];
  const rows = Math.max(1, view.groups.length);
  const name = (replica, stage) => (rows > 1 ? `${replica}/${stage}` : `${stage}`);
  const left = new Map(view.links.map((link) => [
    `${name(link.source_replica, link.source)} ${name(link.target_replica, link.target)}`, link,
  ]));
  const take = (source, target) => {
    const key = `${source} ${target}`, link = left.get(key);
    left.delete(key);
    return link;
  };
  for (let row = 0; row < rows; row++) {
    if (rows > 1) parts.push(rowHead(row, view.groups[row]));
    const stages = view.stages.filter((stage) => stage.replica === row);
    stages.forEach((stage, i) => {
      parts.push(stageCard(stage, !stage.present && !view.ended));
      if (i + 1 === stages.length) return;
      const here = name(row, i), next = name(row, i + 1);
      parts.push(linkCard(here, next, take(here, next), take(next, here)));
    });
  }
  // Links between stages that are not neighbours: interleaved chunks, tied embeddings, other rows.
  for (const key of [...left.keys()]) {
    if (left.has(key)) {
      const [source, target] = key.split(" ");
      const card = linkCard(source, target, take(source, target), take(target, source));
      card.classList.add("apart");
      parts.push(card);
    }
  }
  return parts;
}

function rowHead(row, groups) {
  const named = `gradient group${groups.length > 1 ? "s" : ""} ${groups.join(", ")}`;
  return element("li", { class: "row-head", "data-row": row }, element("strong", {}, `row ${row}`), ` ${named}`);
}

export const abreast = (view) => view.groups.length < 2 && view.stages.length <= MOST_ABREAST;

// Only the kinds that some stage's bar shows.
export function legend(view) {
  const shown = Object.entries(KINDS).filter(([kind]) => view.stages.some((stage) => stage.shares[kind] >= VISIBLE));
  return shown.map(([kind, words]) => element("li", {}, element("i", { class: `kind ${kind}` }), words));
}

// `away`: the stage's node is missing while the run is on.
function stageCard(stage, away) {
  const known = Object.keys(stage.shares).length > 0;
  const bar = element("div", { class: "shares", role: "img", "aria-label": known ? sharesText(stage) : "no step yet" });
  for (const kind of Object.keys(KINDS)) {
    const share = stage.shares[kind] ?? 0;
    if (share <= 0) continue;
    const part = element("span", { class: `kind ${kind}`, title: `${KINDS[kind]}: ${percent(share)}` });
    bar.append(styled(part, { "flex-grow": share.toFixed(5) }));
  }
  const facts = [stage.blocks ? `${stage.blocks}\u00a0block${stage.blocks > 1 ? "s" : ""}` : "", memory(stage), experts(stage), slower(stage)];
  return element(
    "li",
    { class: `stage${away ? " away" : ""}`, "data-stage": stage.stage },
    element(
      "div",
      { class: "stage-head" },
      element("strong", {}, `stage ${stage.stage}`),
      element("span", { class: "mono node" }, stage.node_id),
      stage.name ? element("span", { class: "owner" }, stage.name) : null,
      element("span", { class: "muted device", title: stage.device }, stage.device),
      element("span", { class: away ? "trouble facts" : "muted facts" }, away ? "its node is missing" : facts.filter(Boolean).join(" · ")),
    ),
    bar,
    element(
      "p",
      { class: "split" },
      element("span", { class: "busy" }, known ? `busy ${percent(stage.busy)}` : "no step yet"),
      known ? element("span", { class: "waiting" }, `waits ${percent(stage.waiting)}`) : null,
    ),
  );
}

function sharesText(stage) {
  return Object.keys(KINDS)
    .filter((kind) => stage.shares[kind] >= VISIBLE)
    .map((kind) => `${KINDS[kind]} ${percent(stage.shares[kind])}`)
    .join(", ");
}

function memory(stage) {
  const peak = stage.gpu_memory_bytes ? stage.gpu_peak_memory_bytes : stage.peak_memory_bytes;
  return peak ? `at most ${bytes(peak)}${stage.gpu_memory_bytes ? " of GPU memory" : ""}` : "";
}

function experts(stage) {
  if (!stage.expert_load) return "";
  const dead = stage.dead_experts ? `, ${stage.dead_experts} expert${stage.dead_experts > 1 ? "s" : ""} without tokens` : "";
  return `busiest expert ${stage.expert_load.toFixed(1)}\u00d7 the mean${dead}`;
}

function slower(stage) {
  return stage.without_kernels ? `slower: its kernels (${stage.without_kernels}) give wrong results, so plain torch is used` : "";
}

function linkCard(source, target, there, back) {
  const card = element("li", { class: "link", "data-link": `${source}-${target}` });
  if (there) card.append(lane(there, [source, target]));
  if (back) card.append(lane(back, [target, source]));
  if (!there && !back) card.append(element("p", { class: "muted" }, "nothing sent yet"));
  const trouble = troubles([there, back].filter(Boolean));
  if (trouble) card.append(element("p", { class: "trouble" }, trouble));
  return card;
}

function lane(link, names) {
  const [source, target] = names;
  const forward = link.source_replica === link.target_replica ? link.source < link.target : link.source_replica < link.target_replica;
  // The view says which links are full, so page, sentences, `thinwire top` and the alert agree.
  const level = link.full ? " full" : (link.use ?? 0) >= BUSY ? " high" : "";
  const known = link.capacity_mbit > 0 && !link.little_used;
  const bar = element("div", { class: "use" }, styled(element("span"), { width: `${100 * (link.use ?? 0)}%` }));
  const flows = link.flows.map((flow) => `${flow.codec}, ${bits(flow.bits_per_element)}\u00a0bits per element`);
  return element(
    "div",
    { class: `lane${level}${forward ? "" : " back"}`, "data-way": `${source}-${target}` },
    element(
      "p",
      { class: "lane-head" },
      element("span", { class: "arrow", "aria-hidden": "true" }, forward ? "→" : "←"),
      element("strong", {}, `${source} to ${target}`),
      element("span", { class: "rate" }, known ? `${mbit(link.mbit)} of ${mbit(link.capacity_mbit)}\u00a0Mbit/s` : `${mbit(link.mbit)}\u00a0Mbit/s, ${link.little_used ? "little used" : "capacity still unknown"}`),
      element("span", { class: "use-text" }, known ? percent(link.use) : ""),
    ),
    bar,
    element(
      "p",
      { class: "muted lane-facts" },
      ...flows.map((words) => element("span", { class: "flow" }, words)),
      link.program_limits ? element("span", {}, `limited by the program, not the line: its sender is busy ${percent(link.processor)} of the time`) : null,
      link.round_trip_seconds > 0 ? element("span", {}, `round trip ${duration(link.round_trip_seconds)}`) : null,
      element("span", {}, `${bytes(link.bytes)} sent`),
      link.path ? element("span", { class: "path" }, path(link)) : null,
    ),
  );
}

function path(link) {
  const [kind, relay] = link.path.split(" ");
  const words = kind === "relay" ? `relay (${relay || "coordinator"})` : link.path;
  const why = [link.why_not_direct, link.why_not_together].filter(Boolean).join("; ");
  return why ? `${words}, because ${why}` : words;
}

function troubles(links) {
  const again = links.reduce((sum, link) => sum + link.retransmits, 0);
  const damaged = links.reduce((sum, link) => sum + link.rejects, 0);
  const words = [];
  if (again) words.push(`${integer(again)} frame${again > 1 ? "s" : ""} sent again`);
  if (damaged) words.push(`${integer(damaged)} damaged`);
  return words.join(", ");
}
