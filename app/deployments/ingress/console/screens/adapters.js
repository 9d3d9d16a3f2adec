// Adapters: the table, loading by hub, URL, folder or drop; and the page of one adapter.
import {
  html, useSignal, useEffect, useRef, get, api, all, headers, url, act, go, link, setQuery, useRead, may, number, bytes,
  seconds, percent, duration, saveCsv, say,
} from "../core.js";
import {
  Page, Card, Table, Empty, State, Tag, Time, Digest, Facts, Button, Field, Select, Search, Tabs, Problem, Icon, Curl, Code, Dialog,
  FormDialog, confirmName, openDialog, closeDialog, curlDialog,
} from "../ui.js";
import { droppedFiles, readPeft, upload, headerJson } from "../peft.js";
import { EventList, failures } from "./overview.js";

const PAGE = 50;
export default ({ path, query }) => path[0] ? html`<${Adapter} key=${path[0]} name=${path[0]} query=${query} />` : html`<${List} query=${query} />`;

function List({ query }) {
  const filter = {
    search: query.get("search") ?? "", state: query.get("state") ?? "", pinned: query.get("pinned") ?? "",
    sort: query.get("sort") ?? "name", offset: Number(query.get("offset") ?? 0),
  };
  const list = useRead(() => get("/v1/loras", { ...filter, limit: PAGE }), Object.values(filter));
  const recent = useRead(() => get("/v1/events", { limit: 200 }));
  const change = values => setQuery({ offset: "", ...values });
  const entries = list.data?.data ?? [], total = list.data?.total ?? 0;
  const isFiltered = filter.search || filter.state || filter.pinned;
  const pending = useful(recent.data?.data ?? [], entries);
  return html`<${Page} title="Adapters" lead="LoRA fine-tunes of the base model. Requests name one as their model."
    actions=${html`<${Button} icon="download" onClick=${() => exportCsv(filter)}>CSV</${Button}>
      <${Button} kind="primary" icon="plus" onClick=${() => loadDialog("source")}>Load adapter</${Button}>`}>
    ${pending.length > 0 && html`<${Card} title="Not served yet" flush aside="Loads under way and loads that failed"><${Table} label="Loads" rows=${pending} rowKey=${row => row.name} columns=${[
      { title: "Name", cell: row => html`<a href=${link(["adapters", row.name])}>${row.name}</a>` },
      { title: "State", cell: row => html`<${State} value=${row.state} />` },
      { title: "Reason", className: "wrap", cell: row => row.reason ?? "" },
      { title: "Since", cell: row => html`<${Time} value=${row.created} />` },
    ]} /></${Card}>`}
    <${Card} flush title=${html`<div class="toolbar"><${Search} label="Name, description or digest" value=${filter.search} onInput=${search => change({ search })} />
      <${Select} label="State" value=${filter.state} onChange=${state => change({ state })} options=${[["", "any"], ["LOADED", "loaded"], ["REGISTERED", "registered, not read"]]} />
      <${Select} label="Pinned" value=${filter.pinned} onChange=${pinned => change({ pinned })} options=${[["", "any"], ["true", "yes"], ["false", "no"]]} /></div>`}>
      <${Problem} error=${list.error} />
      <${Table} label="Adapters" rows=${entries} sort=${filter.sort} onSort=${sort => change({ sort })} columns=${[
        { title: "Name", sort: "name", cell: row => html`<a href=${link(["adapters", row.id])}>${row.id}</a>${row.pinned && html` <${Tag} kind="accent">pinned</${Tag}>`}
          ${row.description && html`<span class="sub" title=${row.description}>${row.description}</span>`}` },
        { title: "State", cell: row => html`<${State} value=${row.state} />` },
        { title: "Rank", sort: "max_rank", num: true, cell: row => row.max_rank || "–" },
        { title: "Size", sort: "size_bytes", num: true, cell: row => row.size_bytes ? bytes(row.size_bytes) : "–" },
        { title: "Generation", num: true, cell: row => row.generation },
        { title: "Digest", cell: row => html`<${Digest} value=${row.digest} length=${10} />` },
        { title: "Loaded", sort: "created", cell: row => html`<${Time} value=${row.created} />` },
        { title: "", className: "end", cell: row => html`<a class="button small ghost" href=${link(["playground"], { c: "base:|adapter:" + row.id })}>Try</a>` },
      ]} empty=${list.isLoading && !list.data ? html`<p class="empty muted">Reading…</p>` : isFiltered
        ? html`<${Empty} title="No adapter matches" action=${html`<${Button} onClick=${() => setQuery({ search: "", state: "", pinned: "", offset: "" })}>Clear the filter</${Button}>`}>Names, descriptions and the beginning of digests are searched.</${Empty}>`
        : html`<${Empty} title="No adapter yet" action=${html`<${Button} kind="primary" icon="plus" onClick=${() => loadDialog("source")}>Load adapter</${Button}>`}>Drop a PEFT folder anywhere on this console, or load one from a hub, a URL or a folder of the server.</${Empty}>`} />
      ${total > 0 && html`<div class="pager"><span>${number(filter.offset + 1)}–${number(filter.offset + entries.length)} of ${total.toLocaleString("en-GB")}</span>
        <${Button} small disabled=${!filter.offset} onClick=${() => setQuery({ offset: Math.max(0, filter.offset - PAGE) || "" })}>Back</${Button}>
        <${Button} small disabled=${!list.data.has_more} onClick=${() => setQuery({ offset: filter.offset + PAGE })}>Next</${Button}>
        <${Curl} call=${["GET", "/v1/loras", { query: { ...filter, limit: PAGE } }]} /></div>`}
    </${Card}></${Page}>`;
}

