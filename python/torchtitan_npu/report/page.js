const DATA = JSON.parse(document.getElementById("data").textContent);
/* Okabe and Ito's colours, which colour-blind readers can tell apart; then again, dashed. */
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#888888"];
const PART_COLOURS = { data: "#e69f00", communication: "#d55e00", checkpoint: "#cc79a7", rest: "#56b4e9" };
const UNITS = {
  loss: ["Loss", "nats per token"], validation: ["Validation loss", "nats per token"], grad_norm: ["Gradient norm", "before clipping"], lr: ["Learning rate", ""],
  throughput: ["Throughput", "tokens/s, all ranks"], mfu: ["Model FLOPs utilisation", "%"],
  memory: ["Peak memory", "GB, worst rank"], loss_scale: ["Loss scale", ""],
};
const LOGARITHMIC = { loss: false, validation: false, grad_norm: false, loss_scale: true };
const SMOOTHED = ["loss", "grad_norm", "throughput", "mfu"];

const byId = (id) => document.getElementById(id);
const charts = [];
const view = { range: null, xName: "step", onZoom: null };
view.onZoom = (range) => {
  view.range = range;
  byId("reset").hidden = range === null;
  redraw();
};
function redraw() { charts.forEach((chart) => chart.draw()); }

DATA.runs.forEach((run, i) => {
  run.colour = COLOURS[i % COLOURS.length];
  run.dash = ["none", "6 3", "2 2"][Math.floor(i / COLOURS.length) % 3];
  run.shown = true;
});

/* Exponential moving average whose beginning is not pulled to zero; gaps stay gaps. */
function smooth(values, weight) {
  let [sum, total] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

function linesOf(name) {
  const weight = Number(byId("smoothing").value);
  return DATA.runs.filter((run) => run.shown && run.lines[name]).map((run) => {
    const { mean, low, high } = run.lines[name];
    const line = { name: run.name, colour: run.colour, dash: run.dash, x: run[view.xName], y: mean, low, high };
    if (name === "validation") {  // not every step has one: the line joins those that have
      const known = mean.map((value, i) => i).filter((i) => mean[i] !== null);
      for (const key of ["x", "y", "low", "high"]) line[key] = line[key] && known.map((i) => line[key][i]);
    }
    if (weight > 0 && SMOOTHED.includes(name)) line.smooth = smooth(mean, weight);
    return line;
  });
}

function partsOf(run) {
  return DATA.parts.filter((part) => run.parts[part].some((value) => value !== null))
    .map((part) => ({ name: part, colour: PART_COLOURS[part], x: run[view.xName], y: run.parts[part] }));
}

function table(id, head, rows) {
  const section = byId(`${id}-section`);
  const useful = rows.filter((row) => row.slice(1).some((text) => text !== ""));
  if (!useful.length) { if (section) section.hidden = true; return; }
  const made = html("table");
  if (head.length) {
    const row = html("tr");
    head.forEach((text) => row.append(html("th", "", text)));
    made.append(row);
  }
  for (const texts of useful) {
    const row = html("tr");
    texts.forEach((text) => row.append(html("td", "", text)));
    made.append(row);
  }
  byId(id).append(made);
}

function legend() {
  DATA.runs.forEach((run) => {
    const button = html("button");
    button.type = "button";
    button.setAttribute("aria-pressed", "true");
    const sample = element("svg");
    sample.append(element("line", { x1: 0, x2: 22, y1: 5, y2: 5, stroke: run.colour, "stroke-width": 3, "stroke-dasharray": run.dash }));
    button.append(sample, html("span", "", run.name));
    button.addEventListener("click", () => {
      run.shown = !run.shown;
      button.setAttribute("aria-pressed", String(run.shown));
      if (run.figure) run.figure.hidden = !run.shown;
      redraw();
    });
    byId("legend").append(button);
  });
}

function build() {
  legend();
  for (const run of DATA.runs) {
    const notes = [...run.notes];
    if (run.stepsPerPoint > 1) notes.push(`each point is the mean of ${run.stepsPerPoint} steps, the band their range`);
    if (notes.length) byId("notes").append(html("p", "", `${run.name}: ${notes.join("; ")}`));
  }
  const head = ["", ...DATA.runs.map((run) => run.name)];
  table("summary", head, DATA.summary);
  table("differences", head, DATA.differences);
  table("plan", head, DATA.plan);
  table("configuration", [], DATA.configuration);
  const add = (chart) => { charts.push(chart); byId("charts").append(chart.figure); };
  for (const [name, [title, unit]] of Object.entries(UNITS)) {
    if (!DATA.runs.some((run) => run.lines[name])) continue;
    add(new Chart({ title, unit, view, lines: () => linesOf(name), logarithmic: LOGARITHMIC[name] ?? null, cuts: name === "grad_norm" }));
  }
  for (const run of DATA.runs.filter((candidate) => candidate.step.length)) {
    const title = DATA.runs.length > 1 ? `Time per step: ${run.name}` : "Time per step";
    const chart = new Chart({ title, unit: "seconds", stacked: true, view, lines: () => partsOf(run) });
    for (const part of partsOf(run)) {
      const label = html("span", "", "■ ");
      label.style.color = part.colour;
      label.append(html("span", "", part.name));
      chart.figure.firstChild.append(label);
    }
    run.figure = chart.figure;
    add(chart);
  }
  byId("x-axis").addEventListener("change", (event) => { view.xName = event.target.value; view.onZoom(null); });
  const smoothing = byId("smoothing");
  smoothing.value = DATA.runs.some((run) => run.step.length > 200) ? 0.9 : 0;
  const showSmoothing = () => { byId("smoothing-value").textContent = Number(smoothing.value).toFixed(2); };
  smoothing.addEventListener("input", () => { showSmoothing(); redraw(); });
  showSmoothing();
  byId("reset").addEventListener("click", () => view.onZoom(null));
  redraw();
}

build();
