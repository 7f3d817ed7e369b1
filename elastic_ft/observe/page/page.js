"use strict";
// The service's page: the jobs at /, one of them at /jobs/ID. Asks the service over HTTP
// (docs/service.md), and draws a job with what draws the report.

const JOBS_EVERY_MS = 2000, VIEW_EVERY_MS = 1000, QUIET_MS = 5000, AGAIN_MS = 2000;
const ANSWER_WITHIN_MS = 15000, DONE_WITHIN_MS = 45000, JOBS_SHOWN = 200;
const OVER = ["completed", "failed", "stopped"];
const main = document.getElementById("main"), link = document.getElementById("link");
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));
const told = (event) => new Promise((done) => window.addEventListener(event, done, { once: true }));

// ------------------------------------------------------------------------- the service

class Refusal extends Error {
  constructor(status, words) {
    super(words);
    this.status = status;
  }
}
async function call(path, options = {}) {
  const answer = await fetch(`/api/v1/${path}`, { ...options, cache: "no-store" });
  if (answer.ok) return answer;
  const found = await answer.json().catch(() => ({}));
  throw new Refusal(answer.status, found.error || `the service answered ${answer.status}`);
}
async function get(path) {
  return (await call(path, { signal: AbortSignal.timeout(ANSWER_WITHIN_MS) })).json();
}
async function post(path, value) {
  const options = { method: "POST", body: JSON.stringify(value), headers: { "Content-Type": "application/json" }, signal: AbortSignal.timeout(DONE_WITHIN_MS) };
  return (await call(path, options)).json();
}

// What is shown is as old as the last answer, and the page says so.
let heardAt = 0, troubled = "";
function heard() {
  heardAt = Date.now();
  troubled = "";
  sayLink();
}
function unheard(error) {
  troubled = error instanceof Refusal ? error.message : "the service does not answer";
  sayLink();
}
function sayLink() {
  const live = !troubled;
  document.body.classList.toggle("stale", !live);
  const since = heardAt ? `what you see is of ${new Date(heardAt).toLocaleTimeString()}` : "nothing is known yet";
  const words = live ? "live" : `Not connected (${troubled}): ${since}. Trying again.`;
  if (link.textContent !== words) link.textContent = words;
}
// Again and again, until the place is another: what fails is said, and tried again. Work that takes
// long comes less often. quiet(): is over when there is news.
async function always(everyMs, work, quiet = () => null) {
  const place = location.pathname;
  while (location.pathname === place) {
    const began = Date.now();
    try {
      if ((await work()) === "over") return;
      heard();
    } catch (error) {
      if (error instanceof Refusal && [401, 403].includes(error.status)) await askToken(error);
      else if (error instanceof Refusal && error.status === 404) return void main.replaceChildren(el("p", {}, error.message));
      else {
        unheard(error);
        await Promise.race([sleep(AGAIN_MS), told("online")]);
        continue;
      }
    }
    await sleep(Math.max(everyMs, 5 * (Date.now() - began)));
    await quiet();
  }
}
// The service answers a token with a cookie that scripts can't read: nothing is kept here.
async function askToken(error) {
  const field = el("input", { type: "password", id: "token", autocomplete: "off", required: true });
  const said = el("span", {}, `${error.message}. `);
  const form = el("form", { class: "token" }, said, el("label", { for: "token" }, "Token: "), field, " ", el("button", {}, "Use it"));
  const before = [...main.childNodes];
  main.replaceChildren(form);
  field.focus();
  for (;;) {
    await new Promise((done) => form.addEventListener("submit", (event) => {
      event.preventDefault();
      done();
    }, { once: true }));
    try {
      await call("login", { method: "POST", headers: { Authorization: `Bearer ${field.value}` }, signal: AbortSignal.timeout(ANSWER_WITHIN_MS) });
      break;
    } catch (again) {
      said.textContent = `${again instanceof Refusal ? again.message : "the service does not answer"}. `;
    }
  }
  main.replaceChildren(...before);
}
function confirmed(words, verb, dangerous) {
  const dialog = document.getElementById("ask"), yes = document.getElementById("ask-yes");
  document.getElementById("ask-words").textContent = words;
  yes.textContent = verb;
  yes.className = dangerous ? "danger" : "";
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((done) => dialog.addEventListener("close", () => done(dialog.returnValue === "yes"), { once: true }));
}

// ---------------------------------------------------------------------------- the jobs

