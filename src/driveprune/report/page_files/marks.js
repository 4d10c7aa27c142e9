"use strict";
// What the figures are made of, and the numbers embedded in the page. Names come from run folders and
// files of other people: they are only ever set as text, never as HTML.

const { works, labels, groups, runs } = JSON.parse(document.getElementById("data").textContent);
runs.forEach((run, place) => {
  run.place = place;
  run.done = run.standing === "done";
});
groups.forEach((group, place) => {
  group.runs = runs.filter((run) => run.group === place);
});
const byId = new Map(runs.map((run) => [run.id, run]));
const shown = { data: "", model: "", methods: new Set(labels.keys()) };

// ---------------------------------------------------------------- words and elements

const percent = (fraction) => (fraction == null ? "unknown" : `${(100 * fraction).toFixed(2)}%`);
const sparsityName = (sparsity) => `${+(100 * sparsity).toPrecision(6)}%`;
const densityName = (density) => sparsityName(1 - density);
const isDense = (run) => labels[run.label].name === "dense";
const hashOf = (run) => `#run=${encodeURIComponent(run.id)}`;

function timeName(seconds) {
  if (seconds == null) return "unknown";
  if (seconds < 600) return `${seconds.toFixed(seconds < 10 ? 2 : seconds < 100 ? 1 : 0)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function describe(run) {
  return [
    `${labels[run.label].name} at ${sparsityName(run.sparsity)}, seed ${run.seed}`,
    `accuracy ${percent(run.last)}, best epoch ${percent(run.best)}`,
    isDense(run)
      ? `${timeName(run.total)} in all`
      : `network in ${timeName(run.pruning)}, ${timeName(run.total)} in all`,
    ...(run.collapsed ? ["collapsed: no path leads from input to output"] : run.finding ? [run.finding] : []),
  ].join("\n");
}

const downwards = {
  draw(context, area) {
    const y = -Math.sqrt(area / (Math.sqrt(3) * 3));
    context.moveTo(0, -y * 2);
    context.lineTo(-Math.sqrt(3) * y, y);
    context.lineTo(Math.sqrt(3) * y, y);
    context.closePath();
  },
};
const SHAPES = {
  circle: d3.symbolCircle,
  square: d3.symbolSquare,
  triangle: d3.symbolTriangle,
  diamond: d3.symbolDiamond,
  downwards,
  cross: d3.symbolCross,
  wye: d3.symbolWye,
  star: d3.symbolStar,
};

function swatch(label) {
  const svg = d3
    .create("svg")
    .attr("width", 24)
    .attr("height", 12)
    .attr("viewBox", "-12 -6 24 12")
    .attr("aria-hidden", "true");
  svg
    .append("line")
    .attr("x1", -12)
    .attr("x2", 12)
    .attr("stroke", label.colour)
    .attr("stroke-width", 2)
    .attr("stroke-dasharray", label.name === "dense" ? "4 3" : label.dash);
  if (label.name !== "dense")
    svg.append("path").attr("d", d3.symbol(SHAPES[label.symbol], 56)()).attr("fill", label.colour);
  return svg.node();
}

function legend(entries) {
  return make(
    "ul",
    { class: "legend" },
    ...entries.map(([sign, text]) => make("li", {}, make("span", { class: "swatch" }, sign), text)),
  );
}

function square(colour) {
  const svg = d3.create("svg").attr("width", 12).attr("height", 12).attr("aria-hidden", "true");
  svg.append("rect").attr("width", 12).attr("height", 12).attr("rx", 2).attr("fill", colour);
  return svg.node();
}

// ---------------------------------------------------------------- what figures have in common

const visibleGroup = (group) =>
  (!shown.data || group.data === shown.data) && (!shown.model || group.model === shown.model);
const visible = (run) => shown.methods.has(run.label) && visibleGroup(groups[run.group]);
const doneIn = (group) => group.runs.filter((run) => run.done && shown.methods.has(run.label));
const prunedIn = (group) => doneIn(group).filter((run) => !isDense(run));
const sparsitiesOf = (found) => [...new Set(found.map((run) => run.sparsity))].sort(d3.ascending);
const labelsOf = (found) => [...new Set(found.map((run) => run.label))].sort(d3.ascending);

/** Mean and deviation over seeds of a number, for each method and sparsity. */
function cells(found, number) {
  const gathered = d3.groups(
    found.filter((run) => number(run) != null),
    (run) => run.label,
    (run) => run.sparsity,
  );
  return gathered.flatMap(([label, inner]) =>
    d3
      .sort(inner, (item) => item[0])
      .map(([sparsity, same]) => ({
        label,
        sparsity,
        density: 1 - sparsity,
        mean: d3.mean(same, number),
        deviation: d3.deviation(same, number) ?? 0,
        pruning: Math.max(
          1e-3,
          d3.mean(same, (run) => run.pruning),
        ),
        collapsed: same.every((run) => run.collapsed),
      })),
  );
}

/** The paper's axis: what is kept, on a log scale, named by what is removed. Names that would touch are left out. */
function sparsityAxis(found, width) {
  const kept = sparsitiesOf(found).map((sparsity) => 1 - sparsity);
  const domain = [kept[0] * 1.15, kept.at(-1) / 1.15];
  const room = (46 * Math.log(domain[0] / domain[1])) / Math.max(60, width - 70);
  const ticks = [];
  for (const density of kept) if (!ticks.length || Math.log(ticks.at(-1) / density) > room) ticks.push(density);
  return { type: "log", domain, ticks, tickFormat: densityName, label: "sparsity →", labelAnchor: "right" };
}

/** An axis that leaves out collapsed networks, which would flatten all others: they are drawn at its foot. */
function accuracyAxis(found, number, label, extra = []) {
  const sound = found.filter((run) => !run.collapsed);
  const [low, high] = d3.extent([...(sound.length ? sound : found).map(number), ...extra]);
  const pad = Math.max(0.2, 0.06 * (high - low));
  return { domain: [low - pad, high + pad], grid: true, label, labelAnchor: "top", nice: true };
}

/** One point for each run, which links to it; a collapsed network is hollow. */
function points(found, x, y, floor = -Infinity) {
  const options = {
    x,
    y: (run) => Math.max(floor, y(run)),
    symbol: "label",
    href: hashOf,
    ariaLabel: describe,
  };
  return [
    Plot.dot(
      found.filter((run) => !run.collapsed),
      { ...options, fill: "label", r: 4.8, stroke: "var(--card)", strokeWidth: 0.8 },
    ),
    Plot.dot(
      found.filter((run) => run.collapsed),
      { ...options, fill: "var(--card)", r: 4.2, stroke: "label", strokeWidth: 1.8 },
    ),
    Plot.dot(
      found.filter((run) => run.word === "unstable"),
      { ...options, symbol: "circle", fill: "none", r: 8.5, stroke: "label", strokeWidth: 1.4 },
    ),
  ];
}

/** The axes of log scales, with a name at every tick: those that Plot makes leave out what d3 takes for crowded. */
function logAxes(options) {
  const marks = [];
  for (const [side, axis] of [
    ["x", Plot.axisX],
    ["y", Plot.axisY],
  ]) {
    const scale = options[side];
    if (scale?.type !== "log") continue;
    marks.push(axis(scale.ticks, { text: scale.tickFormat, label: scale.label, labelAnchor: scale.labelAnchor }));
    if (scale.grid) marks.unshift(side === "x" ? Plot.gridX(scale.ticks) : Plot.gridY(scale.ticks));
    options[side] = { ...scale, axis: null, grid: false };
  }
  return marks;
}

function plot(width, { height = 300, marks, ...options }) {
  const axes = logAxes(options);
  const used = [...labels.keys()];
  return Plot.plot({
    width,
    height,
    marginLeft: 44,
    marginBottom: 38,
    marginRight: 18,
    marginTop: 26,
    ...options,
    style: { fontSize: "12px", fontFamily: "inherit", background: "none" },
    color: options.color ?? { domain: used, range: labels.map((label) => label.colour) },
    symbol: { domain: used, range: labels.map((label) => SHAPES[label.symbol]) },
    marks: [...axes, ...marks],
  });
}

/** A line for each method: dashes are no scale of Plot, so each has a mark of its own. */
function lines(rows, options) {
  return d3
    .groups(rows, (row) => row.label)
    .map(([label, own]) =>
      Plot.line(own, {
        ...options,
        stroke: labels[label].colour,
        strokeWidth: 2,
        clip: true,
        strokeDasharray: labels[label].name === "dense" ? "4 3" : labels[label].dash || undefined,
      }),
    );
}

function denseLine(group, number) {
  const dense = doneIn(group).filter((run) => isDense(run) && number(run) != null);
  if (!dense.length) return { marks: [], values: [] };
  const value = d3.mean(dense, number);
  const colour = labels[dense[0].label].colour;
  return {
    values: [value],
    label: dense[0].label,
    marks: [Plot.ruleY([value], { stroke: colour, strokeWidth: 1.5, strokeDasharray: "4 3" })],
  };
}

const methodLegend = (found, dense) =>
  legend(
    [...(dense?.label == null ? [] : [dense.label]), ...labelsOf(found)].map((label) => [
      swatch(labels[label]),
      labels[label].name,
    ]),
  );

/** Small panels of the same axes, side by side as far as there is room. */
function multiples(items, width, least, panel) {
  const rows = Math.ceil(items.length / Math.max(1, Math.floor(width / least)));
  const columns = Math.ceil(items.length / rows);
  const box = make("div", { class: "multiples", style: `grid-template-columns: repeat(${columns}, minmax(0, 1fr))` });
  for (const item of items) {
    const [title, svg] = panel(item, Math.floor((width - 13 * (columns - 1)) / columns));
    box.append(make("div", {}, make("h4", {}, title), svg));
  }
  return box;
}
