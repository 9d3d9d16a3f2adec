// Events of adapters, and who changed what.
import { html, useSignal, get, setQuery, useRead, may, saveCsv } from "../core.js";
import { Page, Card, Table, Empty, Time, Tabs, Search, Button, Problem, Curl } from "../ui.js";
import { pageOf, detailOf } from "./overview.js";

const SOURCES = {
  events: ["Adapter events", "/v1/events", "name", [["when", row => row.created], ["adapter", row => row.name], ["what", row => row.event], ["where", row => row.replica_id], ["detail", detailOf]]],
  audit: ["Management calls", "/v1/audit", "name", [["when", row => row.created], ["name", row => row.name], ["what", row => row.action], ["who", row => row.who], ["detail", detailOf]]],
  admin: ["Projects and keys", "/v1/organization/audit_logs", null, [["when", row => row.effective_at], ["project", row => row.project?.id], ["what", row => row.type], ["who", row => row.actor?.api_key?.id], ["detail", row => row[row.type]?.changes_requested]]],
};
const text = value => value == null ? "" : typeof value === "object" ? JSON.stringify(value) : String(value);
export default function Activity({ query }) {
  const tab = query.get("tab") ?? "events", name = query.get("name") ?? "", [title, path, filter, columns] = SOURCES[tab], pages = useSignal([]);
  const asked = { limit: 100, ...(filter && name ? { [filter]: name } : {}) };
  const first = useRead(async () => { pages.value = []; return get(path, asked); }, [tab, name]);
  const last = pages.value.at(-1) ?? first.data, rows = [...(first.data?.data ?? []), ...pages.value.flatMap(page => page.data)];
  const more = async () => { pages.value = [...pages.value, await get(path, { ...asked, [tab === "admin" ? "after" : "before"]: last.last_id })]; };
  const tabs = Object.entries(SOURCES).filter(([each]) => each !== "admin" || may.administer.value).map(([each, [word]]) => [each, word]);
  return html`<${Page} title="Events and audit" lead="What happened to adapters, and who changed what, newest first."
    actions=${html`<${Button} icon="download" disabled=${!rows.length} onClick=${() => saveCsv(`${tab}.csv`, columns.map(([word, read]) => [word, word === "when" ? row => new Date(read(row) * 1000).toISOString() : read]), rows)}>CSV</${Button}><${Curl} small=${false} call=${["GET", path, { query: asked }]} />`}>
    <${Tabs} label="Kind" value=${tab} tabs=${tabs} onChange=${value => setQuery({ tab: value, name: "" })} />
    <${Card} flush title=${filter ? html`<${Search} label="Only this name" value=${name} onInput=${value => setQuery({ name: value })} />` : title}><${Problem} error=${first.error} />
      <${Table} label=${title} rows=${rows} columns=${columns.map(([word, read], at) => ({ title: word[0].toUpperCase() + word.slice(1), className: word === "detail" ? "wrap" : "",
        cell: row => word === "when" ? html`<${Time} value=${read(row)} />` : at === 1 && tab === "events" ? html`<a href=${pageOf(row)}>${read(row)}</a>` : word === "what" && text(read(row)).startsWith("failed") ? html`<span class="bad-text">${text(read(row))}</span>` : text(read(row)) }))}
        empty=${first.data && html`<${Empty} title="Nothing yet">Loads, changes and deletions are listed here.</${Empty}>`} />
      ${last?.has_more && html`<div class="pager"><${Button} small onClick=${more}>Older</${Button}></div>`}</${Card}></${Page}>`;
}
