// Projects, their keys and limits, and admin keys. A key's value is shown once.
import { html, useSignal, get, api, all, go, link, useRead, number, act, session } from "../core.js";
import { Page, Card, Table, Empty, State, Time, Facts, Button, Field, Problem, Curl, Tag, Code, Dialog, FormDialog, confirmName, openDialog, closeDialog } from "../ui.js";

const ORG = "/v1/organization";
export default ({ path }) => path[0] ? html`<${Project} key=${path[0]} id=${path[0]} />` : html`<${List} />`;

const keyColumns = remove => [
  { title: "Key", cell: row => html`${row.name}<span class="sub"><code>${row.redacted_value}</code></span>` },
  { title: "Account", cell: row => row.owner?.service_account ? html`${row.owner.service_account.name} <${Tag}>${row.owner.service_account.role}</${Tag}>` : "" },
  { title: "Created", cell: row => html`<${Time} value=${row.created_at} />` }, { title: "Last used", cell: row => html`<${Time} value=${row.last_used_at} />` },
  { title: "Expires", cell: row => row.expires_at ? html`<${Time} value=${row.expires_at} />` : html`<span class="muted">never</span>` },
  { title: "", className: "end", cell: row => html`<${Button} small kind="quiet-danger" onClick=${() => remove(row)}>Revoke</${Button}>` },
];
/** Show a new key's value, once. */
const showSecret = (value, name) => openDialog(() => html`<${Dialog} title="Copy the key now" onClose=${closeDialog}><p>This is the only time that <b>${name}</b> is shown.</p><${Code} text=${value} label="The new key" />
  <div class="row center"><${Button} kind="primary" onClick=${closeDialog}>I have stored it</${Button}></div></${Dialog}>`);
const days = text => text ? { expires_in_seconds: Math.round(Number(text) * 86400) } : {};

function List() {
  const projects = useRead(() => all(`${ORG}/projects`, { include_archived: true }));
  const keys = useRead(() => all(`${ORG}/admin_api_keys`));
  return html`<${Page} title="Projects and keys" lead="A project is a tenant: it has its own keys, adapters, limits and usage."
    actions=${html`<${Button} onClick=${() => openDialog(() => html`<${NewAdminKey} onDone=${keys.reload} />`)}>New admin key</${Button}><${Button} kind="primary" icon="plus" onClick=${() => openDialog(() => html`<${NewProject} />`)}>New project</${Button}>`}>
    <${Card} title="Projects" flush aside=${html`<${Curl} call=${["GET", `${ORG}/projects`]} />`}><${Problem} error=${projects.error} /><${Table} label="Projects" rows=${projects.data ?? []} columns=${[
      { title: "Name", cell: row => html`<a href=${link(["projects", row.id])}>${row.name}</a>` }, { title: "State", cell: row => html`<${State} value=${row.status} />` },
      { title: "Id", cell: row => html`<code class="muted">${row.id}</code>` }, { title: "Created", cell: row => html`<${Time} value=${row.created_at} />` },
    ]} empty=${projects.data && html`<${Empty} title="No project yet" action=${html`<${Button} kind="primary" onClick=${() => openDialog(() => html`<${NewProject} />`)}>New project</${Button}>`}>Make one for each team or customer, then give it a key.</${Empty}>`} /></${Card}>
    <${Card} title="Admin keys" flush aside="They manage everything and run no model"><${Problem} error=${keys.error} /><${Table} label="Admin keys" rows=${keys.data ?? []} columns=${keyColumns(row => confirmName({
      title: `Revoke ${row.name}`, name: row.name, submit: "Revoke", done: "The key was revoked", what: "Whoever uses this admin key is locked out at once.",
      depends: async () => row.id === session.value.key_id ? ["this page: you are signed in with it"] : [], call: () => ["DELETE", `${ORG}/admin_api_keys/${row.id}`], run: () => api("DELETE", `${ORG}/admin_api_keys/${row.id}`), onDone: keys.reload,
    })).filter(column => column.title !== "Account")} empty=${html`<${Empty} title="No admin key in the database">You are signed in with the one from the environment.</${Empty}>`} /></${Card}></${Page}>`;
}

