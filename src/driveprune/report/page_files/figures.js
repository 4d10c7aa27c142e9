"use strict";
// The figures, one function each: (group, width) -> nodes, or null if the filters leave nothing.

const accuracyOf = (run) => (run.last == null ? null : 100 * run.last);
const tested = (run) => run.done && run.last != null;

function accuracy(group, width) {
  const found = prunedIn(group).filter(tested);
  if (!found.length) return null;
  const dense = denseLine(group, accuracyOf);
  const rows = cells(found, accuracyOf);
  const y = accuracyAxis(found, accuracyOf, "↑ test accuracy, %", dense.values);
  return [
    methodLegend(found, dense),
    plot(width, {
      height: 340,
      x: sparsityAxis(found, width),
      y,
      marks: [
        ...dense.marks,
        Plot.areaY(
          rows.filter((row) => row.deviation),
          {
            x: "density",
            y1: (row) => row.mean - row.deviation,
            y2: (row) => row.mean + row.deviation,
            fill: "label",
            fillOpacity: 0.15,
            clip: true,
          },
        ),
        ...lines(rows, { x: "density", y: "mean" }),
        ...points(found, (run) => 1 - run.sparsity, accuracyOf, y.domain[0]),
      ],
    }),
  ];
}

/** The cells that no other beats in both time and accuracy. */
function front(rows) {
  let best = -Infinity;
  return d3
    .sort(
      rows,
      (row) => row.pruning,
      (row) => -row.mean,
    )
    .filter((row) => row.mean > best && ((best = row.mean), true));
}

function cost(group, width) {
  const found = prunedIn(group).filter(tested);
  if (!found.length) return null;
  const time = (run) => Math.max(1e-3, run.pruning);
  const [low, high] = d3.extent(found, time);
  const x = {
    type: "log",
    domain: [low / 1.6, high * 1.6],
    label: "time to the network →",
    tickFormat: shortTime,
    grid: true,
  };
  const panel = (sparsity, own) => {
    const here = found.filter((run) => run.sparsity === sparsity);
    const y = accuracyAxis(here, accuracyOf, "↑ accuracy, %");
    return [
      `${sparsityName(sparsity)} sparsity`,
      plot(own, {
        height: 210,
        x: { ...x, ticks: decades(...x.domain, (own - 60) / 58) },
        y: { ...y, ticks: 4 },
        marks: [
          Plot.line(
            front(
              cells(
                here.filter((run) => !labels[run.label].check && !run.collapsed),
                accuracyOf,
              ),
            ),
            { x: "pruning", y: "mean", stroke: "var(--soft)", strokeOpacity: 0.35, strokeWidth: 6, clip: true },
          ),
          ...points(here, time, accuracyOf, y.domain[0]),
        ],
      }),
    ];
  };
  return [methodLegend(found), multiples(sparsitiesOf(found), width, 240, panel)];
}

const shortTime = (seconds) =>
  seconds < 1 ? `${+(1000 * seconds).toPrecision(2)} ms` : `${d3.format(",")(seconds)} s`;

/** Powers of ten in a range, not too many; where there are not two, twos and fives as well. */
function decades(low, high, most = 5) {
  const powers = d3.range(Math.ceil(Math.log10(low)), Math.floor(Math.log10(high)) + 1);
  const step = Math.ceil(powers.length / Math.max(2, most));
  if (powers.length > 1) return powers.filter((_, place) => place % step === 0).map((power) => 10 ** power);
  const from = 10 ** Math.floor(Math.log10(low));
  return [1, 2, 5, 10, 20, 50].map((digit) => digit * from).filter((value) => value >= low && value <= high);
}

function relative(group, width) {
  // whatever the filters: the line of IMP is what the others are compared with
  const imp = d3.rollup(
    group.runs.filter((run) => tested(run) && labels[run.label].name === group.imp),
    (same) => d3.mean(same, accuracyOf),
    (run) => run.sparsity,
  );
  const found = prunedIn(group).filter((run) => tested(run) && imp.has(run.sparsity) && labels[run.label].name !== group.imp);
  if (!found.length) return null;
  const change = (run) => accuracyOf(run) - imp.get(run.sparsity);
  const rows = cells(found, change);
  const y = accuracyAxis(found, change, "↑ points above IMP", [0]);
  return [
    methodLegend(found),
    plot(width, {
      height: 340,
      x: sparsityAxis(found, width),
      y: { ...y, tickFormat: (value) => (value ? d3.format("+")(value) : "0") },
      marks: [
        Plot.ruleY([0], { stroke: "currentColor", strokeWidth: 1.5 }),
        ...lines(rows, { x: "density", y: "mean" }),
        ...points(found, (run) => 1 - run.sparsity, change, y.domain[0]),
      ],
    }),
  ];
}

