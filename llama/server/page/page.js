/* The page of `clearllama serve`: a chat whose every token can be opened.

   Turns form a tree. A turn is a question, the ids of its prompt and the tokens of its answer; every other answer to it
   (an alternative token, another seed, an edited question, a head switched off) is a sibling. Nothing is deleted. */
"use strict";

// name: [label, default] of a number; the other settings are in index.html
const FIELDS = { temperature: ["Temperature", 0.8], top_k: ["Top-k (0 is off)", 0], top_p: ["Top-p (1 is off)", 0.95],
  min_p: ["Min-p (0 is off)", 0.05], repetition_penalty: ["Repetition penalty (1 is off)", 1], max_tokens: ["Longest answer", 512],
  seed: ["Seed", ""] };
// stage between the model's probabilities and the draw: [label, what it does]
const STAGES = {
  grammar: ["the JSON schema", "keeps the words that fit"],
  temperature: ["temperature", "divides the logits by"],
  top_k: ["top-k", "keeps the most probable words, at most"],
  top_p: ["top-p", "keeps the most probable words until their sum reaches"],
  min_p: ["min-p", "keeps words at least as probable as the first one times"],
  greedy: ["temperature 0", "takes the most probable word"],
};
const CHATS = ["What is the capital of Japan?", "Why is the sky blue?", "Name three fruits, one on each line."];
const TEXTS = ["In the beginning God", "And he said unto them,", "The capital of Japan is"];
const WAITS = 150; // ms from the last step to the request for the inside of a token
const ENDS = { length: "largest length", context: "context full", stopped: "stopped", gone: "server gone" }; // of an incomplete answer

let card = null; // the model, from /v1/models
let turns = [{ n: 0, children: [], active: 0 }]; // turn 0 is the root
let chosen = null; // {turn, i}: the open token
const BEST = { against: null, head: null, key: null };
let asked = BEST; // what is chosen in the panel; null is the best one
let inside = null; // what /look/inside returned for it
let editing = null; // the turn whose question is being edited
let running = null; // {turn, abort, done}
let lost = false; // whether the server is gone
const seen = new Map(); // request -> inside
const answers = new Map(); // turn -> its element

const ids = (tokens) => tokens.map((one) => one.id);
const bytes = (one) => (one.control ? [] : one.bytes ?? new TextEncoder().encode(one.text)); // none of a control token
const hex = (one) => bytes(one).map((byte) => byte.toString(16).toUpperCase().padStart(2, "0")).join(" ");
const decoder = () => new TextDecoder("utf-8", { ignoreBOM: true });
const textOf = (tokens) => decoder().decode(Uint8Array.from(tokens.flatMap((one) => [...bytes(one)])));
const seed = () => Number(id("set-seed").value || crypto.getRandomValues(new Uint32Array(1))[0] % 10000);
const thousands = (n) => n.toLocaleString("en");
const say = (text) => put("status", text);
const banner = (text) => put("banner", text);
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
/** What must be equal for ids and looks to stay valid. */
const identity = () => [card.id, ...["n_layers", "n_heads", "vocab_size", "parameters", "weights"].map((name) => card.meta[name])].join(" ");
const openTurn = () => turns[chosen.turn];
const current = () => (chosen ? openTurn() : path().at(-1));
const before = (turn, i) => [...ids(turn.prompt), ...ids(turn.tokens.slice(0, i))]; // the ids before a token of the answer

// ------------------------------------------------------------------------------------------------------------ the server
class Refused extends Error {}

async function call(path, body, signal) {
  for (;;) {
    const headers = { "Content-Type": "application/json" };
    if (sessionStorage.getItem("clearllama-key")) headers.Authorization = `Bearer ${sessionStorage.getItem("clearllama-key")}`;
    const response = await fetch(path, { signal, headers, ...(body && { method: "POST", body }) });
    if (response.ok) return response;
    const message = (await response.json().catch(() => ({}))).error?.message ?? `the server answered ${response.status}`;
    if (response.status === 401) await new Promise(askKey);
    else if (response.status !== 429) throw new Refused(message);
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
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) yield JSON.parse(part.slice(6));
  }
}

