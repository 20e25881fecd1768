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
  chosen = inside = null;
  document.body.classList.remove("open");
  mark();
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

/** The table of words: what the model computed, and what the word was drawn with, in bars of one scale. */
function drawWords() {
  const turn = openTurn(), one = openWord(), given = chosen.i < 0, { left = {}, top } = one, stages = Object.keys(left);
  const rest = (name) => Number(Math.max(0, 1 - top.reduce((sum, other) => sum + (other[name] ?? 0), 0)).toFixed(4));
  const bar = (p) => make("span", { class: "both" }, make("span", { class: "p" }, share(p)), p ? track(p) : "");
  put("chosen", named(one), make("small", {}, ` position ${turn.prompt.length + chosen.i}`));
  id("own").value = "";
  id("take").hidden = given;
  put("forced", given ? "A word of your text: the model’s probabilities are computed now, and nothing was drawn. To change it, edit the text."
    : one.forced ? `You chose this word; the model gave it ${share(one.p)}. ` : "",
    given || one.left ? "" : "A link holds all alternatives, and what the filters did, for the word only that was open.");
  const others = one.p === undefined ? [] : [{ p: rest("p"), ...(given ? {} : { q: rest("q") }) }];
  put("alternatives", ...[...top, ...others].map((other, k) => {
    const row = press("", () => take(k), { class: "row", "aria-current": other.id === one.id });
    row.disabled = given || k === top.length;
    row.append(k < 10 ? make("kbd", {}, (k + 1) % 10) : make("span"), make("span", { class: "ellipsis" }, k < top.length ? spelled(other) : "all others"), bar(other.p),
      other.cut ? make("span", { class: "cut" }, `cut by ${STAGES[other.cut][0]}`) : given ? "" : bar(other.q));
    return row;
  }));
  put("kept", ...stages.filter((stage) => STAGES[stage]).map((stage) => {
    const [label, does] = STAGES[stage], before = left[stages[stages.indexOf(stage) - 1]], cuts = !["penalties", "temperature"].includes(stage);
    return make("li", {}, make("b", {}, label), ` ${does(turn.sampling, one.warm)}`,
      cuts ? `: ${thousands(left[stage])} of ${thousands(before)} words left` : "");
  }));
  put("prompt-tokens", ...turn.prompt.map((other) =>
    make("span", { class: other.control ? "token control" : "token" }, other.bytes ? hex(other) : plain(other.text))));
}

/** Go on with a word of one's own in place of the open token; a space before that token stays. */
function takeOwn(event) {
  event.preventDefault();
  const turn = openTurn(), one = turn.tokens[chosen.i], text = id("own").value;
  const own = (text.startsWith(" ") ? "" : /^ ?/.exec(one.text ?? "")[0]) + text;
  if (text) branch(turn, turn.tokens.slice(0, chosen.i), { first: chosen.i, own });
}

/** Go on with the k-th alternative of the open token. */
function take(k) {
  const turn = openTurn(), one = openWord(), other = one.top[k];
  if (chosen.i < 0 || !other || other.id === one.id) return;
  branch(turn, [...turn.tokens.slice(0, chosen.i), { ...other, top: one.top, left: one.left, warm: one.warm, thought: one.thought, forced: true }], { first: chosen.i });
}

let request = null; // the pending request to /look/inside, if any
/** Ask for the inside of the open token, unless it is known. */
function look(changes = {}, view = "") {
  if (saved && "head" in changes) changes = {}; // only what was open is in the file
  Object.assign(chosen, changes);
  if (view && innerWidth < 1000) tab(view);
  request?.abort();
  request = null;
  const turn = openTurn(), one = openWord();
  if (turn.model !== identity()) return wait("Another model wrote this answer, so its inside can't be computed.");
  if (running) return wait("The inside is computed when the answer is complete.");
  if (!before(turn, chosen.i).length) return wait("Nothing comes before the first token, so nothing was computed.");
  chosen.against ??= rival(one)?.id;
  const { against, head, key } = chosen, body = inspection({ against, head, key });
  if (inside === null) wait("…");
  request = new AbortController();
  inspect(body, drawInside, wait, request.signal);
}

/** The body of a request for the inside of the open token. */
function inspection(fields) {
  const turn = openTurn();
  return JSON.stringify({ ids: before(turn, chosen.i), token: openWord().id, off: turn.off, ...fields });
}

