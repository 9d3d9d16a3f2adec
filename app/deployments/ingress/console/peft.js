// A PEFT folder, read and checked in the browser before a byte is sent.
import { number } from "./core.js";

/** The files of a drop: of folders, too. */
export async function droppedFiles(transfer) {
  const entries = [...transfer.items].map(item => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.length) return [...transfer.files];
  const files = [];
  const walk = async entry => {
    if (entry.isFile) files.push(await new Promise((done, fail) => entry.file(done, fail)));
    else {
      const reader = entry.createReader();
      for (;;) {
        const part = await new Promise((done, fail) => reader.readEntries(done, fail));
        if (!part.length) break;
        for (const each of part) await walk(each);
      }
    }
  };
  for (const entry of entries) await walk(entry);
  return files;
}

/** What is known of the adapter before it is sent: {config, weights, facts, checks}. `checks`: [kind, text]. */
export async function readPeft(files) {
  const find = name => files.find(file => file.name === name);
  const checks = [], facts = {};
  const bad = text => checks.push(["bad", text]), ok = text => checks.push(["ok", text]), warn = text => checks.push(["warn", text]);
  const configFile = find("adapter_config.json"), weights = find("adapter_model.safetensors");
  let config = null;
  if (!configFile) bad("adapter_config.json is missing. PEFT writes it with save_pretrained().");
  if (!weights) {
    bad(find("adapter_model.bin") ? "adapter_model.bin is a pickle, which can run code when it is read. Save it again with save_pretrained(..., safe_serialization=True)."
      : "adapter_model.safetensors is missing.");
  }
  if (configFile) {
    try { config = JSON.parse(await configFile.text()); } catch (error) { bad(`adapter_config.json is not JSON: ${error.message}`); }
  }
  if (config) {
    facts.base = config.base_model_name_or_path; facts.rank = config.r; facts.alpha = config.lora_alpha;
    if (config.peft_type && config.peft_type !== "LORA") bad(`The adapter is ${config.peft_type}, and only LORA is served.`);
    else ok(`LoRA of rank ${config.r}, alpha ${config.lora_alpha}${config.use_dora ? ", DoRA" : ""}${config.use_rslora ? ", rank-stabilised" : ""}`);
    if (facts.base) ok(`Trained for ${facts.base}; the service checks the shapes against its model.`);
  }
  if (weights) {
    try { readTensors(await header(weights), weights.size, config, { ok, bad, warn }, facts); } catch (error) { bad(`adapter_model.safetensors cannot be read: ${error.message}`); }
  }
  const others = files.filter(file => ![configFile, weights].includes(file)).length;
  if (others && weights) warn(`${others} other ${others === 1 ? "file is" : "files are"} not sent; the service needs these two only.`);
  return { config, weights, facts, checks, isGood: Boolean(config && weights && !checks.some(([kind]) => kind === "bad")) };
}

async function header(file) {
  if (file.size < 10) throw new Error("it is empty");
  const size = Number(new DataView(await file.slice(0, 8).arrayBuffer()).getBigUint64(0, true));
  if (size > 100e6 || size + 8 > file.size) throw new Error("its header is longer than the file; the copy is incomplete");
  return { size, tensors: JSON.parse(await file.slice(8, 8 + size).text()) };
}

function readTensors({ size, tensors }, fileSize, config, { ok, bad, warn }, facts) {
  const names = Object.keys(tensors).filter(name => name !== "__metadata__");
  const end = Math.max(0, ...names.map(name => tensors[name].data_offsets[1])) + size + 8;
  if (end !== fileSize) bad(`The tensors end at byte ${end} and the file at ${fileSize}; the copy is incomplete.`);
  const a = names.filter(name => /lora_(embedding_)?A/.test(name)), b = names.filter(name => /lora_(embedding_)?B/.test(name));
  if (!a.length) bad("There are no lora_A tensors; is this a whole model?");
  else if (a.length !== b.length) bad(`There are ${a.length} lora_A tensors and ${b.length} lora_B tensors.`);
  const ranks = new Set(a.map(name => name.includes("embedding") ? tensors[name].shape[1] : tensors[name].shape[0]));
  const parameters = names.reduce((sum, name) => sum + tensors[name].shape.reduce((x, y) => x * y, 1), 0);
  const types = [...new Set(names.map(name => tensors[name].dtype))];
  facts.parameters = parameters; facts.types = types; facts.size = fileSize;
  if (a.length && end === fileSize) ok(`${a.length} ${a.length === 1 ? "pair" : "pairs"} of matrices, ${number(parameters)} parameters, ${types.join(", ")}`);
  const allowed = new Set([config?.r, ...Object.values(config?.rank_pattern ?? {})]);
  const odd = [...ranks].filter(rank => config && !allowed.has(rank));
  if (odd.length) warn(`Tensors have the rank ${odd.join(", ")}, and adapter_config.json says ${config.r}.`);
}

/** Send weights with their configuration; `onProgress` gets 0 to 1. */
export function upload(target, { config, weights }, headers, onProgress) {
  const request = new XMLHttpRequest();
  const done = new Promise((resolve, reject) => {
    request.open("PUT", target);
    for (const [name, value] of Object.entries(headers)) request.setRequestHeader(name, value);
    request.setRequestHeader("Content-Type", "application/octet-stream");
    request.setRequestHeader("X-Adapter-Config", headerJson(config));
    request.upload.onprogress = event => { if (event.lengthComputable) onProgress(event.loaded / event.total); };
    request.onerror = () => reject(new Error("the connection was lost"));
    request.onabort = () => reject(new Error("the upload was cancelled"));
    request.onload = () => {
      let body = null;
      try { body = JSON.parse(request.responseText); } catch { /* a proxy's page */ }
      if (request.status < 300) resolve(body);
      else reject(new Error(body?.error?.message ?? `the service answered ${request.status}`));
    };
    request.send(weights);
  });
  return { done, abort: () => request.abort() };
}
/** JSON that fits into a header: ASCII, on one line. */
export const headerJson = value => JSON.stringify(value).replace(/[\u007f-\uffff]/g, each => "\\u" + each.charCodeAt(0).toString(16).padStart(4, "0"));
