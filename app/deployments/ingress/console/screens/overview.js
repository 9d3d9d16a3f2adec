// Overview: what is wrong first, then the last hour, replicas, memory and events.
import {
  html, overview, history, may, number, seconds, bytes, percent, link, computed,
} from "../core.js";
import { Page, Card, Table, Empty, State, Time, Meter, Icon, Curl } from "../ui.js";
import { LineChart } from "../charts.js";

const STEP = 5;
/** The hour on an even grid: a sample that is absent had no request. */
const grid = computed(() => {
  const samples = history.value, now = overview.value;
  if (!now) return null;
  const end = Math.floor(now.time / STEP) * STEP - STEP;
  const first = samples.times[0] ?? end;
  const start = Math.max(end - 3600, first);
  const times = [];
  for (let time = start; time <= end; time += STEP) times.push(time);
  const at = new Map(samples.times.map((time, index) => [time, index]));
  const column = (name, absent) => times.map(time => at.has(time) ? samples[name][at.get(time)] ?? absent : absent);
  const rate = name => column(name, 0).map(value => value / STEP);
  return { times, column, rate };
});
const mean = (values, last) => {
  const part = values.slice(-last).filter(value => value != null);
  return part.length ? part.reduce((a, b) => a + b, 0) / part.length : null;
};

export default function Overview() {
  const now = overview.value;
  if (!now || !grid.value) return html`<${Page} title="Overview" lead="Connecting to the service…" />`;
  const { times, column, rate } = grid.value;
  const requests = rate("requests"), refused = rate("refused"), errors = rate("errors");
  const written = rate("completion_tokens"), read = rate("prompt_tokens");
  const p50 = column("time_to_first_token_p50", null), p99 = column("time_to_first_token_p99", null);
  const open = column("open", null), queued = column("queued", null);
  const isOperator = may.operate.value;
  return html`<${Page} title="Overview"
    lead=${isOperator ? `${now.is_ready ? "Serving" : "Not serving"} ${now.model} with ${number(now.num_adapters)} ${now.num_adapters === 1 ? "adapter" : "adapters"} on ${now.replicas.length} ${now.replicas.length === 1 ? "replica" : "replicas"}.`
      : `${now.is_ready ? "The service is ready." : "The service is not ready."} This project has ${number(now.num_adapters)} ${now.num_adapters === 1 ? "adapter" : "adapters"}.`}
    actions=${html`<${Curl} small=${false} call=${["GET", "/v1/overview"]} />`}>
    <${Problems} now=${now} refused=${refused} errors=${errors} />
    <div class="grid two live-data">
      <${Graph} title="Requests per second" data=${[times, requests, refused, errors]} format=${number} series=${[
        { title: "finished", color: "--s1", fill: true }, { title: "refused", color: "--s2" }, { title: "failed", color: "--bad" }]}
        figures=${[mean(requests, 6), mean(refused, 6), mean(errors, 6)]} />
      <${Graph} title="Tokens per second" data=${[times, written, read]} format=${number} series=${[
        { title: "written", color: "--s1", fill: true }, { title: "read", color: "--s3" }]}
        figures=${[mean(written, 6), mean(read, 6)]} />
      <${Graph} title="Time to first token" data=${[times, p50, p99]} format=${seconds} series=${[
        { title: "median", color: "--s1", sparse: true }, { title: "99th percentile", color: "--s2", sparse: true }]}
        figures=${[mean(p50, 6), mean(p99, 6)]} />
      ${isOperator && html`<${Graph} title="Open and queued" data=${[times, open, queued]} format=${number} series=${[
        { title: "open here", color: "--s1", fill: true, spans: true }, { title: "on all replicas", color: "--s3", spans: true }]}
        figures=${[now.num_open_requests, queued.at(-1)]} />`}
    </div>
    ${isOperator && html`<div class="grid side-main live-data"><${Replicas} replicas=${now.replicas} /><${Memory} now=${now} /></div>`}
    <${Card} title="Last events" flush aside=${html`<a href=${link(["activity"])}>All events</a>`}><${EventList} events=${now.events.slice(0, 8)} /></${Card}>
  </${Page}>`;
}

const Graph = ({ title, data, series, format, figures }) => html`<${Card} title=${title}>
  <div class="figures">${series.map((each, index) => html`<span class="figure"><span class="swatch" style=${{ background: `var(${each.color})` }}></span>
    <strong>${format(figures[index])}</strong>${each.title}</span>`)}</div>
  <${LineChart} data=${data} series=${series} format=${format} label=${title} /></${Card}>`;

