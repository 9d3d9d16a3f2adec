// The shell: sign-in, navigation, and the screen of the page's route.
import { render } from "./vendor/preact.js";
import {
  html, signal, useSignal, useEffect, effect, route, session, sessionNote, findSession, signIn, signOut, project, theme,
  overview, age, isStale, may, all, number, link,
} from "./core.js";
import { Icon, Button, Select, Field, DialogHost, Messages, Problem, Page, Empty } from "./ui.js";
import { droppedFiles } from "./peft.js";

const SCREENS = {
  overview: ["", "Overview", () => may.manage.value],
  playground: ["", "Playground", () => session.value.role !== "management"],
  adapters: ["Adapters", "Adapters", () => may.manage.value],
  aliases: ["Adapters", "Aliases", () => may.manage.value],
  residency: ["Adapters", "Residency map", () => may.operate.value],
  projects: ["Tenants", "Projects and keys", () => may.administer.value],
  usage: ["Tenants", "Usage and costs", () => may.administer.value],
  batches: ["Work", "Batches", () => session.value.kind !== "operator"],
  files: ["Work", "Files", () => session.value.kind !== "operator"],
  replicas: ["Service", "Replicas", () => may.operate.value],
  activity: ["Service", "Events and audit", () => may.manage.value],
  settings: ["Service", "Settings", () => true],
};
const modules = signal({});
const load = async name => {
  if (modules.value[name]) return;
  const module = await import(`./screens/${name}.js`);
  modules.value = { ...modules.value, [name]: module.default };
};

const Mark = () => html`<svg viewBox="0 0 32 32" aria-hidden="true"><rect width="32" height="32" rx="8" fill="var(--accent)"/>
  <g fill="none" stroke="var(--accent-text)" stroke-width="2.6" stroke-linecap="round"><path d="M9 9v14h5"/><path d="M17 10h6"/>
  <path d="M17 16h6" opacity=".7"/><path d="M19 23h4" opacity=".45"/></g></svg>`;

const SignIn = () => {
  const value = useSignal(""), keep = useSignal(false), error = useSignal(null), busy = useSignal(false);
  useEffect(() => { document.title = "Sign in · polylora"; }, []);
  const submit = async event => {
    event.preventDefault();
    busy.value = true; error.value = null;
    try { await signIn(value.value.trim(), keep.value); } catch (problem) { error.value = problem; } finally { busy.value = false; }
  };
  return html`<main class="sign-in" id="main"><form onSubmit=${submit} class="card">
    <div class="brand"><${Mark} />polylora</div>
    <div class="stack tight"><h1>Sign in</h1><p class="muted">With an admin key for everything, or with a project's key for that project.</p></div>
    ${sessionNote.value && html`<p class="notice warn">${sessionNote.value}</p>`}
    <${Field} label="API key" type="password" value=${value.value} autocomplete="off" spellcheck="false" required
      hint="The first admin key comes from: polylora create-admin-key" onInput=${text => { value.value = text; }} />
    <label class="check"><input type="checkbox" checked=${keep.value} onChange=${event => { keep.value = event.target.checked; }} />
      Stay signed in here for 8 hours</label>
    <p class="hint">${keep.value ? "A cookie that scripts cannot read stands for the key. Signing out removes it."
      : "The key stays in this page's memory and is gone when you reload."}</p>
    ${error.value && html`<${Problem} error=${error.value} />`}
    <button class="button primary" disabled=${busy.value || !value.value.trim()}>${busy.value ? "Checking…" : "Sign in"}</button>
  </form></main>`;
};

const Live = () => {
  if (age.value === null) return html`<span class="live waiting"><span class="dot"></span>connecting</span>`;
  return isStale.value ? html`<span class="live stale"><span class="dot"></span>stale for ${Math.round(age.value)} s</span>`
    : html`<span class="live"><span class="dot"></span>live</span>`;
};

/** A PEFT folder may be dropped on every screen; otherwise the browser would leave the page and show the file. */
const Drop = () => {
  const over = useSignal(false);
  useEffect(() => {
    const hasFiles = event => event.dataTransfer?.types?.includes("Files");
    const enter = event => { if (hasFiles(event)) { event.preventDefault(); over.value = may.manage.value; } };
    const leave = event => { if (!event.relatedTarget) over.value = false; };
    const drop = async event => {
      over.value = false;
      if (event.defaultPrevented || !hasFiles(event)) return;  // the dialog's own place took it
      event.preventDefault();
      if (!may.manage.value) return;
      const files = await droppedFiles(event.dataTransfer);
      (await import("./screens/adapters.js")).loadDialog("drop", files);
    };
    const listeners = { dragover: enter, dragleave: leave, drop };
    for (const [name, listener] of Object.entries(listeners)) addEventListener(name, listener);
    return () => { for (const [name, listener] of Object.entries(listeners)) removeEventListener(name, listener); };
  }, []);
  return over.value ? html`<div class="drop-veil"><div>Drop the PEFT folder to load it</div></div>` : null;
};

