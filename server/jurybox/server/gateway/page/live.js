// The live page: takes samples from /events and shows them. Text from the server is only ever set as text.
import { bars, ranges, sparkline } from "./charts.js";

const POINTS = 150; // samples kept: a minute
const SILENT = 4000, AGAIN = 1000; // ms without a sample until the server counts as gone; between two attempts
const $ = (id) => document.getElementById(id);
const past = { rows: [], p50: [], p99: [], batch: [], waiting: [] };
let stream = null, heard = performance.now(), seen = null, latest = null, retry = 0;

// ---- words

function count(value) {
  if (value === null) return "–";
  if (value >= 1e6) return `${(value / 1e6).toFixed(2)} M`;
  if (value >= 1e5) return `${Math.round(value / 1e3)} k`;
  if (value >= 100) return Math.round(value).toLocaleString("en").replaceAll(",", "\u202f");
  return value >= 10 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(1);
}

function duration(seconds) {
  if (seconds === null) return "–";
  for (const [limit, scale, unit] of [[1e-3, 1e6, "µs"], [1, 1e3, "ms"], [120, 1, "s"], [7200, 1 / 60, "min"], [172800, 1 / 3600, "h"]])
    if (seconds < limit * 0.9995) {
      const value = seconds * scale;
      return `${value >= 10 || value === 0 || Number.isInteger(value) ? Math.round(value) : value.toFixed(1)}\u00a0${unit}`;
    }
  return `${Math.round(seconds / 86400)}\u00a0days`;
}

const bytes = (value) =>
  !value ? "–" : value < 2 ** 30 ? `${(value / 2 ** 20).toFixed(1)}\u00a0MiB` : `${(value / 2 ** 30).toFixed(2)}\u00a0GiB`;

const GOOD = ["serving", "ready"], WAITING = ["starting", "loading", "draining", "reloading", "absent", "sleeping"];
const tone = (state) => (GOOD.includes(state) ? "good" : WAITING.includes(state) ? "warn" : "bad");

// ---- the connection

function connect() {
  clearTimeout(retry);
  stream?.close();
  stream = new EventSource("/events");
  stream.addEventListener("sample", (event) => { heard = performance.now(); show(JSON.parse(event.data)); });
  stream.addEventListener("gone", (event) => { heard = performance.now(); gone(JSON.parse(event.data).reason); });
  stream.onerror = () => { gone("Nothing answers at this address."); later(); };
}

function later() {
  stream?.close();
  clearTimeout(retry);
  retry = setTimeout(connect, AGAIN);
}

function gone(reason) {
  const since = seen === null ? "" : ` Last seen at ${new Date(seen).toLocaleTimeString()}.`;
  document.body.dataset.link = "gone";
  say("state", "gone", "state bad");
  $("banner").hidden = false;
  say("banner", `The server is gone: ${reason}${since} This page goes on by itself when it is back.`);
  document.title = "gone · Jurybox";
}

setInterval(() => {
  if (document.hidden || performance.now() - heard < SILENT) return;
  heard = performance.now();
  gone("It has been silent for some seconds.");
  later();
}, 500);

// A page that nobody sees costs the server nothing.
document.addEventListener("visibilitychange", () => {
  clearTimeout(retry);
  heard = performance.now();
  if (document.hidden) stream?.close();
  else connect();
});
addEventListener("resize", () => latest && draw(latest));

// ---- the page

function say(id, text, className) {
  const node = $(id);
  if (node.textContent !== text) node.textContent = text;
  if (className !== undefined && node.className !== className) node.className = className;
}

