/* Settings, stored conversations, exports and imports, links to the open view. */
"use strict";

/** Draw the fields with the model's defaults, or with the values that were set in this tab. */
function drawSettings() {
  const own = card.meta.sampling, values = Object.keys(own).length ? { top_k: 0, top_p: 1, min_p: 0, ...own } : {};
  put("fields", ...Object.entries(FIELDS).map(([name, [label, value]]) => make("label", {}, label,
    make("input", { id: `set-${name}`, type: "number", step: "any", min: 0, value: values[name] ?? value }))));
  const kept = JSON.parse(sessionStorage.getItem("clearllama-settings") ?? "{}");
  for (const field of fields()) if (kept[field.id]) [field.value, field.checked] = kept[field.id];
}
const fields = () => id("settings").querySelectorAll("input, textarea");

function saveSettings() {
  try {
    JSON.parse(id("schema").value || "{}");
  } catch (error) {
    id("schema").value = "";
    say(`The schema is not JSON, so it is not used: ${error.message}`);
  }
  const values = [...fields()].map((field) => [field.id, [field.value, field.checked]]);
  sessionStorage.setItem("clearllama-settings", JSON.stringify(Object.fromEntries(values)));
}

/** stored: the store of conversations. settled: the result of a request to the store. */
const stored = (mode = "readonly") => db.transaction("conversations", mode).objectStore("conversations");
const settled = (request) => new Promise((resolve, reject) => {
  Object.assign(request, { onsuccess: () => resolve(request.result), onerror: () => reject(request.error) });
});

/** Open the store, and the conversation that this tab had. */
async function openStore() {
  const request = indexedDB.open("clearllama", 1), last = JSON.parse(sessionStorage.getItem("clearllama-conversation"));
  request.onupgradeneeded = () => request.result.createObjectStore("conversations");
  db = await settled(request).catch((error) => say(`This browser keeps no conversations: ${error.message}`));
  if (db && last) [turns, key] = [(await settled(stored().get(last))) ?? turns, last];
}

const keep = (its) => sessionStorage.setItem("clearllama-conversation", JSON.stringify((key = its)));

/** Store the conversation in place of its last state. If another tab has replaced that state, both conversations remain. */
function save() {
  if (!db || turns.length < 2) return;
  const store = stored("readwrite"), old = key;
  if (old) store.delete(old);
  keep([Date.now() + Math.random(), turns[1].question.slice(0, 100)]);
  if (location.hash) history.replaceState(null, "", location.pathname); // the page no longer shows what a link opened
  store.put(turns, key);
  store.transaction.onabort = () => say("The browser can't keep this conversation; export it.", keep(old));
  store.transaction.commit(); // also while the page closes
}

/** List the stored conversations, the last one first. */
async function drawStored() {
  const keys = db ? (await settled(stored().getAllKeys())).reverse() : [];
  const remove = async (one) => confirm(`Delete “${one[1]}”?`) && drawStored(await settled(stored("readwrite").delete(one)));
  put("stored", ...keys.map((one) => make("div", { class: "foot" },
    press(plain(one[1]), async () => replace(await settled(stored().get(one)), one), { class: "ellipsis" }),
    new Date(one[0]).toLocaleString([], { dateStyle: "short", timeStyle: "short" }), press("delete", () => remove(one), { class: "quiet" }))));
}

// [name, content, type, note] of an export; last is the last turn that is shown
const EXPORTS = {
  json: () => ["clearllama.json", JSON.stringify({ clearllama: card.meta.version, model: identity(), turns }, null, 1), "application/json"],
  md: () => ["clearllama.md", path().map((one) => `${changedSystem(one) === null ? "" : `_System: ${changedSystem(one)}_\n\n`}**${one.question}**`
    + `${isText(one) ? "" : "\n\n"}${said(one)}\n\n_${card.id}, ${describe(one)}_\n`).join("\n"), "text/markdown"],
  curl(last) {
    const { response_format, ...sampling } = last.sampling, chat = !isText(last), begun = last.tokens.slice(0, last.given), given = said({ tokens: begun });
    const text = !chat ? { prompt: contents(last) + given }
      : { messages: [...messages(last), ...(given ? [{ role: "assistant", content: given }] : [])], response_format };
    const body = JSON.stringify({ ...text, ...sampling, seed: last.seed }, null, 1);
    const notes = [last.off.length && `Not in this request: without ${last.off.map(partName).join(", ")}`,
      last.patch && "Not in this request: the vector of another question",
      !chat && response_format && "Not in this request: the JSON schema", begun.some((one) => one.thought) && "Not in this request: the given thought",
      (given || (!chat && last.parent)) && "Forced and earlier words are sent as text: their tokens may differ"];
    const secret = sessionStorage.getItem("clearllama-key") ? ' -H "Authorization: Bearer $CLEARLLAMA_API_KEY"' : "";
    return ["clearllama.sh", `${notes.filter(Boolean).map((one) => `# ${one}.\n`).join("")}curl ${location.origin}/v1/${chat ? "chat/" : ""}completions`
      + ` -H 'Content-Type: application/json'${secret} -d '${body.replaceAll("'", "'\\''")}'\n`, "text/plain"];
  },
  html: async (last) => ["trace.html", await delivered((await computed("page", last)).text()), "text/html", differs(last)],
  npz: async (last) => ["activations.npz", await delivered((await computed("activations", last)).blob()), "application/octet-stream", differs(last)],
  view: async () => ["clearllama.html", withView(await delivered((await call("view.html")).text())), "text/html",
    "The file holds the conversation as shown, and opens without a server."],
};
const computed = (kind, last) => call(`look/${kind}`, JSON.stringify({ ids: before(last).slice(-card.meta.traced) }));
const differs = (last) => [count() > card.meta.traced && "Computed from the last 256 tokens only: its numbers differ from the panel’s.",
  last.off.length && "Computed with all heads."].filter(Boolean).join(" ");