/** Names whose newest events say that they are being loaded, or failed. */
const useful = (events, served) => {
  const states = { requested: "REQUESTED", downloading: "DOWNLOADING", validating: "VALIDATING", "downloaded to disk": "ON_DISK", "loaded to host": "ON_HOST", failed: "FAILED" };
  const ended = new Set(["routable", "registered", "registered lazily", "removed", "draining"]);
  const seen = new Map();
  for (const event of events) if (!seen.has(event.name) && (states[event.event] || ended.has(event.event))) seen.set(event.name, event);
  const names = new Set(served.map(each => each.id));
  return [...seen].filter(([name, event]) => states[event.event] && !(names.has(name) && event.event !== "failed" && event.event !== "requested") && (Date.now() / 1000 - event.created < 86400))
    .map(([name, event]) => ({ name, state: states[event.event], reason: event.event === "failed" ? String(event.detail ?? "") : "", created: event.created }));
};

async function exportCsv(filter) {
  const rows = [];
  try {
    for (let offset = 0; ; offset += 1000) {
      const page = await get("/v1/loras", { ...filter, offset, limit: 1000 });
      rows.push(...page.data);
      if (!page.has_more) break;
    }
    saveCsv("adapters.csv", ["id", "state", "generation", "digest", "max_rank", "size_bytes", "pinned", "traffic_weight", "description", "source", "created", "owner"].map(name => [name, row => row[name]]), rows);
    say(`${rows.length} adapters exported`);
  } catch (error) { say(error.message, "bad"); }
}

// -- loading --

