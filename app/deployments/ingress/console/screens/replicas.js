// Replicas: their counts, and the hour of replicas and queue that autoscaling looked at.
import { html, overview, history, number, percent, bytes, exact } from "../core.js";
import { Page, Card, Table, Empty, State, Time, Curl, Meter } from "../ui.js";
import { LineChart } from "../charts.js";

export default function Replicas() {
  const now = overview.value, samples = history.value, rows = now?.replicas ?? [];
  if (!now) return html`<${Page} title="Replicas" lead="Connecting…" />`;
  const changes = [];
  samples.replicas.forEach((count, at) => { const before = samples.replicas[at - 1]; if (at && count != null && before != null && count !== before) changes.push({ id: samples.times[at], from: before, to: count, queued: samples.queued[at - 1], open: samples.open[at - 1] }); });
  return html`<${Page} title="Replicas" lead="Each is one engine with its own memory. Ray Serve starts and stops them by its autoscaling settings." actions=${html`<${Curl} small=${false} call=${["GET", "/v1/status"]} />`}>
    <div class="grid two live-data"><${Card} title="Replicas, last hour"><${LineChart} label="Replicas" format=${number} series=${[{ title: "replicas", color: "--s1", fill: true, spans: true }]} data=${[samples.times, samples.replicas]} /></${Card}>
      <${Card} title="Requests on all replicas, last hour"><${LineChart} label="Requests" format=${number} series=${[{ title: "requests", color: "--s3", fill: true, spans: true }]} data=${[samples.times, samples.queued]} /></${Card}></div>
    <${Card} flush title="Now"><${Table} label="Replicas" rows=${rows} columns=${[
      { title: "Replica", cell: row => html`<code>${row.id}</code>` }, { title: "State", cell: row => html`<${State} value=${row.state} />` }, { title: "Started", cell: row => html`<${Time} value=${row.started || null} />` },
      { title: "Running", num: true, cell: row => number(row.stats?.num_running) }, { title: "Waiting", num: true, cell: row => number(row.stats?.num_waiting) },
      { title: "KV blocks", cell: row => row.stats?.num_blocks ? html`<${Meter} label="used" value=${row.stats.num_blocks - row.stats.num_blocks_free} max=${row.stats.num_blocks} text=${percent(1 - row.stats.num_blocks_free / row.stats.num_blocks)} />` : "–" },
      { title: "Rank rows", cell: row => row.num_rank_rows && row.stats?.num_rank_rows_free != null ? html`<${Meter} label="used" value=${row.num_rank_rows - row.stats.num_rank_rows_free} max=${row.num_rank_rows} text=${percent(1 - row.stats.num_rank_rows_free / row.num_rank_rows)} />` : "–" },
      { title: "Adapters on it", num: true, cell: row => number(row.stats?.residents) }, { title: "assigned", num: true, cell: row => number(row.num_assigned) },
      { title: "Adapter found", num: true, cell: row => { const s = row.stats ?? {}, asked = (s.num_adapter_hits ?? 0) + (s.num_adapter_misses ?? 0); return asked ? percent(s.num_adapter_hits / asked) : "–"; } },
      { title: "Memory", num: true, cell: row => row.stats?.memory_bytes ? bytes(row.stats.memory_bytes) : "–" }]} empty=${html`<${Empty} title="No replica">The first request or the autoscaler starts one.</${Empty}>`} /></${Card}>
    <${Card} flush title="Changes of the last hour" aside="with the load just before">${changes.length ? html`<${Table} label="Changes" rows=${changes.reverse()} columns=${[
      { title: "When", cell: row => exact(row.id) }, { title: "Replicas", cell: row => `${row.from} → ${row.to}` }, { title: "Requests on replicas", num: true, cell: row => number(row.queued) }, { title: "Open requests", num: true, cell: row => number(row.open) }]} />` : html`<${Empty} title="No change">The number of replicas has stayed the same for as long as the service remembers.</${Empty}>`}</${Card}></${Page}>`;
}
