/* The page of `clearllama serve`: a chat whose every token can be opened.

   Turns form a tree. A turn is a question, the ids of its prompt and the tokens of its answer; every other answer to it
   (an alternative token, another seed, an edited question, a head switched off) is a sibling. Nothing is deleted: IndexedDB keeps it. */
"use strict";

// name of a numeric setting: [label, default]; the other settings are in index.html
const FIELDS = { temperature: ["Temperature", 0.8], top_k: ["Top-k (0 is off)", 0], top_p: ["Top-p (1 is off)", 0.95],
  min_p: ["Min-p (0 is off)", 0.05], repetition_penalty: ["Repetition penalty (1 is off)", 1], max_tokens: ["Longest answer", 512] };
// stage between the model's probabilities and the draw: [label, function that says what the stage does]; warm is the largest probability after the temperature
const STAGES = {
  penalties: ["repetition penalty", ({ repetition_penalty: x }) => `makes words already used less probable (${x})`],
  grammar: ["the JSON schema", () => "drops the words that do not fit"],
  temperature: ["temperature", ({ temperature: x }, warm) => `divides the logits by ${x}: the largest probability becomes ${share(warm)}`],
  top_k: ["top-k", ({ top_k: x }) => `keeps the most probable words, at most ${thousands(x)}`],
  top_p: ["top-p", ({ top_p: x }) => `keeps the most probable words until their sum reaches ${x}`],
  min_p: ["min-p", ({ min_p: x }, warm) => `drops words that after the temperature are below ${x} × ${share(warm)} = ${share(x * warm)}`],
  greedy: ["temperature 0", () => "takes the most probable word"],
};
const CHATS = ["What is the capital of Japan?", "Why is the sky blue?", "Name three fruits, one on each line."];
const TEXTS = ["In the beginning God", "And he said unto them,", "The capital of Japan is"];
const ENDS = { length: "largest length", context: "context full", stopped: "stopped", gone: "server gone" }; // why an answer is incomplete

const saved = JSON.parse(id("saved")?.textContent ?? "null"); // the view in this file; null if a server sent the page
let card = null; // the model, from /v1/models
let turns = [{ n: 0, children: [], active: 0 }]; // turn 0 is the root
let chosen = null; // the open token: {turn, i}, and what was chosen in its panel: against, head, key
let inside = null; // what /look/inside returned for the open token
let texts = false; // whether the next conversation continues texts, without the chat template
let editing = null; // the turn whose question is being edited
let running = null; // {turn, abort, done}
let lost = false; // whether the server is gone
let keyed = false; // whether the last move came from the keyboard; only then do letters act in the focused answer
let db = null; // the store of conversations: [time of the last change, title] -> turns
let key = null; // the key of this conversation in db; null until it is stored
const seen = new Map(); // request -> inside, for the last 50 requests; at 1,500 tokens, an inside has 40 kB
const answers = new Map(); // turn -> its element

