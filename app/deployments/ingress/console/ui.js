// Parts that the screens are made of.
import {
  html, signal, useSignal, useEffect, useLayoutEffect, useRef, curl, exact, ago, say, get, messages,
} from "./core.js";

const ICONS = {
  overview: "M4 13h6V4H4zM14 20h6v-9h-6zM4 20h6v-3H4zM14 7h6V4h-6z",
  playground: "M5 4v16M5 8h9l-2-3M5 8l9 0M12 20l7-5-7-5z",
  adapters: "M4 7l8-4 8 4-8 4zM4 12l8 4 8-4M4 17l8 4 8-4",
  aliases: "M4 12h5c4 0 4-6 8-6h3M9 12c4 0 4 6 8 6h3M18 4l2 2-2 2M18 16l2 2-2 2",
  residency: "M4 4h4v4H4zM10 4h4v4h-4zM16 4h4v4h-4zM4 10h4v4H4zM16 10h4v4h-4zM10 16h4v4h-4zM16 16h4v4h-4z",
  projects: "M3 20v-1c0-3 2.5-5 6-5s6 2 6 5v1M9 11a3.5 3.5 0 100-7 3.5 3.5 0 000 7M16 4.5a3.5 3.5 0 010 6M18 15c2 .7 3 2.200 3 4v1",
  usage: "M4 20V10M10 20V4M16 20v-8M22 20H2",
  batches: "M4 6h16M4 12h16M4 18h10",
  files: "M6 3h8l5 5v13H6zM14 3v5h5",
  activity: "M3 12h4l3 8 4-16 3 8h4",
  replicas: "M4 4h16v6H4zM4 14h16v6H4zM8 7h.01M8 17h.01",
  settings: "M12 15a3 3 0 100-6 3 3 0 000 6zM12 3v3M12 18v3M3 12h3M18 12h3M5.600 5.600l2.100 2.100M16.300 16.300l2.100 2.100M5.600 18.400l2.100-2.100M16.300 7.700l2.100-2.100",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  menu: "M4 6h16M4 12h16M4 18h16",
  close: "M6 6l12 12M18 6L6 18",
  plus: "M12 5v14M5 12h14",
  search: "M11 18a7 7 0 100-14 7 7 0 000 14zM16 16l5 5",
  pin: "M9 4h6l-1 6 3 3H7l3-3zM12 13v7",
  more: "M5 12h.01M12 12h.01M19 12h.01",
  upload: "M12 16V4M7 9l5-5 5 5M4 20h16",
  download: "M12 4v12M7 11l5 5 5-5M4 20h16",
  key: "M14 10a4 4 0 10-4 4l1.500-.5L13 15h2v2h2v2h3v-3l-6-6",
  warn: "M12 4l9 16H3zM12 10v4M12 17h.01",
  check: "M5 12l5 5L20 7",
  sun: "M12 16a4 4 0 100-8 4 4 0 000 8zM12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.500 1.500M17.500 17.500L19 19M5 19l1.500-1.500M17.500 6.500L19 5",
  right: "M9 6l6 6-6 6",
  play: "M7 5l12 7-12 7z",
  stop: "M6 6h12v12H6z",
};
export const Icon = ({ name, size = 18 }) => html`<svg class="icon" width=${size} height=${size} viewBox="0 0 24 24"
  aria-hidden="true"><path d=${ICONS[name]} /></svg>`;

export const Button = ({ kind = "", icon, children, small, label, ...rest }) => html`<button type="button"
  class=${`button ${kind} ${small ? "small" : ""} ${children ? "" : "square"}`} aria-label=${label} title=${label}
  ...${rest}>${icon && html`<${Icon} name=${icon} size=${16} />`}${children}</button>`;

const STATES = {
  LOADED: ["ok", "loaded"], REGISTERED: ["idle", "registered"], REQUESTED: ["busy", "requested"],
  DOWNLOADING: ["busy", "downloading"], VALIDATING: ["busy", "validating"], ON_DISK: ["busy", "on disk"],
  ON_HOST: ["busy", "in host memory"], DRAINING: ["busy", "draining"], REMOVED: ["idle", "removed"],
  FAILED: ["bad", "failed"], running: ["ok", "running"], unreachable: ["bad", "unreachable"], draining: ["busy", "draining"],
  active: ["ok", "active"], archived: ["idle", "archived"], completed: ["ok", "completed"],
  in_progress: ["busy", "in progress"], validating: ["busy", "validating"], finalizing: ["busy", "finalizing"],
  failed: ["bad", "failed"], cancelled: ["idle", "cancelled"], cancelling: ["busy", "cancelling"],
  expired: ["idle", "expired"],
};
export const State = ({ value }) => {
  const [kind, word] = STATES[value] ?? ["idle", String(value).toLowerCase()];
  return html`<span class=${`state ${kind}`}><span class="dot" aria-hidden="true"></span>${word}</span>`;
};
export const Tag = ({ children, kind = "" }) => html`<span class=${`tag ${kind}`}>${children}</span>`;
export const Time = ({ value }) => value == null ? html`<span class="muted">–</span>`
  : html`<time dateTime=${new Date(value * 1000).toISOString()} title=${exact(value)}>${ago(value)}</time>`;
