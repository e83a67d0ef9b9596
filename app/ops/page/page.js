// The status page. It asks /admin/vram every two seconds, and at once when the stream of events brings one.
// What the service says is put in as text, never as markup. What is unknown is shown as "unknown", never as 0.
// All of it is one file, and longer than others, because the page is to have one script and no build step.
"use strict";

const EVERY_MS = 2000;
const REQUESTS_EVERY_MS = 10000;
const SHOWN_ROWS = 50;
const KEPT_S = 6 * 3600;
const MIB = 1 << 20;

const OWNERS = ["weights", "kv_cache", "context", "modules", "scratch", "cublas_workspace", "cuda_graphs", "shadow", "pool_cached", "unaccounted"];
const FLOORS = ["warn", "trim", "reload"];

// ---- words and figures

const byId = (id) => document.getElementById(id);
/** The sentences of a glossary at the end of the page, by name. */
const glossary = (id) => Object.fromEntries([...byId(id).querySelectorAll("dt")].map((term) => [term.textContent, term.nextElementSibling.textContent]));
const STATES = glossary("states");
const CLASSES = glossary("classes");
const ORDER = Object.keys(STATES); // from the worst to the best
const ENGINE = {
  loading: "The engine is being loaded; requests are answered with 503 until it is ready.",
  failed: "No engine could be loaded; requests are answered with 503. The log says why.",
  stopped: "The service is ending.",
};
const known = (value) => value !== null && value !== undefined;
const minus = (text) => text.replace("-", "−");
const number = (value, digits = 0) => minus(value.toLocaleString("en", { maximumFractionDigits: digits }));
const small = (value) => minus(value.toLocaleString("en", { maximumSignificantDigits: 2 }));
/** Small sizes keep two digits: nothing that is not zero looks like it. */
const mib = (bytes) => `${bytes && Math.abs(bytes) < MIB ? small(bytes / MIB) : number(bytes / MIB, Math.abs(bytes) < 1024 * MIB ? 1 : 0)} MiB`;
const signed = (bytes) => (bytes > 0 ? "+" : "") + mib(bytes);
const loss = (bytes) => (bytes < 0 ? `${mib(-bytes)} gained` : bytes > 0 ? `${mib(bytes)} lost` : "no change");
const percent = (ratio) => `${ratio > 0 && ratio < 0.0005 ? "< 0.1" : number(100 * ratio, ratio < 0.1 ? 1 : 0)} %`;
const clock = (time, form = {}) => new Date(time).toLocaleTimeString("en-GB", form);
const moment = (time) => (Math.abs(Date.now() - new Date(time)) < 43200e3 ? clock(time) : new Date(time).toLocaleString("en-GB"));

function span(seconds) {
  if (seconds < 90) return `${number(seconds)} s`;
  if (seconds < 5400) return `${number(seconds / 60)} min`;
  return seconds < 172800 ? `${number(seconds / 3600, 1)} h` : `${number(seconds / 86400, 1)} days`;
}

function element(name, content, attributes = {}) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value) made.setAttribute(key, value);
  made.append(...[content].flat());
  return made;
}

const shown = (value, words = String) => (known(value) ? words(value) : element("span", "unknown", { class: "unknown" }));
const count = (value) => shown(value, (known) => number(known));
/** A size in MiB, with the exact bytes on hover. */
const size = (bytes, words = mib) => shown(bytes, () => element("data", words(bytes), { value: String(bytes), title: `${number(bytes)} bytes` }));
const pair = (term, content) => element("div", [element("dt", term), element("dd", content)]);
const swatch = (name) => element("i", "", { class: `swatch ${name}` });
const time = (at, title = at) => element("td", element("time", moment(at), { datetime: at, title }), { class: "nowrap" });

/** New children for `place`, unless they would look the same: a selection and an open hint survive. */
function put(place, content) {
  const next = element("i", content).childNodes;
  const same = next.length === place.childNodes.length && [...next].every((node, at) => node.isEqualNode(place.childNodes[at]));
  if (!same) place.replaceChildren(...next);
}

const named = (root, name) => root.querySelector(`[data-is="${name}"]`);
const fill = (root, places) => Object.entries(places).forEach(([name, content]) => put(named(root, name), content));

