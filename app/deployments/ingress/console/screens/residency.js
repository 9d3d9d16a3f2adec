// Residency map: adapters × places (host memory and each replica) on a canvas, wrapped into bands like a newspaper.
import { html, useSignal, useEffect, useRef, get, go, setQuery, useRead, isDark, overview, number, bytes } from "../core.js";
import { Page, Card, Empty, Problem, Search, Select, Curl } from "../ui.js";

const SIZES = [["4", "small"], ["9", "medium"], ["20", "large, with names"]];

export default function Residency({ query }) {
  const search = query.get("search") ?? "", zoom = query.get("zoom"), order = query.get("order") ?? "name";
  const map = useRead(() => get("/v1/residency"), [Math.floor((overview.value?.time ?? 0) / 15)]);
  const data = map.data, count = data?.adapters.name.length ?? 0;
  const size = Number(zoom ?? (count > 800 ? 4 : count > 150 ? 9 : 20));
  const resident = data ? data.adapters.resident.filter(each => each.length).length : 0;
  return html`<${Page} title="Residency map" lead=${data ? `${number(count)} ${count === 1 ? "adapter" : "adapters"} on ${data.replicas.length} ${data.replicas.length === 1 ? "replica" : "replicas"}: ${number(resident)} on a device, ${number(data.adapters.host.filter(Boolean).length)} in host memory. Policy: ${data.policy}.` : "Reading…"}
    actions=${html`<${Curl} small=${false} call=${["GET", "/v1/residency"]} />`}>
    <${Problem} error=${map.error} />
    ${data && !count ? html`<${Card}><${Empty} title="No adapter to place">Load one, and the replica that serves it appears here.</${Empty}></${Card}>` : data && html`<${Card} flush title=${html`<div class="toolbar">
      <${Search} label="Find an adapter" value=${search} onInput=${text => setQuery({ search: text })} />
      <${Select} label="Size" value=${String(size)} onChange=${value => setQuery({ zoom: value })} options=${SIZES} />
      <${Select} label="Order" value=${order} onChange=${value => setQuery({ order: value })} options=${[["name", "name"], ["place", "replica"], ["rank", "rank"]]} /></div>`}
      aside=${html`<${Keys} />`}><${Map} data=${data} size=${size} search=${search} order=${order} /></${Card}>`}</${Page}>`;
}

const Keys = () => html`<div class="keys"><span><i class="swatch" style=${{ background: "var(--s1)" }}></i>on the device</span>
  <span><i class="swatch" style=${{ background: "var(--s2)" }}></i>assigned, not there yet</span><span><i class="swatch" style=${{ background: "var(--s3)" }}></i>host memory</span>
  <span><i class="swatch" style=${{ background: "var(--text)" }}></i>pinned</span></div>`;

