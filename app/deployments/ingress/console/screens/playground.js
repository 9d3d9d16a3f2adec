// Playground: one prompt to up to four models side by side, differences from the first column marked.
//
// The columns are in the URL; prompts are not.
import {
  html, useSignal, useEffect, useRef, session, may, inferenceKey, send, eventsOf, setQuery, number, seconds, percent, address, signal, say,
} from "../core.js";
import { Page, Card, Button, Field, Problem, Icon, NameList, loadNames, Code, Dialog, Tabs, openDialog, closeDialog, Tag } from "../ui.js";

const settings = signal({ prompt: "How many customers live in Oslo?", system: "", temperature: "0", top_p: "1", max_tokens: "96", seed: "1", tools: "", schema: "" });
const set = changes => { settings.value = { ...settings.value, ...changes }; };

/** "base:" | "adapter:sql" | "mix:sql*0.7,support*0.3" <-> {kind, name, parts}. */
const parse = text => {
  const kind = text.split(":")[0], rest = text.slice(kind.length + 1);
  if (kind === "mix") return { kind, parts: rest.split(",").filter(Boolean).map(part => { const [name, weight] = part.split("*"); return { name, weight: Number(weight ?? 1) }; }) };
  return { kind: kind === "base" ? "base" : "adapter", name: rest };
};
const write = column => column.kind === "mix" ? `mix:${column.parts.map(part => `${part.name}*${part.weight}`).join(",")}` : column.kind === "base" ? "base:" : `adapter:${column.name}`;

export default function Playground({ query }) {
  useEffect(() => { loadNames(inferenceKey.value); }, [session.value?.key_id, inferenceKey.value]);
  const columns = (query.get("c") ?? "base:|adapter:").split("|").filter(Boolean).slice(0, 4).map(parse);
  const answers = useSignal({}), running = useRef(null), busy = useSignal(false);
  const change = list => setQuery({ c: list.map(write).join("|") });
  const needsKey = !may.infer.value && !inferenceKey.value;
  const run = async event => {
    event?.preventDefault();
    running.current?.abort();
    const abort = new AbortController();
    running.current = abort;
    busy.value = true; answers.value = {};
    await Promise.all(columns.map((column, index) => stream(column, abort.signal, part => { answers.value = { ...answers.value, [index]: part }; })));
    if (running.current === abort) busy.value = false;
  };
  useEffect(() => () => running.current?.abort(), []);
  const reference = answers.value[0]?.tokens ?? [];
  const given = settings.value;
  return html`<${Page} title="Playground" lead="One prompt to several models. Words that the first column does not have are underlined."
    actions=${html`<${Button} onClick=${() => codeDialog(columns)}>View code</${Button}>
      <${Button} icon="plus" disabled=${columns.length >= 4} onClick=${() => change([...columns, { kind: "adapter", name: "" }])}>Add column</${Button}>`}>
    ${needsKey && html`<${KeyCard} />`}
    <form class="play" onSubmit=${run}>
      <${Card}><div class="stack">
        <${Field} label="Prompt">${id => html`<textarea id=${id} rows="3" value=${given.prompt} onInput=${event => set({ prompt: event.target.value })}
          onKeyDown=${event => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run(event); }}></textarea>`}</${Field}>
        <div class="params">${[["temperature", "Temperature", 0.1], ["top_p", "Top p", 0.05], ["max_tokens", "Max tokens", 1], ["seed", "Seed", 1]].map(([name, label, step]) => html`<${Field}
          key=${name} label=${label} type="number" min="0" step=${step} value=${given[name]} onInput=${value => set({ [name]: value })} />`)}</div>
        <details><summary>System prompt, tools and JSON schema</summary><div class="grid">
          ${[["system", "System prompt"], ["tools", "Tools (JSON list)"], ["schema", "Answer's JSON schema"]].map(([name, label]) => html`<${Field} key=${name} label=${label}>${id => html`<textarea id=${id} value=${given[name]}
            spellcheck="false" onInput=${event => set({ [name]: event.target.value })}></textarea>`}</${Field}>`)}</div></details>
        <div class="row">${busy.value ? html`<${Button} icon="stop" onClick=${() => { running.current?.abort(); busy.value = false; }}>Stop</${Button}>`
          : html`<button class="button primary" disabled=${needsKey || !given.prompt}><${Icon} name="play" size=${16} />Run</button>`}<span class="muted">Ctrl + Enter</span><span class="grow"></span>
          <span class="legend-bar">certain${[0, 1, 2, 3].map(level => html`<i style=${{ background: shade(-level * 1.2 - 0.01) }}></i>`)}unlikely</span></div>
      </div></${Card}>
      <div class="columns">${columns.map((column, index) => html`<${Column} key=${index} column=${column} index=${index} answer=${answers.value[index]} reference=${index ? reference : null}
        onChange=${next => change(columns.map((each, at) => at === index ? next : each))} onRemove=${columns.length > 1 ? () => { answers.value = {}; change(columns.filter((_, at) => at !== index)); } : null} />`)}</div>
    </form><${NameList} id="models" more=${[["auto", "chosen by the prompt"]]} /><${NameList} id="adapters" only="adapter" /></${Page}>`;
}