async function connect() {
  card = (await (await call("v1/models")).json()).data[0];
  const { weights, template } = card.meta;
  drawSettings();
  put("about", make("b", {}, card.id), ` · ${weights}`);
  document.title = `${card.id} · clearllama`;
  id("question").placeholder = template ? "Ask…" : "Begin a text, and the model continues it…";
  const foreign = turns.slice(1).some((one) => one.model !== identity());
  banner(foreign ? `Another model wrote answers of this conversation. This is ${card.id}; looks into those answers are off.` : "");
  draw();
  put("samples", ...(template ? CHATS : TEXTS).map((text) => press(text, () => ask(text))));
}

/** Tell why a request failed. */
function failed(error, tell) {
  if (error instanceof Refused) tell(error.message);
  else gone(null);
}

/** The server does not answer: wait until it does, then continue the answer that it left incomplete. */
async function gone(turn) {
  if (lost) return;
  lost = true;
  banner("The server does not answer. The text is kept; this page tries again every two seconds.");
  do await pause(2000);
  while (!(await fetch("health").then((response) => response.ok, () => false)));
  lost = false;
  await connect();
  if (chosen) look();
  if (turn?.end === "gone" && !running) branch(turn, turn.tokens, {});
}

// -------------------------------------------------------------------------------------------------------------- the tree
/** The turns that are shown, from the first to the last. */
function path() {
  const shown = [];
  for (let one = turns[0]; one.children.length;) shown.push(one = turns[one.children[one.active]]);
  return shown;
}

function add(parent, fields) {
  const turn = { n: turns.length, parent, children: [], active: 0, question: "", prompt: [], tokens: [], end: null, off: [],
    source: null, first: null, ...fields };
  turns.push(turn);
  turns[parent].active = turns[parent].children.push(turn.n) - 1;
  return turn;
}

/** The messages of a turn that is shown, up to its question. */
function messages(turn) {
  const system = id("system").value, all = path().flatMap((one) => [["user", one.question, one], ["assistant", textOf(one.tokens)]]);
  const sent = [...(system ? [["system", system]] : []), ...all.slice(0, all.findIndex(([, , one]) => one === turn) + 1)];
  return sent.map(([role, content]) => ({ role, content }));
}

/** Show how many tokens the conversation has, and return it. */
function count() {
  const last = path().at(-1), used = last ? last.prompt.length + last.tokens.length : 0;
  put("count", `${thousands(used)} / ${thousands(card.meta.context)} tokens`);
  return used;
}

async function ask(question) {
  if (!question.trim() || !card) return;
  if (!editing && count() + 8 >= card.meta.context) {
    return say(`The context is full: ${thousands(count())} of ${thousands(card.meta.context)} tokens. Nothing was sent;`
      + " begin a new conversation, or edit an earlier question.");
  }
  while (running) await stop();
  const parent = editing ? editing.parent : path().at(-1)?.n ?? 0;
  [editing, id("question").value] = [null, ""];
  await run(add(parent, { question, sampling: sampling(), seed: seed() }));
}

/** Another answer to the question of a turn, which begins with these tokens. */
async function branch(turn, tokens, fields) {
  while (running) await stop();
  const { question, prompt, seed, off, sampling } = turn;
  if (turn.model !== identity()) return;
  await run(add(turn.parent, { question, prompt, tokens: [...tokens], sampling, seed, off, source: turn.n, ...fields }));
}
const again = (turn) => branch(turn, [], { seed: seed(), sampling: sampling() });
const switchOff = (one) => branch(openTurn(), [], { off: [...openTurn().off, one], watched: chosen.i });

function sampling() {
  const values = Object.keys(FIELDS).filter((name) => name !== "seed").map((name) => [name, Number(id(`set-${name}`).value || FIELDS[name][1])]);
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
    save();
    draw();
    if (chosen && chosen.turn === turn.source) select(turn.n, turn.first ?? Math.min(chosen.i, turn.tokens.length - 1));
    else if (chosen) select(chosen.turn, chosen.i);
  });
  const opened = chosen && chosen.turn === turn.source;
  if (opened && chosen.i < turn.tokens.length) chosen.turn = turn.n;
  else if (chosen && !opened) unselect();
  draw();
  id("scroll").scrollTop = id("scroll").scrollHeight;
  id(`answer-${turn.n}`).focus({ preventScroll: true });
  return running.done;
}

