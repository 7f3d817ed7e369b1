"use strict";
// What a chart of a run shows: each draws itself, says what it shows in words, and has a table.

const KINDS = {
  train: "training",
  again: "trained again",
  pause: "paused to recover",
  suspended: "suspended",
  start: "starting",
  end: "ending",
};
const MARKS = {
  lost: { words: "lost or broken", path: "M-4,-4L4,4M4,-4L-4,4" },
  joined: { words: "joined", path: "M0,-5L5,4L-5,4Z" },
  changed: { words: "asked or announced", path: "M0,-5L5,0L0,5L-5,0Z" },
  injected: { words: "fault injected on purpose", path: "M-4,-5H4L0,5Z" },
  in_charge: { words: "another controller", path: "M-4,-4H4V4H-4Z" },
};
const MARK_LINES_MAX = 40;
const LEFT = 50, RIGHT = 10, AXIS = 20, TOP = 16;

// A frame of a chart: scales, grid, and what all charts show of the run alike.
function frame(seen, width, height, low, high, valueTicks, label) {
  const across = Math.max(10, width - LEFT - RIGHT), down = height - TOP - AXIS;
  const span = Math.max(seen.now_x, 1e-3);
  const x = (value) => LEFT + (across * Math.min(value, span)) / span;
  const y = (value) => TOP + down * (1 - (value - low) / (high - low || 1));
  const back = svg("g", { class: "grid" });
  for (const value of valueTicks) {
    back.append(svg("line", { x1: LEFT, x2: LEFT + across, y1: y(value), y2: y(value) }));
    back.append(svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, label(value)));
  }
  for (const [value, text] of timeTicks(span, across / 90)) {
    back.append(svg("line", { x1: x(value), x2: x(value), y1: TOP + down, y2: TOP + down + 4 }));
    const anchor = x(value) > LEFT + across - 20 ? "end" : "middle";
    back.append(svg("text", { x: x(value), y: height - 3, "text-anchor": anchor }, text));
  }
  return { x, y, across, down, span, back, bottom: TOP + down };
}
function marksOf(seen, f) {
  const group = svg("g", {});
  const lastAt = {};
  for (const mark of seen.marks) {
    const at = f.x(mark.x), last = lastAt[mark.kind];
    if (last && at - last.at < 5) {
      last.count += mark.count;
      last.text.textContent = `×${last.count}`;
      continue;
    }
    const text = svg("text", { x: at + 6, y: TOP - 4 }, mark.count > 1 ? `×${mark.count}` : "");
    group.append(svg("g", { class: `mark ${mark.kind}` },
      svg("line", { x1: at, x2: at, y1: TOP - 2, y2: f.bottom }),
      svg("path", { d: MARKS[mark.kind].path, transform: `translate(${at},${TOP - 8})` }), text));
    lastAt[mark.kind] = { at, text, count: mark.count };
  }
  if (group.childElementCount > MARK_LINES_MAX) group.classList.add("dense"); // or lines hide what they mark
  for (const [gapX, gapS] of seen.gaps) {
    const at = f.x(gapX);
    group.append(svg("g", { class: "gap" },
      svg("line", { x1: at, x2: at, y1: TOP - 2, y2: f.bottom }),
      svg("text", { x: at + 4, y: f.bottom - 4 }, `not run for ${duration(gapS)}`)));
  }
  return group;
}
function line(points, f) { // points: [x, step, value]; null breaks it
  let path = "", open = false;
  for (const [x, , value] of points) {
    if (value === null) { open = false; continue; }
    path += `${open ? "L" : "M"}${f.x(x).toFixed(1)},${f.y(value).toFixed(1)}`;
    open = true;
  }
  return path;
}

// ------------------------------------------------------------------------------ charts
// Each: {title(seen), words(seen), height, draw(seen, width, height) -> nodes, table(seen)}