export const Digest = ({ value, length = 12 }) => value
  ? html`<code class="digest" title=${value}>${value.slice(0, length)}</code>` : html`<span class="muted">–</span>`;

export const Problem = ({ error }) => error ? html`<div class="notice bad" role="alert"><${Icon} name="warn" />
  <div><strong>${error.status === 403 ? "Not allowed" : error.status === 404 ? "Not found" : "That did not work"}</strong>
  <p>${error.message}</p></div></div>` : null;

export const Empty = ({ title, children, action }) => html`<div class="empty"><h3>${title}</h3><p>${children}</p>
  ${action && html`<div class="row center">${action}</div>`}</div>`;

export const Page = ({ title, lead, actions, children, crumbs }) => {
  useEffect(() => { document.title = `${title} · polylora`; }, [title]);
  return html`<div class="page"><header class="page-head"><div class="page-title">
    ${crumbs && html`<nav class="crumbs" aria-label="Breadcrumb">${crumbs}</nav>`}
    <h1 tabindex="-1">${title}</h1>${lead && html`<p class="lead">${lead}</p>`}</div>
    ${actions && html`<div class="actions">${actions}</div>`}</header>${children}</div>`;
};
export const Card = ({ title, aside, children, className = "", flush }) => html`<section
  class=${`card ${flush ? "flush" : ""} ${className}`} aria-label=${typeof title === "string" ? title : undefined}>
  ${title && html`<header class="card-head"><h2>${title}</h2>${aside && html`<div class="aside">${aside}</div>`}</header>`}
  ${children}</section>`;

/** `columns`: {key, title, cell(row), num, sort, width}. `sort`: "-created"; `onSort` gets the next one. */
export const Table = ({ columns, rows, sort, onSort, empty, label, rowKey = row => row.id }) => {
  const field = sort?.replace(/^-/, "");
  return html`<div class="table-wrap" tabindex="0" role="region" aria-label=${`${label}, table`}><table>
    <thead><tr>${columns.map(column => {
      const isOn = column.sort && column.sort === field;
      const down = sort?.startsWith("-");
      const next = isOn ? (down ? field : `-${field}`) : column.sort === "name" ? column.sort : `-${column.sort}`;
      return html`<th scope="col" class=${column.num ? "num" : ""}
        aria-sort=${isOn ? (down ? "descending" : "ascending") : undefined}>${column.sort && onSort
          ? html`<button type="button" class="sort" onClick=${() => onSort(next)}>${column.title}<span
            class="arrow" aria-hidden="true">${isOn ? (down ? "↓" : "↑") : ""}</span></button>`
          : column.title || html`<span class="sr">Actions</span>`}</th>`;
    })}</tr></thead>
    <tbody>${rows.map(row => html`<tr key=${rowKey(row)}>${columns.map((column, index) => index === 0
      ? html`<th scope="row" class=${column.num ? "num" : ""}>${column.cell(row)}</th>`
      : html`<td class=${`${column.num ? "num" : ""} ${column.className ?? ""}`}>${column.cell(row)}</td>`)}</tr>`)}</tbody>
    </table>${!rows.length && empty}</div>`;
};

export const Facts = ({ items }) => html`<dl class="facts">${items.filter(Boolean).map(([name, value]) => html`<div>
  <dt>${name}</dt><dd>${value ?? "–"}</dd></div>`)}</dl>`;

/** `isCache`: it is meant to be full. */
export const Meter = ({ label, value, max, text, isCache }) => {
  const part = max ? Math.min(1, value / max) : 0;
  const kind = isCache ? "" : part > 0.95 ? "bad" : part > 0.8 ? "warn" : "";
  return html`<div class="meter-row"><div class="meter-text"><span>${label}</span><span class="muted">${text}</span></div>
    <div class="meter" role="meter" aria-label=${label} aria-valuemin="0" aria-valuemax=${max || 1}
    aria-valuenow=${Math.min(value, max || 1)} aria-valuetext=${text}><div class=${kind} style=${{ width: `${part * 100}%` }}></div></div></div>`;
};