function workersOf(workers) {
  const target = workers.target !== null && workers.target !== undefined && workers.target !== workers.now ? ` → ${workers.target}` : "";
  return `${workers.now ?? 0}${target} (${workers.min} to ${workers.max})`;
}
function stateOf(state) {
  return el("span", { class: `badge ${state}` }, STATES[state] || state);
}
function jobsPage() {
  document.title = "Jobs: elastic_ft";
  const all = el("input", { type: "checkbox", id: "all" });
  const slots = el("p", { class: "words" }), rows = el("div", {});
  const earlier = el("button", { type: "button" }, "Earlier jobs"), later = el("button", { type: "button" }, "Later jobs");
  const pages = el("nav", { "aria-label": "Pages of jobs", hidden: true }, earlier, " ", later);
  main.replaceChildren(el("h1", {}, "Jobs"), slots, el("label", { class: "choice" }, all, "with those that have ended"), rows, pages);
  let shown = "", turns = 0, from = ["after", ""]; // of those that have ended the last ones come first
  const turned = (name, id) => {
    from = [name, id];
    turns += 1;
    look().then(heard, unheard);
  };
  const look = async () => {
    const [name, id] = from, turn = turns;
    const asked = `jobs?all=${all.checked ? 1 : 0}&limit=${JOBS_SHOWN}&${name}=${encodeURIComponent(id)}`;
    const [{ jobs, more }, service] = await Promise.all([get(asked), get("service")]);
    if (turn !== turns) return; // another page was asked for meanwhile
    if (!jobs.length && id) return void turned("after", "");
    earlier.disabled = !(name === "before" ? more : id);
    later.disabled = !(name === "after" ? more : id);
    pages.hidden = earlier.disabled && later.disabled;
    earlier.onclick = () => turned("before", jobs[0].id);
    later.onclick = () => turned("after", jobs[jobs.length - 1].id);
    if (service.slots) slots.textContent = `${count(service.slots.used)} of ${many(service.slots.all, "slot")} used on ${many(service.nodes.length, "node")}.`;
    const now = JSON.stringify(jobs);
    if (now === shown) return;
    shown = now;
    const focused = document.activeElement?.getAttribute("href");
    if (!jobs.length) return void rows.replaceChildren(el("p", {}, "No jobs. elastic-ft submit JOB.yaml adds one."));
    rows.replaceChildren(table("Jobs", ["job", "state", "queue", "priority", "workers", "step", "steps/s", "ends in", "why"],
      jobs.map((job) => [
        el("a", { href: `/jobs/${encodeURIComponent(job.id)}` }, job.id), stateOf(job.state), job.queue, job.priority, workersOf(job.workers),
        `${count(job.step ?? 0)}${job.steps ? ` of ${count(job.steps)}` : ""}`, few(job.rate), duration(job.eta_s), job.why || job.reason || "",
      ]), true));
    if (focused?.startsWith("/jobs/")) rows.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus();
  };
  all.addEventListener("change", () => turned(all.checked ? "before" : "after", ""));
  always(JOBS_EVERY_MS, look);
}

// --------------------------------------------------------------------------- one of them