const NewProject = () => {
  const name = useSignal("");
  const call = () => ["POST", `${ORG}/projects`, { body: { name: name.value } }];
  return html`<${FormDialog} title="New project" submit="Create" done="The project exists" call=${call} run=${() => api(...call())} onDone=${made => go(["projects", made.id])} disabled=${!name.value}>
    <${Field} label="Name" value=${name.value} hint="Its limits are tenants.default_limits until you change them." onInput=${value => { name.value = value; }} /></${FormDialog}>`;
};
const NewAdminKey = ({ onDone }) => {
  const name = useSignal(""), life = useSignal("");
  const call = () => ["POST", `${ORG}/admin_api_keys`, { body: { name: name.value, ...days(life.value) } }];
  return html`<${FormDialog} title="New admin key" submit="Create" done="The key exists" call=${call} run=${() => api(...call())} onDone=${made => { onDone(); showSecret(made.value, made.name); }} disabled=${!name.value}>
    <${Field} label="Name" value=${name.value} onInput=${value => { name.value = value; }} /><${Field} label="Days until it expires (optional)" type="number" min="1" value=${life.value} onInput=${value => { life.value = value; }} /></${FormDialog}>`;
};
const NewKey = ({ path, onDone }) => {
  const name = useSignal(""), role = useSignal("member"), life = useSignal("");
  const call = () => ["POST", `${path}/service_accounts`, { body: { name: name.value, role: role.value, ...days(life.value) } }];
  return html`<${FormDialog} title="New key" submit="Create" done="The key exists" call=${call} run=${() => api(...call())} onDone=${made => { onDone(); showSecret(made.api_key.value, made.name); }} disabled=${!name.value}>
    <${Field} label="For whom or what" value=${name.value} hint="The name of its service account." onInput=${value => { name.value = value; }} />
    <${Field} label="May">${id => html`<select id=${id} value=${role.value} onChange=${event => { role.value = event.target.value; }}><option value="member">run models and manage the project's adapters</option><option value="inference">run models</option><option value="management">manage the project's adapters</option></select>`}</${Field}>
    <${Field} label="Days until it expires (optional)" type="number" min="1" value=${life.value} onInput=${value => { life.value = value; }} /></${FormDialog}>`;
};

