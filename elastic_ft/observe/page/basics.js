"use strict";
// Elements, words for amounts, and axes. Texts of a run only ever become text nodes.

// ---------------------------------------------------------------------------- elements

function made(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
function el(name, attributes, ...children) {
  return made(document.createElement(name), attributes, children);
}
function svg(name, attributes, ...children) {
  return made(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}
const SHORT = 24; // characters that stay on one line where there is room
const AMOUNT = /^[\d,.]+( (s|min|h|d|%|kB|MB|GB|TB|B))?$/;

// A column of amounts is aligned at its right. stacked: on a narrow screen each row is a card.
function table(caption, heads, rows, stacked = false) {
  const isAmount = (value) => typeof value === "number" || (typeof value === "string" && AMOUNT.test(value));
  const isNone = (value) => value === null || value === undefined || value === "" || value === "–";
  const amounts = heads.map((_, n) => rows.some((row) => isAmount(row[n])) && rows.every((row) => isAmount(row[n]) || isNone(row[n])));
  const shape = (n, text) => (amounts[n] ? "number" : text.length <= SHORT ? "short" : null);
  const cell = (value, n) => {
    const place = { scope: n ? null : "row", "data-head": heads[n] };
    if (value instanceof Node) return el(n ? "td" : "th", place, value);
    const text = typeof value === "number" ? count(value) : String(value ?? "");
    return el(n ? "td" : "th", { ...place, class: shape(n, text) }, text);
  };
  return el("div", { class: stacked ? "scroll stacked" : "scroll", tabindex: 0, role: "region", "aria-label": caption },
    el("table", {},
      el("caption", { class: "hidden" }, caption),
      el("thead", {}, el("tr", {}, heads.map((head, n) => el("th", { scope: "col", class: amounts[n] ? "number" : null }, head)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map(cell))))));
}

// ------------------------------------------------------------------------------- words

function count(value, digits = 0) {
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}
function few(value) { // three digits or so
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 100) return count(value);
  if (size >= 10) return count(value, 1);
  if (size >= 0.01 || size === 0) return count(value, 3);
  return value.toExponential(2);
}
function duration(s) {
  if (s === null || s === undefined) return "–";
  if (s < 10) return `${count(s, 2)} s`;
  if (s < 120) return `${count(s, s < 60 ? 1 : 0)} s`;
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = units.findIndex(([size]) => s >= size);
  const [size, name] = units[first], [next, small] = units[first + 1];
  let whole = Math.floor(s / size), rest = Math.round((s - whole * size) / next);
  if (rest * next >= size) { whole += 1; rest = 0; }
  return rest ? `${whole} ${name} ${rest} ${small}` : `${whole} ${name}`;
}
function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 1000) return `${count(value, unit === "B" ? 0 : 1)} ${unit}`;
    value /= 1000;
  }
  return `${count(value, 1)} TB`;
}
function percent(share) {
  return `${count(100 * share, 1)} %`;
}
function moment(atS) {
  return atS ? `${new Date(atS * 1000).toISOString().slice(0, 19).replace("T", " ")} UTC` : "";
}
function many(n, one, more) {
  return `${count(n)} ${n === 1 ? one : more || `${one}s`}`;
}

// -------------------------------------------------------------------------------- axes

function niceStep(span, wanted, sizes) {
  const rough = span / Math.max(1, wanted);
  if (sizes) {
    const found = sizes.find((size) => size >= rough);
    if (found) return found;
  }
  const unit = 10 ** Math.floor(Math.log10(rough || 1));
  return [1, 2, 5, 10].map((n) => n * unit).find((size) => size >= rough * 0.999);
}
function ticks(low, high, wanted, whole) {
  let step = niceStep(high - low || 1, wanted);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9 && found.length < 50; n += 1) found.push(n * step + 0);
  return found;
}
function timeTicks(span, wanted) {
  const sizes = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400, 172800, 604800];
  const step = niceStep(span, wanted, sizes);
  const [size, name] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([unit]) => step >= unit) || [1, "s"];
  const found = [];
  for (let n = 0; n * step <= span && found.length < 50; n += 1) found.push([n * step, `${count((n * step) / size, 2)} ${name}`]);
  return found;
}

