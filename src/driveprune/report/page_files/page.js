"use strict";
// The page: draws what is looked at, filters, lists the runs, shows one at #run=ID.

// ---------------------------------------------------------------- drawing: only what is looked at

const charts = new Map(
  [...document.querySelectorAll("figure[data-figure]")].map((figure) => [figure, { drawn: "", seen: false }]),
);
let version = 0;

const widthOf = (figure) => figure.querySelector(".chart").clientWidth;

function draw(figure, width = widthOf(figure)) {
  const chart = charts.get(figure);
  const box = figure.querySelector(".chart");
  const state = `${version} ${width}`;
  if (chart.drawn === state || !width) return;
  const nodes = FIGURES[figure.dataset.figure](groups[figure.dataset.group], width);
  box.replaceChildren(...(nodes ?? [make("p", { class: "empty" }, "Nothing to show: no run has these numbers, or the filters hide all that have.")]));
  makeReachable(box, figure.querySelector("h3").textContent);
  chart.drawn = state;
  if (!performance.getEntriesByName("first-chart").length) performance.mark("first-chart");
}

/** Names for screen readers, and one stop of the Tab key a figure: the arrow keys go from point to point. */
function makeReachable(box, title) {
  for (const svg of box.querySelectorAll("svg[class^=plot]")) {
    svg.setAttribute("role", "group");
    svg.setAttribute("aria-label", title);
  }
  for (const link of box.querySelectorAll("svg a")) {
    link.setAttribute("aria-label", link.firstChild.getAttribute("aria-label"));
    link.firstChild.removeAttribute("aria-label");
  }
  const stops = [
    ...box.querySelectorAll("svg a, svg rect[aria-label], svg path[aria-label], svg circle[aria-label]"),
  ];
  stops.forEach((stop, place) => {
    stop.setAttribute("tabindex", place ? -1 : 0);
    if (stop.localName !== "a") stop.setAttribute("role", "img");
  });
  box.onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const place = stops.indexOf(document.activeElement);
    if (!step || place < 0) return;
    event.preventDefault();
    const next = stops[(place + step + stops.length) % stops.length];
    stops[place].setAttribute("tabindex", -1);
    next.setAttribute("tabindex", 0);
    next.focus();
  };
}

function drawSeen() {
  for (const [figure, chart] of charts) if (chart.seen) draw(figure);
}

const observer = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) charts.get(entry.target).seen = entry.isIntersecting;
    drawSeen();
  },
  { rootMargin: "400px" },
);
charts.forEach((_, figure) => observer.observe(figure));
let resized;
addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(drawSeen, 150);
});

/** All widths first: to ask for one after each drawing would lay out the page anew each time. */
function drawAll() {
  const widths = new Map([...charts.keys()].map((figure) => [figure, widthOf(figure)]));
  widths.forEach((width, figure) => draw(figure, width));
}
addEventListener("beforeprint", drawAll);
matchMedia("print").addEventListener("change", (event) => (event.matches ? drawAll() : drawSeen()));

// ---------------------------------------------------------------- the tip beside a point

const tip = document.getElementById("tip");