// ---- talking to the service

async function ask(path, method = "GET", body = undefined) {
  const headers = body === undefined ? {} : { "content-type": "application/json" };
  const answer = await fetch(path, { method, headers, body: body && JSON.stringify(body), cache: "no-store" });
  const text = await answer.text();
  const json = text ? JSON.parse(text) : null;
  if (answer.ok || answer.status === 409) return { status: answer.status, json };
  if (answer.status === 401 && path !== "/admin/login") showLogin();
  throw new Error(json?.error?.message ?? `The service answered ${answer.status}.`);
}

let timer = null;
let stream = null;
let heard = null;
let vram = null;
let requestsAt = 0;
const past = new Map();
const charts = new Map();
const events = new Map();

function showLogin() {
  clearInterval(timer);
  stream?.close();
  timer = stream = vram = heard = null;
  byId("status").hidden = byId("logout").hidden = true;
  byId("login").hidden = false;
  contact("", "");
  byId("key").focus();
}

async function open() {
  await refresh();
  if (vram === null) return;
  byId("login").hidden = true;
  byId("status").hidden = byId("logout").hidden = false;
  show();
  await recall();
  timer ??= setInterval(refresh, EVERY_MS);
}

/** What was before this page was opened, or while nobody looked; and from now on what happens. */
async function recall() {
  listen();
  const [history, happened] = await Promise.all([ask("/admin/vram/history"), ask("/admin/events")]);
  for (const device of history.json.devices) past.set(device.device, COLUMNS.map((name) => device[name]));
  note(happened.json.events);
  show();
}

function listen() {
  stream?.close();
  stream = new EventSource("/admin/events");
  stream.onmessage = (message) => {
    note([JSON.parse(message.data)]);
    requestsAt = 0;
    refresh();
  };
}

async function refresh() {
  try {
    vram = (await ask("/admin/vram")).json;
    heard = Date.now();
    for (const device of vram.devices) remember(device, heard / 1000);
    if (!byId("status").hidden) show();
    contact("yes", "Live");
    if (stream?.readyState === EventSource.CLOSED) listen();
    if (heard - requestsAt > REQUESTS_EVERY_MS) {
      requestsAt = heard;
      showRequests((await ask(`/admin/vram/requests?limit=${SHOWN_ROWS}`)).json.requests);
    }
  } catch (error) {
    if (byId("login").hidden) contact("no", heard ? `No answer; figures are of ${clock(heard)}` : error.message);
  }
}

function contact(live, text) {
  byId("contact").dataset.live = live;
  put(byId("contact"), text);
  document.body.classList.toggle("stale", live === "no");
}

function show() {
  showNow(vram);
  byId("no-devices").hidden = vram.devices.length > 0;
  byId("trim").hidden = byId("mode").hidden = byId("span-label").hidden = !vram.devices.length;
  vram.devices.forEach(showDevice);
}

// ---- now

const badness = (device) => ORDER.indexOf(device.state);
/** The device for which `value` is least; null where it is known of none. */
const least = (devices, value) =>
  devices.reduce((a, b) => (known(value(b)) && (a === null || value(b) < value(a)) ? b : a), null);

function level({ idle_free: idle, floors, tight }) {
  if (!known(idle) || !known(floors?.reload) || tight) return "";
  return FLOORS.findLast((name) => idle < floors[name]) ?? "ok";
}

/** The one sentence for whoever looks at night. */
function verdict({ devices, reload, engine }) {
  if (reload.in_progress) return `The engine is being replaced: ${reload.phase}. Requests wait and go on where they were.`;
  if (engine in ENGINE) return ENGINE[engine];
  if (!devices.length) return "Serving from the CPU; there is no device memory to watch.";
  const worst = least(devices, badness);
  const shrinking = least(devices, (device) => device.trend.forecast_seconds);
  if (shrinking && badness(worst) >= ORDER.indexOf("watch")) {
    return `Device ${shrinking.device} loses memory: its reload floor is ${span(shrinking.trend.forecast_seconds)} away.`;
  }
  if (worst.state !== "ok") return `Device ${worst.device}: ${worst.state}. ${STATES[worst.state] ?? ""}`;
  return devices.length > 1 ? "All devices have room above their floors." : "The device has room above its floors.";
}

