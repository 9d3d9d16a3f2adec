// Aliases: names that stand for adapters by weight. The bar is dragged; a canary stands beside its baseline.
import { html, useSignal, useEffect, useRef, get, api, all, setQuery, useRead, number, seconds, percent, act } from "../core.js";
import { Page, Card, Table, Empty, Time, Button, Field, Problem, Curl, Tag, FormDialog, Dialog, confirmName, openDialog, closeDialog, NameList, loadNames } from "../ui.js";

const COLORS = ["--s1", "--s2", "--s3", "--s4", "--s5", "--s6"];
const total = targets => Object.values(targets).reduce((sum, weight) => sum + weight, 0);

export default function Aliases({ query }) {
  const list = useRead(() => all("/v1/aliases"));
  useEffect(() => { loadNames(); }, []);
  const canary = query.get("canary");
  useEffect(() => { if (canary) { setQuery({ canary: "" }); create({ "": 95, [canary]: 5 }); } }, [canary]);
  const entries = list.data ?? [];
  return html`<${Page} title="Aliases" lead="Names that clients use while you decide what answers: one adapter, or several by weight. A user stays with the same target."
    actions=${html`<${Button} kind="primary" icon="plus" onClick=${() => create({ "": 1 })}>New alias</${Button}>`}>
    <${Problem} error=${list.error} />
    ${entries.map(each => html`<${Alias} key=${each.id} alias=${each} onDone=${list.reload} />`)}
    ${list.data && !entries.length && html`<${Card}><${Empty} title="No alias yet" action=${html`<${Button} kind="primary" icon="plus" onClick=${() => create({ "": 1 })}>New alias</${Button}>`}>Give clients a name such as <code>sql-live</code>. Later, send 5 % of its requests to a new adapter, compare, then promote it or roll back.</${Empty}></${Card}>`}
    <${NameList} id="targets" only="adapter" /></${Page}>`;
}

function create(targets) {
  openDialog(() => html`<${Create} first=${targets} />`);
}
function Create({ first }) {
  const name = useSignal(""), rows = useSignal(Object.entries(first).map(([target, weight]) => ({ target, weight: String(weight) })));
  const body = () => ({ targets: Object.fromEntries(rows.value.filter(row => row.target).map(row => [row.target, Number(row.weight)])) });
  const path = () => `/v1/aliases/${encodeURIComponent(name.value)}`;
  const change = (at, next) => { rows.value = rows.value.map((row, index) => index === at ? { ...row, ...next } : row); };
  return html`<${FormDialog} title="New alias" submit="Create" done="The alias is in force" call=${() => ["PUT", path(), { body: body() }]} run=${() => api("PUT", path(), { body: body() })} disabled=${!name.value || !rows.value.some(row => row.target)}>
    <${Field} label="Name" value=${name.value} hint="What clients send as their model." spellcheck="false" autocomplete="off" onInput=${value => { name.value = value.trim(); }} />
    ${rows.value.map((row, at) => html`<div class="row" key=${at}><div class="grow"><${Field} label=${`Target ${at + 1}`} list="targets" value=${row.target} spellcheck="false" autocomplete="off" onInput=${target => change(at, { target: target.trim() })} /></div>
      <${Field} label="Weight" hint=${`${percent(Number(row.weight) / (rows.value.reduce((sum, each) => sum + Number(each.weight), 0) || 1))} of the requests`} type="number" min="0" step="any" value=${row.weight} onInput=${weight => change(at, { weight })} /></div>`)}
    <div><${Button} small icon="plus" onClick=${() => { rows.value = [...rows.value.map((row, _, { length }) => length === 1 ? { ...row, weight: "95" } : row), { target: "", weight: "5" }]; }}>Add target</${Button}></div></${FormDialog}>`;
}

