// State that every screen shares: routes of the page, the session, calls of the API, and the live stream.
//
// A key is only in this module's memory, or the server's cookie stands for it; never in a URL or in storage.
import { h } from "./vendor/preact.js";
import { useEffect, useLayoutEffect, useRef } from "./vendor/hooks.js";
import { signal, computed, effect, useSignal, batch } from "./vendor/signals.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);
export { signal, computed, effect, useSignal, useEffect, useLayoutEffect, useRef, batch };

/** The service's address, whatever prefix a proxy gives it: the page is at <address>/console/. */
export const address = new URL("..", document.baseURI).href.replace(/\/$/, "");

// -- preferences: not secret, so storage may have them --

const stored = name => { try { return localStorage.getItem(`polylora.${name}`); } catch { return null; } };
const preference = (name, initial) => {
  const value = signal(stored(name) ?? initial);
  effect(() => { try { localStorage.setItem(`polylora.${name}`, value.value); } catch { /* private window */ } });
  return value;
};
export const theme = preference("theme", "auto");
export const zone = preference("zone", "local");
const systemDark = matchMedia("(prefers-color-scheme: dark)");
const systemIsDark = signal(systemDark.matches);
systemDark.addEventListener("change", event => { systemIsDark.value = event.matches; });
/** Whether the page is dark now; canvases draw again when it changes. */
export const isDark = computed(() => theme.value === "dark" || (theme.value === "auto" && systemIsDark.value));
effect(() => { document.documentElement.dataset.theme = isDark.value ? "dark" : "light"; });

// -- the page's route: #/adapters/sql?tab=events --

const parseHash = () => {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { path: path.split("/").filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query) };
};
export const route = signal(parseHash());
addEventListener("hashchange", () => { route.value = parseHash(); });

export const link = (path, query) => {
  const text = new URLSearchParams(Object.entries(query ?? {}).filter(([, v]) => v !== "" && v != null)).toString();
  return "#/" + path.map(encodeURIComponent).join("/") + (text ? "?" + text : "");
};
export const go = (path, query) => { location.hash = link(path, query); };
/** Change parts of the query in place; empty values leave it. */
export const setQuery = changes => {
  const query = Object.fromEntries(route.value.query);
  history.replaceState(null, "", link(route.value.path, { ...query, ...changes }));
  route.value = parseHash();
};

// -- calls --

export class ApiError extends Error {
  constructor(status, body) {
    const error = body?.error ?? {};
    super(error.message ?? `the service answered ${status}`);
    this.status = status; this.code = error.code; this.param = error.param;
  }
}

const key = signal("");
/** The key that the playground uses when the session's own may not infer. */
export const inferenceKey = signal("");
export const session = signal(undefined);      // undefined: not known yet; null: sign in
export const sessionNote = signal("");
/** The project that an admin looks at; "" for the public adapters. */
export const project = signal("");

export const headers = (more = {}, useKey = "") => {
  const all = { "X-Polylora-Console": "1", ...more };
  const value = useKey || key.value;
  if (value) all.Authorization = `Bearer ${value}`;
  if (project.value && session.value?.kind === "admin" && !useKey) all["OpenAI-Project"] = project.value;
  return all;
};
export const url = (path, query) => {
  const params = new URLSearchParams();
  for (const [name, value] of Object.entries(query ?? {})) {
    if (Array.isArray(value)) value.forEach(each => params.append(`${name}[]`, each));
    else if (value !== "" && value != null) params.set(name, value);
  }
  const text = params.toString();
  return address + path + (text ? "?" + text : "");
};

export async function send(method, path, { query, body, signal: abort, useKey, more } = {}) {
  const isJson = body !== undefined && !(body instanceof FormData) && !(body instanceof Blob);
  const answer = await fetch(url(path, query), {
    method, signal: abort, credentials: "same-origin",
    headers: headers({ ...(isJson ? { "Content-Type": "application/json" } : {}), ...more }, useKey),
    body: isJson ? JSON.stringify(body) : body,
  });
  if (answer.ok) return answer;
  let text = null;
  try { text = await answer.json(); } catch { /* a proxy's own page */ }
  if (answer.status === 401 && session.value && !useKey) signedOut(text?.error?.message ?? "");
  throw new ApiError(answer.status, text);
}
export const api = async (method, path, options) => {
  const answer = await send(method, path, options);
  return answer.status === 204 ? null : answer.json();
};
export const get = (path, query, options) => api("GET", path, { query, ...options });