export const loadDialog = (tab, files) => openDialog(() => html`<${Load} tab=${tab} files=${files} />`);
function Load({ tab: first, files }) {
  const tab = useSignal(first === "drop" ? "drop" : "source");
  return html`<${Dialog} title="Load an adapter" onClose=${closeDialog} wide>
    <${Tabs} label="Where it is" value=${tab.value} onChange=${value => { tab.value = value; }} tabs=${[["source", "Folder or URL"], ["hub", "Hub"], ["drop", "From this computer"]]} />
    ${tab.value === "drop" ? html`<${DropForm} files=${files} />` : html`<${SourceForm} key=${tab.value} isHub=${tab.value === "hub"} />`}</${Dialog}>`;
}
function SourceForm({ isHub }) {
  const name = useSignal(""), source = useSignal(""), description = useSignal(""), lazy = useSignal(false), error = useSignal(null), busy = useSignal(false);
  const isOpen = useRef(true);
  useEffect(() => () => { isOpen.current = false; }, []);
  const place = () => isHub && source.value ? `hf://${source.value.replace(/^hf:\/\//, "")}` : source.value;
  const body = () => ({ name: name.value || guess(source.value), path: place(), ...(description.value ? { description: description.value } : {}), ...(lazy.value ? { lazy: true } : {}) });
  const submit = async event => {
    event.preventDefault();
    busy.value = true; error.value = null;
    try {
      await api("POST", "/v1/loras", { body: body() });
      say(lazy.value ? "Registered; the first request reads it" : "Loading has begun");
      if (!isOpen.current) return; // closed meanwhile: stay where the user went
      closeDialog();
      go(["adapters", body().name]);
    } catch (problem) { error.value = problem; } finally { busy.value = false; }
  };
  return html`<form onSubmit=${submit}>
    <${Field} label=${isHub ? "Repository" : "Folder or URL"} value=${source.value} required spellcheck="false" autocomplete="off"
      placeholder=${isHub ? "org/name@revision" : "sql-v2, s3://bucket/sql-v2/ or https://host/sql-v2/"}
      hint=${isHub ? "Add @revision to load exactly that commit." : "A folder below the server's adapter folders (LORA_PATH), or a URL that the operator allows (adapters.urls)."}
      onInput=${value => { source.value = value; }} />
    <${Field} label="Name" value=${name.value} placeholder=${guess(source.value) || "the model's name in requests"} spellcheck="false" autocomplete="off" onInput=${value => { name.value = value; }} />
    <${Field} label="Description (optional)" value=${description.value} hint="Shown in lists, and compared with prompts for model “auto”." onInput=${value => { description.value = value; }} />
    <label class="check"><input type="checkbox" checked=${lazy.value} onChange=${event => { lazy.value = event.target.checked; }} />Only register the name; the first request reads it</label>
    <${Problem} error=${error.value} />
    <footer><${Button} kind="ghost" icon="copy" onClick=${() => curlDialog("Copy as curl", "POST", "/v1/loras", { body: body() })}>Copy as curl</${Button}><span class="grow"></span>
    <${Button} onClick=${closeDialog}>Cancel</${Button}><button class="button primary" disabled=${busy.value || !source.value}>${busy.value ? "Working…" : "Load"}</button></footer></form>`;
}
const guess = text => (text.split("@")[0].split("/").filter(Boolean).at(-1) ?? "").replace(/[^A-Za-z0-9._-]/g, "-").replace(/^[^A-Za-z0-9]+/, "");