async function stream(turn, signal) {
  Object.assign(turn, { model: identity(), end: null, error: "" });
  const text = turn.prompt.length ? { ids: ids(turn.prompt) } : card.meta.template ? { messages: messages(turn) } : { prompt: turn.question };
  const body = { ...text, ...(turn.tokens.length && { answer: ids(turn.tokens) }), ...turn.sampling, seed: turn.seed, off: turn.off };
  try {
    say("The answer begins.");
    const response = await call("look/answer", JSON.stringify(body), signal);
    for await (const event of events(response)) receive(turn, event);
    if (!turn.end) throw new TypeError("the connection ended");
  } catch (error) {
    turn.end = signal.aborted ? "stopped" : error instanceof Refused ? "error" : "gone";
    turn.error = turn.end === "error" ? error.message : "";
    if (turn.end === "gone") gone(turn);
  }
  const same = turn.first === null && turns[turn.source]?.tokens.length === turn.tokens.length;
  say(turn.error || (turn.end === "stop" ? "The answer is complete." : `The answer is incomplete: ${ENDS[turn.end]}.`)
    + (same ? " It is word for word that of the branch before." : "") + (turn.source === null ? "" : " ‹ above it shows the branch before."));
}

function receive(turn, event) {
  if (event.error) throw new Refused(event.error.message);
  if (event.prompt) Object.assign(turn, { prompt: event.prompt, seed: event.seed });
  id("reading").hidden = !event.read || event.read === event.of;
  if (event.read) id("reading").value = event.read / event.of;
  if (event.end) turn.end = event.end;
  if (event.id === undefined) return;
  const i = turn.tokens.push(event) - 1, other = turns[turn.source]?.tokens[i];
  if (other && turn.first === null && other.id !== event.id) turn.first = i;
  frame ||= requestAnimationFrame(() => grow(turn));
}

let frame = 0;
/** Draw the tokens that came since the last frame: one layout for all of them. */
function grow(turn) {
  const scroll = id("scroll"), below = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight;
  frame = 0;
  answerNode(turn);
  if (below < 120) scroll.scrollTop = scroll.scrollHeight;
  count();
}

// -------------------------------------------------------------------------------------------------------------- the chat
/** The span of a token. A character that is split over tokens is in the last of them; the others are chips. */
function tokenNode(turn, i, decode) {
  const one = turn.tokens[i], text = one.control ? one.text : decode.decode(Uint8Array.from(bytes(one)), { stream: true });
  const level = one.p >= 0.5 ? "" : one.p >= 0.1 ? "m1" : one.p >= 0.01 ? "m2" : "m3";
  const kind = `t ${one.control || !text ? "chip" : level} ${i === turn.first ? "first" : ""} ${text.startsWith("\n") ? "line" : ""}`;
  const node = make("span", { class: kind, id: `t${turn.n}-${i}`, "data-token": `${turn.n}-${i}`, role: "option", "aria-selected": "false" });
  const [, space, word] = /^( ?)(.*)$/s.exec(text ? plain(text) : hex(one));
  node.append(word && space, make("span", { class: "w" }, word || space));
  if (one.control) node.firstElementChild.append(make("small", {}, ` ${share(one.p)}`));
  return node;
}

/** The element of an answer, which is kept; new tokens are added. */
function answerNode(turn) {
  if (!answers.has(turn.n)) {
    const node = make("div", { class: "answer", id: `answer-${turn.n}`, role: "listbox", tabindex: 0, dir: "auto",
      "aria-label": "answer; arrow keys choose a token" });
    answers.set(turn.n, { node, decode: decoder() });
  }
  const { node, decode } = answers.get(turn.n);
  for (let i = node.childElementCount; i < turn.tokens.length; i++) node.append(tokenNode(turn, i, decode));
  return node;
}

/** What switching a head off did to the open token of the branch before, or to the first token that became another. */
function effect(turn) {
  const i = Math.min(turn.watched, turn.first ?? Infinity), one = turns[turn.source]?.tokens[i];
  if (!one || !turn.tokens[i]) return "";
  const after = turn.tokens[i].top.find((other) => other.id === one.id);
  return `: ${named(one).textContent} ${share(one.p)} → ${after ? share(after.p) : "not among the ten"}`;
}

