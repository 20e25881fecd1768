/* Settings, stored conversations, exports and imports. */
"use strict";

/** The fields with the model's defaults, or as they were changed in this tab. */
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

/** The store of conversations, and the result of a request to it. */
const stored = (mode = "readonly") => db.transaction("conversations", mode).objectStore("conversations");
const settled = (request) => new Promise((resolve, reject) => {
  Object.assign(request, { onsuccess: () => resolve(request.result), onerror: () => reject(request.error) });
});

const keep = (its) => sessionStorage.setItem("clearllama-conversation", JSON.stringify((key = its)));

/** Store the conversation in place of its last state. If another tab has replaced that one, both remain. */
function save() {
  if (!db || turns.length < 2) return;
  const store = stored("readwrite"), old = key;
  if (old) store.delete(old);
  keep([Date.now() + Math.random(), turns[1].question.slice(0, 100)]);
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
    + `\n\n${said(one)}\n\n_${card.id}, ${describe(one)}_\n`).join("\n"), "text/markdown"],
  curl(last) {
    const { response_format, ...sampling } = last.sampling, chat = card.meta.template, begun = last.tokens.slice(0, last.given), given = said({ tokens: begun });
    const text = !chat ? { prompt: contents(last) + given }
      : { messages: [...messages(last), ...(given ? [{ role: "assistant", content: given }] : [])], response_format };
    const body = JSON.stringify({ ...text, ...sampling, seed: last.seed }, null, 1);
    const notes = [last.off.length && `Not in this request: without head ${last.off.map((one) => one.join(".")).join(", ")}`,
      !chat && response_format && "Not in this request: the JSON schema", begun.some((one) => one.thought) && "Not in this request: the given thought",
      (given || (!chat && last.parent)) && "Given and earlier words are text here: their tokens may differ"];
    const secret = sessionStorage.getItem("clearllama-key") ? ' -H "Authorization: Bearer $CLEARLLAMA_API_KEY"' : "";
    return ["clearllama.sh", `${notes.filter(Boolean).map((one) => `# ${one}.\n`).join("")}curl ${location.origin}/v1/${chat ? "chat/" : ""}completions`
      + ` -H 'Content-Type: application/json'${secret} -d '${body.replaceAll("'", "'\\''")}'\n`, "text/plain"];
  },
  html: async (last) => ["trace.html", await delivered((await computed("page", last)).text()), "text/html", differs(last)],
  npz: async (last) => ["activations.npz", await delivered((await computed("activations", last)).blob()), "application/octet-stream", differs(last)],
};
const computed = (kind, last) => call(`look/${kind}`, JSON.stringify({ ids: before(last).slice(-card.meta.traced) }));
const differs = (last) => [count() > card.meta.traced && "Computed without the tokens before: its numbers differ from those of the panel.",
  last.off.length && "Computed with all heads."].filter(Boolean).join(" ");

async function exportAs(kind) {
  if (!path().length) return;
  put("exported", ["html", "npz"].includes(kind) ? "The file is being computed: some seconds." : "");
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
    await replace(checked(JSON.parse(await file.text()).turns));
    save();
    id("export").close();
  } catch (error) {
    put("exported", `${file.name} is not an export of this page: ${error.message}`);
  }
}

/** Return a tree of turns that comes from outside. Raises an error unless this page can draw it. */
function checked(found) {
  const whole = (x, end = Infinity) => Number.isInteger(x) && x >= 0 && x < end, text = (...all) => all.every((x) => typeof x === "string");
  const spelt = (one) => whole(one.id) && (text(one.text) || one.bytes.every((x) => whole(x, 256)));
  const other = (one) => spelt(one) && Number.isFinite(one.p) && (Number.isFinite(one.q) || Object.hasOwn(STAGES, one.cut));
  const drawn = (one) => spelt(one) && one.top.every(other) && [one.p, one.warm ?? 1, ...Object.values(one.left ?? {})].every(Number.isFinite);
  const linked = (one, n) => one.n === n && whole(one.active, one.children.length || 1)
    && one.children.every((child) => found[child].parent === n && child > n) && (n === 0 || found[one.parent].children.includes(n));
  const turn = (one) => text(one.question, one.system) && one.prompt.every(spelt) && one.tokens.every(drawn)
    && [one.sampling.temperature, one.seed].every(Number.isFinite) && [one.given, one.source ?? 0, one.first ?? 0].every((x) => whole(x))
    && one.off.every((head) => whole(head[0]) && whole(head[1]));
  if (found?.length && found.every(linked) && found.slice(1).every(turn)) return found;
  throw new Error("its turns are incomplete or damaged");
}

/** Show another conversation. its: its key, if it is stored */
async function replace(others, its = null) {
  while (running) await stop();
  [turns, editing, id("question").value] = [others, null, ""];
  keep(its);
  unselect();
  answers.clear();
  say("");
  draw();
  drawStored();
  id("question").focus();
}
