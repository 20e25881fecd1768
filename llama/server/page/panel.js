/* The panel beside the chat: a token with its alternatives, and what the model computed before it. */
"use strict";

function select(n, i) {
  if (!id(`t${n}-${i}`)) return;
  if (chosen?.turn !== n || chosen.i !== i) {
    chosen = saved?.open?.turn === n && saved.open.i === i ? { ...saved.open } : { turn: n, i };
    say("");
  }
  document.body.classList.add("open", "found");
  mark();
  id(`t${n}-${i}`).scrollIntoView({ block: "nearest" });
  drawWords();
  look();
}

function unselect() {
  request?.abort();
  gridding?.abort();
  chosen = inside = null;
  document.body.classList.remove("open");
  mark();
  markSources();
}

function mark() {
  const open = chosen && id(`t${chosen.turn}-${chosen.i}`);
  open?.closest("details")?.setAttribute("open", "");
  for (const node of [...document.querySelectorAll(".t.chosen"), ...(open ? [open] : [])]) {
    node.classList.toggle("chosen", node === open);
    node.setAttribute("aria-selected", node === open);
    node.closest(".answer").setAttribute("aria-activedescendant", node === open ? node.id : "");
  }
}

/** A token with all its spaces, as lists show it. */
function spelled(one) {
  if (one.control) return make("span", { class: "token control" }, one.text);
  return one.bytes ? token(`<${hex(one)}>`) : token(one.text);
}
/** A token as sentences name it. */
const named = (one) => spelled({ ...one, text: one.text?.replace(/^ (?=\S)/, "") });

/** The table of words: for each word, a bar for the model's probability and one for its chance to be drawn, in one scale. */
function drawWords() {
  const turn = openTurn(), one = openWord(), given = chosen.i < 0, { left = {}, top } = one, stages = Object.keys(left);
  const rest = (name) => Number(Math.max(0, 1 - top.reduce((sum, other) => sum + (other[name] ?? 0), 0)).toFixed(4));
  const bar = (p) => make("span", { class: "both" }, make("span", { class: "p" }, share(p)), p ? track(p) : "");
  put("chosen", named(one), make("small", {}, ` position ${turn.prompt.length + chosen.i}`));
  id("own").value = "";
  drawSentence();
  id("take").hidden = given;
  put("linked", given ? "A word of your text: the model’s probabilities are computed now, and nothing was drawn. To change it, edit the text."
    : one.left ? "" : "Only for the word that was open does a link hold all alternatives and what the filters did.");
  const others = one.p === undefined ? [] : [{ p: rest("p"), ...(given ? {} : { q: rest("q") }) }];
  put("alternatives", ...[...top, ...others].map((other, k) => {
    const current = other.id === one.id, cutHere = other.cut && k && !top[k - 1].cut;
    const row = press("", () => take(k), { class: `row ${k < SHOWN || current ? "" : "extra"} ${cutHere ? "cut-here" : ""}`, "aria-current": current });
    row.disabled = given || k === top.length;
    row.append(k < 10 ? make("kbd", {}, (k + 1) % 10) : make("span"), make("span", { class: "ellipsis" }, k < top.length ? spelled(other) : "all others"), bar(other.p),
      other.cut ? make("span", { class: "cut" }, `cut by ${STAGES[other.cut][0]}`) : given ? "" : bar(other.q));
    return row;
  }));
  put("more", `${Math.max(0, top.length - SHOWN)} more`);
  const cuts = (stage) => !["penalties", "temperature"].includes(stage), earlier = (stage) => left[stages[stages.indexOf(stage) - 1]];
  const known = stages.filter((stage) => STAGES[stage]), active = known.filter((stage) => cuts(stage) && left[stage] < earlier(stage));
  put("left", active.length ? `${active.map((stage) => STAGES[stage][0]).join(" and ")} left ${thousands(left[stages.at(-1)])} of ${thousands(left[stages[0]])} words`
    : "No filter cut a word");
  put("kept", ...known.map((stage) => {
    const [label, does] = STAGES[stage];
    return make("li", {}, make("b", {}, label), ` ${does(turn.sampling, one.warm)}`,
      cuts(stage) ? `: ${thousands(left[stage])} of ${thousands(earlier(stage))} words left` : "");
  }));
  put("prompt-tokens", ...turn.prompt.map((other, position) => make("span", { class: other.control ? "token control" : "token", "data-source": position },
    other.bytes ? hex(other) : plain(other.text))));
}