function showTip(event) {
  const target = event.target.closest?.(".chart :is(a, rect, path, circle)[aria-label]");
  tip.hidden = !target;
  if (!target) return;
  tip.textContent = target.getAttribute("aria-label");
  const at = target.getBoundingClientRect();
  const own = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(6, Math.min(innerWidth - own.width - 6, at.left + at.width / 2 - own.width / 2))}px`;
  tip.style.top = `${at.top > own.height + 12 ? at.top - own.height - 8 : at.bottom + 8}px`;
}
for (const kind of ["pointerover", "focusin"]) document.addEventListener(kind, showTip);
for (const kind of ["scroll", "focusout"])
  document.addEventListener(
    kind,
    () => {
      tip.hidden = true;
    },
    true,
  );

// ---------------------------------------------------------------- the list of runs, in slices

const SLICE = 100;
const list = document.getElementById("list");
const more = document.getElementById("more");
let listed = [];

function listRow(run) {
  const numbers = run.done
    ? [
        percent(run.last).replace("%", ""),
        percent(run.best).replace("%", ""),
        isDense(run) ? "" : timeName(run.pruning),
        timeName(run.total),
      ]
    : ["", "", "", ""];
  const name = make("th", { scope: "row" }, make("a", { href: hashOf(run) }, run.id));
  const standing = make("td", {}, make("span", { class: `standing ${run.standing}` }, run.standing));
  const about = [labels[run.label].name, run.sparsity == null ? "" : sparsityName(run.sparsity), run.seed ?? ""];
  return make("tr", {}, name, standing, ...[...about, ...numbers].map((text) => make("td", {}, String(text))));
}

function showMore() {
  const body = list.tBodies[0];
  body.append(...listed.slice(body.rows.length, body.rows.length + SLICE).map(listRow));
  const left = listed.length - body.rows.length;
  more.hidden = left <= 0;
  more.textContent = `Show ${Math.min(SLICE, left)} more of ${left.toLocaleString("en")}`;
}
more.addEventListener("click", showMore);

// ---------------------------------------------------------------- filters

const filters = document.getElementById("filters");

function readFilters() {
  const chosen = new FormData(filters);
  shown.data = chosen.get("data");
  shown.model = chosen.get("model");
  shown.methods = new Set(chosen.getAll("method").map(Number));
}

function applyFilters() {
  readFilters();
  const names = new Set([...shown.methods].map((place) => labels[place].name));
  for (const part of document.querySelectorAll("main [data-group]:not(figure), nav [data-group]"))
    part.hidden = !visibleGroup(groups[part.dataset.group]);
  for (const row of document.querySelectorAll("tr[data-method]")) row.hidden = !names.has(row.dataset.method);
  for (const row of document.querySelectorAll("tr[data-run]")) row.hidden = !visible(runs[row.dataset.run]);
  listed = runs.filter(visible);
  list.tBodies[0].replaceChildren();
  showMore();
  const count = groups.filter((group) => visibleGroup(group) && group.runs.some(visible)).length;
  document.getElementById("count").textContent =
    `${listed.length.toLocaleString("en")} of ${runs.length.toLocaleString("en")} runs, ${count} of ${groups.length} group${groups.length === 1 ? "" : "s"}`;
  version += 1;
  drawSeen();
}
filters.addEventListener("change", applyFilters);
filters.addEventListener("click", (event) => {
  if (event.target.dataset.all == null) return;
  filters.querySelectorAll("[name=method]").forEach((box) => {
    box.checked = Boolean(event.target.dataset.all);
  });
  applyFilters();
});

// ---------------------------------------------------------------- the details of a run, at #run=ID

const dialog = document.getElementById("run");
let specs;

/** JSON with line breaks. By letters, not by parsing: JavaScript would write 1.0 as 1, and the checksum is over 1.0. */
function pretty(text) {
  let depth = 0,
    quoted = false,
    made = "";
  for (let i = 0; i < text.length; i++) {
    const letter = text[i];
    if (letter === "\\") {
      made += letter + text[++i];
      continue;
    }
    if (letter === '"') quoted = !quoted;
    if (quoted || !"{}[], ".includes(letter)) made += letter;
    else if ("{[".includes(letter) && "}]".includes(text[i + 1])) made += letter + text[++i];
    else if ("{[".includes(letter)) made += `${letter}\n${"  ".repeat(++depth)}`;
    else if ("}]".includes(letter)) made += `\n${"  ".repeat(--depth)}${letter}`;
    else if (letter === ",") made += `,\n${"  ".repeat(depth)}`;
    else if (letter === " " && text[i - 1] === ":") made += " ";
  }
  return made;
}

function facts(run) {
  const count = d3.format(",");
  const pairs = [
    ["standing", run.standing],
    ["method", labels[run.label].name],
    ["data", run.data ?? groups[run.group].data],
    ["model", groups[run.group].model],
  ];
  if (run.sparsity != null) pairs.push(["sparsity", sparsityName(run.sparsity)], ["seed", run.seed]);
  if (run.done) {
    pairs.push(
      ["accuracy, last epoch", percent(run.last)],
      [`best epoch (by ${run.best_by})`, percent(run.best)],
      ["time to the network", isDense(run) ? "–" : timeName(run.pruning)],
      ["time in all", timeName(run.total)],
      ["removed, exactly", run.removed == null ? "–" : `${(100 * run.removed).toFixed(4)}%`],
      ["effective sparsity", run.effective == null ? "unknown" : `${(100 * run.effective).toFixed(4)}%`],
      ["collapsed", run.collapsed ? "yes: no path leads through it" : "no"],
      ...(run.finding && !run.collapsed ? [["stability", run.finding]] : []),
    );
    if (run.bytes) pairs.push(["file", `${count(run.bytes)} bytes`]);
    if (run.macs?.[0] != null) pairs.push(["multiply-adds, one example", `${count(run.macs[0])} of ${count(run.macs[1])}`]);
    if (run.speedup != null) pairs.push(["measured speed-up", `${run.speedup.toFixed(2)}×`]);
    works.forEach((work, place) => {
      if (run.seconds[place]) pairs.push([work, timeName(run.seconds[place])]);
    });
  }
  return make(
    "dl",
    { class: "facts" },
    ...pairs.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, String(value)))),
  );
}

function runCurve(run) {
  const rows = run.curve.map((test, place) => ({ label: run.label, epoch: run.epochs[place], test: 100 * test }));
  return make(
    "div",
    { class: "chart" },
    plot(Math.min(640, innerWidth * 0.94 - 50), {
      height: 200,
      x: { label: "epoch →", tickFormat: "d", ticks: 6 },
      y: { label: "↑ test accuracy, %", grid: true, ticks: 5 },
      marks: [
        ...lines(rows, { x: "epoch", y: "test" }),
        Plot.tip(
          rows,
          Plot.pointer({ x: "epoch", y: "test", title: (row) => `epoch ${row.epoch}: ${row.test.toFixed(2)}%` }),
        ),
      ],
    }),
  );
}

function commandOf(run) {
  const text = make("pre", { tabindex: 0, id: "command" }, run.command);
  const copy = make("button", { type: "button" }, "Copy");
  const said = make("span", { role: "status" });
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(run.command);
      said.textContent = "copied";
    } catch {
      // not allowed here: leave it selected, so that one key copies it
      getSelection().selectAllChildren(text);
      said.textContent = "press Ctrl+C";
    }
  });
  const named = run.named ? [make("p", {}, run.named)] : [];
  return [make("h3", {}, "Repeat it"), text, ...named, make("div", { class: "actions" }, copy, said)];
}

function specOf(run) {
  specs ??= JSON.parse(document.getElementById("specs").textContent);
  const spec = specs[run.place];
  if (!spec) return [];
  const link = make(
    "a",
    { download: "spec.json", href: URL.createObjectURL(new Blob([spec, "\n"], { type: "application/json" })) },
    "Download spec.json",
  );
  return [
    make("h3", {}, "Spec"),
    make("pre", { tabindex: 0, id: "spec" }, pretty(spec)),
    make("div", { class: "actions" }, link),
  ];
}

function openRun() {
  const found = byId.get(new URLSearchParams(location.hash.slice(1)).get("run"));
  if (!found) {
    if (dialog.open) dialog.close();
    return;
  }
  document.getElementById("run-title").textContent = found.id;
  document
    .getElementById("run-body")
    .replaceChildren(
      facts(found),
      ...(found.error
        ? [make("h3", {}, "Error"), make("pre", { tabindex: 0 }, found.error)]
        : found.why
          ? [make("p", {}, found.why)]
          : []),
      ...(found.curve?.length > 1 ? [make("h3", {}, "Learning curve"), runCurve(found)] : []),
      ...(found.command ? commandOf(found) : []),
      ...specOf(found),
    );
  tip.hidden = true;
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
}
addEventListener("hashchange", openRun);
dialog.addEventListener("close", () => {
  if (location.hash.startsWith("#run=")) history.replaceState(null, "", location.pathname + location.search);
});
dialog.addEventListener("click", (event) => {
  if (event.target === dialog) dialog.close();
});

// ---------------------------------------------------------------- light and dark

const theme = document.getElementById("theme");
const root = document.documentElement;
const isDark = () =>
  root.dataset.theme === "dark" || (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
const nameTheme = () => {
  theme.textContent = isDark() ? "☀ Light" : "☾ Dark";
};
theme.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  nameTheme();
});

// ---------------------------------------------------------------- begin

const byName = new Map(labels.map((label) => [label.name, label]));
for (const place of document.querySelectorAll(".swatch[data-method]"))
  place.append(swatch(byName.get(place.dataset.method)));
for (const part of [theme, filters, list]) part.hidden = false;
if (innerWidth < 768) filters.querySelector("details").open = false;
nameTheme();
applyFilters();
openRun();
performance.mark("usable");
