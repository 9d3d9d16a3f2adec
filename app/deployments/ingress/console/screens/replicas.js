// Replicas: their counts, draining one, and a timeline of what autoscaling wanted, why, and what came of it.
import { html, overview, history, number, percent, bytes, exact, api } from "../core.js";
import { Page, Card, Table, Empty, State, Time, Curl, Meter, Button, Tag, confirmName } from "../ui.js";
import { LineChart } from "../charts.js";

export default function Replicas() {
  const now = overview.value, samples = history.value, rows = now?.replicas ?? [];
  if (!now) return html`<${Page} title="Replicas" lead="Connecting…" />`;
  const decisions = now.scaling_decisions ?? [], own = decisions.filter(each => each.deployment === "EngineReplica");
  const wanted = samples.times.map((time, at) => own.find(each => each.created >= time && each.created < (samples.times[at + 1] ?? Infinity))?.target_num_replicas ?? null);
  const lines = [{ title: "replicas", color: "--s1", fill: true, spans: true }, ...own.length ? [{ title: "wanted", color: "--s2", sparse: true, spans: false }] : []];
  return html`<${Page} title="Replicas" lead="Each is one engine with its own memory. Ray Serve starts and stops them by its autoscaling settings." actions=${html`<${Curl} small=${false} call=${["GET", "/v1/overview"]} />`}>
    <div class="grid two live-data"><${Card} title="Replicas, last hour"><${LineChart} key=${lines.length} label="Replicas" format=${number} series=${lines} data=${[samples.times, samples.replicas, wanted].slice(0, lines.length + 1)} /></${Card}>
      <${Card} title="Requests on all replicas, last hour"><${LineChart} label="Requests" format=${number} series=${[{ title: "requests", color: "--s3", fill: true, spans: true }]} data=${[samples.times, samples.queued]} /></${Card}></div>
    <${Card} flush title="Now"><${Table} label="Replicas" rows=${rows} columns=${[
      { title: "Replica", cell: row => html`<code>${row.id}</code>` }, { title: "State", cell: row => html`<${State} value=${row.state} />` }, { title: "Started", cell: row => html`<${Time} value=${row.started || null} />` },
      { title: "Running", num: true, cell: row => number(row.stats?.num_running ?? row.num_requests) }, { title: "Waiting", num: true, cell: row => number(row.stats?.num_waiting) },
      { title: "KV blocks", cell: row => row.stats?.num_blocks ? html`<${Meter} label="used" value=${row.stats.num_blocks - row.stats.num_blocks_free} max=${row.stats.num_blocks} text=${percent(1 - row.stats.num_blocks_free / row.stats.num_blocks)} />` : "–" },
      { title: "Rank rows", cell: row => row.num_rank_rows && row.stats?.num_rank_rows_free != null ? html`<${Meter} label="used" isCache value=${row.num_rank_rows - row.stats.num_rank_rows_free} max=${row.num_rank_rows} text=${percent(1 - row.stats.num_rank_rows_free / row.num_rank_rows)} />` : "–" },
      { title: "Adapters held", num: true, cell: row => number(row.stats?.residents) }, { title: "Assigned", num: true, cell: row => number(row.num_assigned) },
      { title: "Found on it", num: true, cell: row => { const s = row.stats ?? {}, asked = (s.num_adapter_hits ?? 0) + (s.num_adapter_misses ?? 0); return asked ? percent(s.num_adapter_hits / asked) : "–"; } },
      { title: "Memory", num: true, cell: row => row.stats?.memory_bytes ? bytes(row.stats.memory_bytes) : "–" },
      { title: "", cell: row => row.state !== "draining" && html`<${Button} small kind="quiet-danger" onClick=${() => drain(row, rows)}>Drain</${Button}>` }]} empty=${html`<${Empty} title="No replica">The first request or the autoscaler starts one.</${Empty}>`} /></${Card}>
    <${Timeline} decisions=${decisions} samples=${samples} isKnown=${now.scaling_decisions != null} /></${Page}>`;
}

const drain = (row, rows) => {
  const isLast = !rows.some(each => each.state === "running" && each.id !== row.id);
  const call = ["POST", `/v1/replicas/${encodeURIComponent(row.id)}/drain`, { query: { force: isLast || null } }];
  confirmName({
    title: `Drain ${row.id}`, name: row.id, submit: "Drain", done: `${row.id} drains`,
    what: "It gets no new requests. Running ones end on it; what is left after two minutes continues on other replicas. Ray Serve stops it and starts another in its place.",
    depends: () => [row.num_requests && `running requests: ${row.num_requests}`, row.num_assigned && `assigned adapters: ${row.num_assigned}, which get other replicas`,
      isLast && "all new requests: no other replica is running, so they wait for the next one, or are refused with 503"].filter(Boolean),
    call: () => call, run: () => api(...call),
  });
};

/** Decisions, and the changes in the samples with the load just before, newest first. */
const Timeline = ({ decisions, samples, isKnown }) => {
  const entries = decisions.map(each => ({ id: `${each.created} ${each.deployment} ${each.target_num_replicas}`, time: each.created, isWanted: true, from: each.prev_num_replicas, to: each.target_num_replicas,
    where: each.deployment, why: `${each.reason} need ${number(each.needed_replicas)} ${each.needed_replicas === 1 ? "replica" : "replicas"}` }));
  samples.replicas.forEach((count, at) => {
    const before = samples.replicas[at - 1];
    if (at && count != null && before != null && count !== before) entries.push({ id: samples.times[at], time: samples.times[at], from: before, to: count, why: `${number(samples.queued[at - 1])} requests on replicas, ${number(samples.open[at - 1])} open` });
  });
  entries.sort((a, b) => b.time - a.time);
  return html`<${Card} flush title="Timeline" aside=${isKnown ? "what autoscaling wanted, and what changed" : "autoscaling's decisions are not known while placement restarts"}>${entries.length ? html`<${Table} label="Timeline" rows=${entries} columns=${[
    { title: "When", cell: row => exact(row.time) }, { title: "What", cell: row => html`<${Tag} kind=${row.isWanted ? "accent" : ""}>${row.isWanted ? "wanted" : "changed"}</${Tag}> ${row.isWanted && row.where !== "EngineReplica" ? row.where : ""}` },
    { title: "Replicas", cell: row => `${row.from} → ${row.to}` }, { title: "Why, or the load just before", cell: row => row.why }]} />`
    : html`<${Empty} title="No change">The number of replicas has stayed the same for as long as the service remembers.</${Empty}>`}</${Card}>`;
};