/** Continue with the user's own word in place of the open token; a space at the start of that token stays. */
function takeOwn(event) {
  event.preventDefault();
  const turn = openTurn(), one = turn.tokens[chosen.i], text = id("own").value;
  const own = (text.startsWith(" ") ? "" : /^ ?/.exec(one.text ?? "")[0]) + text;
  if (text) branch(turn, turn.tokens.slice(0, chosen.i), { first: chosen.i, own });
}

/** Continue with the k-th alternative in place of the open token. */
function take(k) {
  const turn = openTurn(), one = openWord(), other = one.top[k];
  if (chosen.i < 0 || !other || other.id === one.id) return;
  branch(turn, [...turn.tokens.slice(0, chosen.i), { ...other, top: one.top, left: one.left, warm: one.warm, thought: one.thought, forced: true }], { first: chosen.i });
}

const SHOWN = 5, PARTS = 8; // alternatives and rows of Why that are shown at first
let request = null; // the pending request to /look/inside, if any
/** Ask for the inside of the open token, unless it is known. */
function look(changes = {}, view = "") {
  if (saved && "head" in changes) changes = {}; // only what was open is in the file
  Object.assign(chosen, changes);
  if (view) tab(view);
  request?.abort();
  request = null;
  const turn = openTurn(), one = openWord();
  if (turn.model !== identity()) return wait("Another model wrote this answer, so its inside can't be computed.");
  if (turn.patch) return wait("This answer uses another question’s vector, so its inside is not computed.");
  if (running) return wait("The inside is computed when the answer is complete.");
  if (!before(turn, chosen.i).length) return wait("Nothing comes before the first token, so nothing was computed.");
  chosen.against ??= rival(one)?.id;
  const { against, head, key } = chosen, body = inspection({ against, head, key });
  if (inside === null) wait("…");
  if (gridding?.body !== gridBody()) gridding?.abort();
  request = new AbortController();
  inspect(body, drawInside, wait, request.signal);
}

/** The body of a request for the inside of the open token. */
function inspection(fields) {
  const turn = openTurn();
  return JSON.stringify({ ids: before(turn, chosen.i), token: openWord().id, off: turn.off, ...fields });
}

async function inspect(body, show, tell, signal, kind = "inside") {
  const name = kind === "inside" ? body : `${body} ${kind}`;
  try {
    if (!seen.has(name)) seen.set(name, await delivered((await call(`look/${kind}`, body, signal)).json(), signal));
    if (seen.size > 50) seen.delete(seen.keys().next().value);
    show(seen.get(name));
  } catch (error) {
    if (!signal?.aborted) failed(error, tell);
  }
}

/** Whether `inside` belongs to the open word. */
const known = () => Boolean(inside && chosen?.known);

/** Show why there is no inside. */
function wait(text) {
  if (text) {
    inside = null;
    markSources();
  }
  put("waiting", text);
}

/** The word to compare the open word with: the word that it replaced, else a word with p >= .1, else the first whole word or number. */
function rival(one) {
  const others = rivals(one), replaced = chosen.i === openTurn().first && turns[openTurn().source]?.tokens[chosen.i];
  return others.find((other) => other.id === replaced?.id)
    ?? others.find((other) => other.p >= 0.1 || /^ ?(\p{L}{3,}|\p{N}+)$/u.test(other.text)) ?? others[0];
}