/** Why, and what else is not well. */
function remark(devices, watchdog) {
  const [worst, ...others] = devices.filter(({ state }) => state !== "ok" && state !== "disabled").sort((a, b) => badness(a) - badness(b));
  const said = others.map(({ device, state }) => `Device ${device}: ${state}.`);
  said.push(...devices.filter(({ tight }) => tight).map(({ device }) => `Device ${device} is tight.`));
  if (worst?.reason) said.unshift(`Why: ${worst.reason}.`);
  if (watchdog?.mode === "dry-run") said.push("Dry run: decisions are recorded and not carried out.");
  return said.join(" ");
}

function showNow({ devices, reload, queue, watchdog, engine, model, version }) {
  const low = least(devices, ({ idle_free: idle, floors }) => (known(idle) && known(floors?.reload) ? idle - floors.reload : null));
  const next = least(devices, (device) => device.trend.forecast_seconds);
  const calm = devices.length && devices.every((device) => ["flat", "first_use"].includes(device.trend.class));
  fill(document, {
    model: shown(model, (name) => `${name} · ${version}`),
    verdict: verdict(vram),
    note: remark(devices, watchdog),
    least: size(low?.idle_free),
    "least-sub": low ? `idle free on device ${low.device}` : "",
    ahead: next ? span(next.trend.forecast_seconds) : calm ? "not shrinking" : shown(null),
    "ahead-sub": next ? [count(next.trend.forecast_requests), ` requests, device ${next.device}`] : "",
    running: [count(queue.running), " running"],
    "queue-sub": [count(queue.waiting), " waiting, ", count(queue.held), " held"],
    lost: count(queue.lost),
    engine: reload.in_progress ? reload.phase : engine === "ready" ? "serving" : engine,
    "engine-sub": `generation ${reload.generation}`,
    mode: watchdog.mode,
    "mode-sub": watchdog.until ? `until ${moment(watchdog.until)}` : devices.length ? "until it is changed" : "",
  });
  named(document, "least").dataset.level = low ? level(low) : "";
  named(document, "lost").dataset.level = queue.lost > 0 ? "reload" : "ok";
  document.title = `${low ? `${mib(low.idle_free)} free` : "Ullage"} · ${verdict(vram).split(/[:.;]/)[0]}`;
  showReload(reload);
}

function showReload({ in_progress: busy, phase, reason, started_at: since, last, budget_left: budget }) {
  const entries = [pair("Automatic ones left this hour", count(budget))];
  if (busy) entries.unshift(pair("Now", `${phase} (${reason}), since ${moment(since)}`));
  if (last) entries.push(pair("Last", `${last.reason}, ${last.result}, ${number(last.seconds, 2)} s`));
  put(byId("last-reload"), entries);
  byId("reload").querySelector("button").disabled = busy;
}

// ---- devices

function cardOf(device) {
  const id = `device-${device}`;
  if (!byId(id)) {
    const card = byId("device-card").content.firstElementChild.cloneNode(true);
    card.id = id;
    byId("devices").append(card);
    byId("trim-device").append(element("option", `device ${device}`, { value: String(device) }));
  }
  return byId(id);
}

