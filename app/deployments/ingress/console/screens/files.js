// Files of the caller.
import { html, api, all, act, useRead, bytes } from "../core.js";
import { Page, Card, Table, Empty, Time, Button, Problem, Curl, Icon, confirmName } from "../ui.js";
import { download } from "./batches.js";

export default function Files() {
  const list = useRead(() => all("/v1/files", {}, 1000));
  const upload = file => { const form = new FormData(); form.append("purpose", "batch"); form.append("file", file); return act(`${file.name} was uploaded`, () => api("POST", "/v1/files", { body: form })).then(list.reload); };
  return html`<${Page} title="Files" lead="Inputs and outputs of batches."
    actions=${html`<label class="button primary"><${Icon} name="upload" size=${16} />Upload<input class="sr" type="file" accept=".jsonl" onChange=${event => { if (event.target.files[0]) upload(event.target.files[0]); event.target.value = ""; }} /></label>`}>
    <${Card} flush title="Files" aside=${html`<${Curl} call=${["GET", "/v1/files"]} />`}><${Problem} error=${list.error} /><${Table} label="Files" rows=${list.data ?? []} columns=${[
      { title: "Name", cell: row => html`${row.filename}<span class="sub"><code>${row.id}</code></span>` }, { title: "Purpose", cell: row => row.purpose }, { title: "Size", num: true, cell: row => bytes(row.bytes) }, { title: "Created", cell: row => html`<${Time} value=${row.created_at} />` }, { title: "Deleted", cell: row => html`<${Time} value=${row.expires_at} />` },
      { title: "", className: "end", cell: row => html`<${Button} small onClick=${() => download(row.id, row.filename)}>Download</${Button}> <${Button} small kind="quiet-danger" onClick=${() => confirmName({ title: `Delete ${row.filename}`, name: row.filename, submit: "Delete", done: "The file was deleted", what: "Batches that still read it fail.",
        depends: async () => (await all("/v1/batches", {}, 500)).filter(each => each.input_file_id === row.id && !each.completed_at && !each.cancelled_at && !each.failed_at).map(each => `batch ${each.id}`), call: () => ["DELETE", `/v1/files/${row.id}`], run: () => api("DELETE", `/v1/files/${row.id}`), onDone: list.reload })}>Delete</${Button}>` },
    ]} empty=${list.data && html`<${Empty} title="No file yet">A batch reads a file with one JSON request a line: <code>{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {…}}</code></${Empty}>`} /></${Card}></${Page}>`;
}