const NO_LIMIT = 2147483647;
const amount = value => value == null || value === NO_LIMIT ? "no limit" : number(value);
function Project({ id }) {
  const path = `${ORG}/projects/${encodeURIComponent(id)}`;
  const project = useRead(() => get(path), [id]), tenant = useRead(() => get(`/v1/tenants/${encodeURIComponent(id)}`), [id]);
  const keys = useRead(() => all(`${path}/api_keys`), [id]), rates = useRead(() => all(`${path}/rate_limits`), [id]);
  const models = useRead(() => get(`${path}/model_permissions`), [id]), spend = useRead(() => get(`${path}/spend_limit`).catch(error => { if (error.status === 404) return null; throw error; }), [id]);
  const one = project.data, limits = tenant.data;
  if (!one) return html`<${Page} title="Project" crumbs=${html`<a href="#/projects">Projects and keys</a>`}><${Problem} error=${project.error} /></${Page}>`;
  const isActive = one.status === "active";
  return html`<${Page} title=${one.name} crumbs=${html`<a href="#/projects">Projects and keys</a>`} lead=${html`<code>${one.id}</code>`}
    actions=${isActive && html`<a class="button" href=${link(["usage"], { project: id })}>Usage</a><${Button} onClick=${() => openDialog(() => html`<${Rename} path=${path} name=${one.name} onDone=${project.reload} />`)}>Rename</${Button}>
      <${Button} kind="quiet-danger" onClick=${() => confirmName({ title: `Archive ${one.name}`, name: one.name, submit: "Archive", done: "The project is archived", what: "Its keys stop working at once. This cannot be undone.",
        depends: async () => [...(keys.data ?? []).map(key => `key ${key.name}${key.last_used_at ? ", in use" : ""}`), ...Object.keys(limits?.shares ?? {}).map(name => `adapter ${name}, shared with other projects`)],
        call: () => ["POST", `${path}/archive`], run: () => api("POST", `${path}/archive`), onDone: project.reload })}>Archive</${Button}><${Button} kind="primary" icon="plus" onClick=${() => openDialog(() => html`<${NewKey} path=${path} onDone=${keys.reload} />`)}>New key</${Button}>`}>
    ${!isActive && html`<p class="notice warn">This project is archived: its keys do not work.</p>`}
    <${Card} title="API keys" flush><${Problem} error=${keys.error} /><${Table} label="API keys" rows=${keys.data ?? []} columns=${keyColumns(row => confirmName({ title: `Revoke ${row.name}`, name: row.name, submit: "Revoke", done: "The key was revoked",
      what: "Requests with this key are refused at once, and its batches end.", call: () => ["DELETE", `${path}/api_keys/${row.id}`], run: () => api("DELETE", `${path}/api_keys/${row.id}`), onDone: keys.reload }))}
      empty=${keys.data && html`<${Empty} title="No key yet">Without a key nobody can send requests for this project.</${Empty}>`} /></${Card}>
    <div class="grid">
      <${Card} title="Limits" aside=${html`<${Button} small onClick=${() => openDialog(() => html`<${Limits} id=${id} limits=${limits} onDone=${tenant.reload} />`)}>Change</${Button}>`}><${Problem} error=${tenant.error} />${limits && html`<${Facts} items=${[
        ["Concurrent sequences", amount(limits.max_concurrent)], ["Adapters", amount(limits.max_adapters)], ["Bytes of adapters", amount(limits.max_adapter_bytes)], ["Calls per minute", amount(limits.calls_per_min)],
        ["Weight in the fair queue", limits.weight], ["Limits are enforced", limits.enforce ? "yes" : "no, only counted"]]} />`}</${Card}>
      <${Card} title="Monthly spend" aside=${html`<${Button} small onClick=${() => openDialog(() => html`<${Spend} path=${path} spend=${spend.data} onDone=${spend.reload} />`)}>Change</${Button}>`}><${Problem} error=${spend.error} />
        ${spend.data ? html`<${Facts} items=${[["Limit", `$${(spend.data.threshold_amount / 100).toFixed(2)}`], ["State", spend.data.enforcement.status === "enforcing" ? html`<span class="bad-text">reached: requests are refused</span>` : "below it"]]} />` : html`<p class="muted">No limit.</p>`}</${Card}>
    </div>
    <${Card} title="Rate limits" flush aside=${html`<${Button} small onClick=${() => openDialog(() => html`<${Rate} path=${path} onDone=${rates.reload} />`)}>Set a limit</${Button}>`}><${Problem} error=${rates.error} /><${Table} label="Rate limits" rows=${rates.data ?? []} columns=${[
      { title: "Model", cell: row => row.model }, { title: "Requests per minute", num: true, cell: row => amount(row.max_requests_per_1_minute) }, { title: "Tokens per minute", num: true, cell: row => amount(row.max_tokens_per_1_minute) },
      { title: "Requests per day", num: true, cell: row => amount(row.max_requests_per_1_day) }, { title: "", className: "end", cell: row => html`<${Button} small onClick=${() => openDialog(() => html`<${Rate} path=${path} row=${row} onDone=${rates.reload} />`)}>Change</${Button}>` }]} /></${Card}>
    <${Card} title="Models it may use" aside=${html`<${Button} small onClick=${() => openDialog(() => html`<${Models} path=${path} models=${models.data} onDone=${models.reload} />`)}>Change</${Button}>`}>${models.data && html`<p>${models.data.mode === "allow_list" ? "Only these:" : models.data.model_ids.length ? "All but these:" : "All models and adapters that it sees."}</p><div class="row">${models.data.model_ids.map(each => html`<${Tag}>${each}</${Tag}>`)}</div>`}</${Card}>
    <${Card} title="Adapters that it shares" aside=${html`<${Button} small onClick=${() => act("Its cached prefixes are not used any more", () => api("POST", `/v1/tenants/${encodeURIComponent(id)}/rotate_salt`))}>Rotate the cache salt</${Button}>`}>${Object.keys(limits?.shares ?? {}).length ? html`<${Facts} items=${Object.entries(limits.shares).map(([name, list]) => [name, list.join(", ")])} />` : html`<p class="muted">None.</p>`}</${Card}></${Page}>`;
}
const Rename = ({ path, name, onDone }) => { const text = useSignal(name); const call = () => ["POST", path, { body: { name: text.value } }];
  return html`<${FormDialog} title=${`Rename ${name}`} call=${call} run=${() => api(...call())} onDone=${onDone}><${Field} label="Name" value=${text.value} onInput=${value => { text.value = value; }} /></${FormDialog}>`; };