const ids = (tokens) => tokens.map((one) => one.id);
const bytes = (one) => (one.control ? [] : one.bytes ?? new TextEncoder().encode(one.text)); // a control token has none
const hex = (one) => bytes(one).map((byte) => byte.toString(16).toUpperCase().padStart(2, "0")).join(" ");
const decoder = () => new TextDecoder("utf-8", { ignoreBOM: true });
const textOf = (tokens) => decoder().decode(Uint8Array.from(tokens.flatMap((one) => [...bytes(one)])));
/** The text of an answer without its thought. */
const said = (turn) => (turn.tokens.some((one) => one.thought) ? textOf(turn.tokens.filter((one) => !one.thought)).trimStart() : textOf(turn.tokens));
const seed = () => Number(id("set-seed").value || crypto.getRandomValues(new Uint32Array(1))[0] % 10000);
const thousands = (n) => n.toLocaleString("en");
const say = (text) => put("status", text);
const banner = (text) => put("banner", text);
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
/** What must be equal for ids and looks to stay valid. */
const identity = () => [card.id, ...["n_layers", "n_heads", "vocab_size", "parameters", "weights"].map((name) => card.meta[name])].join(" ");
const openTurn = () => turns[chosen.turn];
const current = () => (chosen ? openTurn() : path().at(-1));
/** Whether a turn is a text that is continued, rather than a question. */
const isText = (turn) => !card.meta.template || turn.raw;
/** A token of a turn: i of the answer, or of the prompt, where it is negative and counts from the end. */
const wordAt = (turn, i) => (i < 0 ? turn.prompt.at(i) : turn.tokens[i]);
const before = (turn, i) => (i < 0 ? ids(turn.prompt).slice(0, i) : [...ids(turn.prompt), ...ids(turn.tokens.slice(0, i))]); // the ids before token i
/** The open token. Only a look knows the probabilities of one in the prompt. */
const openWord = () => ({ top: [], ...wordAt(openTurn(), chosen.i), ...chosen.found });
const place = (turn) => `${turns[turn.parent].children.indexOf(turn.n) + 1}/${turns[turn.parent].children.length}`; // its number among its siblings
const rivals = (one) => one.top.filter((other) => other.id !== one.id); // the words that a token can be compared with

// ------------------------------------------------------------------------------------------------------------ the server
class Refused extends Error {} // the server refused the request
class Gone extends Error {} // the server does not answer; all other errors are the page's own

/** What the network delivers; if it fails, and not because we cancelled it, the server is gone. */
const delivered = (promise, signal) => promise.catch((error) => {
  throw signal?.aborted ? error : new Gone(error.message);
});

async function call(path, body, signal) {
  if (saved) throw new Refused("This file holds one view and works without a server, so nothing else can be computed.");
  for (;;) {
    const headers = { "Content-Type": "application/json" };
    if (sessionStorage.getItem("clearllama-key")) headers.Authorization = `Bearer ${sessionStorage.getItem("clearllama-key")}`;
    const response = await delivered(fetch(path, { signal, headers, ...(body && { method: "POST", body }) }), signal);
    if (response.ok) return response;
    const message = (await response.json().catch(() => ({}))).error?.message ?? `the server answered ${response.status}`;
    if (response.status === 401) await new Promise(askKey);
    else if (response.status !== 429) throw new Refused(message[0].toUpperCase() + message.slice(1));
    else for (let seconds = Number(response.headers.get("Retry-After")) || 2; seconds > 0; seconds--) {
      say(`The server is busy with other looks: trying again in ${seconds} s.`);
      await pause(1000);
      signal?.throwIfAborted();
    }
  }
}

function askKey(done) {
  id("key").onclose = () => done(sessionStorage.setItem("clearllama-key", id("key-value").value));
  id("key").showModal();
}

/** The events of a stream. */
async function* events(response, signal) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await delivered(reader.read(), signal);
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part[0] !== ":") yield JSON.parse(part.slice(6));  // skip comments
  }
}

async function connect() {
  card = saved?.card ?? (await delivered((await call("v1/models")).json())).data[0];
  const { weights, rounding, exact } = card.meta;
  const how = `Drawn probabilities can be ${rounding} above or below those of float32: the largest difference measured on two small models. `
    + `What happens inside is computed ${exact ? "in float32" : "with the same rounding"}.`;
  drawSettings();
  put("about", make("b", {}, card.id), ` · ${weights}`, rounding ? make("span", { title: how }, ` · p ± ${rounding}`) : "");
  document.title = `${card.id} · clearllama`;
  foreign();
  draw();
  drawStored();
}

/** Show whether the conversation, or the next one, is a chat or a text. */
function drawMode() {
  const text = isText(path()[0] ?? { raw: texts });
  id("mode").hidden = !card.meta.template;
  for (const button of id("mode").children) button.setAttribute("aria-pressed", (button.dataset.mode === "text") === text);
  put("begin", text ? "Begin a text" : "Ask");
  put("samples", ...(text ? TEXTS : CHATS).map((one) => press(one, () => ask(one))));
  id("question").placeholder = !text ? "Ask…" : path().length ? "More text, its first space included…" : "Begin a text to continue…";
}