function describe(turn) {
  const off = turn.off.length && `without head ${turn.off.map((one) => one.join(".")).join(", ")}${effect(turn)}`;
  return [off, `seed ${turn.seed}`, `temperature ${turn.sampling.temperature}`, ENDS[turn.end] ?? turn.error].filter(Boolean).join(" · ");
}

function turnNode(turn) {
  const siblings = turns[turn.parent].children, place = siblings.indexOf(turn.n), busy = running?.turn === turn;
  const asked = make("div", { class: "asked" }, make("p", { class: "who" }, card.meta.template ? "You" : "Text"),
    make("p", { class: "question", dir: "auto" }, plain(turn.question)), press("edit", () => edit(turn), { class: "quiet" }));
  const move = (by, label, sign) => press(sign, () => step(turn, by), { "aria-label": label, class: "quiet" });
  const branches = siblings.length < 2 ? [] : [move(-1, "previous branch", "‹"),
    make("span", { class: "place" }, `${place + 1}/${siblings.length}`), move(1, "next branch", "›")];
  const resumable = turn.end && turn.end !== "stop" && turn.tokens.length;
  const buttons = busy ? [press("Stop", stop)] : [
    press("copy", () => navigator.clipboard.writeText(textOf(turn.tokens)).then(() => say("Copied.")), { class: "quiet" }),
    press("again", () => again(turn), { class: "quiet", title: "with the settings as they are now" }),
    ...(resumable ? [press("continue", () => branch(turn, turn.tokens, {}), { class: "quiet" })] : [])];
  const foot = make("p", { class: "foot" }, make("span", {}, describe(turn)), ...buttons);
  return make("article", { id: `turn-${turn.n}`, class: busy ? "busy" : "" }, asked,
    make("div", { class: "who" }, "Llama", make("small", {}, "  ", ...branches)), answerNode(turn), foot);
}

function draw() {
  const focused = document.activeElement?.id;
  put("chat", ...path().map(turnNode));
  document.body.classList.toggle("marks", id("marks").checked);
  if (focused?.startsWith("answer-")) id(focused)?.focus({ preventScroll: true });
  id("send").textContent = running ? "Stop" : "Send";
  id("reading").hidden = true;
  count();
  mark();
}

/** Show the next or previous branch of a turn. */
function step(turn, by) {
  const parent = turns[turn.parent], last = parent.children.length;
  parent.active = (parent.children.indexOf(turn.n) + by + last) % last;
  const shown = turns[parent.children[parent.active]];
  const i = chosen?.turn === turn.n ? chosen.i : -1;
  unselect();
  draw();
  id(`answer-${shown.n}`).focus({ preventScroll: true });
  select(shown.n, i);
}

function edit(turn) {
  editing = turn;
  id("question").value = turn.question;
  id("question").focus();
  say("Editing: Enter sends the changed question as another branch, Esc leaves it.");
}

// ------------------------------------------------------------------------------------------------------------- the panel
function select(n, i) {
  const turn = turns[n];
  if (i < 0 || i >= turn.tokens.length) return;
  if (chosen?.turn !== n || chosen.i !== i) asked = BEST;
  chosen = { turn: n, i };
  document.body.classList.add("open");
  mark();
  id(`t${n}-${i}`).scrollIntoView({ block: "nearest" });
  drawWords();
  look();
}

function unselect() {
  request?.abort();
  chosen = inside = null;
  document.body.classList.remove("open");
  mark();
}

function mark() {
  const open = chosen && id(`t${chosen.turn}-${chosen.i}`);
  for (const node of [...document.querySelectorAll(".t.chosen"), ...(open ? [open] : [])]) {
    node.classList.toggle("chosen", node === open);
    node.setAttribute("aria-selected", node === open);
    node.parentElement.setAttribute("aria-activedescendant", node === open ? node.id : "");
  }
}

/** A token with all its spaces, as lists show it. */
function spelled(one) {
  if (one.control) return make("span", { class: "token control" }, one.text);
  return one.bytes ? token(`<${hex(one)}>`) : token(one.text);
}
/** A token as sentences name it. */
const named = (one) => spelled({ ...one, text: one.text?.replace(/^ (?=\S)/, "") });