const KeyCard = () => {
  const text = useSignal("");
  return html`<${Card} title="A key that may run models"><p class="muted">This key manages the service; only a project's key runs models. Enter one for this page: it stays in memory.
      ${may.administer.value && html` <a href="#/projects">Projects and keys</a> makes one.`}</p>
    <form class="row end" onSubmit=${event => { event.preventDefault(); inferenceKey.value = text.value.trim(); }}><div class="grow"><${Field} label="Project's API key" type="password" autocomplete="off" value=${text.value} onInput=${value => { text.value = value; }} /></div>
    <button class="button primary" disabled=${!text.value}>Use it here</button></form></${Card}>`;
};

function Column({ column, index, answer, reference, onChange, onRemove }) {
  const title = index === 0 ? "Reference" : `Column ${index + 1}`;
  return html`<section class=${`card column ${column.kind === "mix" ? "mixing" : ""}`} aria-label=${title}>
    <header class="card-head"><h2>${title}</h2><div class="aside">${answer?.adapter && html`<${Tag} kind="accent">${answer.adapter}</${Tag}>`}
      ${onRemove && html`<${Button} small kind="ghost" icon="close" label=${`Remove ${title}`} onClick=${onRemove} />`}</div></header>
    <div class="row"><select aria-label=${`Kind of ${title}`} value=${column.kind} onChange=${event => onChange({ base: { kind: "base" }, adapter: { kind: "adapter", name: "" },
        mix: { kind: "mix", parts: [{ name: column.name ?? "", weight: 1 }] } }[event.target.value])}>
        ${[["base", "Base model"], ["adapter", "Adapter, alias or auto"], ["mix", "Mixed adapters"]].map(([value, text]) => html`<option value=${value} selected=${value === column.kind}>${text}</option>`)}</select>
      ${column.kind === "adapter" && html`<input list="models" aria-label=${`Model of ${title}`} placeholder="name, or auto" value=${column.name} spellcheck="false" autocomplete="off" onChange=${event => onChange({ ...column, name: event.target.value.trim() })} />`}</div>
    ${column.kind === "mix" && html`<div class="stack tight">${column.parts.map((part, at) => {
      const replace = next => onChange({ ...column, parts: column.parts.map((each, place) => place === at ? next : each) });
      return html`<div class="slider" key=${at}><input class="slider-name" list="adapters" aria-label=${`Adapter ${at + 1} of ${title}`} placeholder="adapter" value=${part.name} onChange=${event => replace({ ...part, name: event.target.value.trim() })} />
        <input type="range" min="-1" max="2" step="0.05" value=${part.weight} aria-label=${`Weight of ${part.name || "adapter"} in ${title}`} onInput=${event => replace({ ...part, weight: Number(event.target.value) })} />
        <span class="num">× ${part.weight.toFixed(2)}</span><${Button} small kind="ghost" icon="close" label=${`Leave out ${part.name || "adapter"}`} disabled=${column.parts.length < 2} onClick=${() => onChange({ ...column, parts: column.parts.filter((_, place) => place !== at) })} /></div>`;
    })}<div><${Button} small icon="plus" onClick=${() => onChange({ ...column, parts: [...column.parts, { name: "", weight: 0.5 }] })}>Add adapter</${Button}></div></div>`}
    <${Answer} answer=${answer} reference=${reference} title=${title} /></section>`;
}