/** The token at a position of the text, which is the prompt and the answer. */
const at = (position) => openTurn().prompt[position] ?? openTurn().tokens[position - openTurn().prompt.length];

/** A part is [layer, head]; the number after the last head stands for the MLP of the layer. */
const isHead = (part) => part[1] < card.meta.n_heads;
const partName = (part) => (isHead(part) ? `head ${part.join(".")}` : `MLP ${part[0]}`);

/** 1 if the model prefers the open word to the other one, else -1. Effects are shown for the word that it prefers. */
const side = () => (inside.difference < 0 ? -1 : 1);
const other = () => rivals(openWord()).find((one) => one.id === chosen.against);
/** The two words: the one that the model prefers, then the other one. */
const pair = () => [openWord(), other()][side() < 0 ? "reverse" : "slice"]();

const percent = (p) => `${figures(p > 0.999 && p < 1 ? 99.9 : 100 * p, p > 0.99 ? 3 : 2)} %`;
const bySize = (rows) => rows.sort(([a], [b]) => Math.abs(b) - Math.abs(a));

/** What the heads add directly, by source token. */
const direct = () => inside.by_token.map((x) => side() * x);
/** For each token, what the difference loses if the last token does not read it; null until this is known. */
const losses = () => seen.get(`${sourcesBody()} sources`)?.without.map((x) => side() * (inside.difference - x)) ?? null;
const sourcesBody = () => inspection({ against: chosen.against });

const CONTINUED = /[\p{L}\p{M}\p{N}]$/u, CONTINUES = /^(?!\p{Ideographic}|[\u0e00-\u0eff\u3040-\u30ff])[\p{L}\p{M}\p{N}]/u;
const textAt = (position) => (at(position)?.control ? "" : at(position)?.text ?? "");
/** The positions before the open word in groups: tokens that continue a word belong to it. */
function words() {
  const found = [];
  inside.by_token.forEach((_, position) => {
    if (CONTINUED.test(textAt(position - 1)) && CONTINUES.test(textAt(position))) found.at(-1).push(position);
    else found.push([position]);
  });
  return found;
}
/** Words, sorted by what they contribute: `of` is `sum` of their tokens, or `strongest` of them. */
const ranked = (values, of) => bySize(words().map((all) => [of(all.map((position) => values[position])), all]));
const sum = (all) => all.reduce((a, b) => a + b, 0), strongest = (all) => all.reduce((a, b) => (Math.abs(b) > Math.abs(a) ? b : a));
const wordOf = (all) => [named(all[1] ? { text: all.map(textAt).join("").replace(/^(.{24}).+$/s, "$1…") } : at(all[0])), make("sub", {}, all[0])];

/** The positions of the question in its prompt: [position, its bytes]; empty if the question is not found there. */
function asked(turn) {
  const binary = (all) => Array.from(all, (byte) => String.fromCharCode(byte)).join(""), text = binary(new TextEncoder().encode(turn.question.trim()));
  const pieces = turn.prompt.map((one) => (one.control ? "\0" : binary(bytes(one)))), whole = `${pieces.join("")}\0`, found = whole.lastIndexOf(`${text}\0`);
  const start = found < 0 ? whole.lastIndexOf(text) : found, end = start + text.length;
  let first = 0;
  return start < 0 || !text ? [] : pieces.flatMap((piece, position) => {
    const part = [...piece.slice(Math.max(0, start - first), Math.max(0, end - first))].map((one) => one.charCodeAt(0));
    first += piece.length;
    return part.length ? [[position, part]] : [];
  });
}

/** Where a position is, for a sentence. */
function whereabouts(position) {
  const turn = openTurn(), question = asked(turn).map(([one]) => one);
  if (position === inside.by_token.length - 1) return "(the last token itself)";
  if (position >= turn.prompt.length) return "in the answer";
  if (question.includes(position)) return isText(turn) ? "in your text" : "in your question";
  return at(position).control ? "among the control tokens" : position > question.at(-1) ? "in the chat template" : "earlier in the prompt";
}