/** The table of words: what the model computed, and what the word was drawn with, in bars of one scale. */
function drawWords() {
  const turn = openTurn(), one = turn.tokens[chosen.i], { left = {}, top } = one, stages = Object.keys(left);
  const rest = (name) => Number(Math.max(0, 1 - top.reduce((sum, other) => sum + (other[name] ?? 0), 0)).toFixed(4));
  const bar = (p) => make("span", { class: "both" }, make("span", { class: "p" }, share(p)), p ? track(p) : "");
  put("chosen", named(one), make("small", {}, ` position ${turn.prompt.length + chosen.i}`));
  put("alternatives", ...[...top, { p: rest("p"), q: rest("q") }].map((other, k) => {
    const row = press("", () => take(k), { class: "row", "aria-current": other.id === one.id });
    row.disabled = k === top.length;
    row.append(make("kbd", {}, k < 9 ? k + 1 : ""), make("span", { class: "ellipsis" }, k < top.length ? spelled(other) : "all others"), bar(other.p),
      other.cut ? make("span", { class: "cut" }, `cut by ${STAGES[other.cut][0]}`) : bar(other.q));
    return row;
  }));
  put("kept", ...stages.filter((stage) => STAGES[stage]).map((stage) => {
    const [label, does] = STAGES[stage], before = left[stages[stages.indexOf(stage) - 1]];
    return make("li", {}, make("b", {}, label), ` ${[does, turn.sampling[stage]].join(" ").trim()}: `,
      stage === "temperature" ? `the most probable word ${share(top[0].p)} → ${share(one.warm ?? 0)}` : `${thousands(left[stage])} of ${thousands(before)}`);
  }));
  put("prompt-tokens", ...turn.prompt.map((other) =>
    make("span", { class: other.control ? "token control" : "token" }, other.bytes ? hex(other) : plain(other.text))));
}

/** Go on with the k-th alternative of the open token. */
function take(k) {
  const turn = openTurn(), one = turn.tokens[chosen.i], other = one.top[k];
  if (!other || other.id === one.id) return;
  branch(turn, [...turn.tokens.slice(0, chosen.i), { ...other, top: one.top, left: one.left, warm: one.warm }], { first: chosen.i });
}

let request = null; // the request for an inside that is not shown yet
/** Ask for the inside of the open token, unless it is known. */
function look(changes = {}, view = "") {
  asked = { ...asked, ...changes };
  if (view && innerWidth < 1000) tab(view);
  request?.abort();
  request = null;
  const turn = openTurn(), one = turn.tokens[chosen.i];
  if (turn.model !== identity()) return wait("Another model wrote this answer, so its inside can't be computed.");
  if (running) return wait("The inside is computed when the answer is complete.");
  asked.against ??= rival(one)?.id;
  const body = inspection(asked); // null is as absent
  if (seen.has(body)) return drawInside(seen.get(body));
  if (inside === null) wait("…");
  request = new AbortController();
  inspect(body, drawInside, wait, request.signal, inside === null ? WAITS : 0);
}

/** The body of a request for the inside of the open token. */
function inspection(fields) {
  const turn = openTurn();
  return JSON.stringify({ ids: before(turn, chosen.i), token: turn.tokens[chosen.i].id, off: turn.off, ...fields });
}

async function inspect(body, show, tell, signal, delay = 0) {
  try {
    await pause(delay);
    signal?.throwIfAborted();
    if (!seen.has(body)) seen.set(body, await (await call("look/inside", body, signal)).json());
    show(seen.get(body));
  } catch (error) {
    if (!signal?.aborted) failed(error, tell);
  }
}

/** Show why the inside is not there. */
function wait(text) {
  if (text) inside = null;
  put("waiting", text);
}

/** The word that the open one is compared with: one as probable as .1, or else the first whole word or number. */
function rival(one) {
  const others = one.top.filter((other) => other.id !== one.id);
  return others.find((other) => other.p >= 0.1 || /^ ?(\p{L}{3,}|\p{N}+)$/u.test(other.text)) ?? others[0];
}

/** The token at a position of the text: of the prompt or of the answer. */
const at = (position) => openTurn().prompt[position] ?? openTurn().tokens[position - openTurn().prompt.length];

