"use strict";
// Draws a run: the value of run_view.RunView (docs/report.md). The report has this file inside; the
// service's page loads it.

const STATES = {
  queued: "queued", starting: "starting", running: "running", suspended: "suspended", stopping: "stopping",
  completed: "completed", failed: "failed", stopped: "stopped", dead: "nobody runs it",
};
const CLASSES = {
  productive_step: "steps that are committed",
  wasted_progress_from_disruption: "steps run again",
  noticing: "until a fault was noticed",
  fencing: "breaking off",
  forming: "forming groups",
  resharding: "state from other workers",
  unproductive_checkpoint_restore_time: "state from a checkpoint",
  unproductive_checkpoint_save_time: "waiting for snapshots",
  data_loading_sync: "waiting for data",
  program_startup: "starting",
  suspended: "suspended",
  idle: "idle",
  shutdown: "ending",
};
// ----------------------------------------------------------------------------- a run

// Returns {show(seen), at(x)}: the skeleton is made once, so that focus, open tables and the cursor
// stay when a running job's picture is drawn again.
// under: what stands below the job's name and state.
function makePicture(root, under = null) {
  const charts = [loss, rate, world, band];
  const parts = {
    title: el("h1", { id: "title" }), badge: el("span", { class: "badge" }),
    lead: el("p", { class: "lead" }), tiles: el("dl", { class: "tiles" }),
    legend: el("ul", { class: "legend", "aria-label": "Marks in the pictures" }),
    slider: el("input", { type: "range", min: 0, step: "any", "aria-label": "Moment of the run", id: "moment" }),
    readout: el("output", { for: "moment", id: "readout" }),
    before: el("button", { type: "button" }, "◀ mark"), after: el("button", { type: "button" }, "mark ▶"),
    charts: el("div", {}), sections: el("div", {}),
  };
  parts.before.setAttribute("aria-label", "To the mark before");
  parts.after.setAttribute("aria-label", "To the next mark");
  const bar = el("div", { class: "cursor" }, el("div", { class: "controls" }, parts.before, parts.slider, parts.after), parts.readout);
  root.replaceChildren(el("header", {}, parts.title, parts.badge), parts.lead, ...(under ? [under] : []), parts.tiles, parts.legend, bar, parts.charts, parts.sections);
  let seen = null, cursor = null;

  const figures = charts.map((chart) => {
    const made = {
      chart, head: el("h2", {}), words: el("p", { class: "words" }), legend: el("ul", { class: "legend" }),
      picture: svg("svg", { role: "img", class: "chart" }), rows: el("div", {}),
    };
    made.details = el("details", {}, el("summary", {}, "Table"), made.rows);
    made.details.addEventListener("toggle", () => fill(made));
    made.picture.addEventListener("pointermove", (event) => point(made.picture, event));
    made.picture.addEventListener("pointerdown", (event) => point(made.picture, event));
    parts.charts.append(el("figure", {}, el("figcaption", {}, made.head, made.words), made.legend, made.picture, made.details));
    return made;
  });
  const sections = SECTIONS.map((section) => {
    const body = el("div", {}), head = el("span", {});
    const details = el("details", section.open ? { open: true } : {}, el("summary", {}, el("h2", {}, section.title), head), body);
    details.addEventListener("toggle", () => details.open && seen && section.fill(body, seen));
    parts.sections.append(details);
    return { section, details, body, head };
  });

  function fill(made) {
    if (made.details.open && seen) keepingScroll(made.rows, () => made.rows.replaceChildren(made.chart.table(seen)));
  }
  function point(picture, event) {
    const box = picture.getBoundingClientRect();
    const across = box.width - LEFT - RIGHT;
    at(((event.clientX - box.left - LEFT) / across) * seen.now_x);
  }
  function at(x) {
    if (!seen) return;
    const atEnd = parts.slider.dataset.end === "yes";
    cursor = Math.max(0, Math.min(seen.now_x, x));
    parts.slider.value = cursor;
    if (!atEnd || cursor < seen.now_x) parts.slider.dataset.end = cursor >= seen.now_x ? "yes" : "no";
    const words = readout(seen, cursor);
    parts.readout.textContent = words;
    parts.slider.setAttribute("aria-valuetext", words);
    for (const made of figures) {
      const at = LEFT + ((made.width - LEFT - RIGHT) * cursor) / Math.max(seen.now_x, 1e-3);
      made.line?.setAttribute("transform", `translate(${at.toFixed(1)},0)`);
    }
  }
  function toMark(sign) {
    const xs = [...seen.marks.map((mark) => mark.x), 0, seen.now_x].sort((a, b) => a - b);
    const found = sign > 0 ? xs.find((x) => x > cursor + 1e-6) : xs.findLast((x) => x < cursor - 1e-6);
    if (found !== undefined) at(found);
  }
  parts.slider.addEventListener("input", () => at(Number(parts.slider.value)));
  parts.slider.addEventListener("keydown", (event) => { // "any" would make a key go a whole second
    const steps = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 20, PageDown: -20 };
    if (!(event.key in steps)) return;
    event.preventDefault();
    at(cursor + (steps[event.key] * seen.now_x) / 200);
  });
  parts.before.addEventListener("click", () => toMark(-1));
  parts.after.addEventListener("click", () => toMark(1));

  function draw() {
    const width = Math.max(200, parts.charts.clientWidth);
    for (const made of figures) {
      const { chart } = made;
      made.width = width;
      made.head.textContent = chart.title(seen);
      made.words.textContent = chart.words(seen);
      made.legend.replaceChildren(...(chart.legend ? chart.legend(seen) : []).filter(Boolean));
      made.legend.hidden = !made.legend.childElementCount;
      made.picture.setAttribute("viewBox", `0 0 ${width} ${chart.height}`);
      made.picture.setAttribute("height", chart.height);
      made.picture.setAttribute("aria-label", `${chart.title(seen)}. ${chart.words(seen)}`);
      made.line = svg("line", { class: "now", x1: 0, x2: 0, y1: TOP, y2: chart.height - AXIS });
      made.picture.replaceChildren(...chart.draw(seen, width, chart.height).flat().filter(Boolean), made.line);
      fill(made);
    }
    at(parts.slider.dataset.end === "no" ? cursor : seen.now_x);
  }
  function show(value) {
    seen = value;
    parts.title.textContent = seen.name;
    parts.badge.textContent = STATES[seen.state] || seen.state;
    parts.badge.className = `badge ${seen.state}`;
    parts.lead.textContent = inShort(seen);
    parts.tiles.replaceChildren(...tiles(seen));
    parts.legend.replaceChildren(...Object.keys(MARKS).filter((kind) => seen.counts[kind]).map((kind) => markKey(kind, `${MARKS[kind].words}: ${count(seen.counts[kind])}`)));
    parts.slider.max = seen.now_x;
    if (cursor === null) { cursor = seen.now_x; parts.slider.dataset.end = "yes"; }
    draw();
    for (const { section, details, body, head } of sections) {
      head.textContent = section.brief(seen);
      if (details.open) keepingScroll(body, () => section.fill(body, seen));
    }
  }
  let drawnAt = 0;
  new ResizeObserver(() => {
    if (!seen || parts.charts.clientWidth === drawnAt) return;
    drawnAt = parts.charts.clientWidth;
    draw();
  }).observe(parts.charts);
  return { show, at };
}
function keepingScroll(node, change) {
  const before = node.querySelector(".scroll")?.scrollTop || 0, focused = node.contains(document.activeElement);
  change();
  const after = node.querySelector(".scroll");
  if (after) after.scrollTop = before;
  if (after && focused) after.focus({ preventScroll: true });
}
function readout(seen, x) {
  const parts = [`after ${duration(x)}`];
  const near = seen.series.loss.findLast((point) => point[0] <= x + 1e-9);
  if (near) parts.push(`step ${count(near[1])}, loss ${near[2] === null ? "not finite" : few(near[2])}`);
  const speed = seen.series.rate.values[Math.floor(x / seen.series.rate.width_s)];
  if (speed !== undefined) parts.push(`${few(speed)} ${seen.unit}/s`);
  const there = seen.worlds.findLast((change) => change[0] <= x + 1e-9);
  if (there && there[1]) parts.push(`${many(there[1], "worker")}${there[2] ? ` (${there[2]})` : ""}`);
  const close = seen.marks.filter((mark) => Math.abs(mark.x - x) <= seen.now_x / 150);
  for (const mark of close.slice(0, 3)) parts.push(mark.text + (mark.count > 1 ? ` (and ${mark.count - 1} more)` : ""));
  return parts.join(" · ");
}
function inShort(seen) {
  const { count: changes, paused_s: paused, steps_lost: lostSteps, steps_redone: redone } = seen.recoveries;
  const cost = changes ? ` ${many(changes, "change")} of membership: ${duration(paused)} of pauses, ${many(lostSteps, "step")} lost, ${count(redone)} run again.` : "";
  const how = seen.reason && seen.state !== "running" ? `${seen.reason}.` : STATES[seen.state] || seen.state;
  return `${how.replace(/\.*$/, ".")}${cost}${seen.began_at_s ? ` Began ${moment(seen.began_at_s)}.` : ""}`;
}
function value(point) {
  return point[2] === null ? "not finite" : few(point[2]);
}
function tiles(seen) {
  const of = seen.steps ? ` of ${count(seen.steps)}` : "";
  const all = Object.values(seen.wall).reduce((a, b) => a + b, 0);
  const limits = seen.max_workers ? ` of ${seen.min_workers} to ${seen.max_workers}` : "";
  const shown = [
    ["Step", `${count(seen.step)}${of}`],
    ["Loss", seen.loss === null ? "–" : few(seen.loss)],
    ["Workers", `${seen.world}${limits}`],
    ["Training", percent(seen.goodput)],
    ["Time", duration(all)],
  ];
  for (const [name, points] of Object.entries(seen.series.named).slice(0, 3)) shown.push([name, value(points.at(-1))]);
  if (seen.rate !== null) shown.push([`${seen.unit}/s`, few(seen.rate)]);
  if (seen.eta_s !== null) shown.push(["Ends in", duration(seen.eta_s)]);
  return shown.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));
}

