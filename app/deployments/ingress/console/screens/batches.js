// Batches of the caller, with their progress and results.
import { html, useSignal, useEffect, api, all, send, act, save, useRead, number } from "../core.js";
import { Page, Card, Table, Empty, State, Time, Button, Problem, Curl, Field, FormDialog, confirmName, openDialog } from "../ui.js";

export const download = (id, name) => act(`${name} was downloaded`, async () => save(name, await (await send("GET", `/v1/files/${id}/content`)).blob()));
export default function Batches() {
  const list = useRead(() => all("/v1/batches", {}, 500)), rows = list.data ?? [];
  const isRunning = rows.some(row => ["validating", "in_progress", "finalizing", "cancelling"].includes(row.status));
  useEffect(() => { if (!isRunning) return undefined; const timer = setInterval(list.reload, 4000); return () => clearInterval(timer); }, [isRunning]);
  return html`<${Page} title="Batches" lead="Files of requests that run at lower priority than interactive ones, within 24 hours."
    actions=${html`<${Button} kind="primary" icon="plus" onClick=${() => openDialog(() => html`<${New} onDone=${list.reload} />`)}>New batch</${Button}>`}>
    <${Card} flush title="Batches" aside=${html`<${Curl} call=${["GET", "/v1/batches"]} />`}><${Problem} error=${list.error} /><${Table} label="Batches" rows=${rows} columns=${[
      { title: "Batch", cell: row => html`<code>${row.id}</code><span class="sub">${row.endpoint}</span>` }, { title: "State", cell: row => html`<${State} value=${row.status} />` },
      { title: "Progress", cell: row => { const { total, completed, failed } = row.request_counts ?? {}; return html`<progress value=${completed + failed} max=${total || 1} aria-label="Progress"></progress><span class="sub">${number(completed)} of ${number(total)}${failed ? html`, <span class="bad-text">${number(failed)} failed</span>` : ""}</span>`; } },
      { title: "Created", cell: row => html`<${Time} value=${row.created_at} />` },
      { title: "", className: "end", cell: row => html`${row.output_file_id && html`<${Button} small onClick=${() => download(row.output_file_id, `${row.id}-output.jsonl`)}>Answers</${Button}> `}${row.error_file_id && html`<${Button} small onClick=${() => download(row.error_file_id, `${row.id}-errors.jsonl`)}>Errors</${Button}> `}
        ${["validating", "in_progress"].includes(row.status) && html`<${Button} small kind="quiet-danger" onClick=${() => confirmName({ title: "Cancel the batch", name: row.id, submit: "Cancel the batch", done: "The batch ends", what: "Its finished answers are kept.", call: () => ["POST", `/v1/batches/${row.id}/cancel`], run: () => api("POST", `/v1/batches/${row.id}/cancel`), onDone: list.reload })}>Cancel</${Button}>`}` },
    ]} empty=${list.data && html`<${Empty} title="No batch yet">Upload a file with one request a line under Files, then start a batch with it.</${Empty}>`} /></${Card}></${Page}>`;
}
const New = ({ onDone }) => {
  const files = useRead(() => all("/v1/files", { purpose: "batch" }, 500), [], { live: false }), file = useSignal(""), endpoint = useSignal("/v1/chat/completions");
  const call = () => ["POST", "/v1/batches", { body: { input_file_id: file.value || files.data?.[0]?.id, endpoint: endpoint.value, completion_window: "24h" } }];
  return html`<${FormDialog} title="New batch" submit="Start" done="The batch has begun" call=${call} run=${() => api(...call())} onDone=${onDone} disabled=${!files.data?.length}>
    <${Field} label="Input file" hint=${files.data && !files.data.length ? "Upload one under Files first." : ""}>${id => html`<select id=${id} value=${file.value} onChange=${event => { file.value = event.target.value; }}>${(files.data ?? []).map(each => html`<option value=${each.id}>${each.filename} · ${each.id}</option>`)}</select>`}</${Field}>
    <${Field} label="Route">${id => html`<select id=${id} onChange=${event => { endpoint.value = event.target.value; }}>${["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/score", "/v1/rerank", "/v1/classify"].map(each => html`<option value=${each}>${each}</option>`)}</select>`}</${Field}></${FormDialog}>`;
};