function showDevice(device) {
  const { state, trend, floors, reason, error } = device;
  const card = cardOf(device.device);
  const since = known(device.idle_free) && known(device.baseline_free) ? device.idle_free - device.baseline_free : null;
  fill(card, {
    title: `Device ${device.device}`,
    state,
    name: [shown(device.name), device.stages?.length ? ` · stage ${device.stages.join(", ")}` : ""],
    explained: STATES[state] ?? "",
    reason: state !== "ok" && reason ? `Why: ${reason}${error ? ` (${error})` : ""}.` : "",
    idle: size(device.idle_free),
    pairs: [
      pair("Free now", size(device.free)),
      pair("At ready", size(device.baseline_free)),
      pair("Since ready", size(since, signed)),
      ...FLOORS.map((name) => pair([swatch(`floor-${name}`), `${name[0].toUpperCase()}${name.slice(1)} floor`], size(floors?.[name]))),
    ],
    class: trend.class,
    "class-text": CLASSES[trend.class] ?? "",
    trend: [
      pair("Per request", size(trend.bytes_per_request, loss)),
      pair("Per hour", size(known(trend.bytes_per_second) ? trend.bytes_per_second * 3600 : null, loss)),
      pair("Per 1k tokens", size(trend.bytes_per_1k_prompt_tokens, loss)),
      pair("Confidence", shown(trend.confidence, percent)),
      pair("Reload floor in", outlook(trend)),
    ],
  });
  named(card, "state").dataset.state = state;
  named(card, "tight").hidden = named(card, "tight-text").hidden = !device.tight;
  showGauge(named(card, "gauge"), device);
  showLedger(named(card, "stack"), named(card, "ledger"), device);
  draw(named(card, "chart"), named(card, "readout"), device.device);
}

function outlook({ class: kind, forecast_seconds: seconds, forecast_requests: requests }) {
  if (!known(seconds)) return ["flat", "first_use"].includes(kind) ? "not shrinking" : shown(null);
  return `${span(seconds)}${known(requests) ? `, ${number(requests)} requests` : ""}`;
}

function showGauge(gauge, device) {
  const { idle_free: idle, baseline_free: ready, floors } = device;
  const most = Math.max(ready ?? 0, idle ?? 0, (floors?.warn ?? 0) * 1.25, 1);
  for (const [name, bytes] of Object.entries({ ...floors, fill: idle })) {
    gauge.querySelector(`.${name}`).style.width = `${(100 * (bytes ?? 0)) / most}%`;
  }
  gauge.dataset.level = level(device);
  const words = known(idle) ? `${mib(idle)} idle free` : "idle free memory is unknown";
  gauge.setAttribute("aria-label", known(ready) ? `${words}, ${mib(ready)} at ready` : words);
}

function showLedger(stack, body, { ledger, total, own, other, reserved, free, drift }) {
  const owners = [...new Set([...OWNERS, ...Object.keys(ledger)])].filter((owner) => owner in ledger);
  const owned = owners.map((owner) => [owner, ledger[owner], OWNERS.includes(owner) ? owner : "other"]);
  const rest = [["other processes", other, "other"], ["driver’s own", reserved, "reserved"], ["free", free, "free"]];
  const row = ([name, bytes, colour], kind) => element("tr", [
    element("th", colour ? [swatch(colour), name] : name, { scope: "row" }),
    element("td", size(bytes), { class: "number" }),
    element("td", known(bytes) && known(total) ? percent(bytes / total) : "", { class: "number" }),
  ], { class: kind });
  const unexplained = known(own) ? [] : [row(["unexplained change since ready", drift])];
  put(body, [...owned.map((of) => row(of)), row(["this engine", own], "sum"), ...unexplained, ...rest.map((of) => row(of)), row(["total", total], "sum")]);
  const parts = [...owned, ...rest].filter(([, bytes]) => bytes > 0);
  put(stack, parts.map(([, , colour]) => element("i", "", { class: colour })));
  parts.forEach(([, bytes], at) => { stack.children[at].style.flexGrow = bytes; });
}

// ---- charts

const COLUMNS = ["time", "free", "idle_free", ...FLOORS];

function remember({ device, free, idle_free: idle, floors }, at) {
  if (!past.has(device)) past.set(device, COLUMNS.map(() => []));
  const series = past.get(device);
  [at, free, idle, ...FLOORS.map((name) => floors?.[name])].forEach((value, column) => series[column].push(value ?? null));
  while (series[0][0] < at - KEPT_S) series.forEach((values) => values.shift());
}

const colour = (name) => () => getComputedStyle(document.documentElement).getPropertyValue(name);
const line = (name, more) => ({ stroke: colour(name), points: { show: false }, ...more });

/** From zero, with the floors; but where they are far below, as near as a loss can be seen. */
function heights(chart, low, high) {
  if (!known(low)) return [0, 100];
  const warn = chart.data[3].findLast(known) ?? 0;
  const around = Math.max((high - low) / 4, 8);
  return low > 4 * warn ? [low - around, high + around] : [0, Math.max(high, warn) * 1.08];
}