const unitOf = (seconds) => (seconds < 300 ? ["seconds", 1] : seconds < 7200 ? ["minutes", 60] : ["hours", 3600]);

function phases(group, width) {
  const found = doneIn(group);
  if (!found.length) return null;
  const rows = d3
    .groups(found, (run) => run.label)
    .flatMap(([label, same]) =>
      works.map((work, place) => ({ label, work, seconds: d3.mean(same, (run) => run.seconds[place] ?? 0) })),
    );
  const totals = d3.rollups(
    rows,
    (same) => d3.sum(same, (row) => row.seconds),
    (row) => row.label,
  );
  const [unit, one] = unitOf(d3.max(totals, (item) => item[1]));
  const used = works.filter((work) => d3.sum(rows, (row) => (row.work === work ? row.seconds : 0)) > 0);
  const colours = works.map((_, place) => `var(--w${place})`);
  return [
    legend(used.map((work) => [square(colours[works.indexOf(work)]), work])),
    plot(width, {
      height: 46 * totals.length + 60,
      marginLeft: 4,
      marginRight: 62,
      marginTop: 6,
      x: {
        label: `${unit} →`,
        transform: (seconds) => seconds / one,
        ticks: Math.max(2, Math.floor(width / 110)),
        grid: true,
      },
      y: { axis: null, domain: labelsOf(found), padding: 0 },
      color: { domain: works, range: colours },
      marks: [
        Plot.barX(
          rows.filter((row) => row.seconds > 0),
          Plot.stackX({
            y: "label",
            x: "seconds",
            fill: "work",
            order: works,
            insetTop: 20,
            insetBottom: 6,
            insetRight: 0.5,
            ariaLabel: (row) => `${labels[row.label].name}\n${row.work}: ${timeName(row.seconds)}`,
          }),
        ),
        Plot.text(totals, {
          y: "0",
          x: 0,
          text: (row) => labels[row[0]].name,
          textAnchor: "start",
          dy: -13,
          fontWeight: 500,
        }),
        Plot.text(totals, { y: "0", x: "1", text: (row) => timeName(row[1]), textAnchor: "start", dx: 5, dy: 7 }),
      ],
    }),
  ];
}

const shade = (place, count) => `var(--s${count < 2 ? 4 : Math.round((place * 6) / (count - 1))})`;

function layers(group, width) {
  const found = prunedIn(group).filter((run) => run.kept?.length);
  if (!found.length) return null;
  const sparsities = sparsitiesOf(found);
  const rows = d3
    .groups(
      found,
      (run) => run.label,
      (run) => run.sparsity,
    )
    .flatMap(([label, inner]) =>
      inner.flatMap(([sparsity, same]) =>
        same[0].kept.map((_, layer) => ({
          label,
          sparsity,
          layer: layer + 1,
          kept: 100 * d3.mean(same, (run) => run.kept[layer] ?? 0),
        })),
      ),
    );
  const least = Math.max(1e-3, d3.min(rows, (row) => row.kept || 100) / 1.5);
  const colours = sparsities.map((_, place) => shade(place, sparsities.length));
  const count = d3.max(rows, (row) => row.layer);
  const panel = (label, own) => {
    const here = d3.sort(
      rows.filter((row) => row.label === label),
      (row) => row.layer,
    );
    const options = { x: "layer", y: (row) => Math.max(least, row.kept), stroke: "sparsity" };
    return [
      labels[label].name,
      plot(own, {
        height: 190,
        color: { type: "ordinal", domain: sparsities, range: colours },
        marginLeft: 48,
        x: {
          domain: [0.7, count + 0.3],
          ticks: d3.ticks(1, count, Math.min(count, own / 40)).filter(Number.isInteger),
          tickFormat: "d",
          label: "layer →",
        },
        y: {
          type: "log",
          domain: [least, 120],
          tickFormat: (value) => `${value}%`,
          ticks: decades(least, 120),
          grid: true,
          label: "↑ kept",
        },
        marks: [
          Plot.line(here, { ...options, z: "sparsity", strokeWidth: 1.8 }),
          Plot.dot(here, {
            ...options,
            fill: (row) => (row.kept ? colours[sparsities.indexOf(row.sparsity)] : "var(--card)"),
            r: 2.6,
            ariaLabel: (row) =>
              `${labels[label].name} at ${sparsityName(row.sparsity)}\n${group.layers[row.layer - 1]}: ${+row.kept.toPrecision(3)}% kept`,
          }),
        ],
      }),
    ];
  };
  return [
    legend(sparsities.map((sparsity, place) => [square(colours[place]), sparsityName(sparsity)])),
    multiples(labelsOf(found), width, 230, panel),
  ];
}