function DropForm({ files }) {
  const found = useSignal(null), name = useSignal(""), progress = useSignal(null), error = useSignal(null), over = useSignal(false);
  const running = useRef(null), input = useRef(null);
  const look = async list => {
    error.value = null;
    found.value = await readPeft(list);
    if (!name.value) name.value = guess(list[0]?.webkitRelativePath?.split("/")[0] ?? "");
  };
  useEffect(() => { if (files?.length) look(files); return () => running.current?.abort(); }, []);
  const target = `/v1/loras/${encodeURIComponent(name.value)}/weights`;
  const submit = async event => {
    event.preventDefault();
    error.value = null; progress.value = 0;
    running.current = upload(url(target), found.value, headers(), part => { progress.value = part; });
    try {
      await running.current.done;
      running.current = null;
      say(`${name.value} is served`);
      closeDialog();
      go(["adapters", name.value]);
    } catch (problem) { error.value = problem; progress.value = null; }
  };
  const peft = found.value;
  return html`<form onSubmit=${submit}>
    <div class=${`drop ${over.value ? "over" : ""}`} onDragOver=${event => { event.preventDefault(); over.value = true; }} onDragLeave=${() => { over.value = false; }}
      onDrop=${async event => { event.preventDefault(); over.value = false; look(await droppedFiles(event.dataTransfer)); }}>
      <${Icon} name="upload" size=${26} /><p>Drop a PEFT folder here: <code>adapter_config.json</code> and <code>adapter_model.safetensors</code></p>
      <div class="row center"><label class="button small">Choose files<input class="sr" type="file" multiple accept=".json,.safetensors" ref=${input} onChange=${event => look([...event.target.files])} /></label></div></div>
    ${peft && html`<ul class="checks" aria-label="Checks">${peft.checks.map(([kind, text]) => html`<li class=${kind}><${Icon} name=${kind === "ok" ? "check" : "warn"} /><span>${text}</span></li>`)}</ul>`}
    ${peft?.isGood && html`<${Field} label="Name" value=${name.value} required spellcheck="false" autocomplete="off" hint="An adapter of this name gets a new generation; the old one serves until this one is ready." onInput=${value => { name.value = value; }} />`}
    ${progress.value !== null && html`<div class="stack tight"><progress value=${progress.value} max="1" aria-label="Upload"></progress>
      <p class="muted">${progress.value < 1 ? `${bytes(progress.value * peft.weights.size)} of ${bytes(peft.weights.size)} sent` : "Sent. The service checks the weights…"}</p></div>`}
    <${Problem} error=${error.value} />
    <footer>${peft?.isGood && html`<${Button} kind="ghost" icon="copy" onClick=${() => curlDialog("Copy as curl", "PUT", target, { more: { "X-Adapter-Config": headerJson(peft.config), "Content-Type": "application/octet-stream" }, file: "--data-binary @adapter_model.safetensors" })}>Copy as curl</${Button}>`}
    <span class="grow"></span><${Button} onClick=${closeDialog}>Cancel</${Button}><button class="button primary" disabled=${!peft?.isGood || !name.value || progress.value !== null}>Load</button></footer></form>`;
}

// -- one adapter --

/** What an operator can do about a failure, by the words of its reason. */
const REMEDIES = [
  [/rank .*(pool|rows|max_rank)|lora_pool_rows/i, "Raise engine.lora_pool_rows (or adapters.max_rank) in the service's configuration, or train with a lower rank."],
  [/no adapter at|not found|no such|does not exist|404/i, "Check the spelling and that the folder or repository exists. Folders are looked up below LORA_PATH and adapters.roots."],
  [/outside|leaves the roots|not allowed|may not be loaded|adapters\.(hub|urls)/i, "The operator decides which places may be loaded from: adapters.roots, adapters.urls and adapters.hub."],
  [/shape|base model|hidden|in_features|out_features|module/i, "The adapter was trained for another base model, or names modules that this one does not have. Compare base_model_name_or_path with the model that is served."],
  [/sign/i, "Sign the adapter with a trusted key (polylora sign), or add its key to adapters.signing.trusted_keys."],
  [/timeout|timed out|connect|network|503|502/i, "The source did not answer. Try again; if it is slow, raise adapters.source_timeout_s."],
  [/pickle|\.bin/i, "Save it again as safetensors: model.save_pretrained(folder, safe_serialization=True)."],
  [/larger|too large|max_adapter_bytes|limit/i, "The adapter is above a limit: see adapters.max_adapter_bytes and the project's limits."],
];
const remedy = reason => REMEDIES.find(([pattern]) => pattern.test(reason))?.[1] ?? "The message says which value is wrong. Correct the adapter or the configuration, then load it again.";