/** The sentence at the top: the word, its probability, and what carries most of its difference to the other one. */
function drawSentence() {
  const one = openWord(), name = make("b", {}, named(one));
  put("sentence", ...(one.p === undefined ? [name, "."] : one.forced ? ["You chose ", name, `; the model gave it ${percent(one.p)}. `] : [name, `, ${percent(one.p)}. `]));
  if (!known()) return;
  const [embedding, heads, mlps] = ["embedding", "heads", "mlps"].map((part) => side() * inside.effects[part]), total = losses(), own = total ?? direct();
  const [[most, layer]] = inside.layers.map((x, i) => [side() * x, i]).sort(([a], [b]) => b - a), [word, less] = pair().map(named);
  const every = ranked(own, total ? strongest : sum), [first, second] = every.filter(([, all]) => CONTINUED.test(textAt(all.at(-1)))), size = Math.abs(inside.difference);
  id("sentence").append(...(side() < 0 ? ["The model preferred ", make("b", {}, word.cloneNode(true)), ". "] : []),
    heads > Math.max(mlps, embedding) ? "" : mlps > embedding ? `Most was added by the MLP layers (${signed(mlps)}; MLP ${layer}: ${signed(most)}). `
      : `Most was added by the embedding of the last token (${signed(embedding)}). `);
  const source = ([, all]) => [...wordOf(all), ` ${whereabouts(all[0])}`], lead = ([x]) => fixed(size - x), two = Math.abs(second?.[0]) > Math.abs(first?.[0]) / 2;
  if (first && total) id("sentence").append("Of the earlier words, ", ...source(first), ` matters most${first[0] < 0 ? ", against it" : ""}: if the last token did not read it, the lead over `,
    less, ` would be ${lead(first)}, not ${fixed(size)}`, ...(two ? ["; if it did not read ", ...source(second), `, ${lead(second)}`] : []), ".",
    ...(first === every[0] ? [] : [" Among all tokens, ", ...wordOf(every[0][1]), `  has the largest effect: unread, the lead is ${lead(every[0])}.`]));
  else if (first) id("sentence").append(`The heads add ${signed(heads)} for it; among the words, `, ...source(first), ` has the largest part (${signed(first[0])}).`);
}

function drawInside(found) {
  if (chosen.i < 0 && !chosen.found) {
    chosen.found = { p: found.p, top: found.top };
    drawWords();
    return look(); // again, now against an alternative
  }
  wait("");
  [inside, request, chosen.known] = [found, null, true];
  const one = openWord(), [word, less] = pair(), than = named(less).textContent;
  const { embedding, heads, mlps } = found.effects, size = Math.abs(found.difference), added = (x) => signed(side() * x);
  drawSentence();
  put("this", side() < 0 ? "Why not " : "Why ", named(one), side() < 0 ? ", but " : ", not ");
  put("against", ...rivals(one).map((rival) => make("option", { value: rival.id }, spelled(rival).textContent)));
  id("against").value = chosen.against;
  const drift = Math.abs(found.p - one.p) > 0.005 ? ` ${card.meta.exact ? "In float32" : "Computed again"}, the probability of ${named(one).textContent} is ${share(found.p)}; the answer’s faster arithmetic gave ${share(one.p)}.` : "";
  put("sums", named(word), ` is ${fixed(size)}  logits ahead of ${than}: together, the heads add ${added(heads)}, the MLP layers ${added(mlps)}, the embedding ${added(embedding)}.${drift}`);
  if (!card.meta.exact && size < 1) put("sums", named(word), ` and ${than} are too close for the model’s rounding.${drift}`);
  put("terms", "Effects are in logits, for (+) or against (−) ", named(word), `: one logit more multiplies the odds of the word over ${than} by 2.7. Another comparison word changes all numbers.`);
  put("of", `adds, of ${fixed(size)}`);
  const read = ranked(direct(), sum);
  put("by-word", ...read.slice(0, 5).flatMap(([x, all]) => [...wordOf(all), ` ${signed(x)}, `]), `all others ${signed(sum(read.slice(5).map(([x]) => x)))}.`);
  drawParts();
  drawGrid();
  drawHead();
  drawLens();
  markSources();
  if (losses() || found.by_token.length > card.meta.gridded) return;
  request = new AbortController();
  inspect(sourcesBody(), () => drawInside(found), say, request.signal, "sources");
}

