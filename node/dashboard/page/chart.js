// A line chart over steps as SVG, drawn in pixels of its container so that lines and text are sharp.

import { element, shape, styled } from "./dom.js";
import { clock, integer } from "./format.js";

const LEFT = 52, RIGHT = 14, TOP = 12, BOTTOM = 26;

export class Chart {
  // `format(value)` returns a value's text; `fromZero` starts the vertical axis at 0; `now()` returns the time.
  constructor(place, { label, format, fromZero, now }) {
    Object.assign(this, { place, label, format, fromZero, now });
    this.curve = { stride: 1, steps: [], times: [], values: [] };
    this.marks = [];
    this.chosen = null;
    this.tip = element("div", { class: "tip", role: "status", hidden: true });
    this.svg = shape("svg", { role: "img", tabindex: "0" });
    place.append(this.svg, this.tip);
    new ResizeObserver(() => this.draw()).observe(place);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerdown", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.choose(null));
    this.svg.addEventListener("blur", () => this.choose(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  // `marks`: points `{step, value, best}` that are drawn over the curve.
  set(curve, marks = []) {
    const kept = curve.values.map((value, i) => (value === null ? -1 : i)).filter((i) => i >= 0);
    this.curve = {
      stride: curve.stride,
      steps: kept.map((i) => curve.steps[i]),
      times: kept.map((i) => curve.times[i]),
      values: kept.map((i) => curve.values[i]),
    };
    this.marks = marks;
    if (this.chosen !== null && this.chosen >= this.curve.steps.length) this.chosen = null;
    this.draw();
  }

  draw() {
    const width = this.place.clientWidth, height = this.place.clientHeight;
    if (!width || !height) return;
    const { steps, values } = this.curve;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren();
    if (!steps.length) {
      this.svg.setAttribute("aria-label", `${this.label}: no data yet`);
      this.svg.append(text(width / 2, height / 2, "no data yet", "middle"));
      return;
    }
    const newest = values.length - 1;
    this.svg.setAttribute("aria-label", `${this.label}: ${this.format(values[0])} at step ${steps[0]}, ${this.format(values[newest])} at step ${steps[newest]}`);
    const rows = ticks(...bounds([...values, ...this.marks.map((mark) => mark.value)], this.fromZero), 4);
    const first = Math.min(steps[0], 1), last = Math.max(steps[newest], first + 1, ...this.marks.map((mark) => mark.step));
    this.x = (step) => LEFT + ((step - first) / (last - first)) * (width - LEFT - RIGHT);
    const low = rows[0], high = rows[rows.length - 1];
    this.y = (value) => TOP + (1 - (value - low) / (high - low)) * (height - TOP - BOTTOM);
    for (const row of rows) {
      const y = Math.round(this.y(row)) + 0.5;
      this.svg.append(shape("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }));
      this.svg.append(text(LEFT - 8, y + 4, axis(row, rows[1] - rows[0]), "end"));
    }
    const columns = ticks(first, last, Math.max(4, Math.floor(width / 110))).filter((step) => step >= first && step <= last && Number.isInteger(step));
    for (const column of columns) {
      const x = Math.round(this.x(column)) + 0.5;
      this.svg.append(shape("line", { class: "tick", x1: x, x2: x, y1: height - BOTTOM, y2: height - BOTTOM + 4 }));
      const anchor = x < LEFT + 12 ? "start" : x > width - RIGHT - 16 ? "end" : "middle";
      this.svg.append(text(x, height - 7, integer(column), anchor));
    }
    const path = steps.map((step, i) => `${i ? "L" : "M"}${this.x(step).toFixed(1)} ${this.y(values[i]).toFixed(1)}`).join("");
    const base = this.y(low).toFixed(1);
    this.svg.append(shape("path", { class: "area", d: `${path}L${this.x(steps[newest]).toFixed(1)} ${base}L${this.x(steps[0]).toFixed(1)} ${base}Z` }));
    this.svg.append(shape("path", { class: "line", d: path }));
    this.svg.append(shape("circle", { class: "newest", cx: this.x(steps[newest]), cy: this.y(values[newest]), r: 3.5 }));
    const marked = this.marks.map(({ step, value }, i) => `${i ? "L" : "M"}${this.x(step).toFixed(1)} ${this.y(value).toFixed(1)}`).join("");
    if (marked) this.svg.append(shape("path", { class: "held-line", d: marked }));
    for (const { step, value, best } of this.marks) {
      this.svg.append(shape("circle", { class: best ? "held best" : "held", cx: this.x(step), cy: this.y(value), r: best ? 6 : 3, "data-step": step }));
    }
    this.mark();
  }

  point(event) {
    if (!this.curve.steps.length) return;
    const x = event.clientX - this.svg.getBoundingClientRect().left;
    let best = 0;
    this.curve.steps.forEach((step, i) => {
      if (Math.abs(this.x(step) - x) < Math.abs(this.x(this.curve.steps[best]) - x)) best = i;
    });
    this.choose(best);
  }

  key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !this.curve.steps.length) return;
    event.preventDefault();
    const newest = this.curve.steps.length - 1;
    this.choose(Math.min(newest, Math.max(0, (this.chosen ?? newest) + by)));
  }

  choose(index) {
    this.chosen = index;
    this.mark();
  }

  mark() {
    this.svg.querySelectorAll(".mark").forEach((node) => node.remove());
    this.tip.hidden = this.chosen === null;
    if (this.chosen === null) return;
    const { steps, values, times, stride } = this.curve;
    const i = this.chosen, x = this.x(steps[i]), y = this.y(values[i]);
    const height = this.place.clientHeight, width = this.place.clientWidth;
    this.svg.append(shape("line", { class: "mark cross", x1: x, x2: x, y1: TOP, y2: height - BOTTOM }));
    this.svg.append(shape("circle", { class: "mark dot", cx: x, cy: y, r: 4 }));
    const mean = stride > 1 ? `, mean of ${stride}` : "";
    const held = this.marks.filter((mark) => mark.step <= steps[i] && mark.step > steps[i] - stride);
    this.tip.replaceChildren(
      element("strong", {}, this.format(values[i])),
      element("span", {}, `step ${integer(steps[i])}${mean}`),
      ...held.map((mark) => element("span", {}, `held out ${this.format(mark.value)}${mark.best ? ", the best" : ""}`)),
      element("span", {}, clock(times[i], this.now())),
    );
    const room = this.tip.offsetWidth + 14;
    styled(this.tip, { left: `${x + room > width ? x - room : x + 12}px`, top: `${Math.max(4, Math.min(y - 24, height - 80))}px` });
  }
}

function text(x, y, words, anchor) {
  return shape("text", { x, y, "text-anchor": anchor }, words);
}

function bounds(values, fromZero) {
  let low = Math.min(...values), high = Math.max(...values);
  if (fromZero) low = Math.min(0, low);
  if (high - low < 1e-9 * Math.max(1, Math.abs(high))) high = low + Math.max(1e-3, Math.abs(low) * 0.1);
  return [low, high];
}

// About `wanted` round numbers that enclose the range from low to high.
export function ticks(low, high, wanted) {
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const numbers = [];
  for (let i = Math.floor(low / step + 1e-9); ; i += 1) {
    numbers.push(Number((i * step).toPrecision(12)));
    if (i * step >= high - step * 1e-9) return numbers;
  }
}

// A tick's text: only as many decimals as the distance to the next one needs.
function axis(value, distance) {
  if (distance < 1e-3) return value ? Number(value.toPrecision(3)).toExponential() : "0";
  const large = Math.abs(value) >= 1000;
  const scale = Math.abs(value) >= 1e6 ? 1e6 : large ? 1000 : 1;
  const suffix = scale === 1e6 ? "M" : large ? "k" : "";
  const decimals = Math.max(0, Math.min(4, -Math.floor(Math.log10(distance / scale) + 1e-9)));
  const tight = Number((distance / scale).toPrecision(3)).toString().split(".")[1];
  return (value / scale).toFixed(Math.max(tight ? tight.length : 0, decimals > 4 ? 4 : 0)) + suffix;
}
