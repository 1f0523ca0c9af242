// The console: asks the server every two seconds what there is, and shows it. No library, no build, no other host.
// What comes from the server is put in as text, never as HTML.
"use strict";

const EVERY_MS = 2000;
const HISTORY = 60; // points of the chart: two minutes
const KEY = "pagedray.key"; // for this tab only

const $ = (id) => document.getElementById(id);
const format = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const sum = (rows, of) => rows.reduce((total, row) => total + of(row), 0);

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function headers(more = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

function say(state, text) {
  const status = $("status");
  if (status.textContent !== text) status.textContent = text; // a screen reader hears changes only
  status.dataset.state = state;
}

// -- what there is ----------------------------------------------------------------------------------------------------

let before = null; // the last state, and when it came
const history = [];

async function refresh() {
  try {
    const answer = await fetch("state", { headers: headers(), cache: "no-store", signal: AbortSignal.timeout(15000) });
    if (answer.status === 401) {
      forget();
      say("bad", "Needs an API key");
    } else if (!answer.ok) {
      say("bad", `The server answers ${answer.status}`);
    } else {
      const state = await answer.json();
      show(state, performance.now());
      say("live", "Live");
    }
  } catch {
    say("bad", "The server does not answer");
  }
}

async function refreshForEver() {
  if (!document.hidden) await refresh();
  setTimeout(refreshForEver, EVERY_MS);
}

function forget() {
  before = null;
  history.length = 0;
  for (const id of ["map", "tenants", "chart"]) $(id).replaceChildren();
  for (const id of ["tokens-now", "running", "queued", "ttft", "itl", "cached"]) $(id).textContent = "–";
}

function show(state, at) {
  const seconds = before ? (at - before.at) / 1000 : 0;
  const old = before ? before.state : state;
  const rates = new Map(state.tenants.map((row) => [nameOf(row), rate(row, old.tenants, seconds)]));
  const generated = sum([...rates.values()], (r) => r.generated);
  const cached = sum([...rates.values()], (r) => r.cached);
  const prompt = cached + sum([...rates.values()], (r) => r.computed);

  $("version").textContent = state.version;
  $("tokens-now").textContent = before ? format.format(generated) : "–";
  $("running").textContent = sum(state.tenants, (t) => t.num_placed);
  $("queued").textContent = sum(state.tenants, (t) => t.num_queued);
  $("ttft").textContent = seconds_text(quantile(0.95, old.latency.ttft, state.latency.ttft));
  $("itl").textContent = seconds_text(quantile(0.95, old.latency.itl, state.latency.itl));
  $("cached").textContent = prompt ? `${Math.round((100 * cached) / prompt)}%` : "–";
  if (before) {
    history.push(generated);
    if (history.length > HISTORY) history.shift();
    draw(history);
  }
  showMap(state);
  showTenants(state.tenants, rates);
  showModels(state.models);
  before = { state, at };
}

const nameOf = (row) => JSON.stringify([row.model, row.tenant]);

// What a tenant gained a second. After the scheduler's restart counts begin anew: then nothing was gained.
function rate(row, old, seconds) {
  const was = old.find((o) => nameOf(o) === nameOf(row));
  const gained = (key) => (seconds && was ? Math.max(0, row[key] - was[key]) / seconds : 0);
  return { generated: gained("generated_tokens"), computed: gained("computed_tokens"), cached: gained("cached_tokens") };
}

// Of the values that came between two states of a histogram, as Prometheus reckons it.
function quantile(q, old, now) {
  const same = old.bounds.length === now.bounds.length;
  const counts = now.counts.map((count, i) => Math.max(0, count - (same ? old.counts[i] : 0)));
  let wanted = q * sum(counts, (count) => count);
  if (!wanted) return null;
  let lower = 0;
  for (let i = 0; i < now.bounds.length; i++) {
    if (counts[i] && wanted <= counts[i]) return lower + ((now.bounds[i] - lower) * wanted) / counts[i];
    wanted -= counts[i];
    lower = now.bounds[i];
  }
  return lower;
}

function seconds_text(value) {
  if (value === null) return "–";
  return value < 1 ? `${Math.round(1000 * value)} ms` : `${value.toFixed(1)} s`;
}

function draw(values) {
  const most = Math.max(1, ...values);
  const points = values.map((v, i) => `${(300 * (i + HISTORY - values.length)) / (HISTORY - 1)},${54 - (50 * v) / most}`);
  const svg = (tag, text) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    element.setAttribute("points", text);
    return element;
  };
  const first = points[0].split(",")[0];
  $("chart").replaceChildren(svg("polygon", `${first},56 ${points.join(" ")} 300,56`), svg("polyline", points.join(" ")));
}