function jobPage(id) {
  document.title = `${id}: elastic_ft`;
  const path = `jobs/${encodeURIComponent(id)}`;
  const said = el("p", { class: "lead", role: "status", id: "said" });
  const decided = el("div", {}), root = el("div", { id: "run" });
  main.replaceChildren(root, decided);
  const controls = controlsOf(path, said);
  const under = el("section", { "aria-label": "Change the job" }, controls.node, said);
  let picture = null, seen = null, isNew = false, wake = () => {};
  const news = () => {
    isNew = true;
    wake();
  };
  const quiet = async () => {
    if (!isNew) await Promise.race([new Promise((done) => { wake = done; }), sleep(QUIET_MS), told("offline")]);
    isNew = false;
  };

  async function look() {
    const job = await get(path);
    document.title = `${job.id}, ${STATES[job.state] || job.state}: elastic_ft`;
    controls.show(job);
    showDecisions(decided, job);
    if (job.state !== "queued" || job.step) {
      seen = await get(`${path}/view`).catch((error) => {
        if ([409, 429, 503].includes(error.status)) return null; // its folder has nothing yet
        throw error;
      });
    }
    if (!seen) return waiting(root, job, under);
    if (!picture) picture = makePicture(root, under);
    const other = ["queued", "suspended", "stopping"].includes(job.state);
    picture.show({ ...seen, name: job.id, state: OVER.includes(job.state) || other ? job.state : seen.state, reason: job.why || seen.reason });
    if (!OVER.includes(job.state)) return "";
    heard();
    return "over";
  }
  always(VIEW_EVERY_MS, look, quiet);
  // The streams only say that something is new: the picture has one source.
  for (const name of ["events", "steps"]) follow(path, name, () => (name === "steps" ? seen?.step : seen?.seq), news);
}
function waiting(root, job, under) {
  root.replaceChildren(el("h1", {}, job.id), stateOf(job.state), el("p", { class: "lead" }, job.why || job.reason || "Nothing is to be seen of it yet."), under);
}
async function follow(path, name, last, news) {
  const place = location.pathname;
  while (location.pathname === place) {
    try {
      const after = last();
      const answer = await call(`${path}/${name}${after > 0 ? `?after=${after}` : ""}`);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        if (/^event: end$/m.test(value)) return void news();
        if (/^data:/m.test(value)) news();
      }
    } catch { // whoever asks for the picture says that the service does not answer
    }
    await sleep(AGAIN_MS);
  }
}
function showDecisions(root, job) {
  const decisions = job.decisions || [];
  const now = JSON.stringify(decisions);
  if (root.dataset.shown === now) return;
  root.dataset.shown = now;
  if (!decisions.length) return void root.replaceChildren();
  root.replaceChildren(el("h2", {}, "What the service decided"), table("Decisions of the service", ["when", "what", "because"],
    decisions.slice(-100).reverse().map((one) => [moment(one.at_s), one.what, one.why])));
}
function controlsOf(path, said) {
  const stop = el("button", { type: "button", class: "danger" }, "Stop");
  const workers = el("input", { type: "number", id: "workers", min: 1, step: 1 });
  const resize = el("button", { type: "button" }, "Resize");
  const priority = el("input", { type: "number", id: "priority", step: 1 });
  const rank = el("button", { type: "button" }, "Set priority");
  const node = el("div", { class: "actions" },
    el("span", {}, el("label", { for: "workers" }, "Workers "), workers, " ", resize),
    el("span", {}, el("label", { for: "priority" }, "Priority "), priority, " ", rank), stop);
  let job = null;
  const untouched = new Set([workers, priority]);
  for (const field of [workers, priority]) field.addEventListener("input", () => untouched.delete(field));

  async function change(verb, value, words, field, dangerous) {
    if (field && !field.checkValidity()) return void field.reportValidity();
    if (!(await confirmed(words, verb, dangerous))) return;
    said.textContent = `${verb}: asked for.`;
    try {
      const after = await post(`${path}/${value.at}`, value.body);
      untouched.add(field);
      show(after);
      said.textContent = `${verb}: the service has taken it down.`;
    } catch (error) {
      said.textContent = error instanceof Refusal ? `${verb}: refused: ${error.message}.`
        : `${verb}: no answer came. It may have been done: look at the job before you ask again.`;
    }
  }
  resize.addEventListener("click", () => change("Resize", { at: "resize", body: { workers: Number(workers.value) } },
    `${job.id}: train with ${many(Number(workers.value), "worker")} at most, instead of ${job.workers.now}? It changes at a step's boundary and loses nothing.`, workers));
  rank.addEventListener("click", () => change("Set priority", { at: "priority", body: { priority: Number(priority.value) } },
    `${job.id}: priority ${priority.value} instead of ${job.priority}? Jobs of a lower priority give way to it.`, priority));
  stop.addEventListener("click", () => change("Stop", { at: "stop", body: { now: false } },
    `Stop ${job.id}? It finishes its step, writes a last checkpoint and ends.`, null, true));

  function show(value) {
    job = value;
    const over = OVER.includes(job.state);
    for (const field of [stop, workers, resize, priority, rank]) field.disabled = over;
    stop.disabled = over || job.state === "stopping";
    workers.min = job.workers.min;
    workers.max = job.workers.max;
    if (untouched.has(workers)) workers.value = job.workers.target ?? job.workers.now;
    if (untouched.has(priority)) priority.value = job.priority;
    node.hidden = over;
  }
  return { node, show };
}

// ------------------------------------------------------------------------------- begin

const asked = location.pathname.match(/^\/jobs\/([^/]+)$/);
if (asked) jobPage(decodeURIComponent(asked[1]));
else jobsPage();