async function exportAs(kind) {
  if (!path().length) return;
  put("exported", ["html", "npz"].includes(kind) ? "The file is being computed; this takes some seconds." : "");
  try {
    const [download, content, type, note = ""] = await EXPORTS[kind](path().at(-1));
    make("a", { download, href: URL.createObjectURL(new Blob([content], { type })) }).click();
    put("exported", note);
  } catch (error) {
    put("exported", error instanceof Gone ? "The server does not answer." : told(error));
  }
}

async function load(file) {
  try {
    await replace(checked(parsed(await file.text()).turns));
    save();
    id("export").close();
  } catch (error) {
    put("exported", `${file.name} is not an export of this page: ${error.message}`);
  }
}

/** Parse JSON that comes from outside. */
const parsed = (json) => JSON.parse(json, (name, value) => {
  if (name === "__proto__") throw new Error("it has a key __proto__");
  return value;
});
const whole = (x, end = 2 ** 31) => Number.isInteger(x) && x >= 0 && x < end;
const head = (x) => x.length === 2 && x.every((one) => whole(one));
const text = (...all) => all.every((x) => typeof x === "string"), part = (x) => Number.isFinite(x) && x >= 0 && x < 1.001;
const spelt = (one) => whole(one.id) && (text(one.text) || one.bytes.every((x) => whole(x, 256)));

/** Return a tree of turns that comes from outside. Raises an error unless this page can draw it. */
function checked(found) {
  const other = (one) => spelt(one) && part(one.p) && (part(one.q) || Object.hasOwn(STAGES, one.cut) || one.cut === "processors");
  const drawn = (one) => spelt(one) && one.top.every(other) && [one.p, one.warm ?? 1].every(part)
    && Object.entries(one.left ?? {}).every(([stage, count]) => whole(count) && !(stage in {}));
  const linked = (one, n) => one.n === n && whole(one.active, one.children.length || 1)
    && one.children.every((child) => found[child].parent === n && child > n) && (n === 0 || found[one.parent].children.includes(n));
  const drawing = (its) => Object.keys(FIELDS).every((name) => Number.isFinite(its[name]))
    && Object.keys(its).every((name) => Object.hasOwn(FIELDS, name) || name === "response_format");
  const turn = (one) => text(one.question, one.system, one.model ?? "", one.error ?? "") && one.prompt.every(spelt) && one.tokens.every(drawn)
    && drawing(one.sampling) && Number.isFinite(one.seed) && [one.given, one.source ?? 0, one.first ?? 0].every((x) => whole(x))
    && one.off.every(head) && text(one.asked ?? "") && [undefined, true, false].includes(one.raw) && whole(one.earlier ?? 0, one.prompt.length + 1)
    && (!one.patch || [one.patch.layer, one.patch.position, ...one.patch.other].every((x) => whole(x))) && [null, "stop", "error", ...Object.keys(ENDS)].includes(one.end);
  if (found?.length && found.every(linked) && found.slice(1).every(turn)) return found;
  throw new Error("its turns are incomplete or damaged");
}

/** Show another conversation. its: the key of this conversation, if it is stored */
async function replace(others, its = null) {
  while (running) await stop();
  [turns, editing, id("question").value] = [others, null, ""];
  keep(its);
  unselect();
  answers.clear();
  if (location.hash) history.replaceState(null, "", location.pathname);
  say("");
  draw();
  foreign();
  drawStored();
  id("question").focus();
}