/** Fields for numbers; empty is `none`. */
const Numbers = ({ fields, values }) => fields.map(([name, label, hint]) => html`<${Field} key=${name} label=${label} hint=${hint} type="number" step="any" value=${values.value[name] ?? ""} onInput=${text => { values.value = { ...values.value, [name]: text }; }} />`);
const filled = (values, none) => Object.fromEntries(Object.entries(values).map(([name, text]) => [name, text === "" || text == null ? none : Number(text)]).filter(([, value]) => value !== undefined));
const Limits = ({ id, limits, onDone }) => {
  const fields = [["max_concurrent", "Concurrent sequences"], ["max_adapters", "Adapters"], ["max_adapter_bytes", "Bytes of adapters"], ["calls_per_min", "Calls per minute"]];
  const values = useSignal(Object.fromEntries(fields.map(([name]) => [name, limits?.[name] ?? ""]))), weight = useSignal(String(limits?.weight ?? 1)), enforce = useSignal(limits?.enforce ?? true);
  const call = () => ["PATCH", `/v1/tenants/${encodeURIComponent(id)}`, { body: { ...filled(values.value, -1), weight: Number(weight.value), enforce: enforce.value } }];
  return html`<${FormDialog} title="Limits" call=${call} run=${() => api(...call())} onDone=${onDone}><p class="muted">Empty means no limit.</p><${Numbers} fields=${fields} values=${values} /><${Field} label="Weight in the fair queue" type="number" step="any" value=${weight.value} onInput=${value => { weight.value = value; }} />
    <label class="check"><input type="checkbox" checked=${enforce.value} onChange=${event => { enforce.value = event.target.checked; }} />Enforce the limits</label></${FormDialog}>`;
};
const Rate = ({ path, row, onDone }) => {
  const fields = [["max_requests_per_1_minute", "Requests per minute"], ["max_tokens_per_1_minute", "Tokens per minute"], ["max_requests_per_1_day", "Requests per day"]];
  const model = useSignal(row?.model ?? session.value.model), values = useSignal(Object.fromEntries(fields.map(([name]) => [name, row && row[name] !== NO_LIMIT ? row[name] : ""])));
  const call = () => ["POST", `${path}/rate_limits/${encodeURIComponent(`rl-${model.value}`)}`, { body: filled(values.value, NO_LIMIT) }];
  return html`<${FormDialog} title="Rate limit" call=${call} run=${() => api(...call())} onDone=${onDone}><${Field} label="Model" value=${model.value} readonly=${Boolean(row)} onInput=${value => { model.value = value; }} /><${Numbers} fields=${fields} values=${values} /></${FormDialog}>`;
};
const Spend = ({ path, spend, onDone }) => {
  const dollars = useSignal(spend ? String(spend.threshold_amount / 100) : "");
  const call = () => dollars.value === "" ? ["DELETE", `${path}/spend_limit`] : ["POST", `${path}/spend_limit`, { body: { threshold_amount: Math.round(Number(dollars.value) * 100), currency: "USD", interval: "month" } }];
  return html`<${FormDialog} title="Monthly spend limit" call=${call} run=${() => api(...call())} onDone=${onDone}><${Field} label="Dollars per month" type="number" min="0" step="any" value=${dollars.value} hint="Empty removes the limit. Prices are tenants.prices." onInput=${value => { dollars.value = value; }} /></${FormDialog}>`;
};
const Models = ({ path, models, onDone }) => {
  const mode = useSignal(models?.mode ?? "deny_list"), text = useSignal((models?.model_ids ?? []).join("\n"));
  const call = () => ["POST", `${path}/model_permissions`, { body: { mode: mode.value, model_ids: text.value.split(/\s+/).filter(Boolean) } }];
  return html`<${FormDialog} title="Models it may use" call=${call} run=${() => api(...call())} onDone=${onDone}><${Field} label="Rule">${id => html`<select id=${id} value=${mode.value} onChange=${event => { mode.value = event.target.value; }}><option value="deny_list">all but these</option><option value="allow_list">only these</option></select>`}</${Field}>
    <${Field} label="Models, one a line">${id => html`<textarea id=${id} value=${text.value} onInput=${event => { text.value = event.target.value; }}></textarea>`}</${Field}></${FormDialog}>`;
};