function Alias({ alias, onDone }) {
  const draft = useSignal(null);
  const path = `/v1/aliases/${encodeURIComponent(alias.id)}`;
  const targets = draft.value ?? alias.targets, names = Object.keys(targets), sum = total(targets) || 1;
  const isChanged = draft.value && JSON.stringify(draft.value) !== JSON.stringify(alias.targets);
  const body = { targets };
  const save = () => act(`${alias.id} has new weights`, () => api("PUT", path, { body })).then(() => { draft.value = null; onDone(); });
  return html`<${Card} title=${alias.id} aside=${html`<span>version ${alias.version} · <${Time} value=${alias.updated} /></span><${Button} small onClick=${() => openDialog(() => html`<${Versions} alias=${alias} path=${path} onDone=${onDone} />`)}>Versions</${Button}>
      <${Button} small onClick=${() => openDialog(() => html`<${AddTarget} alias=${alias} path=${path} onDone=${onDone} />`)}>Add target</${Button}>
      <${Button} small kind="quiet-danger" onClick=${() => confirmName({ title: `Delete ${alias.id}`, name: alias.id, submit: "Delete", done: `${alias.id} was deleted`, what: "Requests that name it are refused from then on. The adapters stay.",
        depends: async () => names.map(name => `requests for ${alias.id} now go to ${name} (${percent(alias.targets[name] / (total(alias.targets) || 1))})`), call: () => ["DELETE", path], run: () => api("DELETE", path), onDone })}>Delete</${Button}><${Curl} call=${["GET", path]} />`}>
    <${Weights} name=${alias.id} targets=${targets} onChange=${next => { draft.value = next; }} />
    ${isChanged && html`<div class="row"><${Button} kind="primary" small onClick=${save}>Save the weights</${Button}><${Button} small onClick=${() => { draft.value = null; }}>Undo</${Button}><${Curl} call=${["PUT", path, { body }]} /></div>`}
    <${Comparison} names=${names} targets=${targets} sum=${sum} alias=${alias} path=${path} onDone=${onDone} /></${Card}>`;
}

function Weights({ name, targets, onChange }) {
  const bar = useRef(null), names = Object.keys(targets), sum = total(targets) || 1;
  const ends = [];
  names.reduce((at, each) => { ends.push(at + targets[each] / sum); return at + targets[each] / sum; }, 0);
  /** Move the border between target `at` and the next to a part of the bar, in whole percents. */
  const move = (at, part) => {
    const low = at ? ends[at - 1] : 0, high = ends[at + 1];
    const border = Math.round(Math.min(high, Math.max(low, part)) * 100) / 100;
    const parts = names.map((_, index) => ends[index] - (index ? ends[index - 1] : 0));
    parts[at] = border - low; parts[at + 1] = high - border;
    onChange(Object.fromEntries(names.map((each, index) => [each, Math.round(parts[index] * 1000) / 10])));
  };
  const drag = (at, event) => {
    event.preventDefault();
    event.currentTarget.setPointerCapture(event.pointerId);
    const box = bar.current.getBoundingClientRect();
    const follow = moved => move(at, (moved.clientX - box.left) / box.width);
    const handle = event.currentTarget;
    handle.addEventListener("pointermove", follow);
    handle.addEventListener("pointerup", () => handle.removeEventListener("pointermove", follow), { once: true });
  };
  return html`<div class="weights" ref=${bar} role="group" aria-label=${`Traffic of ${name}`}>
    ${names.map((each, index) => html`<div class="part" style=${{ width: `${targets[each] / sum * 100}%`, background: `var(${COLORS[index % 6]})` }} title=${`${each}: ${percent(targets[each] / sum)}`}><span>${each} ${percent(targets[each] / sum)}</span></div>`)}
    ${names.slice(0, -1).map((each, index) => html`<div class="handle" role="slider" tabindex="0" aria-label=${`Border between ${each} and ${names[index + 1]}`} aria-valuemin="0" aria-valuemax="100" aria-valuenow=${Math.round(ends[index] * 100)}
      aria-valuetext=${`${each} ${percent(targets[each] / sum)}, ${names[index + 1]} ${percent(targets[names[index + 1]] / sum)}`} style=${{ left: `${ends[index] * 100}%` }} onPointerDown=${event => drag(index, event)}
      onKeyDown=${event => { const step = { ArrowLeft: -0.01, ArrowRight: 0.01, PageDown: -0.1, PageUp: 0.1, Home: -1, End: 1 }[event.key]; if (step) { event.preventDefault(); move(index, ends[index] + step); } }}></div>`)}</div>`;
}