function chartIn(place, readout) {
  const axis = { stroke: colour("--quiet"), ticks: { show: false }, font: "12px system-ui, sans-serif" };
  const minutes = (_, times) => times.map((at) => clock(at * 1000, { hour: "2-digit", minute: "2-digit" }));
  const readOut = ({ data, cursor }) => legend(readout, data, cursor.idx);
  const chart = new uPlot({
    width: place.clientWidth,
    height: place.clientHeight,
    legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false } },
    scales: { x: { range: (_, from, to) => [Math.min(from, to - 120), to] }, y: { range: heights } },
    series: [{}, line("--free", { width: 1 }), line("--idle", { width: 2 }), ...FLOORS.map((name) => line(`--${name}-line`, { width: 1, dash: [6, 4], auto: false }))],
    axes: [
      { ...axis, size: 26, grid: { show: false }, incrs: [60, 120, 300, 600, 1800, 3600], values: minutes },
      { ...axis, size: 56, grid: { stroke: colour("--edge"), width: 1 }, values: (_, sizes) => sizes.map((value) => number(value, 1)) },
    ],
    hooks: { setCursor: [readOut], setData: [readOut] },
  }, COLUMNS.map(() => []), place);
  new ResizeObserver(() => chart.setSize({ width: place.clientWidth, height: place.clientHeight })).observe(place);
  return chart;
}

/** What the lines are; under the pointer also the figures of that moment. */
function legend(readout, data, at) {
  const figure = (name, column) => {
    const value = known(at) ? [" ", known(data[column][at]) ? number(data[column][at], 1) : shown(null)] : [];
    return element("span", [swatch(`line-${name}`), name.replace("_", " "), ...value]);
  };
  put(readout, [figure("idle_free", 2), figure("free", 1), element("span", known(at) ? clock(data[0][at] * 1000) : "dashed: the floors")]);
}

function draw(place, readout, device) {
  const series = past.get(device);
  const from = Math.max(0, series[0].findIndex((at) => at >= heard / 1000 - Number(byId("span").value)));
  const data = series.map((values, column) => values.slice(from).map((value) => (column && known(value) ? value / MIB : value)));
  const idle = data[2].filter(known).map((value) => number(value, 1));
  place.setAttribute("aria-label", `Idle free memory over time: ${idle.length ? `from ${idle[0]} to ${idle.at(-1)} MiB` : "unknown"}`);
  if (!charts.has(device)) charts.set(device, chartIn(place, readout));
  charts.get(device).setData(data);
}

// ---- tables

function note(happened) {
  for (const event of happened) events.set(event.seq, event);
  const newest = [...events.values()].sort((a, b) => b.seq - a.seq).slice(0, SHOWN_ROWS);
  byId("no-events").hidden = newest.length > 0;
  byId("events").hidden = !newest.length;
  put(byId("events").tBodies[0], newest.map(({ time: at, device, kind, class: trend, state, rung, reason, returned_bytes: returned }) => element("tr", [
    time(at),
    element("td", known(device) ? number(device) : "", { "data-label": known(device) && "device" }),
    element("td", known(state) ? element("span", state, { class: "badge", "data-state": state }) : ""),
    element("td", [kind.replace("_", " "), rung && rung !== kind ? ` ${rung}` : "", trend ? ` · ${trend}` : ""]),
    element("td", reason, { class: "wide" }),
    element("td", known(returned) || kind === "trim" || kind === "regrow" ? size(returned) : "", { class: "number", "data-label": "returned" }),
  ])));
}