async function inspect(body, show, tell, signal) {
  try {
    if (!seen.has(body)) seen.set(body, await delivered((await call("look/inside", body, signal)).json(), signal));
    if (seen.size > 50) seen.delete(seen.keys().next().value);
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

/** The word that the open one is compared with: the one that it replaced, else one of at least .1, else the first whole word or number. */
function rival(one) {
  const others = rivals(one), replaced = chosen.i === openTurn().first && turns[openTurn().source]?.tokens[chosen.i];
  return others.find((other) => other.id === replaced?.id)
    ?? others.find((other) => other.p >= 0.1 || /^ ?(\p{L}{3,}|\p{N}+)$/u.test(other.text)) ?? others[0];
}

/** The token at a position of the text: of the prompt or of the answer. */
const at = (position) => openTurn().prompt[position] ?? openTurn().tokens[position - openTurn().prompt.length];

function drawInside(found) {
  if (chosen.i < 0 && !chosen.found) {
    chosen.found = { p: found.p, top: found.top };
    drawWords();
    return look(); // again, now against an alternative
  }
  wait("");
  [inside, request] = [found, null];
  const turn = openTurn(), one = openWord(), { embedding, heads, mlps } = found.effects;
  const against = rivals(one).find((other) => other.id === chosen.against), than = against ? named(against).textContent : "0";
  const [best] = found.heads, name = best.head.join("."), count = thousands(card.meta.n_layers * card.meta.n_heads);
  put("this", named(one));
  put("against", ...rivals(one).map((other) => make("option", { value: other.id }, spelled(other).textContent)));
  id("against").value = against?.id;
  put("summary", "Of all heads, ", make("b", {}, name), best.effect > 0 ? " adds most" : " has the largest effect, but against the word", ". It looked at ",
    ...placed(best.position), ` (${share(best.weight)}).`);
  put("terms", `A head is one of ${count} small parts that look back at earlier tokens; ${name} is head ${best.head[1]} of layer ${best.head[0]}.`,
    " Its effect is in logits, for (+) or against (−) ", named(one), `: each logit multiplies its odds over ${than} by 2.7.`);
  put("sink", named(at(0)), make("sub", {}, 0));
  drawHeads();
  const rest = found.difference - embedding - heads - mlps, rounding = Math.abs(rest) > 0.02 ? `, rounding ${signed(rest)}` : "";
  const drift = Math.abs(found.p - one.p) > 0.005 ? ` Computed again, its probability is ${share(found.p)}; it was drawn with ${share(one.p)}.` : "";
  put("sums", named(one), ` is ${fixed(Math.abs(found.difference))} logits ${found.difference < 0 ? "behind" : "ahead of"} ${than}`,
    `: all ${count} heads together, for and against it, ${signed(heads)}, the MLPs ${signed(mlps)}, the embedding ${signed(embedding)}${rounding}.${drift}`);
  drawHead();
  drawLens();
}

/** A position and its token, as nodes. */
const placed = (position) => [position === 0 ? "first token" : named(at(position)), make("sub", {}, position)];

/** What the model computes with a further head off, if it was measured. */
const without = (head) => inspection({ off: [...openTurn().off, head] });

function drawHeads() {
  const most = Math.max(...inside.heads.map((other) => Math.abs(other.effect))), shown = `${inside.head.head}`;
  put("heads", ...inside.heads.map(({ head, effect, position, weight }) => {
    const open = press("", () => look({ head, key: undefined }, "head"), { class: "name", "aria-current": `${head}` === shown });
    open.append(make("b", {}, head.join(".")), make("span", { class: "p" }, signed(effect)),
      track(Math.abs(effect) / most, effect < 0 ? "fill less" : "fill"), make("span", { class: "looks ellipsis" }, "→ ", ...placed(position), ` ${share(weight)}`));
    const body = without(head), found = seen.get(body), measure = () => inspect(body, () => inside && drawHeads(), say);
    return make("div", { class: "one" }, open,
      found ? make("b", { class: "p" }, `${share(inside.p)} → ${share(found.p)}`)
        : press("probability", measure, { class: "small", title: "of this word with the head off" }),
      press("new answer", () => switchOff(head), { class: "small", title: "answer again with the head off" }));
  }));
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

function drawLens() {
  const one = openWord();
  const cells = (row) => row.top.map((other) => make("span", { class: other.id === one.id ? "guess right" : "guess" }, spelled(other), ` ${share(other.p < 0.0005 ? 0 : other.p)}`));
  put("layers", make("p", { class: "heading" }, make("b", {}, "layer"), make("span", {}, "most probable"), make("b", {}, "rank of ", named(one))),
    ...inside.lens.map((row, i) => make("p", { class: row.rank === 1 ? "won" : "" }, make("b", {}, i ? i - 1 : "start"), make("span", {}, ...cells(row)),
      make("b", {}, thousands(row.rank)))));
}

function tab(name) {
  id("panel").dataset.tab = name;
  for (const button of id("tabs").children) button.setAttribute("aria-pressed", button.dataset.tab === name);
  if (inside) drawPairs(); // a hidden chart has no width
}