const shade = logprob => `color-mix(in srgb, var(--warn) ${Math.min(55, Math.round(-logprob * 15))}%, transparent)`;

function Answer({ answer, reference, title }) {
  if (!answer) return html`<div class="answer muted">The answer appears here.</div><div></div>`;
  const tokens = answer.tokens;
  const isCompared = reference && reference.length > 0 && tokens.length > 0;
  const { kept, score } = isCompared ? difference(reference.map(each => each.text), tokens.map(each => each.text)) : { kept: null, score: null };
  const mean = tokens.length ? tokens.reduce((sum, each) => sum + (each.logprob ?? 0), 0) / tokens.length : null;
  return html`<div class="answer" aria-live="off" tabindex="0" role="region" aria-label=${`Answer, ${title}`}>${tokens.map((token, at) => html`<span class=${`t ${kept && !kept.has(at) ? "new" : ""}`} style=${token.logprob == null ? undefined : { background: shade(token.logprob) }}
      title=${token.logprob == null ? undefined : `${percent(Math.exp(token.logprob))} likely${token.others ? `; also: ${token.others}` : ""}`}>${token.text}</span>`)}${answer.tools && html`<${Code} text=${answer.tools} label="Tool calls" />`}<${Problem} error=${answer.error} /></div>
    <footer class="answer-foot">${isCompared && html`<span><b>${percent(score)}</b> the same as the reference</span>`}
      ${answer.first_s != null && html`<span>first token ${seconds(answer.first_s)}</span>`}${answer.end_s != null && html`<span>${seconds(answer.end_s)} in all</span>`}
      ${answer.usage && html`<span>${number(answer.usage.completion_tokens)} tokens</span>`}${mean != null && html`<span title="exp of minus the mean log-probability">perplexity ${Math.exp(-mean).toFixed(2)}</span>`}${answer.reason && html`<span>${answer.reason}</span>`}</footer>`;
}

/** Which tokens of `b` are in the longest common subsequence with `a`, and twice its length over both lengths. */
export function difference(a, b) {
  const width = b.length + 1, table = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) for (let j = b.length - 1; j >= 0; j--) {
    table[i * width + j] = a[i] === b[j] ? table[(i + 1) * width + j + 1] + 1 : Math.max(table[(i + 1) * width + j], table[i * width + j + 1]);
  }
  const kept = new Set();
  for (let i = 0, j = 0; i < a.length && j < b.length;) {
    if (a[i] === b[j]) { kept.add(j); i++; j++; } else if (table[(i + 1) * width + j] >= table[i * width + j + 1]) i++; else j++;
  }
  return { kept, score: a.length + b.length ? 2 * kept.size / (a.length + b.length) : 1 };
}

function bodyOf(column) {
  const given = settings.value;
  const numeric = name => given[name] === "" ? {} : { [name]: Number(given[name]) };
  const body = {
    model: column.kind === "adapter" ? column.name : session.value.model,
    messages: [...(given.system ? [{ role: "system", content: given.system }] : []), { role: "user", content: given.prompt }],
    ...numeric("temperature"), ...numeric("top_p"), ...numeric("max_tokens"), ...numeric("seed"),
  };
  if (column.kind === "mix") body.adapters = column.parts.filter(part => part.name).map(part => ({ name: part.name, weight: part.weight }));
  if (given.tools.trim()) body.tools = JSON.parse(given.tools);
  if (given.schema.trim()) body.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema: JSON.parse(given.schema) } };
  return body;
}