const menuOpen = signal(false);
const projects = signal([]);
effect(() => {
  if (may.administer.value) all("/v1/organization/projects").then(found => { projects.value = found; }, () => {});
  else projects.value = [];
});

const Side = ({ current }) => {
  const groups = new Map();
  for (const [name, [group, title, allowed]] of Object.entries(SCREENS)) {
    if (allowed()) groups.set(group, [...(groups.get(group) ?? []), [name, title]]);
  }
  const who = session.value;
  const counts = { adapters: overview.value?.num_adapters, replicas: overview.value?.replicas?.length };
  return html`<aside class=${`side ${menuOpen.value ? "open" : ""}`} id="menu" aria-label="Menu">
    <a class="brand" href="#/overview"><${Mark} /><span>polylora<small>${who.model}</small></span></a>
    ${may.administer.value && html`<${Select} label="Project" hideLabel value=${project.value}
      onChange=${value => { project.value = value; }}
      options=${[["", "Public adapters"], ...projects.value.map(each => [each.id, each.name])]} />`}
    <nav aria-label="Screens">${[...groups].map(([group, items]) => html`<div class="nav-group">${group && html`<h2>${group}</h2>`}
      ${items.map(([name, title]) => html`<a href=${link([name])} aria-current=${name === current ? "page" : undefined}
        onClick=${() => { menuOpen.value = false; }}><${Icon} name=${name} />${title}
        ${counts[name] != null && html`<span class="count">${number(counts[name])}</span>`}</a>`)}</div>`)}</nav>
    <div class="side-foot"><div class="row"><${Live} /><span class="grow"></span>
      <${Button} small kind="ghost" icon="sun" label=${`Theme: ${theme.value}`} onClick=${() => {
        theme.value = { auto: "light", light: "dark", dark: "auto" }[theme.value];
      }} /></div>
      <div class="who"><span>${{ open: "No key needed here", admin: "Administrator", operator: "Operator" }[who.kind] ?? who.project_name}</span>
      <span class="muted">${who.kind === "project" ? `project key · ${who.role}` : who.kind === "admin" ? "admin key" : ""}</span></div>
      ${who.kind !== "open" && html`<${Button} small onClick=${signOut}>Sign out</${Button}>`}
    </div></aside>`;
};

const Shell = () => {
  const current = route.value.path[0] ?? (may.manage.value ? "overview" : "playground");
  const entry = SCREENS[current];
  useEffect(() => { document.body.classList.toggle("stale", isStale.value); }, [isStale.value]);
  useEffect(() => { if (entry) load(current); document.querySelector("#main")?.scrollTo?.(0, 0); window.scrollTo(0, 0); }, [current, route.value.path.join("/")]);
  const Screen = modules.value[current];
  return html`<div><a class="skip" href="#main" onClick=${event => { event.preventDefault(); document.querySelector("main h1")?.focus(); }}>Skip to the content</a>
    <div class="shell">
    <header class="topbar"><a class="brand" href="#/overview"><${Mark} />polylora</a><div class="row"><${Live} />
      <${Button} icon="menu" label="Menu" aria-expanded=${menuOpen.value ? "true" : "false"} aria-controls="menu"
        onClick=${() => { menuOpen.value = !menuOpen.value; }} /></div></header>
    ${menuOpen.value && html`<button type="button" class="side-veil" aria-label="Close the menu" onClick=${() => { menuOpen.value = false; }}></button>`}
    <${Side} current=${current} /><${Drop} />
    <main id="main">
      ${isStale.value && html`<div class="stale-bar" role="alert"><${Icon} name="warn" />These numbers are ${Math.round(age.value)} seconds old: the service does not answer. The page tries again by itself.</div>`}
      ${!entry ? html`<${Page} title="No such screen"><${Empty} title="This address has no screen"
          action=${html`<a class="button" href="#/overview">Go to the overview</a>`}>It may have been copied incompletely.</${Empty}></${Page}>`
        : !entry[2]() ? html`<${Page} title=${entry[1]}><${Empty} title="This needs another key">This key may not use this screen. Sign in with an admin key.</${Empty}></${Page}>`
        : Screen ? html`<${Screen} key=${current} path=${route.value.path.slice(1)} query=${route.value.query} />`
        : html`<${Page} title=${entry[1]} />`}
    </main></div></div>`;
};

const failure = signal(null);
const App = () => html`<div>${failure.value ? html`<main class="sign-in" id="main"><div class="card"><h1>The service does not answer</h1>
    <${Problem} error=${failure.value} /><${Button} kind="primary" onClick=${start}>Try again</${Button}></div></main>`
  : session.value === undefined ? null : session.value === null ? html`<${SignIn} />` : html`<${Shell} />`}
  <${DialogHost} /><${Messages} /></div>`;

async function start() {
  failure.value = null;
  try { await findSession(); } catch (error) { failure.value = error; }
}
addEventListener("keydown", event => { if (event.key === "Escape") menuOpen.value = false; });
start();
load(route.value.path[0] in SCREENS ? route.value.path[0] : "overview");
render(html`<${App} />`, document.querySelector("#app"));