/** Say which other model wrote answers of this conversation. */
function foreign() {
  const other = turns.slice(1).find((one) => one.model !== identity());
  const [its, own] = [`${other?.model}`, identity()].map((model) => plain(model.replace(/^(.*?)(?: \d+){4} (.*)$/s, "$1 ($2)")));
  const text = `Another model, ${its}, wrote answers of this conversation. This is ${own}; looks into those answers are off.`;
  if (saved) banner(`A view of an answer by ${own}, saved by clearllama ${card.meta.version}. It works without a server, so nothing else can be computed.`);
  else if (!lost) banner(other ? text : "");
}

/** The message about an error: the server's, or that this page made the error, whose details are in the console. */
const told = (error) => (error instanceof Refused ? "" : `${reportError(error) ?? "This page made an error; please report it"}: `) + error.message;
const failed = (error, tell) => (error instanceof Gone ? gone(null) : tell(told(error)));

/** The server does not answer: wait until it does, then continue the answer that it left incomplete. */
async function gone(turn) {
  if (lost) return;
  lost = true;
  banner("The server does not answer. The text is kept; this page tries again every two seconds.");
  do await pause(2000);
  while (!(await fetch("health").then((response) => response.ok, () => false)));
  lost = false;
  await connect().catch((error) => failed(error, banner));
  if (chosen) look();
  if (turn?.end === "gone" && !running) branch(turn, turn.tokens, {});
}

// -------------------------------------------------------------------------------------------------------------- the tree
/** The turns of a tree that are shown, from the first to the last. */
function path(tree = turns) {
  const shown = [];
  for (let one = tree[0]; one.children.length;) shown.push(one = tree[one.children[one.active]]);
  return shown;
}

function add(parent, fields) {
  const turn = { n: turns.length, parent, children: [], active: 0, question: "", system: "", prompt: [], tokens: [], given: 0, end: null, raw: false, earlier: 0,
    off: [], source: null, first: null, ...fields };
  turns.push(turn);
  turns[parent].active = turns[parent].children.push(turn.n) - 1;
  return turn;
}

/** The messages of a turn that is shown, up to its question. The system message is that which it was sent with. */
function messages(turn) {
  const { system } = turn, all = path().flatMap((one) => [["user", one.question, one], ["assistant", said(one)]]);
  const sent = [...(system ? [["system", system]] : []), ...all.slice(0, all.findIndex(([, , one]) => one === turn) + 1)];
  return sent.map(([role, content]) => ({ role, content }));
}

/** The prompt of a text: the text before it, as ids if this model wrote it, and its question. */
function continued(turn) {
  const last = turns[turn.parent], written = last.model === identity() && last.prompt.length && before(last);
  return written ? { ids: written.filter((one) => !card.meta.stop_ids.includes(one)), prompt: turn.question } : { prompt: contents(turn) };
}
const contents = (turn) => messages(turn).map((one) => one.content).join("");

/** Show how many tokens the conversation has, and return it. */
function count() {
  const last = path().at(-1), used = last ? last.prompt.length + last.tokens.length : 0;
  put("count", `${thousands(used)} / ${thousands(card.meta.context)} tokens`);
  const part = used > card.meta.traced ? `the last ${card.meta.traced} tokens` : "this text";
  put("trace", `trace.html of ${part}`);
  put("npz", `activations (.npz) of ${part}`);
  return used;
}

async function ask(question) {
  if (!question.trim() || !card) return;
  if (!editing && count() + 8 >= card.meta.context) {
    return say(`The context is full: ${thousands(count())} of ${thousands(card.meta.context)} tokens. Nothing was sent;`
      + " begin a new conversation, or edit an earlier question.");
  }
  while (running) await stop();
  const last = path().at(-1), parent = editing ? editing.parent : last?.n ?? 0, { off = [] } = editing ?? last ?? {};
  [editing, id("question").value] = [null, ""];
  id("question")[matchMedia("(pointer: fine)").matches ? "focus" : "blur"](); // a phone's keyboard would cover the answer
  const raw = isText(path()[0] ?? { raw: texts });
  await run(add(parent, { question, raw, system: raw ? "" : id("system").value, off, sampling: sampling(), seed: seed() }));
}