function drawInside(found) {
  wait("");
  [inside, request] = [found, null];
  const turn = openTurn(), one = turn.tokens[chosen.i], { embedding, heads, mlps } = found.effects;
  const others = one.top.filter((other) => other.id !== one.id), against = others.find((other) => other.id === asked.against);
  put("this", named(one));
  put("against", ...others.map((other) => make("option", { value: other.id }, spelled(other).textContent)));
  id("against").value = against?.id;
  const best = found.heads.find((other) => other.effect > 0) ?? found.heads[0];
  put("summary", "Of all heads, ", make("b", {}, best.head.join(".")), best.effect > 0 ? " adds most" : " has the largest effect", ". It looked at ",
    ...placed(best.position), ` (${share(best.weight)}).`);
  put("sink", named(at(0)), make("sub", {}, 0));
  drawHeads();
  const rest = found.difference - embedding - heads - mlps, rounding = Math.abs(rest) > 0.02 ? `, rounding ${signed(rest)}` : "";
  const drift = Math.abs(found.p - one.p) > 0.005 ? ` Computed again, its probability is ${share(found.p)}; it was drawn with ${share(one.p)}.` : "";
  const count = thousands(card.meta.n_layers * card.meta.n_heads);
  put("sums", named(one), ` is ${fixed(Math.abs(found.difference))} logits ${found.difference < 0 ? "behind " : "ahead of "}`, against ? named(against) : "0",
    `: all ${count} heads together, for and against it, ${signed(heads)}, the MLPs ${signed(mlps)}, the embedding ${signed(embedding)}${rounding}.${drift}`);
  drawHead();
  drawLens();
}

/** The token at a position and the position, as nodes. */
const placed = (position) => [position === 0 ? "first token" : named(at(position)), make("sub", {}, position)];

/** What the model computes with a further head off, if it was measured. */
const without = (head) => inspection({ off: [...openTurn().off, head] });

function drawHeads() {
  const most = Math.max(...inside.heads.map((other) => Math.abs(other.effect))), shown = `${inside.head.head}`, off = seen.get(without(inside.head.head));
  put("heads", ...inside.heads.map(({ head, effect, position, weight }) => {
    const open = press("", () => look({ head, key: null }, "head"), { class: "name", "aria-current": `${head}` === shown });
    open.append(make("b", {}, head.join(".")), make("span", { class: "p" }, signed(effect)),
      track(Math.abs(effect) / most, effect < 0 ? "fill less" : "fill"), make("span", { class: "looks ellipsis" }, "→ ", ...placed(position), ` ${share(weight)}`));
    const found = seen.get(without(head)), measure = () => inspect(without(head), () => inside && drawHeads(), say);
    return make("div", { class: "one" }, open,
      found ? make("b", { class: "p" }, share(found.p)) : press("measure", measure, { class: "small", title: "the word’s probability with the head off" }),
      press("switch off", () => switchOff(head), { class: "small", title: "answer again with the head off" }));
  }));
  put("measured", off ? `Without head ${inside.head.head.join(".")}, the probability is ${share(off.p)} instead of ${share(inside.p)}.` : "");
}

function drawHead() {
  const { head: at_, weights, key: k, scores } = inside.head, name = at_.join("."), S = weights.length, shade = ramp();
  put("head-title", `Head ${name}`, make("small", {}, ` layer ${at_[0]}, head ${at_[1]}`));
  put("head-reads", "From ", ...placed(S - 1), ", where the next word was ", named(at(S)), ", it looked at ", ...placed(k), " with weight ",
    make("b", {}, share(weights[k])), ...(k ? [" and at the first token, ", named(at(0)), `, with ${share(weights[0])}`] : []), ".");
  const most = Math.max(...weights);
  put("row", ...weights.map((weight, position) => {
    const node = shaded(spelled(at(position)), shade(Math.sqrt(weight / most)));
    node.title = `position ${position}: weight ${share(weight)}, score ${fixed(scores[position])}`;
    node.dataset.key = position;
    if (position === k) node.classList.add("key");
    if (position === k || weight > most / 4) node.append(make("sub", {}, position));
    return node;
  }));
  put("ends", ...placed(k));
  id("off").textContent = `Switch head ${name} off and answer again`;
  id("distance").max = Math.max(256, 2 * (S - 1 - k));
  id("distance").value = S - 1 - k;
  drawPairs();
}