// -- the map ----------------------------------------------------------------------------------------------------------

function showMap(state) {
  const map = $("map");
  const cards = state.nodes.map((node) => {
    const here = state.groups.filter((group) => group.nodes.includes(node.id));
    const ingresses = state.ingresses.filter((ingress) => ingress.node === node.id).length;
    const parts = [`${format.format(node.cpus)} CPU${node.cpus === 1 ? "" : "s"} in Ray`];
    if (node.gpus) parts.push(`${format.format(node.gpus)} GPU${node.gpus === 1 ? "" : "s"}`);
    if (ingresses) parts.push(ingresses === 1 ? "1 ingress" : `${ingresses} ingresses`);
    const card = make("article", { class: "node" }, make("h3", {}, node.address || node.id.slice(0, 8), make("span", {}, parts.join(", "))));
    card.append(...here.map((group) => groupCard(group, node)));
    if (!here.length) card.append(make("p", { class: "empty" }, "no worker group"));
    if (node.store_budget) {
      const text = `${mib(node.store_bytes)} of ${mib(node.store_budget)}`;
      card.append(meter("KV store", node.store_bytes / node.store_budget, text, `KV store of ${node.address}`, false));
    }
    return card;
  });
  const asleep = state.models.filter((model) => model.state === "asleep").map((model) => model.id);
  if (asleep.length) cards.push(make("p", { class: "empty" }, `Asleep until somebody asks: ${asleep.join(", ")}`));
  const lost = state.models.filter((model) => model.state === "down").map((model) => model.id);
  if (lost.length) cards.push(make("p", { class: "empty", role: "alert" }, `No worker group is up: ${lost.join(", ")}`));
  for (const model of state.models.filter((model) => model.state === "failed")) {
    cards.push(make("p", { class: "empty", role: "alert" }, `${model.id} cannot start: ${model.failure}`));
  }
  map.replaceChildren(...cards);
}

function groupCard(group, node) {
  const ranks = group.nodes.map((id, rank) => [id, rank]).filter(([id]) => id === node.id).map(([, rank]) => rank);
  const used = group.num_blocks ? group.num_used_blocks / group.num_blocks : 0;
  const where = group.nodes.length > 1 ? `ranks ${ranks.join(", ")} of ${group.nodes.length}` : "";
  const hits = group.prefix_cache_queries ? Math.round((100 * group.prefix_cache_hits) / group.prefix_cache_queries) : 0;
  const state = group.draining ? ["leaving"] : [];
  const facts = [...state, `${group.num_running} running`, `${group.num_waiting} waiting`, `${hits}% cached`];
  return make(
    "div",
    { class: "group", "data-load": load(used) },
    make("h4", {}, group.model, make("span", { title: group.id }, where || group.id.slice(-8))),
    make("p", { class: "facts" }, facts.join(" · ")),
    meter("KV", used, `${Math.round(100 * used)}%`, `KV cache in use of group ${group.id}`, true),
  );
}

const load = (share) => (share > 0.95 ? "full" : share > 0.8 ? "high" : "low");
const mib = (bytes) => (bytes < 2 ** 30 ? `${format.format(bytes / 2 ** 20)} MiB` : `${(bytes / 2 ** 30).toFixed(1)} GiB`);