/** Mean accuracy over seeds, by method and epoch. */
function curveRows(found) {
  const all = found.flatMap((run) =>
    run.curve.map((test, place) => ({ label: run.label, epoch: run.epochs[place], test: 100 * test })),
  );
  return d3
    .rollups(
      all,
      (same) => d3.mean(same, (row) => row.test),
      (row) => row.label,
      (row) => row.epoch,
    )
    .flatMap(([label, inner]) => d3.sort(inner, (item) => item[0]).map(([epoch, test]) => ({ label, epoch, test })));
}

function curves(group, width) {
  const found = doneIn(group).filter((run) => run.curve.length > 1);
  if (!found.length) return null;
  const dense = found.filter(isDense);
  const pruned = found.filter((run) => !isDense(run));
  const all = curveRows(found);
  const domain = d3.extent(all, (row) => row.test);
  const panel = (sparsity, own) => {
    const rows = curveRows([...dense, ...pruned.filter((run) => run.sparsity === sparsity)]);
    return [
      sparsity == null ? "dense" : `${sparsityName(sparsity)} sparsity`,
      plot(own, {
        height: 210,
        x: { label: "epoch →", ticks: 5, tickFormat: "d" },
        y: { domain, nice: true, grid: true, ticks: 5, label: "↑ accuracy, %" },
        marks: [
          ...lines(rows, { x: "epoch", y: "test" }),
          Plot.tip(
            rows,
            Plot.pointer({
              x: "epoch",
              y: "test",
              title: (row) => `${labels[row.label].name}, epoch ${row.epoch}: ${row.test.toFixed(2)}%`,
            }),
          ),
        ],
      }),
    ];
  };
  return [
    methodLegend(pruned, dense.length ? { label: dense[0].label } : null),
    multiples(pruned.length ? sparsitiesOf(pruned) : [null], width, 240, panel),
  ];
}

function effective(group, width) {
  const found = prunedIn(group).filter((run) => run.effective != null);
  if (!found.length) return null;
  const x = sparsityAxis(found, width);
  const least = Math.min(x.domain[1], d3.min(found, (run) => (run.effective < 1 ? 1 - run.effective : 1)) / 1.15);
  const ticks = [...x.ticks, ...[1e-3, 1e-4, 1e-5].filter((kept) => kept > least && kept < x.ticks.at(-1) / 1.6)];
  return [
    methodLegend(found),
    plot(width, {
      height: 320,
      marginLeft: 56,
      x: { ...x, label: "nominal sparsity →" },
      y: {
        ...x,
        ticks,
        domain: [x.domain[0], least],
        grid: true,
        label: "↑ effective sparsity",
        labelAnchor: "top",
      },
      marks: [
        Plot.line([x.domain[0], x.domain[1]], {
          x: (kept) => kept,
          y: (kept) => kept,
          stroke: "var(--soft)",
          strokeDasharray: "4 3",
        }),
        ...points(
          found,
          (run) => 1 - run.sparsity,
          (run) => 1 - run.effective,
          least,
        ),
      ],
    }),
  ];
}

/** A number of each run against sparsity, with the mean as a line. */
function bySparsity(found, number, width, y) {
  if (!found.length) return null;
  return [
    methodLegend(found),
    plot(width, {
      height: 320,
      x: sparsityAxis(found, width),
      y: { grid: true, nice: true, zero: true, labelAnchor: "top", ...y },
      marks: [
        ...lines(cells(found, number), { x: "density", y: "mean" }),
        ...points(found, (run) => 1 - run.sparsity, number),
      ],
    }),
  ];
}

function size(group, width) {
  const dense = d3.mean(
    group.runs.filter((run) => run.done && isDense(run)),
    (run) => run.bytes,
  );
  const found = dense ? prunedIn(group).filter((run) => run.bytes) : [];
  return bySparsity(found, (run) => (100 * run.bytes) / dense, width, { label: "↑ % of the dense file" });
}

function speedup(group, width) {
  const found = prunedIn(group).filter((run) => run.speedup != null);
  return bySparsity(found, (run) => run.speedup, width, {
    label: "↑ times as fast as dense",
    tickFormat: (value) => `${value}×`,
  });
}

const FIGURES = { accuracy, cost, relative, phases, layers, curves, effective, size, speedup };