/** What each pair adds to the score at a distance: q and k are rotated already, for the distance that they have. */
function pairs({ q, k, frequencies, weights, key }, distance) {
  const more = distance - (weights.length - 1 - key);
  return frequencies.map((w, i) => {
    const [a, b, c, d] = [q[2 * i], q[2 * i + 1], k[2 * i], k[2 * i + 1]], [x, y] = [a * c + b * d, b * c - a * d];
    return (x * Math.cos(more * w) - y * Math.sin(more * w)) / Math.sqrt(q.length);
  });
}

function drawPairs() {
  const found = inside.head, real = found.weights.length - 1 - found.key, distance = Number(id("distance").value), far = Number(id("distance").max);
  const distances = [real, distance, ...Array.from({ length: 65 }, (_, i) => (i * far) / 64)], every = distances.map((one) => pairs(found, one));
  const scores = every.map((values) => values.reduce((a, b) => a + b, 0)), range = Math.max(...scores) - Math.min(...scores);
  put("apart", `${distance} apart: ${fixed(scores[1])}`);
  put("farthest", `${far} apart`);
  put("reach", `Score: ${fixed(scores[2])} at 0 apart, ${fixed(scores[0])} here (${real}), ${fixed(scores.at(-1))} at ${far} apart. `,
    range < 1 ? "This head hardly cares about the distance." : "A score that is lower by 1 makes a small weight 2.7 times smaller.");
  if (!id("pairs").clientWidth) return; // it is hidden
  const all = every.flat(), plot = chart("pairs", { height: 170, yMin: Math.min(0, ...all), yMax: Math.max(1e-6, ...all), // one scale for all distances
    yTicks: [], yLabel: "part of the score", xLabel: "pairs, fast to slow", left: 4, right: 4 });
  const outlines = make("g", { class: "real" });
  bars(plot, every[1], { tooltip: (i) => `pair ${i}: ${fixed(every[1][i])}, ${degrees(found.frequencies[i])} a token` });
  bars({ ...plot, svg: outlines }, every[0]);
  plot.svg.append(outlines, make("line", { class: "axis", x1: plot.left, x2: plot.left + plot.width, y1: plot.y(0), y2: plot.y(0) }));
  put("pairs", plot.svg);
}

function drawLens() {
  const one = openTurn().tokens[chosen.i];
  const cells = (row) => row.top.map((other) => make("span", { class: other.id === one.id ? "guess right" : "guess" }, spelled(other), ` ${share(other.p)}`));
  put("layers", make("p", { class: "heading" }, make("b", {}, "layer"), make("span", {}, "most probable"), make("b", {}, "rank of ", named(one))),
    ...inside.lens.map((row, i) => make("p", { class: row.rank === 1 ? "won" : "" }, make("b", {}, i ? i - 1 : "start"), make("span", {}, ...cells(row)),
      make("b", {}, thousands(row.rank)))));
}

function tab(name) {
  id("panel").dataset.tab = name;
  for (const button of id("tabs").children) button.setAttribute("aria-pressed", button.dataset.tab === name);
  if (inside) drawPairs(); // a hidden chart has no width
}

// ------------------------------------------------------------------------------------- settings, export, import, restore
/** The fields with the model's defaults, or as they were changed in this tab. */
function drawSettings() {
  const own = card.meta.sampling, values = Object.keys(own).length ? { top_k: 0, top_p: 1, min_p: 0, ...own } : {};
  put("fields", ...Object.entries(FIELDS).map(([name, [label, value]]) => {
    const field = { id: `set-${name}`, type: "number", step: "any", min: 0, placeholder: name === "seed" ? "random" : "" };
    return make("label", {}, label, make("input", { ...field, value: values[name] ?? value }));
  }));
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
  draw();
}

function save() {
  try {
    sessionStorage.setItem("clearllama-turns", JSON.stringify(turns));
  } catch {
    say("This conversation is too long for the browser to keep over a reload; export it.");
  }
}

