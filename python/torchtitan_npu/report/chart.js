"use strict";

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

function html(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

/* A number in at most four digits: 0.00123, 12.35, 4,100, 2.1M. */
function format(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e12 || size < 1e-3) return Number(value.toPrecision(4)).toExponential().replace("e+", "e");
  for (const [limit, letter] of [[1e9, "G"], [1e6, "M"]]) {
    if (size >= limit) return `${Number((value / limit).toPrecision(4))}${letter}`;
  }
  return size >= 1000 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(4)));
}

/* Round numbers that cover [low, high], about `count` of them. */
function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= raw * 0.999);
  const made = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) made.push(Number((k * step).toPrecision(12)));
  return made;
}

function logTicks(low, high) {
  const made = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e += 1) {
    for (const m of [1, 2, 5]) if (m * 10 ** e >= low && m * 10 ** e <= high) made.push(m * 10 ** e);
  }
  return made.length >= 2 ? made : ticks(low, high, 4);
}

/*
 * A chart of lines over x, or of areas on top of each other.
 *   title, unit: text
 *   stacked: whether the lines are areas, each on the sum of those before
 *   logarithmic: whether the y axis begins as one, with a switch; null has no switch
 *   cuts: whether the y axis may leave out values that stand far out
 *   lines(): [{name, colour, dash, x: […], y: […], low: […], high: […], smooth: […]}], null where there is no value
 *   view: {range: [low, high] or null, xName, onZoom(range)}: shared by all charts
 */
class Chart {
  constructor({ title, unit = "", stacked = false, logarithmic = null, cuts = stacked, lines, view }) {
    Object.assign(this, { unit, stacked, cuts, lines, view, logarithmic: Boolean(logarithmic) });
    this.figure = html("figure");
    const caption = html("figcaption", "", title);
    if (unit) caption.append(html("span", "", unit));
    this.remark = html("span");
    caption.append(this.remark);
    if (logarithmic !== null) {
      const label = html("label", "", "log scale ");
      const box = document.createElement("input");
      box.type = "checkbox";
      box.checked = this.logarithmic;
      box.addEventListener("change", () => { this.logarithmic = box.checked; this.draw(); });
      label.append(box);
      caption.append(label);
    }
    this.svg = element("svg", { role: "img", "aria-label": title });
    this.tooltip = html("div", "tooltip");
    this.tooltip.hidden = true;
    this.figure.append(caption, this.svg, this.tooltip);
    this.svg.addEventListener("pointermove", (event) => this.hover(event));
    this.svg.addEventListener("pointerleave", () => this.leave());
    this.svg.addEventListener("pointerdown", (event) => { this.dragFrom = this.toX(event); });
    this.svg.addEventListener("pointerup", (event) => this.drop(event));
    this.svg.addEventListener("dblclick", () => this.view.onZoom(null));
    new ResizeObserver(() => this.draw()).observe(this.figure);
  }

  /* Lines with running sums for stacked charts: `top` is what is drawn, `base` what it stands on. */
  prepared() {
    const lines = this.lines();
    let base = null;
    for (const line of lines) {
      line.base = base;
      line.top = this.stacked ? line.y.map((value, i) => (value ?? 0) + (base ? base[i] : 0)) : line.y;
      base = this.stacked ? line.top : null;
    }
    return lines;
  }

  inRange(x) {
    const range = this.view.range;
    return x !== null && (!range || (x >= range[0] && x <= range[1]));
  }

  /* The y axis covers what is seen; with `cuts`, without the few values that stand far out, and a remark says so. */
  bounds(lines) {
    let [x0, x1] = [Infinity, -Infinity];
    const seen = [];
    let [whole0, whole1] = [Infinity, -Infinity];
    for (const line of lines) {
      line.x.forEach((x, i) => {
        if (x === null) return;
        x0 = Math.min(x0, x);
        x1 = Math.max(x1, x);
        if (!this.inRange(x)) return;
        for (const value of [line.top[i], this.stacked ? null : line.low?.[i], this.stacked ? null : line.high?.[i]]) {
          if (value === null || value === undefined || (this.logarithmic && value <= 0)) continue;
          seen.push(value);
          whole0 = Math.min(whole0, value);
          whole1 = Math.max(whole1, value);
        }
      });
    }
    if (this.view.range) [x0, x1] = this.view.range;
    if (!seen.length) return null;
    if (x0 === x1) [x0, x1] = [x0 - 0.5, x1 + 0.5];
    seen.sort((a, b) => a - b);
    const high = seen[Math.floor((seen.length - 1) * 0.98)];
    let [y0, y1] = [this.stacked ? 0 : whole0, whole1];
    if (this.cuts && !this.logarithmic && high > 0 && whole1 > high * 3) y1 = high * 1.3;
    const cut = y1 < whole1 ? whole1 : null;
    if (this.logarithmic) {
      if (y0 === y1) [y0, y1] = [y0 / 2, y1 * 2];
      else [y0, y1] = [y0 / (y1 / y0) ** 0.04, y1 * (y1 / y0) ** 0.04];
    } else {
      if (y0 === y1) [y0, y1] = [y0 - (Math.abs(y0) || 1) * 0.1, y1 + (Math.abs(y1) || 1) * 0.1];
      const margin = (y1 - y0) * 0.05;
      const zeroBased = this.stacked || (y0 >= 0 && y0 < (y1 - y0) * 0.25);
      y0 = zeroBased ? 0 : y0 - margin;
      y1 += margin;
    }
    return { x0, x1, y0, y1, cut };
  }