function Map({ data, size, search, order }) {
  const box = useRef(null), canvas = useRef(null), at = useSignal(null), place = useSignal(null), explained = useSignal(null), wide = useSignal(900);
  const { adapters, replicas } = data, hasNames = size >= 16;
  const places = replicas.length + 1, isShort = adapters.name.length <= 24 && hasNames;
  const room = isShort ? (wide.value / Math.ceil(adapters.name.length / 12) - 210) / places : 22;
  const cell = Math.max(3, Math.min(isShort ? 64 : size, replicas.length > 40 ? 6 : Math.max(22, Math.floor(room))));
  const index = [...adapters.name.keys()];
  if (order === "rank") index.sort((a, b) => adapters.max_rank[b] - adapters.max_rank[a]);
  if (order === "place") index.sort((a, b) => (adapters.resident[a][0] ?? 1e9) - (adapters.resident[b][0] ?? 1e9));
  const label = hasNames ? 170 : 0, band = label + places * cell + (hasNames ? 24 : 8), head = hasNames ? 26 : 6;
  const bands = Math.max(1, Math.floor((wide.value - 16) / band));
  const rows = Math.max(Math.min(index.length, 12), Math.ceil(index.length / bands)), height = head + rows * size + 10;
  useEffect(() => {
    const observer = new ResizeObserver(() => { wide.value = box.current?.clientWidth ?? 900; });
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  const dark = isDark.value;
  useEffect(() => {
    const node = canvas.current, scale = devicePixelRatio, width = Math.max(wide.value, band + 16);
    node.width = width * scale; node.height = height * scale;
    node.style.width = `${width}px`; node.style.height = `${height}px`;
    const pen = node.getContext("2d"), style = getComputedStyle(document.documentElement), color = name => style.getPropertyValue(name).trim();
    const c = { device: color("--s1"), assigned: color("--s2"), host: color("--s3"), none: color("--sunken"), text: color("--text"), muted: color("--muted"), focus: color("--accent-soft") };
    pen.scale(scale, scale);
    pen.font = `${Math.min(13, size * 0.62)}px ${color("--sans")}`;
    pen.textBaseline = "middle";
    const find = search.toLowerCase();
    if (hasNames) for (let b = 0; b < Math.min(bands, Math.ceil(index.length / rows)); b++) {
      pen.fillStyle = c.muted;
      pen.fillText("host", 8 + b * band + label - 2, 12);
      for (let r = 0; r < replicas.length && replicas.length <= 12; r++) pen.fillText(String(r), 8 + b * band + label + (r + 1) * cell + cell / 2 - 3 + 8, 12);
    }
    index.forEach((i, n) => {
      const x = 8 + Math.floor(n / rows) * band, y = head + (n % rows) * size, gap = size > 5 ? 1.5 : 0.5;
      pen.globalAlpha = find && !adapters.name[i].toLowerCase().includes(find) ? 0.15 : 1;
      if (at.value === n) { pen.fillStyle = c.focus; pen.fillRect(x - 4, y, band - (hasNames ? 14 : 2), size); }
      if (hasNames) { pen.fillStyle = c.text; pen.fillText(clip(pen, adapters.name[i], label - 14), x, y + size / 2); }
      const shift = hasNames ? 8 : 2;
      for (let p = 0; p < places; p++) {
        pen.fillStyle = p === 0 ? (adapters.host[i] ? c.host : c.none) : adapters.resident[i].includes(p - 1) ? c.device : adapters.assigned[i].includes(p - 1) ? c.assigned : c.none;
        pen.fillRect(x + label + p * cell + (p ? shift : 0), y, cell - gap, size - gap);
        if (p === 0 && adapters.pinned[i]) { pen.fillStyle = c.text; pen.fillRect(x + label + cell / 2 - gap / 2 - 1.5, y + size / 2 - 2, 3, 3); }
      }
    });
    pen.globalAlpha = 1;
  }, [data, size, search, order, wide.value, dark, at.value]);
  const under = event => {
    const bounds = canvas.current.getBoundingClientRect(), x = event.clientX - bounds.left - 8, y = event.clientY - bounds.top - head;
    const b = Math.floor(x / band), r = Math.floor(y / size), n = b * rows + r;
    if (x < 0 || y < 0 || r >= rows || b >= bands || n >= index.length) { at.value = null; return; }
    at.value = n; place.value = [event.clientX - bounds.left + 16, event.clientY - bounds.top + 16];
  };
  const move = event => {
    const step = { ArrowDown: 1, ArrowUp: -1, ArrowRight: rows, ArrowLeft: -rows }[event.key];
    if (event.key === "Enter" && at.value !== null) go(["adapters", adapters.name[index[at.value]]]);
    if (!step) return;
    event.preventDefault();
    const n = Math.max(0, Math.min(index.length - 1, at.value === null ? 0 : at.value + step));
    at.value = n; place.value = [8 + Math.floor(n / rows) * band + label + 20, head + (n % rows + 1) * size + 6];
  };
  const i = at.value === null ? null : index[at.value];
  const name = i === null ? null : adapters.name[i];
  useEffect(() => {
    explained.value = null;
    if (name === null || data.tenants[adapters.tenant[i]] !== "default") return undefined;
    const timer = setTimeout(() => get("/v1/residency", { name }).then(found => { explained.value = found; }, () => {}), 200);
    return () => clearTimeout(timer);
  }, [name]);
  return html`<div class="map" ref=${box} tabindex="0" role="application" aria-label="Map of adapters and replicas. Arrow keys move, Enter opens the adapter." onKeyDown=${move}>
    <canvas ref=${canvas} role="img" aria-label=${`${index.length} adapters in ${bands} columns`} onMouseMove=${under} onMouseLeave=${() => { at.value = null; }} onClick=${() => { if (name) go(["adapters", name]); }}></canvas>
    ${i !== null && html`<div class="map-tip" role="status" style=${{ left: `${Math.min(place.value[0], wide.value - 330)}px`, top: `${place.value[1]}px` }}><b>${name}</b>
      <span class="muted">rank ${adapters.max_rank[i]}, ${bytes(adapters.size_bytes[i])}${adapters.rows[i] ? `, ${adapters.rows[i]} rank rows` : ""}${adapters.pinned[i] ? ", pinned" : ""}</span>
      <span>${why(data, i, explained.value)}</span></div>`}</div>`;
}
const clip = (pen, text, width) => { while (text.length > 3 && pen.measureText(text).width > width) text = `${text.slice(0, -2)}…`; return text; };

/** Why the adapter is where it is, in words. */
function why(data, i, explained) {
  const { adapters, replicas } = data, id = at => replicas[at]?.id ?? "a lost replica";
  const resident = adapters.resident[i], assigned = adapters.assigned[i];
  if (!resident.length && !assigned.length) return adapters.host[i] ? "In host memory only. Its next request assigns a replica." : "Not read into memory. Its next request reads it and assigns a replica.";
  const parts = [`Assigned to ${assigned.map(id).join(", ") || "none"}; on the device of ${resident.map(id).join(", ") || "none yet"}.`];
  const order = explained?.preference;
  if (order && assigned.length) {
    const rank = order.indexOf(assigned[0]);
    parts.push(rank === 0 ? "It is the first in the adapter's own order of replicas." : `It is number ${rank + 1} in the adapter's own order of replicas: those before it were more loaded, fuller, or not there when it was assigned.`);
    if (resident.includes(assigned[0])) parts.push(`The policy ${data.policy} keeps it where its rows are.`);
    parts.push(`${id(assigned[0])} has ${replicas[assigned[0]]?.num_requests ?? 0} requests and ${replicas[assigned[0]]?.num_assigned ?? 0} adapters.`);
  }
  return parts.join(" ");
}