/** Another answer to the question of a turn, which begins with these tokens. */
async function branch(turn, tokens, fields) {
  if (saved) return say("Another answer needs a server: this file works without one.");
  while (running) await stop();
  const { question, system, raw, earlier, prompt, seed, off, sampling, asked } = turn, given = tokens.length;
  const fits = turn.patch?.other.length <= prompt.length + given, patched = fits && { patch: turn.patch, asked };
  if (turn.model !== identity()) return;
  await run(add(turn.parent, { question, system, raw, earlier, prompt, tokens: [...tokens], given, sampling, seed, off, source: turn.n, ...patched, ...fields }));
}
const again = (turn) => branch(turn, [], { seed: seed(), sampling: sampling() });
const switchOff = (one) => branch(openTurn(), [], { off: [...openTurn().off, one], watched: chosen.i });

function sampling() {
  const values = Object.entries(FIELDS).map(([name, [, value]]) => [name, Number(id(`set-${name}`).value || value)]);
  const found = Object.fromEntries(values), schema = JSON.parse(id("schema").value || "null");
  found.max_tokens = Math.min(found.max_tokens, card.meta.context);
  return schema === null ? found : { ...found, response_format: { type: "json_schema", json_schema: { name: "answer", schema } } };
}

/** End the answer in progress; what is there stays. */
async function stop() {
  running?.abort.abort();
  await running?.done;
}

function run(turn) {
  const abort = new AbortController();
  running = { turn, abort };
  running.done = stream(turn, abort.signal).finally(() => {
    running = null;
    draw();
    if (chosen?.turn === turn.source) select(turn.n, turn.first ?? Math.min(chosen.i, turn.tokens.length - 1));
    else if (chosen) select(chosen.turn, chosen.i);
    say(outcome(turn));
    save();
  });
  if (chosen?.turn !== turn.source) unselect();
  else if (chosen.i < turn.tokens.length) chosen = { turn: turn.n, i: chosen.i };
  draw();
  id("scroll").scrollTop = id("scroll").scrollHeight;
  if (turn.source !== null && document.activeElement !== id("question")) id(`answer-${turn.n}`).focus({ preventScroll: true });
  return running.done;
}

async function stream(turn, signal) {
  Object.assign(turn, { model: identity(), end: null, error: "" });
  const text = turn.prompt.length ? { ids: ids(turn.prompt) } : isText(turn) ? continued(turn) : { messages: messages(turn) };
  if (!turn.prompt.length) turn.earlier = text.ids?.length ?? 0; // tokens of the prompt that the turns before show
  const { tokens, own, seed, off, patch } = turn, body = { ...text, ...(tokens.length && { answer: ids(tokens) }), own, ...turn.sampling, seed, off, patch };
  try {
    say("The answer begins.");
    const response = await call("look/answer", JSON.stringify(body), signal);
    for await (const event of events(response, signal)) receive(turn, event);
    if (!turn.end) throw new Gone("the connection ended");
  } catch (error) {
    turn.end = signal.aborted ? "stopped" : error instanceof Gone ? "gone" : "error";
    turn.error = turn.end === "error" ? told(error) : "";
    if (turn.end === "gone") gone(turn);
  }
}

/** What is said at the end of an answer. */
function outcome(turn) {
  const source = turns[turn.source], same = turn.first === null && source?.tokens.length === turn.tokens.length;
  return turn.error || (turn.end === "stop" ? "The answer is complete." : `The answer is incomplete: ${ENDS[turn.end]}.`)
    + (same ? ` It is the same as answer ${place(source)}.` : source ? ` ‹ and › above return to answer ${place(source)}.` : "");
}