function Comparison({ names, targets, sum, alias, path, onDone }) {
  const found = useRead(() => Promise.all(names.map(name => get(`/v1/loras/${encodeURIComponent(name)}`).catch(() => null))), [names.join()]);
  const rows = names.map((id, at) => ({ id, at, activity: found.data?.[at]?.activity, state: found.data?.[at]?.state }));
  const first = rows[0]?.activity, rate = each => each?.requests ? each.errors / each.requests : null;
  const versus = (value, base, at) => at && value != null && base ? html` <${Tag} kind=${value > base * 1.2 ? "warn" : ""}>${value >= base ? "+" : ""}${Math.round((value / base - 1) * 100)} %</${Tag}>` : "";
  return html`<${Table} label=${`Targets of ${alias.id}`} rows=${rows} columns=${[
    { title: "Target", cell: row => html`<span class="swatch" style=${{ background: `var(${COLORS[row.at % 6]})` }}></span> <a href=${`#/adapters/${encodeURIComponent(row.id)}`}>${row.id}</a>${names.length > 1 && html` <span class="muted">${row.at ? "canary" : "baseline"}</span>`}` },
    { title: "Share", num: true, cell: row => percent(targets[row.id] / sum) },
    { title: "Requests", num: true, cell: row => number(row.activity?.requests) },
    { title: "Errors", num: true, cell: row => html`${percent(rate(row.activity))}` },
    { title: "First token, median", num: true, cell: row => { const value = row.activity?.time_to_first_token_seconds?.p50; return html`${seconds(value)}${versus(value, first?.time_to_first_token_seconds?.p50, row.at)}`; } },
    { title: "99th percentile", num: true, cell: row => seconds(row.activity?.time_to_first_token_seconds?.p99) },
    { title: "Tokens per answer", num: true, cell: row => { const value = row.activity?.requests ? row.activity.completion_tokens / row.activity.requests : null; return html`${number(value)}${versus(value, first?.requests ? first.completion_tokens / first.requests : null, row.at)}`; } },
    { title: "", className: "end", cell: row => names.length < 2 ? "" : html`<${Button} small onClick=${() => openDialog(() => html`<${FormDialog} title=${`Promote ${row.id}`} submit="Promote" done=${`${row.id} gets all requests of ${alias.id}`}
      call=${() => ["POST", `${path}/promote`, { body: { target: row.id } }]} run=${() => api("POST", `${path}/promote`, { body: { target: row.id } })} onDone=${onDone}><p>All requests for <b>${alias.id}</b> go to <b>${row.id}</b>. A rollback restores today's weights.</p></${FormDialog}>`)}>Promote</${Button}>` },
  ]} />`;
}

function AddTarget({ alias, path, onDone }) {
  const target = useSignal(""), share = useSignal("5");
  const body = () => {
    const part = Math.min(99, Math.max(0, Number(share.value))), sum = total(alias.targets) || 1;
    return { targets: { ...Object.fromEntries(Object.entries(alias.targets).map(([name, weight]) => [name, Math.round(weight / sum * (100 - part) * 100) / 100])), [target.value]: part } };
  };
  return html`<${FormDialog} title=${`Add a target to ${alias.id}`} submit="Start the canary" done="The canary gets traffic" call=${() => ["PUT", path, { body: body() }]} run=${() => api("PUT", path, { body: body() })} onDone=${onDone} disabled=${!target.value}>
    <${Field} label="Adapter" list="targets" value=${target.value} spellcheck="false" autocomplete="off" onInput=${value => { target.value = value.trim(); }} />
    <${Field} label="Share of the traffic, in percent" type="number" min="0" max="99" value=${share.value} hint="The other targets keep their proportions." onInput=${value => { share.value = value; }} /></${FormDialog}>`;
}

function Versions({ alias, path, onDone }) {
  const list = useRead(() => get(`${path}/versions`), []);
  const back = version => act(`${alias.id} is as in version ${version}`, () => api("POST", `${path}/rollback`, { body: { version } })).then(() => { closeDialog(); onDone(); });
  return html`<${Dialog} title=${`Versions of ${alias.id}`} onClose=${closeDialog} wide><${Problem} error=${list.error} /><${Table} label="Versions" rows=${list.data?.data ?? []} columns=${[
    { title: "Version", cell: row => html`${row.id} ${row.is_in_force && html`<${Tag} kind="accent">in force</${Tag}>`}` },
    { title: "Targets", className: "wrap", cell: row => Object.entries(row.targets).map(([name, weight]) => `${name} ${weight}`).join(" · ") },
    { title: "", className: "end", cell: row => row.is_in_force ? "" : html`<${Button} small onClick=${() => back(row.id)}>Roll back to it</${Button}>` },
  ]} /></${Dialog}>`;
}
