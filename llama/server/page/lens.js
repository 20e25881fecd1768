/* The tab "Layers": what the logit lens and the Jacobian lens read from each layer, as curves and as a table. */
"use strict";

/** The rows of each lens with their layer; -1 is the start. The last matrix of a Jacobian lens is the identity. */
function lenses() {
  const logit = inside.lens.map((row, i) => ({ ...row, layer: i - 1 })), last = logit.at(-1);
  return [logit, inside.jacobian && [...inside.jacobian.filter((row) => row.layer < last.layer), last]];
}

function drawLens() {
  const one = openWord(), [logit, jacobian] = lenses(), { lens, tied } = card.meta;
  const guess = (other, ...parts) => make("span", { class: other.id === one.id ? "guess right" : "guess" }, ...parts);
  const words = (row) => (row?.top ?? []).slice(0, jacobian ? 2 : 3).map((other) => guess(other, spelled(other), ` ${other.p < 0.00095 ? "<.001" : share(other.p)}`));
  const line = (k) => make("svg", { class: "sample", viewBox: "0 0 26 8" }, make("path", { class: `curve w${k}`, d: "M0,4L26,4" }));
  const listed = (kind, ...cells) => make("p", { class: kind }, ...cells.map((cell) => make("span", {}, ...cell)));
  id("lens").classList.toggle("two", !!jacobian);
  put("legend", ...inside.words.map((word, k) => guess(word, line(k), spelled(word))));
  put("layers", listed("heading", ["layer"], ["logit lens"], jacobian ? ["Jacobian lens"] : ["rank of ", named(one)]),
    ...logit.map((row) => listed(row.rank === 1 ? "won" : "", [row.layer < 0 ? "start" : row.layer], words(row),
      jacobian ? words(jacobian.find((other) => other.layer === row.layer)) : [thousands(row.rank)])));
  const first = (rows) => rows[rows.findLastIndex((row) => row.rank !== 1) + 1];
  const since = (rows, name) => (rows ? [`${first(rows).layer < 0 ? "from the start" : `from layer ${first(rows).layer}`} on under the ${name} lens`] : []);
  put("first", named(one), first(logit) ? ` has rank 1 ${[...since(logit, "logit"), ...since(jacobian, "Jacobian")].join(", and ")}.` : " does not have rank 1 after the last layer.");
  put("tied", tied ? "This model uses one matrix for input and output, so the input word usually reads as itself there." : "");
  put("moved", jacobian ? `The Jacobian lens first multiplies the output of a layer by a matrix, which says how a change of this output changes that of the last layer, as a mean over ${
    thousands(lens)} ${lens === 1 ? "text" : "texts"}. Layers without a matrix are left out; the last layer needs none.`
    : "The server has no Jacobian lens for this model: clearllama trace --fit-lens makes one, and serve --lens uses it.");
  drawCurves();
}

/** The ranks of the words over the layers, rank 1 on top, in a logarithmic scale. */
function drawCurves() {
  if (!id("legend").clientWidth) return; // it is hidden
  const [logit, jacobian] = lenses(), size = card.meta.vocab_size;
  for (const [name, title, rows] of [["logit-curves", "rank, logit lens", logit], ["jacobian-curves", "rank, Jacobian lens", jacobian]]) {
    if (!rows) continue;
    const plot = chart(name, { height: 200, yMin: -Math.log10(size), yMax: 0, yTicks: [], yLabel: title, xLabel: "layer", left: 44, right: 6 });
    const x = (layer) => plot.left + (plot.width * (layer + 1)) / (logit.length - 1), y = (rank) => plot.y(-Math.log10(rank));
    for (let rank = 1; rank < size; rank *= 10) {
      plot.svg.append(make("line", { class: "axis", x1: plot.left, x2: plot.left + plot.width, y1: y(rank), y2: y(rank) }),
        make("text", { x: plot.left - 5, y: y(rank) + 4, "text-anchor": "end" }, thousands(rank)));
    }
    for (let layer = 0; layer < logit.length - 1; layer += logit.length > 12 ? 5 : 1) {
      plot.svg.append(make("text", { x: x(layer), y: plot.bottom + 15, "text-anchor": "middle" }, layer));
    }
    inside.words.forEach((word, k) => plot.svg.append(make("path", { class: `curve w${k}`, d: `M${rows.map((row) => `${x(row.layer)},${y(row.ranks[k])}`).join("L")}` },
      make("title", {}, spelled(word).textContent))));
    put(name, plot.svg);
  }
}