function Adapter({ name, query }) {
  const path = `/v1/loras/${encodeURIComponent(name)}`;
  const found = useRead(() => get(path), [name]);
  const generations = useRead(() => get(`${path}/generations`).catch(() => ({ data: [] })), [name]);
  const events = useRead(() => get("/v1/events", { name, limit: 100 }), [name]);
  const aliases = useRead(() => all("/v1/aliases"), [name]);
  const one = found.data;
  const busy = one?.job && !["LOADED", "FAILED", "REMOVED"].includes(one.job.state);
  useEffect(() => { if (busy) { const timer = setInterval(found.reload, 1500); return () => clearInterval(timer); } return undefined; }, [busy]);
  const crumbs = html`<a href="#/adapters">Adapters</a>`;
  if (!one) return html`<${Page} title=${name} crumbs=${crumbs} lead=${found.error ? "" : "Reading…"}><${Problem} error=${found.error} /></${Page}>`;
  const isThis = target => target.split("@")[0] === name;  // a target may name a version
  const share = targets => Object.keys(targets).filter(isThis).reduce((sum, target) => sum + targets[target], 0);
  const pointing = (aliases.data ?? []).filter(each => Object.keys(each.targets).some(isThis));
  const reason = one.reason ?? one.job?.reason ?? (failures(events.data?.data ?? []).find(([each]) => each === name)?.[1]);
  const isServed = one.state === "LOADED" || one.state === "REGISTERED";
  const isMissing = one.state === "FAILED" && one.generation == null;  // no load has succeeded: there is nothing to try
  const failed = one.state === "FAILED" || (one.job?.state === "FAILED") || Boolean(one.last_error);
  const reload = source => act("Loading has begun", () => api("POST", "/v1/loras", { body: { name, path: source } })).then(found.reload);
  const activity = one.activity;
  return html`<${Page} title=${name} crumbs=${crumbs} lead=${one.description}
    actions=${html`${!isMissing && html`<a class="button" href=${link(["playground"], { c: `base:|adapter:${name}` })}><${Icon} name="play" size=${16} />Compare with the base</a>`}
      ${may.operate.value && isServed && html`<${Button} icon="pin" onClick=${() => act(one.pinned ? "Unpinned" : "Pinned", () => api("PATCH", path, { body: { pinned: !one.pinned } })).then(found.reload)}>${one.pinned ? "Unpin" : "Pin"}</${Button}>`}
      ${isServed && html`<${Button} onClick=${() => openDialog(() => html`<${Describe} one=${one} path=${path} onDone=${found.reload} />`)}>Describe</${Button}>`}
      ${(one.source || one.job?.path) && html`<${Button} onClick=${() => reload(one.source || one.job.path)}>Load again</${Button}>`}
      ${isMissing && html`<${Button} onClick=${() => act("The failure was dismissed", () => api("DELETE", path)).then(() => go(["adapters"]))}>Dismiss</${Button}>`}
      ${one.state !== "REMOVED" && !isMissing && html`<${Button} kind="quiet-danger" onClick=${() => confirmName({
        title: `Unload ${name}`, name, submit: "Unload", done: `${name} was unloaded`,
        what: "New requests for it are refused. Running ones finish, then its memory is freed on every replica.",
        depends: async () => [...pointing.map(each => `alias ${each.id}`), ...(one.dependents ?? []).map(each => `combination ${each.name} of ${each.project_id}`),
          ...(one.residency?.replicas ?? []).filter(each => each.num_requests).map(each => `${each.num_requests} running requests on ${each.id}`)],
        call: () => ["DELETE", path], run: () => api("DELETE", path), onDone: () => go(["adapters"]),
      })}>Unload</${Button}>`}<${Curl} call=${["GET", path]} small=${false} />`}>
    ${failed && html`<div class="notice bad" role="alert"><${Icon} name="warn" /><div><strong>${one.state === "FAILED" ? "This adapter could not be loaded" : "The last load failed; the generation before still serves"}</strong>
      <p>${one.last_error || reason || one.job?.reason}</p><p><b>What to do:</b> ${remedy(one.last_error || reason || "")}</p></div></div>`}
    <${Card} title="Lifecycle" aside=${html`<${State} value=${one.state} />`}><${Lifecycle} events=${events.data?.data ?? []} one=${one} /></${Card}>
    ${one.generation == null ? null : html`<div class="page"><div class="grid">
      <${Card} title="What it is"><${Facts} items=${[
        ["Generation", one.generation], ["Rank", one.max_rank || "–"], ["Size in memory", bytes(one.size_bytes)],
        ["Digest", html`<${Digest} value=${one.digest} length=${16} />`], ["Source", one.source && html`<code>${one.source}</code>`], ["Owner", one.owner],
        ["Loaded", html`<${Time} value=${one.created} />`], ["Last used", html`<${Time} value=${one.last_used} />`],
        ["Traffic weight", one.traffic_weight], ["Pinned", one.pinned ? "yes" : "no"],
        one.alora_invocation_tokens && ["Invocation tokens", one.alora_invocation_tokens.join(" ")],
      ]} />${one.metadata && Object.keys(one.metadata).length > 0 && html`<${Code} text=${JSON.stringify(one.metadata, null, 2)} label="Configuration as it was read" />`}</${Card}>
      <${Card} title="Usage" aside=${activity && html`since <${Time} value=${activity.since} />`}>${activity && activity.requests ? html`<${Facts} items=${[
        ["Requests", number(activity.requests)], ["Errors", `${number(activity.errors)} (${percent(activity.errors / activity.requests)})`],
        ["Tokens read", number(activity.prompt_tokens)], ["of them cached", percent(activity.cached_tokens / activity.prompt_tokens)], ["Tokens written", number(activity.completion_tokens)],
        activity.time_to_first_token_seconds && ["Time to first token, median", seconds(activity.time_to_first_token_seconds.p50)],
        activity.time_to_first_token_seconds && ["99th percentile", seconds(activity.time_to_first_token_seconds.p99)],
        activity.loads && ["Loads: source, disk, device", `${number(activity.loads.source)}, ${number(activity.loads.disk)}, ${number(activity.loads.device)}`],
      ]} />` : html`<${Empty} title="No request yet">Send one with <code>"model": "${name}"</code>, or try it in the playground.</${Empty}>`}</${Card}>
    </div>
    <div class="grid">
      <${Card} title="Where it is" flush>${one.residency ? html`<${Table} label="Residency" rows=${[{ id: "host memory", host: true }, ...one.residency.replicas]} columns=${[
        { title: "Place", cell: row => row.host ? "Host memory" : html`<code>${row.id}</code>` },
        { title: "Holds it", cell: row => row.host ? (one.residency.host ? html`<${State} value="LOADED" />` : html`<span class="muted">no</span>`) : html`<${State} value="LOADED" />` },
        { title: "Requests", num: true, cell: row => row.host ? "" : number(row.num_requests) },
        { title: "Last used", cell: row => row.host ? "" : html`<${Time} value=${row.last_used} />` },
      ]} />` : html`<${Empty} title="Not shown">Replicas are shared by all projects.</${Empty}>`}</${Card}>
      <${Card} title="Who points here" flush>${pointing.length || one.dependents?.length ? html`<${Table} label="Dependents" rows=${[
          ...pointing.map(each => ({ id: each.id, kind: "alias", share: share(each.targets) / Object.values(each.targets).reduce((a, b) => a + b, 0) })),
          ...(one.dependents ?? []).map(each => ({ id: each.name, kind: "combination" }))]} columns=${[
        { title: "Name", cell: row => html`<a href=${row.kind === "alias" ? link(["aliases"]) : link(["adapters", row.id])}>${row.id}</a>` },
        { title: "Kind", cell: row => row.kind }, { title: "Traffic", num: true, cell: row => row.share == null ? "" : percent(row.share) },
      ]} />` : html`<${Empty} title="Nothing points here" action=${html`<a class="button small" href=${link(["aliases"], { canary: name })}>Start a canary</a>`}>An alias sends a part of its traffic here, for example 5 % as a canary.</${Empty}>`}</${Card}>
    </div>
    <${Card} title="Generations" flush aside="Contents that this name has had; every load of new contents is one"><${Table} label="Generations" rows=${generations.data?.data ?? []} columns=${[
      { title: "Generation", cell: row => html`${row.id} ${row.digest === one.digest && html`<${Tag} kind="accent">serves now</${Tag}>`}` },
      { title: "Digest", cell: row => html`<${Digest} value=${row.digest} length=${16} />` },
      { title: "Rank", num: true, cell: row => row.max_rank }, { title: "Size", num: true, cell: row => bytes(row.size_bytes) },
      { title: "Registered", cell: row => html`<${Time} value=${row.created} />` }, { title: "By", cell: row => row.registered_by },
      { title: "", className: "end", cell: row => row.digest === one.digest ? "" : html`<${Button} small onClick=${() => rollBack(name, row, found.reload)}>Roll back to it</${Button}>` },
    ]} empty=${html`<${Empty} title="No generation">The name has had no contents yet.</${Empty}>`} /></${Card}></div>`}
    <${Card} title="Events" flush><${EventList} events=${(events.data?.data ?? []).slice(0, 30)} /></${Card}></${Page}>`;
}