// ------------------------------------------------------------------------------------------------ links to the open view
const [LONGEST, LARGEST] = [4096, 200_000]; // characters of a view in a link, and of the JSON in it

/** The open view: the turns that are shown, and what is open. short: for a link, keep two alternatives of words that are not open */
function view(short) {
  const shown = path(), brief = ({ left, warm, ...one }) => ({ ...one, top: one.top.filter((other) => other.id === one.id || other === rivals(one)[0]) });
  const words = (turn) => turn.tokens.map((one, i) => (short && !(chosen?.turn === turn.n && chosen.i === i) ? brief(one) : one));
  const listed = shown.map((turn, k) => ({ ...turn, n: k + 1, parent: k, children: shown[k + 1] ? [k + 2] : [], active: 0, source: null, tokens: words(turn) }));
  const open = chosen && { ...chosen, turn: shown.indexOf(openTurn()) + 1 };
  return { turns: [{ n: 0, children: [1], active: 0 }, ...listed], open, tab: id("panel").dataset.tab };
}

/** The page as a file, with the open view and what was computed for its open word in it. */
function withView(page) {
  const asked = chosen && inspection({}).replace(/"off".*/s, ""); // how the requests about the open word begin
  const json = JSON.stringify({ ...view(false), card, seen: [...seen].filter(([body]) => chosen && body.startsWith(asked)) });
  return page.replace('id="saved">', (tag) => tag + json.replaceAll("<", "\\u003c")); // no text can end the element
}

/** Show the view of this file. */
async function openSaved() {
  document.body.classList.add("saved");
  for (const [body, found] of saved.seen) seen.set(body, found);
  id("against").disabled = true;
  await show(saved);
}

/** Copy a link whose part after # holds the open view. Browsers do not send this part. */
async function copyLink() {
  if (!path().length) return;
  const json = JSON.stringify(view(true)), stream = new Blob([json]).stream().pipeThrough(new CompressionStream("deflate-raw"));
  const packed = Array.from(new Uint8Array(await new Response(stream).arrayBuffer()), (byte) => String.fromCharCode(byte)).join("");
  const text = btoa(packed).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  if (text.length > LONGEST || json.length > LARGEST) {
    return put("exported", `For a link, this view is too long: ${thousands(text.length)} characters, and at most ${thousands(LONGEST)} fit. `,
      press("Save it as an HTML file", () => exportAs("view")), " instead. The file holds the conversation as shown.");
  }
  const href = `${location.origin}${location.pathname}#view=${text}`;
  put("exported", make("a", { href }, "This link"), " holds the text as shown and the details of the open word.");
  await navigator.clipboard?.writeText(href).then(() => id("exported").append(" It is copied."), () => {});
}

/** Open the view that the address holds, if any. */
async function openLink() {
  const { hash } = location;
  if (!hash.startsWith("#view=")) return;
  try {
    // a byte of deflate makes at most 1,032, so this also bounds what is unpacked, to 3.2 MB
    if (hash.length > LONGEST + 6) throw new Error(`it has more than ${thousands(LONGEST)} characters`);
    const packed = Uint8Array.from(atob(hash.slice(6).replaceAll("-", "+").replaceAll("_", "/")), (one) => one.charCodeAt(0));
    const json = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"))).text();
    if (json.length > LARGEST) throw new Error(`it holds more than ${thousands(LARGEST)} characters`);
    await show(checkedView(parsed(json)));
    history.replaceState(null, "", hash); // reloading shows the view again
  } catch (error) {
    say(`This link can't be opened: ${plain(error.message)}`);
  }
}

/** Return a view that comes from outside. Raises an error unless this page can draw it. */
function checkedView({ turns: found, open, tab: name }) {
  const { turn: n, i, against, head: shown, key: its, found: given } = open ?? {}, turn = path(checked(found)).find((one) => one.n === n);
  const one = turn && Number.isInteger(i) && (i >= 0 || (isText(turn) && turn.prompt.length + i >= (turn.earlier ?? 0))) && wordAt(turn, i);
  const looked = given === undefined || (i < 0 && part(given.p) && given.top.every((other) => spelt(other) && part(other.p)));
  const right = open === null || (one && looked && (against === undefined || rivals({ top: [], ...one, ...given }).some((other) => other.id === against))
    && (shown === undefined || head(shown)) && whole(its ?? 0));
  if (!right || ![...id("tabs").children].some((button) => button.dataset.tab === name)) throw new Error("what it opens is not there");
  const about = given && { p: given.p, top: given.top };
  return { turns: found, open: open && { turn: n, i, against, head: shown, key: its, found: about }, tab: name };
}

/** Show a view. */
async function show({ turns: found, open, tab: name }) {
  await replace(found);
  tab(name);
  chosen = open;
  if (open) select(open.turn, open.i);
}