function meter(title, share, text, label, warns) {
  const percent = Math.round(100 * share);
  const full = make("div", { class: "full" });
  full.style.width = `${percent}%`;
  const values = { role: "meter", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": percent };
  return make(
    "div",
    { class: "meter", "data-load": warns ? load(share) : "low" },
    make("span", {}, title),
    make("div", { class: "back", ...values, "aria-valuetext": text }, full),
    make("span", {}, text),
  );
}

function showTenants(tenants, rates) {
  const rows = tenants.map((row) => {
    const gained = rates.get(nameOf(row));
    const figures = [row.num_queued, row.num_placed, gained.generated, gained.computed, gained.cached, row.generated_tokens];
    return make(
      "tr",
      {},
      make("td", {}, row.tenant || "(others)"),
      make("td", {}, row.model),
      ...figures.map((figure) => make("td", { class: "number" }, format.format(figure))),
    );
  });
  if (!rows.length) rows.push(make("tr", {}, make("td", { colspan: 8 }, "Nobody has asked for anything yet.")));
  $("tenants").replaceChildren(...rows);
}

function showModels(models) {
  const select = $("model");
  const ids = models.map((model) => model.id);
  if (ids.join("\n") === [...select.options].map((option) => option.value).join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...ids.map((id) => make("option", { value: id }, id)));
  if (ids.includes(chosen)) select.value = chosen;
}

// -- the playground ---------------------------------------------------------------------------------------------------

const messages = [];
let running = null; // an AbortController while an answer comes

function add(role, text) {
  const element = make("div", { class: `message ${role}` }, text);
  $("log").append(element);
  scrollDown();
  return element;
}

function scrollDown() {
  $("log").scrollTop = $("log").scrollHeight;
}

async function ask(text) {
  messages.push({ role: "user", content: text });
  add("user", text);
  const answer = add("assistant", "…");
  const log = $("log");
  log.setAttribute("aria-busy", "true"); // read when it is whole, not word by word
  running = new AbortController();
  showRunning(true);
  const began = performance.now();
  let content = "", first = null, usage = null;
  try {
    const system = $("system").value.trim();
    const body = {
      model: $("model").value,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
      temperature: Number($("temperature").value),
      stream: true,
      stream_options: { include_usage: true },
    };
    if ($("max-tokens").value) body.max_tokens = Number($("max-tokens").value);
    const response = await fetch("../v1/chat/completions", {
      method: "POST",
      headers: headers({ "Content-Type": "application/json" }),
      body: JSON.stringify(body),
      signal: running.signal,
    });
    if (!response.ok) throw new Error(await errorOf(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage || usage;
      const delta = event.choices && event.choices[0] ? event.choices[0].delta : null;
      const piece = delta ? (delta.content || delta.reasoning_content || "") : "";
      if (!piece) continue;
      first = first ?? performance.now();
      content += piece;
      answer.textContent = content;
      scrollDown();
    }
    answer.textContent = content || "(nothing)";
  } catch (error) {
    if (error.name !== "AbortError") {
      if (!content) answer.remove();
      add("error", error.message || "The server does not answer.");
    } else if (!content) {
      answer.textContent = "(stopped)";
    }
  }
  if (content) messages.push({ role: "assistant", content });
  else messages.pop(); // an unanswered question does not go along with the next one
  const took = (performance.now() - (first ?? began)) / 1000;
  const parts = first === null ? [] : [`first token after ${seconds_text((first - began) / 1000)}`];
  if (usage) {
    parts.push(`${usage.completion_tokens} tokens, ${(usage.completion_tokens / Math.max(took, 0.001)).toFixed(0)} a second`);
    const hits = usage.prompt_tokens_details ? usage.prompt_tokens_details.cached_tokens : 0;
    parts.push(`prompt of ${usage.prompt_tokens}, ${hits} cached`);
  }
  $("measure").textContent = parts.join(" · ");
  log.removeAttribute("aria-busy");
  running = null;
  showRunning(false);
}

async function errorOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answers ${response.status}.`;
  }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const frames = buffer.split("\n\n");
    buffer = frames.pop();
    for (const frame of frames) {
      if (frame.startsWith("data: ") && frame !== "data: [DONE]") yield JSON.parse(frame.slice(6));
    }
  }
}

function showRunning(isRunning) {
  $("send").hidden = isRunning;
  $("stop").hidden = !isRunning;
  $("clear").disabled = isRunning;
  if (!isRunning) $("message").focus({ preventScroll: true });
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("message").value.trim();
  if (!text || running) return;
  $("message").value = "";
  ask(text);
});
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running && running.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("clear").addEventListener("click", () => {
  messages.length = 0;
  $("log").replaceChildren();
  $("measure").textContent = "";
  $("message").focus();
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = $("key").value.trim();
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
  $("key").value = "";
  $("key").placeholder = key ? "set" : "none";
  forget();
  refresh();
});
$("key").placeholder = sessionStorage.getItem(KEY) ? "set" : "none";
refreshForEver();