/** A position and its token, as nodes. */
const placed = (position) => [position === 0 ? "first token" : named(at(position)), make("sub", {}, position)];

/** What the model computes with a further head or MLP layer off, if it was measured. */
const without = (part) => inspection({ against: chosen.against, off: [...openTurn().off, part] });

/** List heads and MLP layers, largest effects first, then the sums of all others. The rows add up to the difference. */
function drawParts() {
  const { n_heads, n_layers } = card.meta, { embedding, heads, mlps } = inside.effects, open = `${chosen.part ?? inside.head.head}`;
  const all = [...inside.heads.map((one) => ({ ...one, part: one.head })), ...inside.layers.map((effect, layer) => ({ part: [layer, n_heads], effect }))]
    .sort((a, b) => Math.abs(b.effect) - Math.abs(a.effect)), shown = all.filter(({ part }, i) => i < PARTS || `${part}` === open);
  const [own, layers] = [true, false].map((kind) => shown.filter((one) => isHead(one.part) === kind).map((one) => one.effect));
  const others = [[`${thousands(n_layers * n_heads - own.length)} other heads`, heads - sum(own)], [`${n_layers - layers.length} other MLP layers`, mlps - sum(layers)],
    ["the embedding", embedding], ["rounding, biases", inside.difference - heads - mlps - embedding]].filter(([, x], i) => i < 3 || Math.abs(x) >= 0.005);
  const row = (node, name, effect, ...more) => {
    node.append(make("b", {}, name), make("span", { class: "p" }, signed(side() * effect)),
      track(Math.abs(effect / all[0].effect), side() * effect < 0 ? "fill less" : "fill"), make("span", { class: "looks ellipsis" }, ...more));
    return node;
  };
  put("parts", ...shown.map(({ part, effect, sources }) => {
    const current = `${part}` === open;
    const body = without(part), found = seen.get(body), measure = () => inspect(body, () => inside && drawInside(inside), say);
    const from = sources ? ["from ", ...placed(sources[0][0]), ` ${signed(side() * sources[0][1])}`] : [];
    return make("div", { class: "one" }, row(press("", () => choose(part), { class: "name", "aria-expanded": current }), partName(part).replace("head ", ""), effect, ...from),
      found ? make("b", { class: "p" }, `${share(inside.p)} → ${share(found.p)}`)
        : press("test", measure, { class: "small", title: `the probability of this word without ${partName(part)}` }),
      ...(current ? [make("p", { class: "opened" }, ...contributed(part), ...totals(part), make("span", { class: "buttons" },
        press("new answer", () => switchOff(part), { title: `answer again without ${partName(part)}` }),
        ...(isHead(part) ? [press("its weights", () => tab("head"))] : [])))] : []));
  }), ...others.map(([name, effect]) => make("div", { class: "one rest" }, row(make("p", { class: "name" }), name, effect))));
}

/** Open a part, and show a head in a tab. */
const choose = (part, view) => (isHead(part) ? look({ part, head: part, key: undefined }, view) : look({ part }));

/** The sources that contribute most to a listed head, as a sentence. */
function contributed(part) {
  const found = inside.heads.find((one) => `${one.head}` === `${part}`);
  if (!found) return [];
  return [`Of its effect ${signed(side() * found.effect)}, the largest parts come from `, ...found.sources.filter(([, x], i) => !i || Math.abs(x) > Math.abs(found.effect) / 20).flatMap(([position, x], i) =>
    [i ? ", " : "", ...placed(position), ` ${signed(side() * x)}`]), ". "];
}