const Problems = ({ now, refused, errors }) => {
  const found = [];
  if (!now.is_ready) found.push(["bad", "No replica is ready", "Requests wait or are refused with 503 until one is.", may.operate.value ? link(["replicas"]) : null, "See replicas"]);
  for (const each of now.replicas ?? []) {
    if (each.state === "unreachable") found.push(["bad", `Replica ${each.id} cannot be reached`, "Its streams continue on other replicas. Placement removes it if it stays silent.", link(["replicas"]), "See replicas"]);
    const stats = each.stats;
    if (stats?.num_blocks && stats.num_blocks_free / stats.num_blocks < 0.05) found.push(["warn", `Replica ${each.id} has little KV memory left`, `${stats.num_blocks_free} of ${stats.num_blocks} blocks are free; new requests queue.`, link(["replicas"]), "See replicas"]);
  }
  for (const [name, reason] of failures(now.events)) found.push(["bad", `${name} failed to load`, reason, link(["adapters", name]), "Why, and what to do"]);
  const total = values => values.slice(-60).reduce((a, b) => a + b, 0) * STEP;
  if (total(refused) >= 1) found.push(["warn", `${number(total(refused))} requests were refused in the last five minutes`, "A limit was reached, or no replica had room.", null]);
  if (total(errors) >= 1) found.push(["bad", `${number(total(errors))} requests failed in the last five minutes`, "The service's log has the reasons.", null]);
  if (!found.length) return html`<div class="notice ok"><${Icon} name="check" /><div><strong>Nothing needs attention</strong></div></div>`;
  return html`<section class="problems" aria-label="Problems">${found.slice(0, 6).map(([kind, title, text, place, word]) => html`<div class=${`problem ${kind}`}>
    <${Icon} name="warn" /><div class="grow"><strong>${title}</strong><div>${text}</div></div>${place && html`<a href=${place} class="button small">${word}</a>`}</div>`)}
    ${found.length > 6 && html`<p class="muted">and ${found.length - 6} more</p>`}</section>`;
};
/** Adapters whose last load failed, among these events (newest first). */
export const failures = events => {
  const last = new Map();
  for (const event of events) {
    if (["failed", "routable", "registered", "registered lazily", "removed"].includes(event.event) && !last.has(event.name)) last.set(event.name, event);
  }
  return [...last].filter(([, event]) => event.event === "failed").map(([name, event]) => [name, String(event.detail ?? "")]);
};

const Replicas = ({ replicas }) => html`<${Card} title="Replicas" flush aside=${html`<a href=${link(["replicas"])}>Details</a>`}>
  <${Table} label="Replicas" rows=${replicas} columns=${[
    { title: "Replica", cell: row => html`<code>${row.id}</code>` },
    { title: "State", cell: row => html`<${State} value=${row.state} />` },
    { title: "Running", num: true, cell: row => number(row.stats?.num_running ?? row.num_requests) },
    { title: "Waiting", num: true, cell: row => number(row.stats?.num_waiting) },
    { title: "KV used", num: true, cell: row => row.stats?.num_blocks ? percent(1 - row.stats.num_blocks_free / row.stats.num_blocks) : "–" },
    { title: "Adapters", num: true, cell: row => number(row.stats?.residents ?? row.num_assigned) },
  ]} empty=${html`<${Empty} title="No replica">Replicas appear when their engine has started; the first takes a minute or two.</${Empty}>`} /></${Card}>`;

const Memory = ({ now }) => {
  const host = now.tiers?.host ?? {}, disk = now.tiers?.disk ?? {};
  const total = key => now.replicas.reduce((sum, each) => sum + (each.stats?.[key] ?? 0), 0);
  const blocks = total("num_blocks"), used = blocks - total("num_blocks_free");
  const rows = now.replicas.reduce((sum, each) => sum + each.num_rank_rows, 0), free = total("num_rank_rows_free");
  const hits = host.hits ?? 0, asked = hits + (host.misses ?? 0);
  return html`<${Card} title="Memory by tier">
    <${Meter} label="Device: KV blocks" value=${used} max=${blocks} text=${blocks ? `${number(used)} of ${number(blocks)}` : "no data"} />
    <${Meter} label="Device: rank rows" isCache value=${rows - free} max=${rows} text=${rows ? `${number(rows - free)} of ${number(rows)}` : "no data"} />
    ${[["Host memory", host], ["Disk", disk]].map(([label, tier]) => html`<${Meter} label=${label} isCache value=${tier.held_bytes ?? 0} max=${tier.limit_bytes ?? 0} text=${held(tier)} />`)}
    ${asked > 0 && html`<p class="muted">Reads found in host memory: ${percent(hits / asked)}</p>`}
  </${Card}>`;
};

const held = ({ held_bytes = 0, limit_bytes, held_adapters = 0 }) => `${number(held_adapters)} adapters, ${bytes(held_bytes)}${limit_bytes ? ` of ${bytes(limit_bytes)}` : ""}`;

/** The page about an event's name, and its detail in words. */
export const pageOf = event => event.event.includes("alias") ? link(["aliases"]) : link(["adapters", event.name]);
export const detailOf = ({ detail }) => detail == null || typeof detail === "string" ? detail
  : detail.targets ? `version ${detail.version}: ${Object.entries(detail.targets).map(([name, weight]) => `${name} ${number(weight)}`).join(", ")}` : JSON.stringify(detail);

const words = event => event.event === "routable" ? "is served" : event.event;
export const EventList = ({ events }) => events.length ? html`<ul class="log">${events.map(event => html`<li key=${event.id}><${Time} value=${event.created} />
  <div><a href=${pageOf(event)}>${event.name}</a>
  ${" "}<span class=${event.event.startsWith("failed") ? "failed" : ""}>${words(event)}</span>${event.replica_id && html` <span class="muted">on ${event.replica_id}</span>`}
  ${event.detail && html`<span class="detail">${detailOf(event)}</span>`}</div></li>`)}</ul>`
  : html`<${Empty} title="No events yet">Loads, moves between tiers and failures of adapters appear here.</${Empty}>`;