function showRequests(rows) {
  const numbers = vram.devices.map(({ device }) => device);
  const heads = ["Finished", "Prompt", "Cached", "Generated", "Beside it", ...numbers.map((device) => `Device ${device} idle free, change`)];
  byId("no-requests").hidden = rows.length > 0;
  byId("requests").hidden = !rows.length;
  put(byId("requests").tHead, element("tr", heads.map((head, at) => element("th", head, { scope: "col", class: at && "number" }))));
  const minor = (label, value) => element("td", count(value), { class: "number minor", "data-label": label });
  put(byId("requests").tBodies[0], rows.slice(-SHOWN_ROWS).reverse().map((row) => element("tr", [
    time(row.finished_at, row.id),
    minor("prompt", row.prompt_tokens),
    minor("cached", row.cached_tokens),
    minor("generated", row.generated_tokens),
    minor("beside it", row.overlap),
    ...numbers.map((device) => requestOn(device, row.devices.find((of) => of.device === device))),
  ])));
}

function requestOn(device, of) {
  const owners = Object.entries(of?.change_by_owner ?? {}).filter(([, bytes]) => bytes);
  const change = element("span", size(of?.change, signed), { class: of?.change === 0 ? "change none" : "change" });
  const title = owners.map(([owner, bytes]) => `${owner} ${signed(bytes)}`).join(", ");
  return element("td", [size(of?.idle_free_after), " ", change], { class: "number", "data-label": `device ${device}`, title });
}

// ---- acts

/** On submit: confirm, do, and tell how it went. `question` is asked, `act` gives the lines to show. */
function onSubmit(form, question, act) {
  byId(form).addEventListener("submit", async (submitted) => {
    submitted.preventDefault();
    if (!(await confirmed(question(), byId(form)))) return;
    try {
      put(byId("outcome"), (await act()).map((text) => element("p", text)));
    } catch (error) {
      put(byId("outcome"), element("p", error.message, { class: "bad" }));
    }
    refresh();
  });
}

function confirmed(question, { dataset: { meaning, yes } }) {
  const dialog = byId("confirm");
  put(byId("confirm-title"), question);
  put(byId("confirm-text"), meaning);
  put(byId("confirm-yes"), yes);
  dialog.showModal();
  return new Promise((resolve) => { answer = resolve; });
}

let answer = null;
byId("confirm").addEventListener("submit", ({ submitter }) => answer(submitter.value === "yes"));
byId("confirm").addEventListener("cancel", () => answer(false));

function trimmed({ rung, device, result, returned_bytes: bytes, seconds, message }) {
  const returned = result === "ok" ? `${known(bytes) ? mib(bytes) : "an unknown amount"} returned` : result === "noop" ? "nothing to return" : "failed";
  return `${rung} on device ${device}: ${returned}, ${number(seconds, 3)} s${message ? `; ${message}` : ""}.`;
}

onSubmit("trim", () => `Trim ${byId("rung").value || "every rung"} on ${byId("trim-device").selectedOptions[0].text}?`, async () => {
  const device = byId("trim-device").value;
  const { json } = await ask("/admin/trim", "POST", { rung: byId("rung").value || null, device: device === "" ? null : Number(device) });
  return json.results.length ? json.results.map(trimmed) : ["There was nothing to trim."];
});

onSubmit("reload", () => "Reload the engine?", async () => {
  const { status, json } = await ask("/admin/reload", "POST");
  return [status === 409 ? `One is in progress already: ${json.phase}.` : `The reload has begun: generation ${json.generation}.`];
});

onSubmit("mode", () => `Set the watchdog to ${byId("mode-name").value}?`, async () => {
  const seconds = Number(byId("mode-for").value);
  const until = seconds ? new Date(Date.now() + 1000 * seconds).toISOString() : null;
  await ask("/admin/watchdog", "PUT", { mode: byId("mode-name").value, until });
  return [`The watchdog is set to ${byId("mode-name").value}${until ? ` until ${moment(until)}` : ""}.`];
});

byId("login").querySelector("form").addEventListener("submit", async (submitted) => {
  submitted.preventDefault();
  const key = byId("key").value;
  byId("key").value = "";
  put(byId("login-error"), "");
  try {
    await ask("/admin/login", "POST", { key });
    await open();
  } catch (error) {
    put(byId("login-error"), error.message);
  }
});
byId("logout").addEventListener("click", () => ask("/admin/logout", "POST").then(showLogin));
byId("span").addEventListener("change", show);
document.addEventListener("visibilitychange", () => { if (!document.hidden && timer !== null) recall().catch(() => refresh()); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((chart) => chart.redraw()));
open();