function range(values, pad) {
  const known = values.filter((value) => value !== null && Number.isFinite(value));
  if (!known.length) return [0, 1];
  const low = Math.min(...known), high = Math.max(...known);
  const room = (high - low || Math.abs(high) || 1) * pad;
  return [low - room, high + room];
}
const loss = {
  title: () => "Loss",
  height: 210,
  words(seen) {
    const points = seen.series.loss.filter((point) => point[2] !== null);
    if (!points.length) return "No step is committed yet.";
    const first = points[0], last = points[points.length - 1];
    const held = seen.series.held_out.at(-1);
    return `From ${few(first[2])} at step ${count(first[1])} to ${few(last[2])} at step ${count(last[1])}` +
      (held ? `; held out ${few(held[2])} at step ${count(held[1])}` : "") + ".";
  },
  draw(seen, width, height) {
    const { loss: points, held_out: held } = seen.series;
    const [low, high] = range([...points, ...held].map((point) => point[2]), 0.05);
    const f = frame(seen, width, height, low, high, ticks(low, high, 4), few);
    const saved = seen.checkpoints.xs.map((x) =>
      svg("rect", { class: "checkpoint", x: f.x(x) - 2, y: f.bottom - 5, width: 4, height: 5 }));
    const dots = held.filter((p) => p[2] !== null).map(([x, , v]) => svg("circle", { class: "held", cx: f.x(x), cy: f.y(v), r: 3.5 }));
    const odd = points.filter((p) => p[2] === null).map(([x]) => svg("text", { class: "odd", x: f.x(x), y: TOP + 10 }, "∞"));
    return [f.back, svg("path", { class: "loss", d: line(points, f) }), dots, odd, saved, marksOf(seen, f)];
  },
  legend: (seen) => [
    key("loss", "training"),
    seen.series.held_out.length ? key("held", "held out") : null,
    seen.checkpoints.count ? key("checkpoint", many(seen.checkpoints.count, "checkpoint")) : null,
  ],
  table(seen) {
    const held = new Map(seen.series.held_out.map(([, step, value]) => [step, value]));
    const all = seen.series.loss, each = Math.ceil(all.length / 60);
    const rows = all.filter(([, step], n) => n % each === 0 || n === all.length - 1 || held.has(step));
    return table("Loss by step", ["step", "after", "loss", "held out"],
      rows.map(([x, step, value]) => [step, duration(x), value === null ? "not finite" : few(value), held.has(step) ? few(held.get(step)) : ""]));
  },
};
const rate = {
  title: (seen) => (seen.unit === "tokens" ? "Tokens per second" : "Samples per second"),
  height: 140,
  words(seen) {
    const { values } = seen.series.rate;
    if (!values.length) return "No step is committed yet.";
    const known = values.filter((value) => value > 0).sort((a, b) => a - b);
    return `Median ${few(known[known.length >> 1] ?? 0)}, highest ${few(known.at(-1) ?? 0)}; in steps of ${duration(seen.series.rate.width_s)}.`;
  },
  draw(seen, width, height) {
    const { values, width_s: each } = seen.series.rate;
    const high = Math.max(1e-9, ...values) * 1.05;
    const f = frame(seen, width, height, 0, high, ticks(0, high, 3), few);
    let path = "";
    values.forEach((value, n) => {
      path += `${n ? "L" : "M"}${f.x(n * each).toFixed(1)},${f.y(value).toFixed(1)}H${f.x((n + 1) * each).toFixed(1)}`;
    });
    return [f.back, svg("path", { class: "rate", d: path }), marksOf(seen, f)];
  },
  table(seen) {
    const { values, width_s: each } = seen.series.rate;
    const together = Math.ceil(values.length / 40), rows = [];
    for (let n = 0; n < values.length; n += together) {
      const some = values.slice(n, n + together);
      rows.push([duration(n * each), few(some.reduce((a, b) => a + b, 0) / some.length)]);
    }
    return table(this.title(seen), ["from", seen.unit + " per second"], rows);
  },
};
const world = {
  title: () => "Workers and layout",
  height: 140,
  words(seen) {
    const sizes = seen.worlds.map((change) => change[1]).filter((size) => size > 0);
    if (!sizes.length) return "No world is formed yet.";
    const low = Math.min(...sizes), high = Math.max(...sizes);
    return `${low === high ? "" : `Between ${low} and `}${many(high, "worker")} in ${many(seen.generation, "generation")}; ${seen.layout || "no layout"} at last.`;
  },
  draw(seen, width, height) {
    const high = Math.max(1, ...seen.worlds.map((change) => change[1])) * 1.25;
    const f = frame(seen, width, height, 0, high, ticks(0, high, 3, true), count);
    const areas = [], names = [];
    seen.worlds.forEach(([x, size, layout], n) => {
      const from = f.x(x), to = f.x(n + 1 < seen.worlds.length ? seen.worlds[n + 1][0] : seen.now_x);
      if (!size || to <= from) return;
      areas.push(svg("rect", { class: "world", x: from, y: f.y(size), width: Math.max(1, to - from), height: f.bottom - f.y(size) }));
      if (layout.length * 7 + 6 < to - from) names.push(svg("text", { class: "name", x: from + 5, y: f.y(size) + 14 }, layout));
    });
    return [f.back, areas, names, marksOf(seen, f)];
  },
  table: (seen) => table("Worlds", ["from", "generation", "workers", "layout"],
    seen.worlds.map(([x, size, layout, generation]) => [duration(x), generation, size, layout])),
};
const band = {
  title: () => "Where the time went",
  height: 130,
  words(seen) {
    const all = Object.values(seen.wall).reduce((a, b) => a + b, 0) || 1;
    const parts = Object.entries(KINDS).filter(([kind]) => seen.wall[kind] > 0)
      .map(([kind, words]) => `${words} ${percent(seen.wall[kind] / all)}`);
    return `Of ${duration(all)} of wall clock: ${parts.join(", ") || "nothing yet"}.`;
  },
  draw(seen, width, height) {
    const { kinds, width_s: each } = seen.band;
    const f = frame(seen, width, height, 0, 1, [0, 0.5, 1], (value) => `${100 * value} %`);
    const areas = [];
    const bins = Math.max(0, ...Object.values(kinds).map((values) => values.length));
    const under = new Array(bins).fill(0);
    const whole = under.map((_, n) => Object.values(kinds).reduce((sum, values) => sum + (values[n] || 0), 0));
    for (const [kind, values] of Object.entries(kinds)) {
      let path = "";
      values.forEach((value, n) => {
        if (!(value > 0) || !(whole[n] > 0)) return;
        const share = value / whole[n];
        const from = f.x(n * each), to = Math.max(from + 1, f.x((n + 1) * each));
        path += `M${from.toFixed(1)},${f.y(under[n]).toFixed(1)}H${to.toFixed(1)}V${f.y(under[n] + share).toFixed(1)}H${from.toFixed(1)}Z`;
        under[n] += share;
      });
      areas.push(svg("path", { class: `area ${kind}`, d: path }));
    }
    return [f.back, areas, marksOf(seen, f)];
  },
  legend: (seen) => Object.entries(KINDS).filter(([kind]) => seen.wall[kind] > 0).map(([kind, words]) => key(`area ${kind}`, words)),
  table(seen) {
    const all = Object.values(seen.wall).reduce((a, b) => a + b, 0) || 1;
    return table("Wall clock by kind", ["kind", "time", "share"],
      Object.entries(KINDS).map(([kind, words]) => [words, duration(seen.wall[kind] || 0), percent((seen.wall[kind] || 0) / all)]));
  },
};
function key(name, words) {
  return el("li", {}, svg("svg", { width: 14, height: 12, "aria-hidden": "true" }, svg("rect", { class: `${name} key`, x: 1, y: 1, width: 12, height: 10, rx: 2 })), words);
}
function markKey(kind, words) {
  return el("li", {}, svg("svg", { width: 14, height: 14, "aria-hidden": "true" },
    svg("g", { class: `mark ${kind}` }, svg("path", { d: MARKS[kind].path, transform: "translate(7,7)" }))), words);
}