function show(sample) {
  seen = sample.at * 1000;
  latest = sample;
  document.body.dataset.link = "live";
  const { server, rates, latency, lanes, memory } = sample;
  const down = server.state === "down";
  $("banner").hidden = !down;
  if (down) {
    const how = sample.engines.map((one) => `engine ${one.index} is ${one.state}, restarted ${one.restarts} ${one.restarts === 1 ? "time" : "times"}`);
    say("banner", `No engine serves: ${how.join("; ")}. Requests wait until one does, or their time is over.`);
  }
  say("state", server.state, `state ${tone(server.state)}`);
  say("about", `up ${duration(server.uptime)} · ${server.address} · jurybox ${server.build}`);
  document.title = `${count(rates.rows)} rows/s · Jurybox`;
  say("rows", count(rates.rows));
  say("requests", `${count(rates.requests)} requests/s`);
  say("p50", duration(latency.request.p50));
  say("p99", duration(latency.request.p99));
  say("batch", count(sample.batch.mean));
  say("batches", `${count(rates.batches)} batches/s`);
  say("waiting", count(sample.waiting));
  say("lanes", `${lanes.in_use} ${lanes.in_use === 1 ? "lane" : "lanes"} · ${bytes(memory.shared_bytes)} shared`);
  if (sample.seconds) {
    const now = { rows: rates.rows, p50: latency.request.p50, p99: latency.request.p99, batch: sample.batch.mean, waiting: sample.waiting };
    for (const [name, values] of Object.entries(past)) {
      values.push(now[name]);
      if (values.length > POINTS) values.shift();
    }
  }
  draw(sample);
  fill("models", sample.models.map(model));
  fill("engines", sample.engines.map(engine));
  runs(sample.runs);
  events(sample.events);
  $("first").hidden = !sample.first_request.length;
  say("first", sample.first_request.join("\n"));
}

function draw(sample) {
  sparkline($("rows-spark"), [past.rows], { points: POINTS, words: count });
  sparkline($("latency-spark"), [past.p50, past.p99], { points: POINTS, words: duration, logarithmic: true });
  sparkline($("batch-spark"), [past.batch], { points: POINTS, words: count });
  sparkline($("waiting-spark"), [past.waiting], { points: POINTS, words: count, floor: 4 });
  ranges($("ranges"), ["queue", "forward", "request"].map((name) => [name, sample.latency[name].p50, sample.latency[name].p99]), duration);
  bars($("bars"), sample.batch.counts);
}

function model(held) {
  const { weights } = held;
  const sum = (counts) => Object.values(counts).reduce((all, n) => all + n, 0);
  const kinds = Object.entries(held.errors).filter(([, n]) => n).map(([kind, n]) => `${count(n)} ${kind}`);
  return [
    { text: held.name, small: held.reason },
    { text: held.state, dot: tone(held.state) },
    { text: count(held.rates.rows) },
    { text: duration(held.latency.request.p50) },
    { text: duration(held.latency.request.p99) },
    { text: held.batch.mean === null ? "–" : `${count(held.batch.mean)} of ${held.max_batch}` },
    { text: count(held.waiting) },
    { text: String(held.lanes.in_use) },
    { text: weights.version ? String(weights.version) : "as loaded", small: weights.age === null ? "" : `${duration(weights.age)} old` },
    { text: weights.newest ? String(weights.lag) : "–", tone: weights.lag > 1 ? "warn" : "" },
    { text: count(sum(held.errors)), small: kinds.join(", "), tone: sum(held.failures) ? "bad" : "" },
  ];
}

function engine(one) {
  return [
    { text: `engine ${one.index}` },
    { text: one.state, dot: tone(one.state) },
    { meter: one.busy },
    { text: count(one.rates.requests) },
    { text: duration(one.expected_wait) },
    { text: bytes(one.device_bytes) },
    { text: String(one.restarts), tone: one.restarts ? "warn" : "" },
  ];
}

// ---- trainings

const number = (value) => (value === null ? "–" : Math.abs(value) >= 1e4 ? count(Math.round(value)) : String(Number(value.toPrecision(4))));

function runs(list) {
  $("trainings").hidden = !list.length;
  const target = $("runs"), cards = new Map([...target.children].map((card) => [card.dataset.run, card]));
  const wanted = list.map((run) => cards.get(run.name) ?? newRun(run.name));
  if (wanted.some((card, at) => target.children[at] !== card) || target.children.length > wanted.length) target.replaceChildren(...wanted);
  list.forEach((run, at) => showRun(wanted[at], run));
}