function receive(turn, event) {
  if (event.error) throw new Refused(event.error.message);
  if (event.prompt) Object.assign(turn, { prompt: event.prompt, seed: event.seed });
  if (event.prompt && isText(turn)) draw(); // the tokens of the prompt replace the text
  id("reading").hidden = !event.read || event.read === event.of;
  if (event.read) id("reading").value = event.read / event.of;
  if (event.end) turn.end = event.end;
  if (event.id === undefined) return;
  if (event.forced) turn.given += 1;
  const i = turn.tokens.push(event) - 1, other = turns[turn.source]?.tokens[i];
  if (other && turn.first === null && other.id !== event.id) turn.first = i;
  frame ||= requestAnimationFrame(() => grow(turn));
}

let frame = 0;
/** Draw the tokens that came since the last frame: one layout for all of them. */
function grow(turn) {
  frame = 0;
  answerNode(turn);
  count();
}

// While an answer grows, the end of the chat stays in view, unless the reader scrolled up. Sizes are read when no layout is due.
let atEnd = true;
id("scroll").addEventListener("scroll", ({ target }) => (atEnd = target.scrollHeight - target.scrollTop - target.clientHeight < 120));
new ResizeObserver(() => running && atEnd && id("scroll").scrollTo(0, id("scroll").scrollHeight)).observe(id("chat"));

// -------------------------------------------------------------------------------------------------------------- the chat
/** The span of a token. A character that is split over tokens is in the last of them; the others are chips. */
function tokenNode(turn, i, decode) {
  const one = wordAt(turn, i), end = card.meta.stop_ids.includes(one.id);
  const text = one.control ? (end ? "end" : one.text) : decode.decode(Uint8Array.from(bytes(one)), { stream: true });
  const level = i < 0 ? "given" : one.p >= 0.1 ? "" : one.p >= 0.01 ? "m2" : "m3";
  const kind = `t ${one.control || !text ? "chip" : level} ${i === turn.first ? "first" : ""} ${text.startsWith("\n") ? "line" : ""}`;
  const node = make("span", { class: kind, id: `t${turn.n}-${i}`, "data-token": `${turn.n}-${i}`, role: "option", "aria-selected": "false" });
  const [, space, word] = /^( ?)(.*)$/s.exec(text ? plain(text) : hex(one));
  node.append(word && space, make("span", { class: "w", title: end ? one.text : "" }, word || space));
  if (one.control && i >= 0) node.firstElementChild.append(make("small", {}, ` ${share(one.p)}`));
  return node;
}

/** The element of an answer, which is kept. New tokens are added in blocks of lines, so that only the last one is laid out again. */
function answerNode(turn) {
  if (!answers.has(turn.n)) {
    const node = make("div", { class: "answer", id: `answer-${turn.n}`, role: "listbox", tabindex: 0, dir: "auto",
      "aria-label": "answer; arrow keys choose a token" });
    answers.set(turn.n, { node, decode: decoder(), drawn: 0 });
  }
  const answer = answers.get(turn.n), { node, decode } = answer, given = isText(turn) ? turn.prompt.length - (turn.earlier ?? 0) : 0;
  for (; answer.drawn < given + turn.tokens.length; answer.drawn++) {
    const i = answer.drawn - given, parent = wordAt(turn, i).thought ? folded(node) : node;
    let block = parent.lastElementChild;
    const full = block?.childElementCount >= 40 && block.lastElementChild.textContent.endsWith("\n");
    if (full || !block?.matches(".lines")) parent.append(block = make("div", { class: "lines" }));
    block.append(tokenNode(turn, i, decode));
  }
  return node;
}

/** The thought of an answer, above its text. */
function folded(node) {
  if (!node.querySelector("details")) node.prepend(make("details", {}, make("summary", {}, "thought")));
  return node.querySelector("details");
}