// -------------------------------------------------------------------- what is below them

const shortNode = (node) => el("span", { title: node }, (node || "").slice(0, 12));
let onlyMarked = false; // of events: outlives a redrawing
const SECTIONS = [
  {
    title: "What happened", open: true,
    brief: (seen) => `${many(seen.events.length, "event")}${seen.events_left_out ? `, ${count(seen.events_left_out)} left out` : ""}`,
    fill(body, seen) {
      const rows = () => seen.events.filter((event) => !onlyMarked || event[4] !== "-").map(([x, atS, generation, , kind, text]) => [
        el("span", { title: moment(atS) }, duration(x)), generation,
        el("span", { class: MARKS[kind] ? `mark ${kind}` : null }, text),
      ]);
      const make = () => table("Events of the run", ["after", "generation", "what"], rows());
      const box = el("input", { type: "checkbox", id: "marked" });
      box.checked = onlyMarked;
      let shown = make();
      box.addEventListener("change", () => {
        onlyMarked = box.checked;
        const next = make();
        shown.replaceWith(next);
        shown = next;
      });
      body.replaceChildren(el("label", { class: "choice" }, box, "only losses, joins, changes and what they cost"), shown,
        ...(seen.events_left_out ? [el("p", {}, `${count(seen.events_left_out)} of the lesser events are left out: elastic-ft events has them all.`)] : []));
    },
  },
  {
    title: "What changes of membership cost", open: false,
    brief: (seen) => (seen.recoveries.count ? `${count(seen.recoveries.count)}, ${duration(seen.recoveries.paused_s)} in all` : "none"),
    fill: (body, seen) => body.replaceChildren(table("Recoveries", ["after", "cause", "from step", "workers", "layout", "paused", "steps lost", "run again", "state from", "moved", "processes"],
      seen.recoveries.list.map(([x, cause, step, was, is, layoutWas, layoutIs, paused, lostSteps, redone, source, moved, kept]) =>
        [duration(x), (cause || "").replaceAll("_", " "), step, `${was} → ${is}`, `${layoutWas} → ${layoutIs}`, duration(paused), lostSteps, redone, source, bytes(moved), kept ? "kept" : "new"]))),
  },
  {
    title: "Named metrics", open: false,
    brief: (seen) => Object.entries(seen.series.named).map(([name, points]) => `${name} ${value(points.at(-1))}`).join(", ") || "none",
    fill(body, seen) {
      const named = Object.entries(seen.series.named), thin = (all) => all.filter((_, n) => n % Math.ceil(all.length / 60) === 0 || n === all.length - 1);
      if (!named.length) return body.replaceChildren(el("p", {}, "The model names none beside its loss."));
      return body.replaceChildren(...named.map(([name, points]) => table(name, ["step", "after", name],
        thin(points).map((point) => [point[1], duration(point[0]), value(point)]))));
    },
  },
  {
    title: "Who is where", open: false,
    brief: (seen) => `${many(seen.workers.length + seen.workers_left_out, "worker")}${seen.gone.length + seen.gone_left_out ? `, ${count(seen.gone.length + seen.gone_left_out)} gone` : ""}`,
    fill(body, seen) {
      const who = (seat) => [seat.worker, seat.rank === null ? "–" : seat.rank, shortNode(seat.node), seat.host || "–", seat.pid === null ? "–" : String(seat.pid), duration(seat.since_x)];
      const heads = ["worker", "rank", "node", "machine", "process", "since"];
      const more = (n) => (n ? [el("p", {}, `${count(n)} more are not shown.`)] : []);
      body.replaceChildren(
        table(seen.ended_at_s ? "Workers at the end" : "Workers", [...heads, "is"], seen.workers.map((seat) => [...who(seat), seat.state])), ...more(seen.workers_left_out),
        ...(seen.gone.length ? [el("h3", {}, "Gone"), table("Workers that are gone", [...heads, "until", "why"], seen.gone.map((seat) => [...who(seat), duration(seat.left_x), seat.state]))] : []), ...more(seen.gone_left_out));
    },
  },
  {
    title: "Checkpoints", open: false,
    brief: (seen) => count(seen.checkpoints.count),
    fill: (body, seen) => body.replaceChildren(table("Checkpoints", ["step", "after", "size", "published in", "manifest"],
      seen.checkpoints.list.map(([x, , step, url, size, seconds]) => [step, duration(x), bytes(size), duration(seconds), el("code", {}, url || "")])),
      ...(seen.checkpoints.count > seen.checkpoints.list.length ? [el("p", {}, `The newest ${seen.checkpoints.list.length} of ${count(seen.checkpoints.count)}.`)] : [])),
  },
  {
    title: "Every worker's seconds", open: false,
    brief: (seen) => (seen.worker_seconds ? `${percent(seen.worker_seconds.goodput_per_allocated)} productive` : "when the run has ended"),
    fill(body, seen) {
      const all = seen.worker_seconds;
      if (!all) return body.replaceChildren(el("p", {}, "They are in result.json when the run has ended; elastic-ft events RUN --goodput has them before."));
      return body.replaceChildren(table("Worker seconds by class", ["worker seconds", "time", "share"],
        Object.entries(all.classes).map(([name, s]) => [CLASSES[name] || name, duration(s), percent(s / Math.max(1e-9, all.allocated_s))])));
    },
  },
  {
    title: "The job", open: false,
    brief: () => "",
    fill: (body, seen) => body.replaceChildren(table("The job", ["what", "is"], seen.config)),
  },
];

function showReport() {
  const seen = JSON.parse(document.getElementById("seen").textContent);
  makePicture(document.getElementById("run")).show(seen);
  const made = `Made ${moment(seen.made_at_s)} by elastic-ft report${seen.ended_at_s ? "" : "; the run went on"}.`;
  document.body.append(el("footer", {}, made));
}