let fields = 0;
export const Field = ({ label, hint, error, children, type = "text", value, onInput, ...rest }) => {
  const id = useRef(null);
  id.current ??= `field-${++fields}`;
  const control = children ? children(id.current) : html`<input id=${id.current} type=${type} value=${value}
    aria-describedby=${hint || error ? `${id.current}-hint` : undefined} aria-invalid=${error ? "true" : undefined}
    onInput=${event => onInput(event.target.value)} ...${rest} />`;
  return html`<div class="field"><label for=${id.current}>${label}</label>${control}
    ${(hint || error) && html`<p class=${`hint ${error ? "bad" : ""}`} id=${`${id.current}-hint`}>${error || hint}</p>`}</div>`;
};
export const Select = ({ label, value, onChange, options, hideLabel }) => {
  const id = useRef(null);
  id.current ??= `field-${++fields}`;
  return html`<span class="select"><label for=${id.current} class=${hideLabel ? "sr" : ""}>${label}</label>
    <select id=${id.current} value=${value} onChange=${event => onChange(event.target.value)}>
    ${options.map(([each, text]) => html`<option value=${each} selected=${each === value}>${text}</option>`)}</select></span>`;
};
export const Search = ({ value, onInput, label = "Search", wait = 250 }) => {
  const timer = useRef(0);
  const id = useRef(null);
  id.current ??= `field-${++fields}`;
  return html`<span class="search"><label class="sr" for=${id.current}>${label}</label><${Icon} name="search" size=${16} />
    <input id=${id.current} type="search" placeholder=${label} value=${value} onInput=${event => {
      clearTimeout(timer.current);
      const text = event.target.value;
      timer.current = setTimeout(() => onInput(text), wait);
    }} /></span>`;
};
export const Tabs = ({ value, tabs, onChange, label }) => html`<div class="tabs" role="tablist" aria-label=${label}>
  ${tabs.map(([name, title]) => html`<button type="button" role="tab" aria-selected=${name === value ? "true" : "false"}
    tabindex=${name === value ? 0 : -1} onClick=${() => onChange(name)} onKeyDown=${event => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const index = tabs.findIndex(([each]) => each === name);
      onChange(tabs[(index + step + tabs.length) % tabs.length][0]);
      const buttons = event.currentTarget.parentElement.querySelectorAll("button");
      buttons[(index + step + tabs.length) % tabs.length].focus();
    }}>${title}</button>`)}</div>`;

export const copy = async text => {
  try { await navigator.clipboard.writeText(text); say("Copied"); } catch { say("The browser did not allow copying", "bad"); }
};
export const Code = ({ text, label = "Code" }) => html`<div class="code"><pre tabindex="0" role="region"
  aria-label=${label}><code>${text}</code></pre><${Button} icon="copy" small kind="ghost" label="Copy" onClick=${() => copy(text)} /></div>`;

// -- dialogs --

export const Dialog = ({ title, onClose, children, wide }) => {
  const element = useRef(null), close = useRef(onClose);
  close.current = onClose;
  useLayoutEffect(() => {  // before it is painted: a key that is pressed at sight of the dialog must reach it
    const dialog = element.current, before = document.activeElement;
    dialog.onclose = () => close.current();  // Chromium asks (cancel) only once after a click, then Escape just closes
    dialog.showModal();
    (dialog.querySelector("[autofocus], input:not([type=hidden]), textarea, select") ?? dialog.querySelector("button"))?.focus();
    return () => { dialog.onclose = null; if (dialog.open) dialog.close(); before?.focus?.(); };
  }, []);
  return html`<dialog ref=${element} class=${wide ? "wide" : ""} aria-label=${title}
    onCancel=${event => { event.preventDefault(); onClose(); }}
    onClick=${event => { if (event.target === element.current) onClose(); }}>
    <div class="dialog"><header><h2>${title}</h2><${Button} icon="close" kind="ghost" label="Close" onClick=${onClose} /></header>
    ${children}</div></dialog>`;
};
/** The dialog that is open over any screen: a function that renders it, or null. */
export const dialog = signal(null);
export const openDialog = render => { dialog.value = render; };
export const closeDialog = () => { dialog.value = null; };
export const DialogHost = () => dialog.value ? dialog.value() : null;

