// Usage and costs, by day or hour, grouped by project, key, model or adapter.
import { html, get, setQuery, useRead, number, saveCsv } from "../core.js";
import { Page, Card, Table, Empty, Problem, Select, Button, Curl } from "../ui.js";

const RANGES = { day: [86400, "1h", 24], week: [7 * 86400, "1d", 7], month: [30 * 86400, "1d", 30] };
const COLORS = ["--s1", "--s2", "--s3", "--s4", "--s5", "--s6", "--s7"];
const GROUPS = { project_id: "project", api_key_id: "key", model: "model or adapter" };

export default function Usage({ query }) {
  const range = query.get("range") ?? "week", group = query.get("group") ?? "model", what = query.get("what") ?? "output_tokens", project = query.get("project") ?? "";
  const [span, width, limit] = RANGES[range], end = Math.ceil(Date.now() / 3600000) * 3600, start = width === "1d" ? Math.floor((end - span) / 86400 + 1) * 86400 : end - span;
  const call = { start_time: start, bucket_width: width, limit, group_by: [group], project_ids: project ? [project] : [] };
  const path = what === "cost" ? "/v1/organization/costs" : "/v1/organization/usage/completions";
  const asked = what === "cost" ? { ...call, bucket_width: "1d" } : call;
  const usage = useRead(() => get(path, asked), [range, group, what, project], { live: false });
  const buckets = usage.data?.data ?? [], value = result => what === "cost" ? result.amount.value : result[what], name = result => result[group] ?? "(none)";
  const totals = new Map();
  for (const bucket of buckets) for (const result of bucket.results) totals.set(name(result), (totals.get(name(result)) ?? 0) + value(result));
  const groups = [...totals].sort((a, b) => b[1] - a[1]), shown = groups.slice(0, 6).map(([each]) => each), hasRest = groups.length > 6;
  const parts = bucket => { const list = shown.map(() => 0); let rest = 0; for (const result of bucket.results) { const at = shown.indexOf(name(result)); if (at < 0) rest += value(result); else list[at] += value(result); } return hasRest ? [...list, rest] : list; };
  const highest = Math.max(1e-12, ...buckets.map(bucket => parts(bucket).reduce((a, b) => a + b, 0)));
  const format = amount => what === "cost" ? `$${amount.toFixed(amount < 1 ? 4 : 2)}` : number(amount), all = groups.reduce((sum, [, amount]) => sum + amount, 0);
  const day = time => new Date(time * 1000).toLocaleString("en-GB", width === "1h" ? { hour: "2-digit", minute: "2-digit" } : { day: "numeric", month: "short" });
  const rows = buckets.flatMap(bucket => bucket.results.map(result => ({ start: bucket.start_time, ...result })));
  return html`<${Page} title="Usage and costs" lead="From the ledger, which counts every token of every request."
    actions=${html`<${Button} icon="download" disabled=${!rows.length} onClick=${() => saveCsv(`usage-${range}.csv`, [["start", row => new Date(row.start * 1000).toISOString()], ["project", row => row.project_id], ["key", row => row.api_key_id], ["model", row => row.model ?? row.line_item],
      ...(what === "cost" ? [["usd", row => row.amount.value]] : [["requests", row => row.num_model_requests], ["input_tokens", row => row.input_tokens], ["cached_tokens", row => row.input_cached_tokens], ["output_tokens", row => row.output_tokens]])], rows)}>CSV</${Button}><${Curl} small=${false} call=${["GET", path, { query: asked }]} />`}>
    <div class="toolbar"><${Select} label="Range" value=${range} onChange=${each => setQuery({ range: each })} options=${[["day", "24 hours"], ["week", "7 days"], ["month", "30 days"]]} />
      <${Select} label="Show" value=${what} onChange=${each => setQuery({ what: each })} options=${[["output_tokens", "tokens written"], ["input_tokens", "tokens read"], ["num_model_requests", "requests"], ["cost", "cost"]]} />
      <${Select} label="Group by" value=${group} onChange=${each => setQuery({ group: each })} options=${Object.entries(GROUPS)} />${project && html`<${Button} small onClick=${() => setQuery({ project: "" })}>Only ${project} ×</${Button}>`}</div>
    <${Problem} error=${usage.error} />
    <${Card} title=${html`<span class="figure"><strong>${format(all)}</strong>${{ output_tokens: "tokens written", input_tokens: "tokens read", num_model_requests: "requests", cost: "in all" }[what]}</span>`}
      aside=${html`<div class="keys">${[...shown, ...(hasRest ? ["others"] : [])].map((each, at) => html`<span><i class="swatch" style=${{ background: `var(${COLORS[at]})` }}></i>${each}</span>`)}</div>`}>
      ${groups.length ? html`<div class="bars" role="img" aria-label=${`${format(all)} in ${buckets.length} parts; the table below has the sums`}>${buckets.map(bucket => { const list = parts(bucket); return html`<div title=${`${day(bucket.start_time)}: ${format(list.reduce((a, b) => a + b, 0))}`}>${list.map((each, at) => each > 0 && html`<i style=${{ height: `${each / highest * 100}%`, background: `var(${COLORS[at]})` }}></i>`)}</div>`; })}</div>
        <div class="axis"><span>${day(buckets[0].start_time)}</span><span>highest ${format(highest)}</span><span>${day(buckets.at(-1).start_time)}</span></div>`
        : html`<${Empty} title=${usage.isLoading ? "Reading…" : "No usage in this time"}>Requests appear here seconds after they end.</${Empty}>`}</${Card}>
    <${Card} flush title=${`By ${GROUPS[group]}`}><${Table} label="Sums" rows=${groups} rowKey=${row => row[0]} columns=${[{ title: GROUPS[group], cell: row => row[0] }, { title: "Sum", num: true, cell: row => format(row[1]) }, { title: "Share", num: true, cell: row => `${Math.round(row[1] / all * 100)} %` }]} /></${Card}></${Page}>`;
}