/** The direct effect of a part beside its total effect, as a sentence, if one was measured. */
function totals(part) {
  const [layer, head] = part, grid = seen.get(gridBody(false)), found = seen.get(without(part));
  const own = inside.heads.find((one) => `${one.head}` === `${part}`)?.effect ?? inside.layers[isHead(part) ? -1 : layer];
  const total = found ? inside.difference - found.difference : grid?.total[layer][head];
  if (total === undefined || own === undefined) return [];
  return ["Direct ", make("b", {}, signed(side() * own)), ", total ", make("b", {}, signed(side() * total)),
    ": without this part, the lead falls by the total. The two differ, since later layers react: here these layers ",
    Math.abs(total) < Math.abs(own) ? "make up for some of the loss (self-repair)" : "add to the loss", ". The probability also depends on all other words. "];
}

// ------------------------------------------------------------------------------------------------- marks of the sources
/** Mark the tokens before the open word by what they contribute to it through the heads, or remove the marks. */
function markSources() {
  for (const node of document.querySelectorAll("#chat [data-sign], #prompt [data-sign]")) {
    for (const name of ["style", "title", "aria-description", "data-sign"]) node.removeAttribute(name);
  }
  for (const node of document.querySelectorAll(".question:has([data-source])")) node.replaceChildren(node.textContent);
  document.body.classList.toggle("sourced", known());
  if (!known()) return;
  const turn = openTurn(), question = document.querySelector(`#turn-${turn.n} .question`), decode = decoder(), found = asked(turn), text = turn.question;
  if (found.length) question?.replaceChildren(/^\s*/.exec(text)[0], ...found.flatMap(([position, part]) => {
    const [, space, word] = /^(\s*)(.*)$/s.exec(decode.decode(Uint8Array.from(part), { stream: true }));
    return [space, make("span", { "data-source": position }, plain(word))];
  }), /\s*$/.exec(text)[0]);
  const told = contributions(), values = losses() ?? direct(), most = Math.max(...values.map(Math.abs)), shade = ramp();
  values.forEach((x, position) => {
    const own = id(`t${turn.n}-${position - turn.prompt.length}`), nodes = own ? [own.querySelector(".w")] : document.querySelectorAll(`[data-source="${position}"]`);
    for (const node of nodes) {
      node.title = told[position];
      (own ?? node).setAttribute("aria-description", told[position]);
      (own ?? node).dataset.sign = "";
      node.dataset.sign = Math.abs(x) < most / 20 ? "" : x < 0 ? "−" : "+";
      if (node.dataset.sign) shaded(node, shade((0.6 * Math.abs(x)) / most));
    }
  });
}

/** What each token contributes, for its title. */
function contributions() {
  const [word, less] = pair().map((one) => named(one).textContent), total = losses(), all = (i) => (total ? `${signed(total[i])} logits in all, ` : "");
  return direct().map((x, i) => `${all(i)}${signed(x)} directly through the heads, for ${word} over ${less}`);
}

// ------------------------------------------------------------------------------------------------ all heads and layers
let gridding = null; // the controller of the request for a grid that is being computed, with its body
const gridBody = (mean = id("mean").checked) => inspection({ against: chosen.against, mean });
async function computeGrid() {
  const body = gridBody(), { signal } = (gridding = Object.assign(new AbortController(), { body }));
  drawGrid();
  try {
    for await (const event of events(await call("look/grid", body, signal), signal)) {
      if (event.error) throw new Refused(event.error.message);
      if (event.of) Object.assign(id("gridded"), { value: event.done, max: event.of });
      else seen.set(body, event);
    }
  } catch (error) {
    if (!signal.aborted) failed(error, say);
  }
  if (gridding.signal === signal) gridding = null;
  if (inside) drawInside(inside);
}