export const curlDialog = (title, ...call) => openDialog(() => html`<${Dialog} title=${title} onClose=${closeDialog} wide>
  <p class="muted">What this page sends. Set <code>POLYLORA_API_KEY</code> in your shell first; the key is never part of it.</p>
  <${Code} text=${curl(...call)} label="curl command" /></${Dialog}>`);
/** "Copy as curl" of an action that is not a dialog of its own. */
export const Curl = ({ call, label = "Copy as curl", small = true }) => small
  ? html`<${Button} icon="copy" kind="ghost" small label=${label} onClick=${() => curlDialog(label, ...call)} />`
  : html`<${Button} icon="copy" kind="ghost" onClick=${() => curlDialog(label, ...call)}>${label}</${Button}>`;

/** A dialog with a form. `call(values)`: [method, path, options] of the action; `onDone` gets its answer. */
export const FormDialog = ({ title, submit = "Save", children, call, run, done, onDone, kind = "primary", disabled, wide }) => {
  const busy = useSignal(false), error = useSignal(null);
  const send = async event => {
    event.preventDefault();
    busy.value = true; error.value = null;
    try {
      const answer = await run();
      say(done ?? "Saved");
      closeDialog();
      onDone?.(answer);
    } catch (problem) { error.value = problem; } finally { busy.value = false; }
  };
  return html`<${Dialog} title=${title} onClose=${closeDialog} wide=${wide}><form onSubmit=${send}>
    ${children}<${Problem} error=${error.value} />
    <footer>${call && html`<${Button} kind="ghost" icon="copy" onClick=${() => copy(curl(...call()))}>Copy as curl</${Button}>`}
    <span class="grow"></span><${Button} onClick=${closeDialog}>Cancel</${Button}>
    <button type="submit" class=${`button ${kind}`} disabled=${busy.value || disabled}>${busy.value ? "Working…" : submit}</button></footer>
    </form></${Dialog}>`;
};

/** Ask for the name of what an action destroys, and show what depends on it. */
export const confirmName = ({ title, name, what, depends, submit, call, run, done, onDone }) => openDialog(
  () => html`<${ConfirmName} ...${{ title, name, what, depends, submit, call, run, done, onDone }} />`);
const ConfirmName = ({ title, name, what, depends, submit, call, run, done, onDone }) => {
  const typed = useSignal("");
  const found = useSignal(null);
  useEffect(() => { Promise.resolve(depends?.() ?? []).then(list => { found.value = list; }, () => { found.value = []; }); }, []);
  return html`<${FormDialog} title=${title} submit=${submit} kind="danger" call=${call} run=${run} done=${done}
    onDone=${onDone} disabled=${typed.value !== name}>
    <p>${what}</p>
    ${depends && html`<div class=${`notice ${found.value?.length ? "warn" : ""}`}>${found.value === null ? "Looking for what depends on it…"
      : found.value.length ? html`<div><strong>Depends on it</strong><ul>${found.value.map(each => html`<li>${each}</li>`)}</ul></div>`
      : "Nothing depends on it."}</div>`}
    <${Field} label=${html`Type <code>${name}</code> to confirm`} value=${typed.value} autocomplete="off" spellcheck="false"
      onInput=${value => { typed.value = value; }} />
  </${FormDialog}>`;
};

export const Messages = () => html`<div class="messages" role="status" aria-live="polite">${messages.value.map(each => html`<div
  key=${each.id} class=${`message ${each.kind}`}>${each.text}</div>`)}</div>`;

/** Names of adapters and aliases for inputs with suggestions: the caller's own, then what else it may use. */
export const names = signal([]);
export const loadNames = async (useKey = "") => {
  const list = (path, limit, options) => get(path, { limit }, options).then(found => found.data, () => []);  // an inference key lists models only
  const [adapters, aliases, models] = await Promise.all([list("/v1/loras", 500), list("/v1/aliases", 200), list("/v1/models", 1000, { useKey })]);
  const own = [...adapters.map(each => [each.id, "adapter"]), ...aliases.map(each => [each.id, "alias"])], known = new Set(own.map(([name]) => name));
  names.value = [...own, ...models.filter(each => each.parent && !known.has(each.id)).map(each => [each.id, "model"])];
};
export const NameList = ({ id, more = [], only }) => html`<datalist id=${id}>${[...more, ...names.value]
  .filter(([, kind]) => !only || kind === only).map(([name, kind]) => html`<option value=${name}>${kind}</option>`)}</datalist>`;
