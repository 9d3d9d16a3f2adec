// Settings: this page's preferences, the version, and the service's configuration as it is.
import { html, useSignal, get, useRead, session, theme, zone, may, overview, address } from "../core.js";
import { Page, Card, Table, Facts, Select, Search, Problem, Curl, Tag, Empty } from "../ui.js";

const text = value => value === null ? "none" : typeof value === "object" ? JSON.stringify(value) : String(value);
export default function Settings() {
  const release = useRead(() => get("/version"), [], { live: false }), settings = useRead(() => may.operate.value ? get("/v1/settings") : null, [], { live: false }), search = useSignal("");
  const rows = (settings.data?.data ?? []).filter(row => !search.value || row.id.includes(search.value.toLowerCase()) || row.description.toLowerCase().includes(search.value.toLowerCase()));
  const changed = rows.filter(row => row.is_set), rest = rows.filter(row => !row.is_set);
  return html`<${Page} title="Settings" lead="This page's preferences, and what the service runs with.">
    <div class="grid"><${Card} title="This page"><div class="stack tight selects"><${Select} label="Theme" value=${theme.value} onChange=${value => { theme.value = value; }} options=${[["auto", "as the system"], ["light", "light"], ["dark", "dark"]]} />
        <${Select} label="Times" value=${zone.value} onChange=${value => { zone.value = value; }} options=${[["local", "local"], ["utc", "UTC"]]} /></div></${Card}>
      <${Card} title="The service"><${Facts} items=${[["Version", release.data?.version], ["Base model", session.value.model], ["Address", html`<code>${address}</code>`], ["Placement policy", overview.value?.policy ?? "–"]]} />
        <p class="muted">On the server, <code>polylora doctor</code> checks the machine and its configuration. <a href=${`${address}/openapi.json`}>openapi.json</a> describes every route.</p></${Card}></div>
    ${may.operate.value && html`<${Card} flush title=${html`<${Search} label="Find a setting" value=${search.value} onInput=${value => { search.value = value; }} />`} aside=${html`<${Curl} call=${["GET", "/v1/settings"]} />`}><${Problem} error=${settings.error} />
      <${Table} label="Settings" rows=${[...changed, ...rest]} columns=${[{ title: "Setting", cell: row => html`<code>${row.id}</code> ${row.is_set && html`<${Tag} kind="accent">changed</${Tag}>`}` }, { title: "Value", cell: row => html`<code>${text(row.value)}</code>${row.is_set && html`<span class="sub">default ${text(row.default)}</span>`}` }, { title: "What it does", className: "wrap", cell: row => row.description }]}
        empty=${settings.data && html`<${Empty} title="No setting matches">Names and descriptions are searched.</${Empty}>`} /></${Card}>`}</${Page}>`;
}
