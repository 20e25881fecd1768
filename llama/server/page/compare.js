/* Compare two questions: which vectors of the other question, put into this one, move the answer? */
"use strict";

let comparing = null; // {turn, i, question, other: ids, abort, found, cell: [layer, position]}; i: index of the open word; found: result of /look/patch

function openCompare() {
  comparing = { turn: openTurn(), i: chosen.i };
  put("compare-about", "Change a word of the question so that the answer says another word than ", make("b", {}, named(openWord())),
    ". The change is also made in the answer before it.");
  id("other-question").value = comparing.turn.question;
  drawPatches();
  put("compare-status");
  id("compare").showModal();
}

/** The text before the open word with the words that were changed in the question. */
function edited(question, other, text) {
  const [a, b] = [question, other].map((one) => one.split(/(?<=[^\p{L}\p{M}\p{N}])|(?=[^\p{L}\p{M}\p{N}])/u));
  if (a.length !== b.length) return text;
  return a.reduce((changed, word, k) => (word === b[k] ? changed : changed.replaceAll(word, b[k])), text);
}

/** Answer the other question up to the open word, and patch each vector before this word. */
async function compare() {
  const { turn, i } = comparing, one = turn.tokens[i], question = id("other-question").value, abort = new AbortController(), tell = (...text) => put("compare-status", ...text);
  comparing.abort?.abort();
  comparing = { turn, i, question, abort };
  drawPatches();
  tell("The other question is being read.");
  try {
    const text = card.meta.template ? { messages: messages(turn).with(-1, { role: "user", content: question }) } : { ...continued(turn), prompt: question };
    const own = edited(turn.question, question, textOf(turn.tokens.slice(0, i))), prompt = [], tokens = [];
    const asked = { ...text, own, off: turn.off, max_tokens: 1, temperature: 0 };
    for await (const event of patchEvents("look/answer", asked, abort)) {
      prompt.push(...(event.prompt ?? []));
      if (event.id !== undefined) tokens.push(event);
    }
    const word = tokens.at(-1), [here, there] = [turn.prompt.length + i, prompt.length + tokens.length - 1];
    if (here !== there || prompt.length !== turn.prompt.length) {
      return tell(`Vectors are compared token by token, but before this word, this text has ${here} tokens and the other text has ${there}. Change to a word of as many tokens.`);
    }
    if (word.id === one.id) return tell("Both answers have ", named(word), " here, so no vector can move the answer. Open a word that differs, or ask another question.");
    comparing.other = ids([...prompt, ...tokens.slice(0, i)]);
    const body = { ids: before(turn, i), other: comparing.other, token: one.id, against: word.id, off: turn.off };
    for await (const event of patchEvents("look/patch", body, abort)) {
      if (event.of) tell(make("progress", { max: event.of, value: event.done, "aria-label": "computing the grid" }));
      else comparing.found = event;
    }
    tell("");
    drawPatches();
  } catch (error) {
    if (!abort.signal.aborted) failed(error, tell);
  }
}

async function* patchEvents(path, body, { signal }) {
  for await (const event of events(await call(path, JSON.stringify(body), signal), signal)) {
    if (event.error) throw new Refused(event.error.message);
    yield event;
  }
}

/** A token of this text, and that of the other one if it is different. */
const both = (t) => {
  const { source, target } = comparing.found, differs = source[t].id !== target[t].id;
  return make(differs ? "b" : "span", {}, spelled(target[t]), ...(differs ? [" | ", spelled(source[t])] : []));
};

/** The grid: a row for each token from the first that differs, a column for each layer. */
function drawPatches() {
  const { found } = comparing, shade = ramp(), cell = (layer, t) => {
    const moved = found.restored[layer][t], label = `before layer ${found.layers[layer]}, ${both(t).textContent}: ${hundredths(moved)}`;
    const button = press(moved < -0.05 ? "−" : "", () => drawCell(layer, t), { title: label, "aria-label": label, tabindex: layer ? -1 : 0, "data-cell": `${layer}-${t}` });
    return make("td", {}, shaded(button, shade(0.8 * Math.abs(moved))));
  };
  put("patches");
  put("patched");
  id("compared").hidden = !found;
  if (!found) return;
  const [theirs, ours] = found.answers.map(named), T = found.target.length, first = found.target.findIndex((one, t) => one.id !== found.source[t].id);
  const rows = Array.from({ length: T - first }, (_, k) => first + k), [there, here] = found.differences;
  put("compare-reads", "After this question, ", ours, ` is ${lead(-here)} `, theirs, "; after the other one, ", lead(-there), ". A cell shows how far one vector moves this lead to the other: ",
    "white 0 %, dark 100 % or more. The ", first, " tokens before are equal, so they move nothing.");
  put("patches", make("tr", {}, make("th", {}, "this | other"), ...found.layers.map((layer, l) => make("th", { scope: "col" }, l % 5 ? "" : layer))),
    ...rows.map((t) => make("tr", {}, make("th", { scope: "row" }, both(t)), ...found.layers.map((_, l) => cell(l, t)))));
}
const hundredths = (x) => `${Math.round(100 * x)} %`.replace("-", "−");
const lead = (x) => `${fixed(Math.abs(x))} logits ${x < 0 ? "behind" : "ahead of"}`;

/** What the vector of a cell does, and the button that puts it in. */
function drawCell(layer, t) {
  const { found, turn, i, other, question } = comparing, [theirs, ours] = found.answers.map(named), [there, here] = found.differences, moved = found.restored[layer][t];
  for (const node of id("patches").querySelectorAll("button")) node.setAttribute("aria-current", node.dataset.cell === `${layer}-${t}`);
  const patch = { other, layer: found.layers[layer], position: t };
  put("patched", `With the other question’s vector before layer ${patch.layer} at `, both(t), make("sub", {}, t), ", ", ours, ` is ${lead(-here - moved * (there - here))} `, theirs,
    `: ${hundredths(moved)} of the way. `, press("Answer again with this vector", () => {
      id("compare").close();
      branch(turn, turn.tokens.slice(0, i), { patch, asked: question, watched: i });
    }));
}

function startCompare() {
  arrows("patches", () => comparing.found.layers.length);
  id("compare").addEventListener("close", () => comparing.abort?.abort());
}