// [name, content, type] of an export; last is the last turn that is shown
const EXPORTS = {
  json: () => ["clearllama.json", JSON.stringify({ clearllama: card.meta.version, model: identity(), turns }, null, 1), "application/json"],
  md: () => ["clearllama.md", path().map((one) => `**${one.question}**\n\n${textOf(one.tokens)}\n\n_${card.id}, ${describe(one)}_\n`).join("\n"),
    "text/markdown"],
  curl(last) {
    const body = JSON.stringify({ messages: messages(last), ...last.sampling, seed: last.seed }, null, 1).replaceAll("'", "'\\''");
    return ["clearllama.sh", `curl ${location.origin}/v1/chat/completions -H 'Content-Type: application/json' -d '${body}'\n`, "text/plain"];
  },
  html: async (last) => ["trace.html", await (await call("look/page", JSON.stringify({ ids: before(last) }))).text(), "text/html"],
};

async function exportAs(kind) {
  if (!path().length) return;
  put("exported", kind === "html" ? "The page is being computed: some seconds." : "");
  try {
    const [download, content, type] = await EXPORTS[kind](path().at(-1));
    make("a", { download, href: URL.createObjectURL(new Blob([content], { type })) }).click();
    put("exported", "");
  } catch (error) {
    put("exported", error.message);
  }
}

async function load(file) {
  try {
    const found = JSON.parse(await file.text());
    if (!found.turns?.every((one, n) => one.n === n && Array.isArray(one.children))) throw new Error("it has no turns");
    await replace(found.turns);
    id("export").close();
  } catch (error) {
    put("exported", `${file.name} is not an export of this page: ${error.message}`);
  }
}

/** Show another conversation. */
async function replace(others) {
  while (running) await stop();
  [turns, editing, id("question").value] = [others, null, ""];
  unselect();
  answers.clear();
  say("");
  draw();
  id("question").focus();
}

// ------------------------------------------------------------------------------------------------------------- the start
// data-NAME="value" of an element: what a click on it does
const ACTIONS = {
  token: (value) => select(...value.split("-").map(Number)),
  step: (value) => moveBy(Number(value)),
  tab: (value) => tab(value),
  key: (value) => look({ head: inside.head.head, key: Number(value) }),
  export: exportAs,
  open: (value) => id(value).showModal(),
  new: () => replace([{ n: 0, children: [], active: 0 }]),
  close: unselect,
  off: () => inside && switchOff(inside.head.head),
};
// what a key does when a turn is shown
const KEYS = {
  Escape: () => (running ? stop() : unselect()),
  ArrowLeft: () => moveBy(-1),
  ArrowRight: () => moveBy(1),
  "[": () => step(current(), -1),
  "]": () => step(current(), 1),
  e: () => edit(current()),
  r: () => again(current()),
  o: ACTIONS.off,
};

function moveBy(by) {
  const turn = turns[document.activeElement?.id.split("answer-")[1]] ?? current();
  select(turn.n, chosen?.turn === turn.n ? chosen.i + by : by > 0 ? 0 : turn.tokens.length - 1);
}

function keydown(event) {
  if (event.ctrlKey || event.altKey || event.metaKey || event.isComposing) return;
  if (event.target.closest("input, textarea, select, dialog")) return;
  const action = /^[1-9]$/.test(event.key) ? () => chosen && take(Number(event.key) - 1) : KEYS[event.key];
  if (!action || !current()) return;
  event.preventDefault();
  action();
}

async function start() {
  turns = JSON.parse(sessionStorage.getItem("clearllama-turns") ?? "null") ?? turns;
  id("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    running ? stop() : ask(id("question").value);
  });
  id("question").addEventListener("keydown", (event) => {
    if (event.key === "Escape") running ? stop() : editing && replace(turns);
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) ask(id("question").value);
  });
  document.addEventListener("click", ({ target }) => {
    const found = target.closest("[data-token], [data-key], button"), [[name, value] = []] = Object.entries(found?.dataset ?? {});
    ACTIONS[name]?.(value);
  });
  id("against").addEventListener("change", () => look({ against: Number(id("against").value) }));
  id("distance").addEventListener("input", drawPairs);
  id("settings").addEventListener("close", saveSettings);
  id("import").addEventListener("change", () => load(id("import").files[0]));
  document.addEventListener("keydown", keydown);
  addEventListener("pagehide", save);
  tab(innerWidth < 1000 ? "words" : "why");
  await connect().catch((error) => failed(error, banner));
  document.documentElement.dataset.ready = "";
}

start();