const rollBack = (name, row, done) => openDialog(() => html`<${FormDialog} title=${`Roll back to generation ${row.id}`} submit="Roll back" done="Loading has begun"
  call=${() => ["POST", "/v1/loras", { body: { name, path: row.path } }]} run=${() => api("POST", "/v1/loras", { body: { name, path: row.path } })} onDone=${done}>
  <p>Reads <code>${row.path}</code> again as a new generation of <b>${name}</b>. The present one serves until then.</p>
  <p class="notice">Compare the digests afterwards: it is this generation if the new one begins with <code>${row.digest.slice(0, 16)}</code>. If the files there have changed since, it is not.</p></${FormDialog}>`);

function Describe({ one, path, onDone }) {
  const text = useSignal(one.description ?? ""), weight = useSignal(String(one.traffic_weight ?? 1));
  const body = () => ({ description: text.value, ...(may.operate.value ? { traffic_weight: Number(weight.value) } : {}) });
  return html`<${FormDialog} title=${`Describe ${one.id}`} call=${() => ["PATCH", path, { body: body() }]} run=${() => api("PATCH", path, { body: body() })} onDone=${onDone}>
    <${Field} label="Description" value=${text.value} hint="Shown in lists, and compared with prompts for model “auto”." onInput=${value => { text.value = value; }} />
    ${may.operate.value && html`<${Field} label="Traffic weight" type="number" step="any" min="0" value=${weight.value} hint="Expected traffic, 1 being the usual; placement and eviction use it." onInput=${value => { weight.value = value; }} />`}</${FormDialog}>`;
}