/** What switching a head off did to the open token of the branch before, or to the first token that became another. */
function effect(turn) {
  const i = Math.min(turn.watched, turn.first ?? Infinity), one = turns[turn.source]?.tokens[i];
  if (!one || !turn.tokens[i]) return "";
  const after = turn.tokens[i].top.find((other) => other.id === one.id);
  return `: ${named(one).textContent} ${share(one.p)} → ${after ? share(after.p) : "not among the ten"}`;
}

function describe(turn) {
  const off = turn.off.length && `without ${turn.off.map(partName).join(", ")}${effect(turn)}`;
  const patched = turn.patch && `with the vector before layer ${turn.patch.layer} at token ${turn.patch.position} of the other question “${plain(turn.asked)}”${off ? "" : effect(turn)}`;
  return [off, patched, `seed ${turn.seed}`, `temperature ${turn.sampling.temperature}`, ENDS[turn.end] ?? turn.error].filter(Boolean).join(" · ");
}

/** The system message of a turn if it is another one than before; else null. */
const changedSystem = (turn) => (turn.system === (turns[turn.parent].system ?? "") ? null : turn.system || "(none)");

function turnNode(turn) {
  const busy = running?.turn === turn, changed = changedSystem(turn), system = changed === null ? [] : [
    make("p", { class: "who" }, "System", make("small", {}, turn.parent ? "  from here on the first message of the prompt" : "")),
    make("p", { class: "system", dir: "auto" }, plain(changed))];
  const flows = isText(turn) && turn.prompt.length; // the answer begins with the words of the text
  const asked = make("div", { class: "asked" }, make("p", { class: "who" }, isText(turn) ? "Text" : "You"),
    flows ? "" : make("p", { class: "question", dir: "auto" }, plain(turn.question)), press("edit", () => edit(turn), { class: "quiet" }));
  const move = (by, label, sign) => press(sign, () => step(turn, by), { "aria-label": label, class: "quiet" });
  const branches = turns[turn.parent].children.length < 2 ? [] : [move(-1, "previous branch", "‹"),
    make("span", { class: "place" }, place(turn)), move(1, "next branch", "›")];
  const resumable = turn.end && turn.end !== "stop" && turn.tokens.length;
  const buttons = busy ? [press("Stop", stop)] : [
    press("copy", () => navigator.clipboard.writeText(said(turn)).then(() => say("Copied.")), { class: "quiet" }),
    press("again", () => again(turn), { class: "quiet", title: "with the settings as they are now" }),
    ...(turn.off.length ? [press("with all of the model", () => branch(turn, [], { off: [] }), { class: "quiet" })] : []),
    ...(resumable ? [press("continue", () => branch(turn, turn.tokens, {}), { class: "quiet" })] : [])];
  const foot = make("p", { class: "foot" }, make("span", {}, describe(turn)), ...buttons);
  return make("article", { id: `turn-${turn.n}`, class: `${busy ? "busy" : ""} ${flows ? "flows" : ""}` }, ...system, asked,
    make("div", { class: "who" }, flows ? "" : "Llama", make("small", {}, "  ", ...branches)), answerNode(turn), foot);
}

function draw() {
  const focused = document.activeElement?.id;
  put("chat", ...path().map(turnNode));
  if (focused?.startsWith("answer-")) id(focused)?.focus({ preventScroll: true });
  id("send").textContent = running ? "Stop" : "Send";
  drawMode();
  id("reading").hidden = true;
  count();
  drawOff();
  mark();
  markSources();
}

/** Show the next or previous branch of a turn. */
function step(turn, by) {
  const parent = turns[turn.parent], last = parent.children.length;
  parent.active = (parent.children.indexOf(turn.n) + by + last) % last;
  save();
  const shown = turns[parent.children[parent.active]], i = chosen?.turn === turn.n ? chosen.i : null;
  unselect();
  say("");
  draw();
  id(`answer-${shown.n}`).focus({ preventScroll: true });
  select(shown.n, i);
}