/** All entries of a paged list, up to `most`. */
export async function all(path, query = {}, most = 20000) {
  const entries = [];
  let after;
  do {
    const page = await get(path, { limit: /organization|batches/.test(path) ? 100 : 1000, ...query, after });
    entries.push(...page.data);
    after = page.has_more ? page.last_id ?? page.data.at(-1)?.id : null;
  } while (after && entries.length < most);
  return entries;
}

/** An action as a command. The key is a variable of the shell, never the key itself. */
export function curl(method, path, { query, body, file, more } = {}) {
  const quote = text => `'${String(text).replaceAll("'", `'\\''`)}'`;
  const lines = [`curl ${method === "GET" ? "" : `-X ${method} `}${quote(url(path, query))}`];
  if (session.value?.kind !== "open") lines.push(`-H "Authorization: Bearer $POLYLORA_API_KEY"`);
  if (project.value && session.value?.kind === "admin") lines.push(`-H ${quote(`OpenAI-Project: ${project.value}`)}`);
  for (const [name, value] of Object.entries(more ?? {})) lines.push(`-H ${quote(`${name}: ${value}`)}`);
  if (body !== undefined) lines.push(`--json ${quote(JSON.stringify(body))}`);
  if (file) lines.push(file);
  return lines.join(" \\\n  ");
}

// -- the session --

export async function findSession() {
  try {
    session.value = await get("/v1/session");
  } catch (error) {
    if (error.status === 401) { session.value = null; sessionNote.value = ""; } else throw error;
  }
}
export async function signIn(value, keep) {
  const found = await api("GET", "/v1/session", { useKey: value });
  if (keep) await api("POST", "/v1/session", { useKey: value, body: {} });
  batch(() => { key.value = keep ? "" : value; project.value = ""; session.value = found; sessionNote.value = ""; });
}
export async function signOut() {
  try { await api("DELETE", "/v1/session"); } catch { /* the cookie had ended */ }
  signedOut("");
}
function signedOut(note) {
  batch(() => {
    key.value = ""; inferenceKey.value = ""; project.value = ""; session.value = null; sessionNote.value = note;
    overview.value = null; history_.value = emptyHistory();
  });
}
export const may = {
  operate: computed(() => session.value != null && session.value.kind !== "project"),
  administer: computed(() => session.value?.kind === "admin"),
  manage: computed(() => session.value != null && session.value.role !== "inference"),
  infer: computed(() => session.value?.kind === "open"
    || (session.value?.kind === "project" && session.value.role !== "management")),
};

// -- live: one stream of events for all screens --

const COLUMNS = ["times", "requests", "errors", "refused", "prompt_tokens", "cached_tokens", "completion_tokens",
  "time_to_first_token_p50", "time_to_first_token_p99", "open", "queued", "replicas"];
const emptyHistory = () => Object.fromEntries(COLUMNS.map(name => [name, []]));
export const overview = signal(null);
const history_ = signal(emptyHistory());
export { history_ as history };
const heard = signal(0);
export const clock = signal(Date.now());
setInterval(() => { clock.value = Date.now(); }, 1000);
/** Seconds since the stream's last event; null before the first. */
export const age = computed(() => heard.value ? Math.max(0, (clock.value - heard.value) / 1000) : null);
export const isStale = computed(() => session.value != null && age.value !== null && age.value > 14);
/** Rises when adapters, aliases or events have changed: screens read their lists again. */
export const changed = signal(0);

function take(message, isFirst) {
  const before = isFirst ? null : overview.value;  // another ingress counts changes from another start
  batch(() => {
    overview.value = message;
    heard.value = Date.now();
    if (message.samples.times.length) {
      const old = history_.value, from = message.time - 3600;
      const keep = old.times.findIndex(time => time >= from);
      const next = {};
      for (const name of COLUMNS) {
        const part = keep < 0 ? [] : old[name].slice(keep);
        next[name] = part.concat(message.samples[name] ?? message.samples.times.map(() => null));
      }
      history_.value = next;
    }
    const isNew = !before || before.changes !== message.changes || before.events[0]?.id !== message.events[0]?.id;
    if (isNew) changed.value++;
  });
}

let stream = null;
async function follow(abort) {
  let pause = 500;
  while (!abort.signal.aborted) {
    try {
      const since = history_.value.times.at(-1) ?? 0;
      const answer = await send("GET", "/v1/overview", { query: { stream: true, since }, signal: abort.signal });
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let isFirst = true;
      for await (const data of eventsOf(reader)) { take(data, isFirst); isFirst = false; pause = 500; }
    } catch (error) {
      if (abort.signal.aborted || error.status === 401) return;
      await new Promise(resolve => setTimeout(resolve, pause));
      pause = Math.min(pause * 2, 10000);
    }
  }
}
/** The JSON of each event of a stream, until `[DONE]`. */
export async function* eventsOf(reader) {
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;  // a comment that keeps the connection alive
      const data = part.slice(6);
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}
function restart() {
  stream?.abort();
  stream = null;
  if (session.value && !document.hidden) { stream = new AbortController(); follow(stream); }
}
effect(() => {
  session.value; project.value;
  overview.peek(); overview.value = null; history_.value = emptyHistory(); heard.value = 0;
  queueMicrotask(restart);  // it reads signals that are no reason to connect again
});
document.addEventListener("visibilitychange", restart);  // a page that nobody sees costs nothing

// -- reading on a screen --

/** `{data, error, isLoading, reload}` of what `read` promises; again when `deps` or the registry change. */
export function useRead(read, deps = [], { live = true } = {}) {
  const state = useSignal({ data: null, error: null, isLoading: true });
  const turn = useRef(0);
  const run = () => {
    const mine = ++turn.current;
    state.value = { ...state.peek(), isLoading: true };
    Promise.resolve().then(read).then(
      data => { if (mine === turn.current) state.value = { data, error: null, isLoading: false }; },
      error => { if (mine === turn.current) state.value = { data: state.peek().data, error, isLoading: false }; },
    );
  };
  useEffect(run, [...deps, project.value, session.value?.key_id, live ? changed.value : 0]);
  useEffect(() => () => { turn.current = -1; }, []);
  return { ...state.value, reload: run };
}

// -- messages of finished actions --

export const messages = signal([]);
export function say(text, kind = "ok") {
  const message = { text, kind, id: Math.random() };
  messages.value = [...messages.value, message];
  setTimeout(() => { messages.value = messages.value.filter(each => each !== message); }, kind === "bad" ? 12000 : 5000);
}
/** Run an action and say how it ended; returns what it returned, or undefined. */
export async function act(what, work) {
  try {
    const result = await work();
    say(what);
    changed.value++;
    return result ?? null;
  } catch (error) {
    say(error.message, "bad");
    return undefined;
  }
}

// -- numbers and times --

const plain = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 2 });
const compact = new Intl.NumberFormat("en-GB", { notation: "compact", maximumFractionDigits: 1 });
export const number = value => value == null ? "–" : Math.abs(value) >= 10000 ? compact.format(value)
  : plain.format(Math.abs(value) >= 100 ? Math.round(value) : value);
export const percent = value => value == null || Number.isNaN(value) ? "–"
  : `${value > 0 && value < 0.1 ? (value * 100).toFixed(1) : Math.round(value * 100)} %`;
export const bytes = value => {
  if (value == null) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < 4) { value /= 1024; unit++; }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
};
export const seconds = value => value == null ? "–" : value < 1 ? `${Math.round(value * 1000)} ms`
  : value < 90 ? `${value.toFixed(value < 10 ? 2 : 1)} s` : duration(value);
export const duration = value => value < 90 ? `${Math.round(value)} s` : value < 5400 ? `${Math.round(value / 60)} min`
  : value < 129600 ? `${Math.round(value / 3600)} h` : `${Math.round(value / 86400)} d`;
export const exact = time => time == null ? "" : zone.value === "utc"
  ? new Date(time * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC"
  : new Date(time * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" });
export const ago = time => {
  if (time == null) return "–";
  const passed = clock.value / 1000 - time;
  return passed < 0 ? `in ${duration(-passed)}` : passed < 3 ? "just now" : `${duration(passed)} ago`;
};

/** Save rows as a CSV file of this browser; text that a spreadsheet would run gets an apostrophe. */
export function saveCsv(name, columns, rows) {
  const cell = value => {
    let text = value == null ? "" : typeof value === "object" ? JSON.stringify(value) : String(value);
    if (/^[=+\-@\t\r]/.test(text) && Number.isNaN(Number(text))) text = "'" + text;
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const lines = [columns.map(([title]) => cell(title)), ...rows.map(row => columns.map(([, read]) => cell(read(row))))];
  save(name, new Blob([lines.map(line => line.join(",")).join("\r\n") + "\r\n"], { type: "text/csv" }));
}
export function save(name, blob) {
  const place = URL.createObjectURL(blob);
  const anchor = Object.assign(document.createElement("a"), { href: place, download: name });
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(place), 10000);
}