  draw() {
    const width = this.svg.clientWidth || 460;
    const height = 230;
    this.svg.setAttribute("height", height);
    this.svg.replaceChildren();
    this.drawn = this.prepared();
    const bounds = this.bounds(this.drawn);
    this.remark.textContent = "";
    if (!bounds) {
      this.frame = null;
      this.svg.append(element("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "no values"));
      return;
    }
    const { x0, x1, y0, y1, cut } = bounds;
    if (cut !== null) this.remark.textContent = `cut, highest ${format(cut)}`;
    const frame = { left: 58, right: width - 10, top: 10, bottom: height - 24 };
    this.frame = frame;
    const scale = this.logarithmic ? Math.log10 : (v) => v;
    const [s0, s1] = [scale(y0), scale(y1)];
    this.px = (x) => frame.left + ((x - x0) / (x1 - x0)) * (frame.right - frame.left);
    this.py = (y) => frame.bottom - ((scale(y) - s0) / (s1 - s0)) * (frame.bottom - frame.top);
    this.fromPixel = (p) => x0 + ((p - frame.left) / (frame.right - frame.left)) * (x1 - x0);

    for (const y of this.logarithmic ? logTicks(y0, y1) : ticks(y0, y1, 5)) {
      this.svg.append(element("line", { class: "grid", x1: frame.left, x2: frame.right, y1: this.py(y), y2: this.py(y) }));
      this.svg.append(element("text", { x: frame.left - 6, y: this.py(y) + 4, "text-anchor": "end" }, format(y)));
    }
    for (const x of ticks(x0, x1, Math.max(2, Math.floor(width / 110)))) {
      if (this.view.xName === "step" && !Number.isInteger(x)) continue;
      const anchor = this.px(x) > frame.right - 20 ? "end" : "middle";
      this.svg.append(element("text", { x: this.px(x), y: height - 7, "text-anchor": anchor }, format(x)));
    }
    const id = `clip-${(Chart.count = (Chart.count ?? 0) + 1)}`;
    const clip = element("clipPath", { id });
    clip.append(element("rect", { x: frame.left, y: frame.top - 2, width: Math.max(0, frame.right - frame.left), height: frame.bottom - frame.top + 3 }));
    const area = element("g", { "clip-path": `url(#${id})` });
    this.svg.append(clip, area);
    for (const line of this.drawn) this.stacked ? this.area(area, line) : this.line(area, line);
    this.cursor = element("line", { class: "cursor", y1: frame.top, y2: frame.bottom, visibility: "hidden" });
    this.selection = element("rect", { class: "selection", y: frame.top, height: frame.bottom - frame.top, visibility: "hidden" });
    this.svg.append(this.selection, this.cursor);
  }

  path(xs, ys) {
    let text = "";
    let pen = "M";
    xs.forEach((x, i) => {
      const y = ys[i];
      if (x === null || y === null || y === undefined || (this.logarithmic && y <= 0)) { pen = "M"; return; }
      text += `${pen}${this.px(x).toFixed(1)} ${this.py(y).toFixed(1)}`;
      pen = "L";
    });
    return text;
  }

  line(parent, line) {
    const stroke = { fill: "none", stroke: line.colour, "stroke-linejoin": "round" };
    if (line.low) this.band(parent, line.x, line.low, line.high, line.colour, 0.16);
    if (line.smooth) {
      parent.append(element("path", { ...stroke, d: this.path(line.x, line.y), opacity: 0.28 }));
      parent.append(element("path", { ...stroke, d: this.path(line.x, line.smooth), "stroke-width": 1.8, "stroke-dasharray": line.dash }));
    } else {
      parent.append(element("path", { ...stroke, d: this.path(line.x, line.y), "stroke-width": 1.5, "stroke-dasharray": line.dash }));
    }
    const known = (i) => line.y[i] !== null && line.y[i] !== undefined && line.x[i] !== null;
    line.x.forEach((x, i) => {  // a value between two gaps has no line to be seen by
      if (known(i) && !known(i - 1) && !known(i + 1) && !(this.logarithmic && line.y[i] <= 0)) {
        parent.append(element("circle", { cx: this.px(x), cy: this.py(line.y[i]), r: 2.5, fill: line.colour }));
      }
    });
  }

  area(parent, line) {
    const base = line.base ?? line.top.map(() => 0);
    this.band(parent, line.x, base, line.top, line.colour, 0.85);
    if (line.x.length === 1) {
      const [y0, y1] = [this.py(base[0]), this.py(line.top[0])];
      parent.append(element("rect", { x: this.px(line.x[0]) - 12, width: 24, y: y1, height: y0 - y1, fill: line.colour }));
    }
  }

  band(parent, xs, low, high, colour, opacity) {
    let run = [];
    const flush = () => {
      if (run.length > 1) {
        const back = [...run].reverse();
        const d = this.path(run.map((i) => xs[i]), run.map((i) => high[i])) + this.path(back.map((i) => xs[i]), back.map((i) => low[i])).replace("M", "L");
        parent.append(element("path", { d: `${d}Z`, fill: colour, opacity }));
      }
      run = [];
    };
    xs.forEach((x, i) => {
      const bad = x === null || low[i] === null || high[i] === null || (this.logarithmic && low[i] <= 0);
      if (bad) flush(); else run.push(i);
    });
    flush();
  }

  toX(event) {
    return this.frame ? this.fromPixel(event.clientX - this.svg.getBoundingClientRect().left) : null;
  }

  nearest(line, x) {
    let best = -1;
    line.x.forEach((candidate, i) => {
      if (!this.inRange(candidate)) return;
      if (best < 0 || Math.abs(candidate - x) < Math.abs(line.x[best] - x)) best = i;
    });
    return best;
  }

  hover(event) {
    const x = this.toX(event);
    if (x === null) return;
    if (this.dragFrom !== null && this.dragFrom !== undefined && event.buttons) {
      const [a, b] = [this.px(this.dragFrom), this.px(x)].sort((p, q) => p - q);
      this.selection.setAttribute("x", a);
      this.selection.setAttribute("width", b - a);
      this.selection.setAttribute("visibility", "visible");
    }
    const rows = [];
    let at = null;
    for (const line of this.drawn) {
      const i = this.nearest(line, x);
      if (i < 0) continue;
      if (at === null || Math.abs(line.x[i] - x) < Math.abs(at - x)) at = line.x[i];
      const range = line.low && line.low[i] !== null && line.low[i] !== line.high[i] ? ` (${format(line.low[i])} … ${format(line.high[i])})` : "";
      rows.push([line, format(line.y[i]) + range]);
    }
    if (at === null) return;
    if (this.stacked) rows.reverse();  // as they lie on the chart
    this.cursor.setAttribute("x1", this.px(at));
    this.cursor.setAttribute("x2", this.px(at));
    this.cursor.setAttribute("visibility", "visible");
    this.tooltip.replaceChildren(html("div", "", `${this.view.xName} ${format(at)}`));
    for (const [line, text] of rows) {
      const row = html("div");
      const swatch = html("span", "swatch");
      swatch.style.background = line.colour;
      row.append(swatch, html("span", "", line.name), html("b", "", text));
      this.tooltip.append(row);
    }
    this.tooltip.hidden = false;
    const [outer, inner] = [this.figure.getBoundingClientRect(), this.svg.getBoundingClientRect()];
    const left = inner.left - outer.left + this.px(at);
    const fits = left + 14 + this.tooltip.offsetWidth < this.figure.clientWidth;
    this.tooltip.style.left = `${fits ? left + 14 : Math.max(2, left - 14 - this.tooltip.offsetWidth)}px`;
    this.tooltip.style.top = `${inner.top - outer.top + 12}px`;
  }

  leave() {
    this.tooltip.hidden = true;
    this.dragFrom = null;
    this.cursor?.setAttribute("visibility", "hidden");
    this.selection?.setAttribute("visibility", "hidden");
  }

  drop(event) {
    const from = this.dragFrom;
    const to = this.toX(event);
    this.dragFrom = null;
    if (from === null || from === undefined || to === null) return;
    if (Math.abs(this.px(to) - this.px(from)) > 6) this.view.onZoom([Math.min(from, to), Math.max(from, to)]);
    else this.selection.setAttribute("visibility", "hidden");
  }
}