function drawGrid() {
  const body = gridBody(), found = seen.get(body), busy = gridding?.body === body, { n_heads, gridded } = card.meta, S = inside.by_token.length;
  id("gridded").hidden = id("stop-grid").hidden = !busy;
  id("compute").hidden = busy || found || S > gridded;
  put("too-long", S > gridded ? `The text before this word has ${thousands(S)} tokens; the grid is computed for at most ${thousands(gridded)}.` : "");
  id("measured").hidden = !found;
  if (!found) return put("grid");
  id("measure").querySelector("[value=induction]").disabled = !found.induction;
  const name = id("measure").value, effects = ["direct", "total"].includes(name), factor = effects ? side() : 1, shade = ramp();
  const values = found[name].map((row) => row.map((x) => factor * x)), biggest = (all) => Math.max(1e-6, ...all.flat().map(Math.abs));
  const most = biggest(values.map((row) => row.slice(0, n_heads))), mlp = biggest(values.map((row) => row.slice(n_heads))), open = `${chosen.part ?? inside.head.head}`;
  const cell = (x, layer, head) => {
    const part = [layer, head], size = Math.abs(x) / (head < n_heads ? most : mlp), label = `${partName(part)}: ${effects ? signed(x) : share(x)}`;
    const text = n_heads > 12 || Math.abs(x) < 0.05 ? "" : x.toFixed(1).replace("-", "−");
    const node = press(text, () => choose(part, "head"), { title: label, "aria-label": label, "aria-current": `${part}` === open,
      tabindex: layer + head ? -1 : 0, "data-sign": size < 0.05 ? "" : x < 0 ? "−" : "+" });
    return make("td", {}, shaded(node, shade(0.8 * size)));
  };
  put("grid", make("tr", {}, make("th", {}), ...values[0].map((_, head) => make("th", { scope: "col" }, head < n_heads ? head : "MLP"))),
    ...values.map((row, layer) => make("tr", {}, make("th", { scope: "row" }, layer), ...row.map((x, head) => cell(x, layer, head)))));
}

/** The heads and MLP layers that the next answer does without, above the box. */
function drawOff() {
  const turn = editing ?? path().at(-1), off = turn?.off ?? [];
  put("without", ...(off.length ? ["Without ", ...off.flatMap((part) => [make("b", {}, partName(part)),
    press("switch on", () => branch(turn, [], { off: off.filter((one) => one !== part) }), { class: "quiet", title: "and answer again" })])] : []));
}

// as ACTIONS of page.js
const PANEL = {
  more: () => id("alternatives").classList.toggle("all") || id("alternatives").focus(),
  source: (value) => inside && say(`${named(at(value)).textContent}: ${contributions()[value]}.`),
  compute: computeGrid,
  halt: () => gridding?.abort(),
};

function drawHead() {
  const { head: at_, weights, key: k, scores } = inside.head, name = at_.join("."), S = weights.length, shade = ramp();
  put("head-title", `Head ${name}`, make("small", {}, ` layer ${at_[0]}, head ${at_[1]}`));
  put("head-reads", "At ", ...placed(S - 1), ", before ", named(at(S)), ", this head looked at ", ...placed(k), " with weight ",
    make("b", {}, share(weights[k])), ...(k ? [" and at the first token, ", named(at(0)), `, with ${share(weights[0])}`] : []), ". ",
    ...contributed(at_), ...totals(at_));
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
  id("distance").max = Math.max(256, 2 * (S - 1 - k));
  id("distance").value = S - 1 - k;
  drawPairs();
}