const STEPS = [["requested", "Requested"], ["downloading", "Download"], ["validating", "Check"], ["downloaded to disk", "On disk"], ["loaded to host", "In host memory"], ["routable", "Served"]];
function Lifecycle({ events, one }) {
  // events are newest first: the last load is everything down to its request
  const last = [];
  for (const event of events) { last.unshift(event); if (event.event === "requested" || event.event === "registered lazily") break; }
  if (one.state === "REGISTERED") return html`<p class="muted">The name is registered; the first request reads it.
    <${Button} small onClick=${() => act("It is served", () => api("POST", `/v1/loras/${encodeURIComponent(one.id)}/load`))}>Read it now</${Button}></p>`;
  const at = new Map(last.map(event => [event.event, event]));
  const begun = last[0]?.created;
  const furthest = STEPS.findLastIndex(([event]) => at.has(event));
  const failed = at.get("failed");
  const current = ["downloading", "validating"].includes(STEPS[furthest]?.[0]) ? furthest : furthest + 1;  // these two are recorded when they begin
  return html`<ol class="steps">${STEPS.map(([event, title], index) => {
    const found = at.get(event);
    const kind = failed && index === current ? "failed" : !failed && index === current && one.state !== "LOADED" ? "now" : found || index < furthest ? "done" : "";
    return html`<li class=${kind} aria-current=${kind === "now" ? "step" : undefined}><strong>${title}</strong><span class=${kind === "failed" ? "bad-text" : "muted"}>${kind === "failed" ? html`failed <${Time} value=${failed.created} />`
      : found ? (index === 0 || found.created === begun ? html`<${Time} value=${found.created} />` : `after ${duration(found.created - begun)}`) : kind === "done" ? "not needed" : ""}</span></li>`;
  })}</ol>`;
}