async function stream(column, abort, show) {
  const answer = { tokens: [], first_s: null, end_s: null };
  const began = performance.now(), passed = () => (performance.now() - began) / 1000;
  const calls = [];
  try {
    const body = { ...bodyOf(column), stream: true, stream_options: { include_usage: true }, logprobs: true, top_logprobs: 3 };
    if (column.kind === "adapter" && !column.name) throw new Error("Choose a model for this column.");
    const reply = await send("POST", "/v1/chat/completions", { body, signal: abort, useKey: may.infer.value ? "" : inferenceKey.value });
    answer.adapter = reply.headers.get("X-Polylora-Adapter");
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    let shown = 0;
    for await (const event of eventsOf(reader)) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices?.[0];
      if (event.usage) answer.usage = event.usage;
      if (!choice) continue;
      if (choice.finish_reason) answer.reason = choice.finish_reason;
      for (const call of choice.delta?.tool_calls ?? []) {
        const old = calls[call.index] ??= { name: "", arguments: "" };
        old.name += call.function?.name ?? ""; old.arguments += call.function?.arguments ?? "";
        answer.tools = calls.map(each => `${each.name}(${each.arguments})`).join("\n");
      }
      const parts = choice.logprobs?.content ?? [];
      if (parts.length) answer.tokens = answer.tokens.concat(parts.map(part => ({ text: part.token, logprob: part.logprob, others: (part.top_logprobs ?? []).slice(1).map(each => `${JSON.stringify(each.token)} ${percent(Math.exp(each.logprob))}`).join(", ") })));
      else if (choice.delta?.content) answer.tokens = [...answer.tokens, { text: choice.delta.content, logprob: null }];
      answer.first_s ??= answer.tokens.length ? passed() : null;
      if (performance.now() - shown > 60) { shown = performance.now(); show({ ...answer }); }
    }
    answer.end_s = passed();
  } catch (error) {
    if (!abort.aborted) answer.error = error;
  }
  show({ ...answer });
}

function codeDialog(columns) {
  let bodies;
  try { bodies = columns.map(bodyOf); } catch (error) { say(`Tools or schema are not JSON: ${error.message}`, "bad"); return; }
  openDialog(() => html`<${Shown} bodies=${bodies} />`);
}
function Shown({ bodies }) {
  const language = useSignal("curl"), at = useSignal(0);
  const body = bodies[at.value], json = JSON.stringify(body, null, 2);
  const python = `from openai import OpenAI\n\nclient = OpenAI(base_url="${address}/v1", api_key=os.environ["POLYLORA_API_KEY"])\nanswer = client.chat.completions.create(\n${Object.entries(body)
    .filter(([name]) => name !== "adapters").map(([name, value]) => `    ${name}=${pythonText(value)},`).join("\n")}${body.adapters ? `\n    extra_body={"adapters": ${pythonText(body.adapters)}},` : ""}\n)\nprint(answer.choices[0].message.content)`;
  const text = { curl: `curl '${address}/v1/chat/completions' \\\n  -H "Authorization: Bearer $POLYLORA_API_KEY" \\\n  --json '${json.replaceAll("'", `'\\''`)}'`, python: `import os\n\n${python}`,
    javascript: `const answer = await fetch("${address}/v1/chat/completions", {\n  method: "POST",\n  headers: { "Content-Type": "application/json", Authorization: \`Bearer \${process.env.POLYLORA_API_KEY}\` },\n  body: JSON.stringify(${json.replaceAll("\n", "\n  ")}),\n}).then(reply => reply.json());\nconsole.log(answer.choices[0].message.content);` }[language.value];
  return html`<${Dialog} title="View code" onClose=${closeDialog} wide>
    ${bodies.length > 1 && html`<${Tabs} label="Column" value=${String(at.value)} onChange=${value => { at.value = Number(value); }} tabs=${bodies.map((each, index) => [String(index), index ? `Column ${index + 1}` : "Reference"])} />`}
    <${Tabs} label="Language" value=${language.value} onChange=${value => { language.value = value; }} tabs=${[["curl", "curl"], ["python", "Python"], ["javascript", "JavaScript"]]} />
    <${Code} text=${text} label="Code" /></${Dialog}>`;
}
const pythonText = value => value === null ? "None" : value === true ? "True" : value === false ? "False" : Array.isArray(value) ? `[${value.map(pythonText).join(", ")}]`
  : typeof value === "object" ? `{${Object.entries(value).map(([key, each]) => `${JSON.stringify(key)}: ${pythonText(each)}`).join(", ")}}` : JSON.stringify(value);