function edit(turn) {
  editing = turn;
  if (innerWidth < 1000) unselect(); // the panel would cover the question
  id("question").value = turn.question;
  drawOff();
  id("question").focus();
  say("Editing: Enter sends the changed question as another branch, Esc leaves it.");
}

// ------------------------------------------------------------------------------------------------------------- the start
// data-NAME="value" of an element: what a click on it does
const ACTIONS = {
  token: (value) => select(...value.split(/-(.*)/, 2).map(Number)),
  mode: (value) => drawMode(texts = value === "text"),
  step: (value) => moveBy(Number(value)),
  tab: (value) => tab(value),
  key: (value) => look({ head: inside.head.head, key: Number(value) }),
  export: exportAs,
  link: copyLink,
  compare: openCompare,
  patch: compare,
  open: (value) => id(value).showModal(),
  new: () => replace([{ n: 0, children: [], active: 0 }]),
  close: unselect,
  off: () => inside && switchOff(inside.head.head),
  ...PANEL,
};
// what a key of the keyboard does when a turn is shown; single characters act only in an answer that the keyboard focused
const KEYS = {
  Escape: () => (running ? stop() : chosen ? unselect() : id("question").focus()),
  ArrowLeft: () => moveBy(-1),
  ArrowRight: () => moveBy(1),
  "[": () => step(current(), -1),
  "]": () => step(current(), 1),
  e: () => edit(current()),
  r: () => again(current()),
  o: ACTIONS.off,
  ...Object.fromEntries([..."1234567890"].map((digit, k) => [digit, () => chosen && take(k)])),
};

function moveBy(by) {
  const turn = turns[document.activeElement?.id.split("answer-")[1]] ?? current();
  select(turn.n, chosen?.turn === turn.n ? chosen.i + by : by > 0 ? 0 : turn.tokens.length - 1);
}

function keydown(event) {
  keyed = /^(Tab|Arrow)/.test(event.key) || (keyed && event.key !== "Enter");
  if (event.ctrlKey || event.altKey || event.metaKey || event.isComposing || event.target.closest("input, textarea, select, dialog")) return;
  const character = event.key.length === 1, action = character && !(keyed && event.target.closest(".answer")) ? null : KEYS[event.key];
  if (action && current()) {
    event.preventDefault();
    action();
    if (event.key.startsWith("Arrow") && chosen) id(`answer-${chosen.turn}`).focus({ preventScroll: true });
  } else if (character && event.key !== " ") id("question").focus(); // what is typed goes into the box
}

async function start() {
  id("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    running ? stop() : ask(id("question").value);
  });
  id("question").addEventListener("keydown", (event) => {
    if (event.key === "Escape") running ? stop() : editing ? replace(turns, key) : unselect();
    if (event.key === "ArrowUp" && !id("question").value && current()) id(`answer-${current().n}`).focus({ preventScroll: true });
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) ask(id("question").value);
  });
  document.addEventListener("click", ({ target }) => {
    const found = target.closest("[data-token], [data-key], [data-source], button"), [[name, value] = []] = Object.entries(found?.dataset ?? {});
    ACTIONS[name]?.(value);
  });
  id("against").addEventListener("change", () => {
    chosen.known = false; // the sentence is about the word before
    drawSentence();
    look({ against: Number(id("against").value), head: undefined, key: undefined });
  });
  id("distance").addEventListener("input", drawPairs);
  id("settings").addEventListener("close", saveSettings);
  id("import").addEventListener("change", () => load(id("import").files[0]));
  id("take").addEventListener("submit", takeOwn);
  document.addEventListener("keydown", keydown);
  document.addEventListener("pointerdown", () => (keyed = false));
  addEventListener("pagehide", () => running && save());
  startPanel();
  tab(innerWidth < 1000 ? "words" : "why");
  if (!saved) await openStore();
  await connect().then(saved ? openSaved : openLink).catch((error) => failed(error, banner));
  addEventListener("hashchange", openLink);
  document.documentElement.dataset.ready = "";
}

start();