function newRun(name) {
  const card = Object.assign(document.createElement("li"), { className: "run" });
  card.dataset.run = name;
  const part = (tag, role) => { const node = document.createElement(tag); node.dataset.part = role; card.append(node); return node; };
  part("h3", "name").textContent = name;
  part("p", "figure").className = "figure";
  const chart = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  chart.setAttribute("class", "spark");
  chart.setAttribute("role", "img");
  chart.setAttribute("aria-label", `Mean return of ${name} since its start`);
  card.append(chart);
  part("p", "note").className = "note";
  return card;
}

function showRun(card, run) {
  const part = (role) => card.querySelector(`[data-part="${role}"]`);
  const set = (node, text) => { if (node.textContent !== text) node.textContent = text; };
  set(part("figure"), `return ${number(run.return)}`);
  const told = [`${number(run.env_steps)} env steps`];
  if (run.steps_per_second !== null) told.push(`${number(run.steps_per_second)} steps/s`);
  if (run.evaluated !== null) told.push(`evaluated ${number(run.evaluated)}`);
  if (run.lag !== null) told.push(`lag ${number(run.lag)}`);
  told.push(`${duration(Math.round(run.age))} ago`);
  set(part("note"), told.join(" · "));
  const key = `${run.returns.length} ${run.returns.at(-1)} ${card.clientWidth}`;
  if (card.dataset.key !== key) {
    card.dataset.key = key;
    sparkline(card.querySelector("svg"), [run.returns], { points: Math.max(2, run.returns.length), words: number, fit: true });
  }
  let film = card.querySelector("video");
  if (!run.film) return film?.remove();
  if (!film) {
    film = Object.assign(document.createElement("video"), { muted: true, loop: true, autoplay: true, playsInline: true, controls: true });
    card.append(film);
  }
  const source = `/runs/film?name=${encodeURIComponent(run.name)}&at=${encodeURIComponent(run.film)}`;
  if (film.getAttribute("src") === source) return;
  film.setAttribute("src", source);
  film.setAttribute("aria-label", `The first episode of the evaluation of ${run.name} at ${run.film} env steps`);
}

// Rows of a table; nodes are kept, so that nothing flickers and selected text stays selected.
function fill(id, rows) {
  const body = $(id), heads = [...body.parentNode.tHead.rows[0].cells];
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((cells, at) => {
    const row = body.rows[at] ?? body.insertRow();
    cells.forEach((cell, column) => fillCell(row.cells[column] ?? newCell(row, heads[column], column), cell));
  });
}

function newCell(row, head, column) {
  const cell = document.createElement(column ? "td" : "th");
  if (column) cell.dataset.label = head.textContent;
  else cell.scope = "row";
  cell.className = head.className;
  row.append(cell);
  return cell;
}

function fillCell(cell, { text = "", small = "", dot = "", tone: tint = "", meter }) {
  const key = JSON.stringify([text, small, dot, tint, meter]);
  if (cell.dataset.key === key) return;
  cell.dataset.key = key;
  const inner = document.createElement("span");
  if (dot || tint) inner.className = dot || tint;
  if (dot) inner.append(Object.assign(document.createElement("i"), { className: "dot" }));
  if (meter !== undefined) {
    inner.append(Object.assign(document.createElement("meter"), { value: meter, max: 1, ariaLabel: "share of time computing" }));
    inner.append(Object.assign(document.createElement("span"), { className: "share n", textContent: `${Math.round(100 * meter)} %` }));
  }
  inner.append(text);
  if (small) inner.append(Object.assign(document.createElement("small"), { textContent: small }));
  cell.replaceChildren(inner);
}

function events(list) {
  const target = $("events"), key = JSON.stringify(list);
  if (target.dataset.key === key) return;
  target.dataset.key = key;
  const items = list.toReversed().map(({ at, level, text }) => {
    const item = document.createElement("li"), time = document.createElement("time");
    const when = new Date(at * 1000);
    time.dateTime = when.toISOString();
    time.textContent = when.toLocaleTimeString("en-GB");
    const said = Object.assign(document.createElement("span"), { className: { error: "bad", warning: "warn" }[level] ?? "", textContent: text });
    item.append(time, said);
    return item;
  });
  if (!items.length) items.push(Object.assign(document.createElement("li"), { className: "none", textContent: "nothing yet" }));
  target.replaceChildren(...items);
}

connect();