/** What each pair adds to the score at a distance. q and k are already rotated for their real distance. */
function pairs({ q, k, frequencies, weights, key }, distance) {
  const more = distance - (weights.length - 1 - key);
  return frequencies.map((w, i) => {
    const [a, b, c, d] = [q[2 * i], q[2 * i + 1], k[2 * i], k[2 * i + 1]], [x, y] = [a * c + b * d, b * c - a * d];
    return (x * Math.cos(more * w) - y * Math.sin(more * w)) / Math.sqrt(q.length);
  });
}

const ranges = new WeakMap(); // the head in detail -> its pairs at 65 distances, which the slider does not change
function drawPairs() {
  const found = inside.head, real = found.weights.length - 1 - found.key, distance = Number(id("distance").value), far = Number(id("distance").max);
  if (!ranges.has(found)) ranges.set(found, Array.from({ length: 65 }, (_, i) => pairs(found, (i * far) / 64)));
  const every = [pairs(found, real), pairs(found, distance), ...ranges.get(found)];
  const scores = every.map((values) => values.reduce((a, b) => a + b, 0)), range = Math.max(...scores) - Math.min(...scores);
  put("apart", `in the text, ${real} apart: ${fixed(scores[0])}${distance === real ? "" : `; at ${distance}: ${fixed(scores[1])}`}.`);
  put("farthest", `${far} apart`);
  put("reach", `From 0 to ${far} apart, it is between ${fixed(Math.min(...scores))} and ${fixed(Math.max(...scores))}. `,
    range < 1 ? "This head hardly cares about the distance." : "Lowering a score by 1 divides a small weight by 2.7.");
  if (!id("pairs").clientWidth) return; // it is hidden
  const all = every.flat(), plot = chart("pairs", { height: 170, yMin: Math.min(0, ...all), yMax: Math.max(1e-6, ...all), // one scale for all distances
    yTicks: [], yLabel: "part of the score", xLabel: "pairs, fast to slow", left: 4, right: 4 });
  const outlines = make("g", { class: "real" });
  bars(plot, every[1], { tooltip: (i) => `pair ${i}: ${fixed(every[1][i])}, ${degrees(found.frequencies[i])} a token` });
  bars({ ...plot, svg: outlines }, every[0]);
  plot.svg.append(outlines, make("line", { class: "axis", x1: plot.left, x2: plot.left + plot.width, y1: plot.y(0), y2: plot.y(0) }));
  put("pairs", plot.svg);
}

function tab(name) {
  id("panel").dataset.tab = name;
  for (const button of id("tabs").children) {
    const open = button.dataset.tab === name;
    button.setAttribute("aria-selected", open);
    button.tabIndex = open ? 0 : -1;
  }
  const above = id("tabs").getBoundingClientRect().top - id("panel").getBoundingClientRect().top;
  if (above < 0) id("panel").scrollTop += above; // the beginning of a tab
  if (inside) [drawPairs, drawCurves].forEach((draw) => draw()); // a hidden chart has no width
}

/** Let arrow keys move among the buttons of an element: left and right by one, up and down by columns(). */
function arrows(name, columns) {
  id(name).addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns(), ArrowDown: columns() }[event.key];
    const all = [...id(name).querySelectorAll("button")].filter((one) => one.checkVisibility());
    if (!by) return;
    event.preventDefault();
    event.stopPropagation(); // elsewhere, arrows choose a token
    all[all.indexOf(event.target) + by]?.focus();
  });
}

function startPanel() {
  for (const button of id("tabs").children) {
    const name = button.dataset.tab, label = `tab-${name}`;
    Object.assign(button, { role: "tab", id: label }).setAttribute("aria-controls", name);
    Object.assign(id(name), { role: "tabpanel" }).setAttribute("aria-labelledby", label);
  }
  arrows("tabs", () => 0);
  startCompare();
  id("tabs").addEventListener("focusin", ({ target }) => tab(target.dataset.tab));
  arrows("grid", () => card.meta.n_heads + ["direct", "total"].includes(id("measure").value));
  for (const name of ["measure", "mean"]) id(name).addEventListener("change", drawGrid);
}
