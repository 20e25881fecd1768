"use strict";

// ---------------------------------------------------------------------- numbers and texts: functions without a document

/** The roots of the weights that a byte stands for (trace.packed_maps). */
const ROOTS = Array.from({ length: 256 }, (_, code) => (code > 8 ? Math.sqrt((code - 10) / 100) : code / 26));

/** The index in `bytes` of the weight of token t on token s <= t. */
function place(tokens, heads, layer, head, t, s) {
  const triangle = (tokens * (tokens + 1)) / 2;
  return (layer * heads + head) * triangle + s * tokens - (s * (s - 1)) / 2 + t - s;
}

/** The square root of the weight of token t on token s; 0 if s comes later. */
function root(bytes, tokens, heads, layer, head, t, s) {
  return s > t ? 0 : ROOTS[bytes[place(tokens, heads, layer, head, t, s)]];
}

/** A stored weight; below 0.1 it is one of eight steps. */
function weight(rooted) {
  return (rooted ** 2 < 0.0995 ? "≈" : "") + share(rooted ** 2);
}

/** The end of a text in one line, with at most `most` characters: its last sentence, or its last words. */
function ending(text, most) {
  const whole = harmless(text.replace(/\s+/g, " ").trim()), letters = Array.from(whole);
  if (letters.length <= most) return whole;
  const sentence = whole.split(/(?<=[.!?]) /).at(-1);
  if (sentence.length < most) return `… ${sentence}`;
  const kept = letters.slice(letters.length - most + 1).join("");
  const space = kept.indexOf(" ");
  return `…${space >= 0 && space < most / 2 ? kept.slice(space) : kept}`;
}

/** The title of the page: the end of the text, and the predicted token. */
function headline(prompt, answer) {
  return [ending(prompt, 72), answer.trim() === "" ? visible(answer) : ending(answer, 40)];
}

/** The indices [layer, head] of the largest value. */
function largest(grid) {
  const best = grid.map((row) => row.indexOf(Math.max(...row)));
  const layer = best.reduce((top, head, l) => (grid[l][head] > grid[top][best[top]] ? l : top), 0);
  return [layer, best[layer]];
}

/** The running mean of at most `count` values, up to each value; the first value, of token 0, is left out. */
function runningMean(values, count) {
  return values.map((_, i) => {
    const last = values.slice(Math.max(1, i - count + 1), i + 1);
    return last.length ? last.reduce((a, b) => a + b, 0) / last.length : 0;
  });
}

/** How far the pairs that finish no turn are rotated from one token to the next, in words. */
function aboutSlowPairs(rope) {
  const slow = rope.inv_freq.filter((_, i) => rope.turns[i] < 1), total = rope.turns.length;
  if (Math.max(...rope.inv_freq) === 0) return "No pair is rotated.";
  if (!slow.length) return `All ${total} pairs finish a turn over this text.`;
  const angles = slow.length === 1 ? `It is rotated by ${degrees(slow[0])} from one token to the next.`
    : `From one token to the next, the fastest of them is rotated by ${degrees(Math.max(...slow))} and the slowest by ${degrees(Math.min(...slow))}.`;
  return `${slow.length} of ${total} pairs ${slow.length === 1 ? "does" : "do"} not finish a turn over this text (below the dotted line), so no two tokens have the same angle there. ${angles}`;
}

// ---------------------------------------------------------------------------------------------------------- the page
/** The bytes of a deflated part of the page. */
async function unpack(name) {
  const packed = Uint8Array.from(atob(id(name).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// One long function, since all parts below share the data and the selection.
async function start() {
  const data = JSON.parse(new TextDecoder().decode(await unpack("data")));
  const { tokens, lens, heads, rope, change, patching } = data;
  const T = tokens.ids.length, L = data.layers.length, H = data.n_heads, PAIRS = rope.inv_freq.length;
  const bytes = await unpack("maps");
  const SHOWN = lens.kl[0].length, SKIPPED = T - SHOWN; // tokens with and without a lens
  const text = (id) => data.texts[id];
  const at = (t) => text(tokens.ids[t]);
  const bits = (nats) => nats / Math.LN2;
  const flat = (nested) => nested.flat(Infinity);
  const [answer, second] = tokens.next_ids[T - 1].map(text); // the most probable tokens after the text
  const opening = largest(heads.effects); // the head to start with

  // layer is an index into data.layers, the layers that ran. stage is the row of the lens: layer + 1, or 0 for the
  // embedding, which has no heads and does not change layer.
  const chosen = { token: T - 1, layer: 0, stage: 1, head: 0, lens: "p", heads: "maps" };
  const sizes = { token: T, layer: L, stage: L + 1, head: H };

  /** Resize a canvas to a height in CSS pixels, for the resolution of the screen. */
  function prepared(name, height) {
    const canvas = id(name), ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const draw = canvas.getContext("2d");
    draw.scale(ratio, ratio);
    draw.font = "12px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace";
    draw.textBaseline = "middle";
    return draw;
  }

  /** A text, shortened to a width. */
  function fitted(draw, content, width) {
    if (draw.measureText(content).width <= width) return content;
    const letters = Array.from(content);
    while (letters.length > 1 && draw.measureText(letters.join("") + "…").width > width) letters.pop();
    return letters.join("") + "…";
  }

  function choose(changes) {
    const before = { ...chosen };
    Object.assign(chosen, changes);
    for (const key of Object.keys(sizes)) chosen[key] = Math.min(sizes[key] - 1, Math.max(0, chosen[key]));
    if ("layer" in changes) chosen.stage = chosen.layer + 1;
    else if (chosen.stage > 0) chosen.layer = chosen.stage - 1;
    redraw(Object.keys(chosen).filter((key) => chosen[key] !== before[key]));
  }

  /** A list of predicted tokens, with the token that follows in the text marked. */
  function predictions(name, ids, p, actual, actualP) {
    const largest = Math.max(...p, actualP || 0);
    const rows = ids.map((predicted, i) => [predicted, p[i]]);
    if (actual !== undefined && !ids.includes(actual)) rows.push([actual, actualP]);
    put(name, ...rows.map(([predicted, share_]) => {
      return make("div", { class: predicted === actual ? "prediction actual" : "prediction" }, token(text(predicted)),
        track(share_ / largest), make("span", { class: "p" }, share(share_)));
    }));
  }

  // ---------------------------------------------------------------------------------------------- the strip of tokens
  function buildStrip() {
    const largest = Math.max(1, ...tokens.surprisal.map((s) => (s === null ? 0 : bits(s))));
    put("strip", ...tokens.ids.map((_, t) => {
      const surprisal = tokens.surprisal[t];
      const bar = make("span", { class: "bar" });
      bar.style.height = surprisal === null ? "0" : `${Math.max(1, (72 * bits(surprisal)) / largest)}px`;
      const button = make("button", { type: "button", role: "option" },
        make("span", { class: "bits" }, surprisal === null ? "–" : bits(surprisal).toFixed(1)), bar, token(at(t)));
      button.addEventListener("click", () => choose({ token: t }));
      return button;
    }));
  }

  function drawStrip() {
    const t = chosen.token;
    const buttons = [...id("strip").children], focused = buttons.includes(document.activeElement);
    buttons.forEach((button, i) => {
      button.setAttribute("aria-selected", i === t);
      button.tabIndex = i === t ? 0 : -1; // Tab stops once at the strip; arrow keys move within it
    });
    if (focused) buttons[t].focus();
    if (t === 0) {
      put("before-title", "Before the first token");
      put("before", make("p", { class: "note" }, "No token comes before it, so there is no prediction."));
    } else {
      const surprisal = tokens.surprisal[t];
      put("before-title", "Predicted at ", token(at(t)));
      predictions("before", tokens.next_ids[t - 1], tokens.next_p[t - 1], tokens.ids[t], Math.exp(-surprisal));
      id("before").append(make("p", { class: "note" }, `▸ is the actual token: rank ${tokens.rank[t].toLocaleString("en")}`
        + ` of the vocabulary, ${bits(surprisal).toFixed(2)} bits (${surprisal.toFixed(2)} nats).`));
    }
    put("after-title", "Predicted after ", token(at(t)));
    predictions("after", tokens.next_ids[t], tokens.next_p[t], t + 1 < T ? tokens.ids[t + 1] : undefined,
      t + 1 < T ? Math.exp(-tokens.surprisal[t + 1]) : undefined);
  }

  // --------------------------------------------------------------------------------------- before and after a change
  function drawChange() {
    if (!change) return;
    const t = chosen.token;
    const pairs = [change.before, change.after].map((side) => side.surprisal.map((s) => (s === null ? 0 : bits(s))));
    const long = id("change-chart").clientWidth / T < 8; // two bars a token would be too thin, so lines of means
    const smooth = long ? pairs.map((side) => runningMean(side, 16)) : pairs;
    const most = Math.max(1e-9, ...flat(smooth));
    put("change-reads", long ? `Above: mean surprisal of the last 16 tokens; dashed: original model, solid: changed model.`
      : `Above: surprisal of each token; outlined: original model, filled: changed model.`,
    T > 1 ? ` The means over the text are ${pairs.map((side) => (side.reduce((a, b) => a + b, 0) / (T - 1)).toFixed(2)).join(" and ")} bits.` : "");
    const yTicks = niceTicks(0, most, 4, true);
    const above = chart("change-chart", { height: 170, yMax: yTicks.at(-1), yTicks, yLabel: "surprisal, bits", xLabel: "token" });
    const step = above.width / T;
    if (long) {
      line(above, smooth[0]);
      line(above, smooth[1], "line whole");
    } else for (let i = 0; i < T; i++) {
      const tooltip = `${i} ${visible(at(i))}: ${pairs[0][i].toFixed(2)} → ${pairs[1][i].toFixed(2)} bits`;
      [["hollow", 0.12, pairs[0][i]], [i === t ? "chosen" : "bar", 0.52, pairs[1][i]]].forEach(([cls, inset, value]) => {
        above.svg.append(make("rect", { class: cls, x: above.left + step * (i + inset), width: Math.max(0.5, step * 0.36),
          y: above.y(value), height: above.bottom - above.y(value) }, make("title", {}, tooltip)));
      });
    }
    axisLabels(above, T);
    const klTicks = niceTicks(0, Math.max(1e-9, ...change.kl), 3, true);
    const holder = make("div");
    const below = chart("change-chart", { height: 130, yMax: klTicks.at(-1), yTicks: klTicks, yLabel: "KL, nats",
      xLabel: "prediction after token" });
    bars(below, change.kl, { marked: t, tooltip: (i) => `after ${i} ${visible(at(i))}: ${figures(change.kl[i])} nats` });
    axisLabels(below, T);
    holder.append(above.svg, below.svg);
    put("change-chart", holder);
    put("original-title", "Original model, after ", token(at(t)));
    put("changed-title", "Changed model, after ", token(at(t)));
    predictions("original", change.before.next_ids[t], change.before.next_p[t]);
    predictions("changed", change.after.next_ids[t], change.after.next_p[t]);
  }

  // ------------------------------------------------------------------------------------------- activation patching
  function drawPatching() {
    if (!patching) return;
    const rows = patching.layers.length, shade = ramp();
    const plot = chart("patching-chart", { height: 54 + 9 * rows, yMax: 1, yTicks: [], yLabel: "layer", xLabel: "token" });
    const step = plot.width / T;
    patching.restored.forEach((row, l) => row.forEach((share_, t) => {
      const was = patching.source[t] === patching.target[t] ? "" : ` (other text: ${visible(patching.source[t])})`;
      const tooltip = `layer ${patching.layers[l]}, token ${t} ${visible(patching.target[t])}${was}: ${(100 * share_).toFixed(0)} %`;
      plot.svg.append(make("rect", { x: plot.left + step * t, y: 20 + 9 * l, width: step, height: 9, fill: rgb(shade(share_)) },
        make("title", {}, tooltip)));
    }));
    patching.layers.forEach((layer, l) => {
      if (l % Math.ceil(rows / 16) === 0) plot.svg.append(make("text", { x: plot.left - 6, y: 29 + 9 * l, "text-anchor": "end" }, layer));
    });
    axisLabels(plot, T);
    put("patching-chart", plot.svg);
  }

  // --------------------------------------------------------------------------------------------------- logit lens
  const lowest = Math.max(2, ...flat(lens.rank));
  const LENS = {
    p: { label: "top token", reads: "The stronger the shade, the higher the row's probability of its top token; only in the last row is it the model's.",
      value: (m, n) => lens.top_p[m][n][0] },
    rank: { label: "rank of the answer", reads: "The stronger the shade, the higher the rank of the answer in this row: full at rank 1, none at the lowest rank in the picture.",
      value: (m, n) => 1 - Math.log(lens.rank[m][n]) / Math.log(lowest) },
    kl: { label: "divergence from the last row", reads: "The stronger the shade, the nearer to the last row's prediction: it is e to the power of −KL(last row ‖ this row).",
      value: (m, n) => Math.exp(-lens.kl[m][n]) },
  };
  let lensBox = null;

  function drawLens() {
    const view = LENS[chosen.lens], rows = L + 1, gutter = 34;
    const width = id("lens").clientWidth, cell = (width - gutter) / SHOWN;
    const words = cell >= 30, height = words ? 20 : Math.max(5, Math.min(16, 480 / rows));
    const top = words ? 22 : 4;
    put("lens-reads", words ? "The word is the top token of the row, in bold if it is the answer. "
      : "There is no room for words here: the line below and the table show each row's top token. ", view.reads);
    const draw = prepared("lens", top + rows * height + 2), shade = ramp(), c = colours();
    const gap = cell >= 8 && height >= 8 ? 1 : 0;
    lensBox = { gutter, cell, height, top, rows };
    for (let m = 0; m < rows; m++) {
      for (let n = 0; n < SHOWN; n++) {
        const value = view.value(m, n);
        draw.fillStyle = rgb(shade(value));
        draw.fillRect(gutter + n * cell, top + m * height, cell - gap, height - gap);
        if (words) {
          draw.fillStyle = readable(shade(value));
          draw.font = draw.font.replace(/^(bold )?/, lens.rank[m][n] === 1 ? "bold " : "");
          draw.fillText(fitted(draw, visible(text(lens.top_ids[m][n][0])), cell - 6), gutter + n * cell + 3, top + (m + 0.5) * height);
        }
      }
    }
    draw.font = draw.font.replace(/^bold /, "");
    draw.fillStyle = c.soft;
    const every = Math.ceil(14 / height);
    for (let m = 0; m < rows; m += every) {
      draw.fillText(m === 0 ? "emb" : String(data.layers[m - 1]), 4, top + (m + 0.5) * height);
    }
    if (words) for (let n = 0; n < SHOWN; n++) draw.fillText(fitted(draw, visible(at(SKIPPED + n)), cell - 6), gutter + n * cell + 3, 10);
    draw.lineWidth = 2;
    draw.strokeStyle = c.second;
    if (chosen.token >= SKIPPED) for (const [y, tall] of [[0, rows * height], [chosen.stage * height, height]]) {
      draw.strokeRect(gutter + (chosen.token - SKIPPED) * cell, top + y, cell, tall);
    }
    showLens(chosen.stage, chosen.token);
  }

  const NO_LENS = `The lens shows the last ${SHOWN} tokens only.`;
  function showLens(m, t) {
    const n = t - SKIPPED;
    if (n < 0) put("lens-readout", NO_LENS);
    else put("lens-readout", make("b", {}, m === 0 ? "embedding, before any layer" : `after layer ${data.layers[m - 1]}`), ", at ", token(at(t)),
      ": top token ", token(text(lens.top_ids[m][n][0])), ` with ${share(lens.top_p[m][n][0])}; the answer `, token(text(tokens.next_ids[t][0])),
      ` has rank ${lens.rank[m][n].toLocaleString("en")}; KL from the last row ${figures(lens.kl[m][n])} nats`);
  }

  function drawLensTable() {
    const t = chosen.token, n = t - SKIPPED;
    put("lens-title", "After ", token(at(t)));
    if (n < 0) return put("lens-table");
    const header = make("tr", {}, ...["layer", "top", "p", "rank of answer", "KL, nats"].map((h) => make("th", { scope: "col" }, h)));
    const body = Array.from({ length: L + 1 }, (_, m) => {
      const row = make("tr", { class: lens.rank[m][n] === 1 ? "final" : "", "aria-current": m === chosen.stage },
        make("td", {}, m === 0 ? "emb" : data.layers[m - 1]), make("td", {}, token(text(lens.top_ids[m][n][0]))),
        make("td", {}, share(lens.top_p[m][n][0])), make("td", {}, lens.rank[m][n].toLocaleString("en")),
        make("td", {}, figures(lens.kl[m][n])));
      row.addEventListener("click", () => choose({ stage: m }));
      return row;
    });
    put("lens-table", make("thead", {}, header), make("tbody", {}, ...body));
  }

  // ---------------------------------------------------------------------------------------------------- all heads
  const HEADS = {
    maps: { label: "maps", reads: "Each square is the attention map of a head. A strong left edge is attention to the first token, a strong diagonal to the token itself or the one before." },
    sink: { label: "first token", reads: "The stronger the shade, the higher the weight on the first token, from none at 0 to full at 1.", of: heads.sink, most: 1 },
    previous: { label: "token before", reads: "The stronger the shade, the higher the weight on the previous token, from none at 0 to full at 1.", of: heads.previous, most: 1 },
    effects: { label: "effect on the answer", reads: "The stronger the shade, the more the head adds to the difference of the two logits; heads that lower it have no shade.", of: heads.effects, most: Math.max(1e-9, ...flat(heads.effects)) },
    spread: { label: "spread", reads: "The effective number of attended tokens, e to the power of the entropy of the weights: no shade is one token, full shade the largest number of all heads.",
      of: heads.spread, most: Math.max(...flat(heads.spread)), least: 1 },
  };
  let headsBox = null;
  const picture = { key: "", image: null }; // cache of the small maps; drawn again only if size or colours change

  function drawHeads() {
    const view = HEADS[chosen.heads], width = id("heads").clientWidth, gutter = 24, top = 18;
    put("heads-reads", view.reads);
    const cell = Math.min(44, (width - gutter) / L), gap = cell >= 14 ? 2 : 1;
    const draw = prepared("heads", top + H * cell + 2), c = colours(), shade = ramp();
    headsBox = { gutter, cell, top };
    draw.fillStyle = c.soft;
    draw.textAlign = "center";
    const every = Math.ceil(20 / cell);
    for (let l = 0; l < L; l += every) draw.fillText(String(data.layers[l]), gutter + (l + 0.5) * cell, 8);
    for (let h = 0; h < H; h += Math.ceil(12 / cell)) draw.fillText(String(h), 9, top + (h + 0.5) * cell);
    if (view.of) {
      for (let l = 0; l < L; l++) for (let h = 0; h < H; h++) {
        const least = view.least || 0;
        draw.fillStyle = rgb(shade((view.of[l][h] - least) / Math.max(1e-9, view.most - least)));
        draw.fillRect(gutter + l * cell, top + h * cell, cell - gap, cell - gap);
      }
    } else {
      const ratio = window.devicePixelRatio || 1, size = Math.max(1, Math.floor((cell - gap) * ratio));
      const key = [size, cell, c.raised].join();
      if (picture.key !== key) Object.assign(picture, { key, image: smallMaps(size, cell * ratio, shade) });
      draw.drawImage(picture.image, gutter, top, L * cell, H * cell);
    }
    draw.lineWidth = 1;
    draw.strokeStyle = c.line;
    for (let l = 0; l < L; l++) for (let h = 0; h < H; h++) {
      if (cell >= 10) draw.strokeRect(gutter + l * cell + 0.5, top + h * cell + 0.5, cell - gap - 1, cell - gap - 1);
    }
    draw.lineWidth = 3;
    draw.strokeStyle = c.second;
    draw.strokeRect(gutter + chosen.layer * cell, top + chosen.head * cell, cell - gap, cell - gap);
    showHead(chosen.layer, chosen.head);
  }

  /** All maps on one canvas; a pixel that covers several weights shows the largest, so that thin lines stay visible. */
  function smallMaps(size, pitch, shade) {
    const sheet = make("canvas");
    sheet.width = Math.round(L * pitch);
    sheet.height = Math.round(H * pitch);
    const draw = sheet.getContext("2d"), image = draw.createImageData(size, size);
    const first = (p) => Math.floor((p * T) / size), last = (p) => Math.max(first(p) + 1, Math.ceil(((p + 1) * T) / size));
    const colour = Array.from({ length: 256 }, (_, b) => shade(b / 255));
    for (let l = 0; l < L; l++) for (let h = 0; h < H; h++) {
      for (let y = 0; y < size; y++) for (let x = 0; x < size; x++) {
        let most = 0;
        for (let t = first(y); t < (T > size ? last(y) : first(y) + 1); t++) {
          for (let s = first(x); s < (T > size ? last(x) : first(x) + 1); s++) most = Math.max(most, root(bytes, T, H, l, h, t, s));
        }
        image.data.set([...colour[Math.round(255 * most)], 255], 4 * (y * size + x));
      }
      draw.putImageData(image, Math.round(l * pitch), Math.round(h * pitch));
    }
    return sheet;
  }

  function showHead(l, h) {
    const means = [`first token ${share(heads.sink[l][h])}`];
    if (heads.previous) means.push(`token before ${share(heads.previous[l][h])}`);
    means.push(`itself ${share(heads.itself[l][h])}`);
    put("heads-readout", make("b", {}, `head ${data.layers[l]}.${h}`),
      `: mean weights: ${means.join(", ")}; attends to ${figures(heads.spread[l][h])} tokens; adds ${plus(heads.effects[l][h])} to the logit of `,
      token(answer), " minus that of ", token(second));
  }

  // ----------------------------------------------------------------------------------------------------- one head
  let mapBox = null;

  function drawMap() {
    put("map-title", `Attention map of head ${data.layers[chosen.layer]}.${chosen.head}`
      + (chosen.layer === opening[0] && chosen.head === opening[1] ? ", with the largest effect on the answer" : ""));
    const width = id("map").clientWidth;
    const estimate = Math.min(32, (width - 90) / T), labelled = estimate >= 12;
    const draw0 = prepared("map", 10);
    const longest = labelled ? Math.min(90, Math.max(...tokens.ids.map((_, t) => draw0.measureText(visible(at(t))).width))) : 0;
    const edge = labelled ? longest + 10 : 6;
    const cell = Math.min(32, (width - edge - 2) / T);
    const draw = prepared("map", edge + T * cell + 2), shade = ramp(), c = colours();
    mapBox = { edge, cell };
    draw.imageSmoothingEnabled = false;
    draw.drawImage(headMap(chosen.layer, chosen.head, shade), edge, edge, T * cell, T * cell);
    draw.strokeStyle = c.line;
    draw.lineWidth = 1;
    draw.beginPath(); // the staircase of the causal mask
    draw.moveTo(edge, edge);
    for (let t = 0; t < T; t++) {
      draw.lineTo(edge + (t + 1) * cell, edge + t * cell);
      draw.lineTo(edge + (t + 1) * cell, edge + (t + 1) * cell);
    }
    draw.lineTo(edge, edge + T * cell);
    draw.closePath();
    draw.stroke();
    if (labelled) {
      for (let t = 0; t < T; t++) {
        const label = fitted(draw, visible(at(t)), longest);
        draw.fillStyle = t === chosen.token ? c.second : c.soft;
        draw.textAlign = "right";
        draw.fillText(label, edge - 6, edge + (t + 0.5) * cell);
        draw.fillStyle = c.soft;
        draw.save();
        draw.translate(edge + (t + 0.5) * cell, edge - 6);
        draw.rotate(-Math.PI / 2);
        draw.textAlign = "left";
        draw.fillText(label, 0, 0);
        draw.restore();
      }
    }
    draw.strokeStyle = c.second;
    draw.lineWidth = 2;
    draw.strokeRect(edge, edge + chosen.token * cell, (chosen.token + 1) * cell, cell);
    showMap(chosen.token, bestKey(chosen.token));
  }

  /** The map of a head on a canvas, one pixel for each weight. */
  function headMap(l, h, shade) {
    const sheet = make("canvas", { width: T, height: T });
    const draw = sheet.getContext("2d"), image = draw.createImageData(T, T), colour = ROOTS.map((one) => [...shade(one), 255]);
    for (let t = 0; t < T; t++) for (let s = 0; s <= t; s++) {
      image.data.set(colour[bytes[place(T, H, l, h, t, s)]], 4 * (t * T + s));
    }
    draw.putImageData(image, 0, 0);
    return sheet;
  }

  function bestKey(t) {
    let best = 0;
    for (let s = 1; s <= t; s++) {
      if (root(bytes, T, H, chosen.layer, chosen.head, t, s) > root(bytes, T, H, chosen.layer, chosen.head, t, best)) best = s;
    }
    return best;
  }

  function showMap(t, s) {
    if (s > t) {
      put("map-readout", make("b", {}, `${t} `), token(at(t)), " does not see ", make("b", {}, `${s} `), token(at(s)), ", which comes later");
      return;
    }
    const rooted = root(bytes, T, H, chosen.layer, chosen.head, t, s);
    put("map-readout", make("b", {}, `${t} `), token(at(t)), " attends to ", make("b", {}, `${s} `), token(at(s)), ` with weight ${weight(rooted)}`);
  }

  function drawRow() {
    const t = chosen.token, shade = ramp();
    put("row-title", "What ", token(at(t)), " attends to in this head");
    put("row", ...Array.from({ length: t + 1 }, (_, s) => {
      const value = root(bytes, T, H, chosen.layer, chosen.head, t, s), node = shaded(token(at(s)), shade(value));
      if (s === t) node.classList.add("key");
      node.title = `${s}: ${weight(value)}`;
      node.addEventListener("click", () => choose({ token: s }));
      return node;
    }));
  }

  function drawScale() {
    const shade = ramp();
    const width = Math.min(320, id("scale").clientWidth), steps = 40;
    const svg = make("svg", { viewBox: `0 0 ${width} 40`, height: 40, role: "img", "aria-label": "scale of the shades" });
    svg.style.width = `${width}px`;
    const x = (weight) => 8 + Math.sqrt(weight) * (width - 24);
    for (let i = 0; i < steps; i++) {
      const box = make("rect", { x: x((i / steps) ** 2), y: 8, width: (width - 24) / steps + 0.5, height: 12 });
      box.style.fill = rgb(shade((i + 0.5) / steps));
      svg.append(box);
    }
    svg.append(make("rect", { class: "axis", x: 8, y: 8, width: width - 24, height: 12 }));
    for (const weight of [0, 0.01, 0.1, 0.3, 0.6, 1]) svg.append(make("text", { x: x(weight), y: 35, "text-anchor": "middle" }, weight));
    put("scale", svg);
  }

  function drawProfile() {
    const all = heads.profile[chosen.layer][chosen.head], rest = heads.profile_without_first[chosen.layer][chosen.head];
    const yTicks = niceTicks(0, Math.max(...all, ...rest), 4, true);
    const far = T > 48; // on a linear axis the bars would be too thin, so each doubling has the same width
    const plot = chart("profile", { height: 180, yMax: yTicks.at(-1), yTicks, yLabel: "mean weight",
      xLabel: far ? "tokens back (log scale)" : "tokens back" });
    const x = (distance) => plot.left + plot.width * (far ? Math.log(1 + distance) / Math.log(1 + T) : distance / T);
    const middle = (distance) => (x(distance) + x(distance + 1)) / 2;
    all.forEach((value, i) => {
      const gap = Math.min(3, 0.15 * (x(i + 1) - x(i)));
      plot.svg.append(make("rect", { class: "bar", x: x(i) + gap, width: x(i + 1) - x(i) - 2 * gap, y: plot.y(value),
        height: plot.bottom - plot.y(value) }, make("title", {}, `${i} back: ${share(value)}`
          + (i < rest.length ? `, without the first token ${share(rest[i])}` : ""))));
    });
    if (rest.length) plot.svg.append(make("path", { class: "line", d: `M${rest.map((value, i) => `${middle(i)},${plot.y(value)}`).join("L")}` }));
    if (far) {
      for (let i = 1; i <= T; i *= 2) plot.svg.append(make("text", { x: middle(i - 1), y: plot.bottom + 15, "text-anchor": "middle" }, i - 1));
    } else axisLabels(plot, T);
    put("profile", plot.svg);
  }

  // -------------------------------------------------------------------------------------------------------- RoPE
  function drawHands() {
    const width = id("hands").clientWidth, columns = Math.max(4, Math.min(PAIRS, 32, Math.floor(width / 32)));
    const pitch = width / columns, radius = Math.min(13, pitch / 2 - 2), rows = Math.ceil(PAIRS / columns), tall = 2 * radius + 20;
    const svg = make("svg", { viewBox: `0 0 ${width} ${rows * tall}`, height: rows * tall, role: "img",
      "aria-label": "hands of all pairs at the selected token" });
    rope.inv_freq.forEach((frequency, i) => {
      const angle = chosen.token * frequency, x = (i % columns + 0.5) * pitch, y = Math.floor(i / columns) * tall + radius + 1;
      const group = make("g", {}, make("circle", { class: "dial", cx: x, cy: y, r: radius }),
        make("line", { class: "start", x1: x, y1: y, x2: x + radius, y2: y }),
        make("line", { class: "hand", x1: x, y1: y, x2: x + radius * Math.cos(angle), y2: y - radius * Math.sin(angle) }),
        make("text", { x, y: y + radius + 13, "text-anchor": "middle" }, i),
        make("title", {}, `pair ${i}: ${figures(angle)} radians, ${figures(angle / (2 * Math.PI))} turns`));
      svg.append(group);
    });
    put("hands", svg);
    const fast = rope.inv_freq[0] * chosen.token, slow = rope.inv_freq[PAIRS - 1] * chosen.token;
    put("hands-readout", make("b", {}, `position ${chosen.token}`),
      `: pair 0 has turned by ${figures(fast)} radians, pair ${PAIRS - 1} by ${figures(slow)}`);
  }

  function buildTurns() {
    const factor = rope.attention_factor === 1 ? "" : ` Cosine and sine are multiplied by ${figures(rope.attention_factor)}.`;
    const scaling = rope.scaling ? `, scaling ${rope.scaling.rope_type || rope.scaling.type}` : "";
    const still = rope.inv_freq.every((frequency) => frequency === 0);
    put("rope-reads", still ? "In this trace nothing is rotated." : `The base θ is ${figures(rope.theta)}${scaling}.${factor}`);
    put("turns-reads", aboutSlowPairs(rope));
  }

  function drawTurns() {
    const low = Math.floor(Math.log10(Math.max(1e-12, Math.min(1, ...rope.turns.filter((t) => t > 0)))));
    const high = Math.max(1, Math.ceil(Math.log10(Math.max(1, ...rope.turns))));
    const plot = chart("turns", { height: 150, yMax: high - low, yTicks: [], yLabel: "full turns (log scale)", xLabel: "pair", left: 64 });
    const step = Math.ceil((high - low) / 5);
    for (let e = low; e <= high; e += step) {
      plot.svg.append(make("line", { class: "axis", x1: plot.left, x2: plot.left + plot.width, y1: plot.y(e - low), y2: plot.y(e - low) }),
        make("text", { x: plot.left - 6, y: plot.y(e - low) + 4, "text-anchor": "end" }, e >= -3 ? figures(10 ** e) : `1e${e}`.replace("-", "−")));
    }
    bars(plot, rope.turns.map((t) => (t > 0 ? Math.max(0, Math.log10(t) - low) : 0)),
      { tooltip: (i) => `pair ${i}: ${figures(rope.turns[i])} turns, frequency ω = ${figures(rope.inv_freq[i])} radians a token, ${degrees(rope.inv_freq[i])}` });
    plot.svg.append(make("line", { class: "limit", x1: plot.left, x2: plot.left + plot.width, y1: plot.y(-low), y2: plot.y(-low) }),
      make("text", { class: "ink", x: plot.left + plot.width, y: plot.y(-low) - 4, "text-anchor": "end" }, "one turn"));
    axisLabels(plot, PAIRS);
    put("turns", plot.svg);
  }

  const meanNorms = rope.inv_freq.map((_, i) => flat(heads.pair_norms.map((layer) => layer.map((head) => head[i])))
    .reduce((a, b) => a + b, 0) / (L * H));

  function drawNorms() {
    put("norms-title", `Frequencies used by head ${data.layers[chosen.layer]}.${chosen.head}`);
    const own = heads.pair_norms[chosen.layer][chosen.head], yTicks = niceTicks(0, Math.max(...own, ...meanNorms), 4, true);
    const plot = chart("norms", { height: 180, yMax: yTicks.at(-1), yTicks, yLabel: "mean |qᵢ| |kᵢ|", xLabel: "pair, fast to slow", left: 64 });
    bars(plot, own, { tooltip: (i) => `pair ${i}: ${figures(own[i])}, mean of all heads ${figures(meanNorms[i])}` });
    line(plot, meanNorms);
    axisLabels(plot, PAIRS);
    put("norms", plot.svg);
  }

  // ------------------------------------------------------------------------------------------- drawing and controls
  function drawControls() {
    for (const key of ["token", "layer", "head"]) id(key).value = chosen[key];
  }

  // A function that draws, and the parts of `chosen` that it shows. All also depend on the width of the window and the colours.
  const SHOWS = [[drawControls, "token", "layer", "head"], [drawStrip, "token"], [drawChange, "token"], [drawPatching],
    [drawLens, "token", "stage", "lens"], [drawLensTable, "token", "stage"], [drawHeads, "layer", "head", "heads"],
    [drawMap, "token", "layer", "head"], [drawRow, "token", "layer", "head"], [drawScale], [drawProfile, "layer", "head"],
    [drawHands, "token"], [drawTurns], [drawNorms, "layer", "head"]];

  /** Call the functions that show one of these parts of `chosen`. */
  function redraw(changed) {
    for (const [draw, ...shown] of SHOWS) if (shown.some((key) => changed.includes(key))) draw();
  }
  function drawAll() {
    for (const [draw] of SHOWS) draw();
  }

  function buildChoices(name, options, key) {
    const buttons = Object.entries(options).filter(([, option]) => option.of !== null).map(([value, option]) => {
      const button = press(option.label, () => {
        for (const other of buttons) other.setAttribute("aria-pressed", other === button);
        choose({ [key]: value });
      }, { "aria-pressed": chosen[key] === value });
      return button;
    });
    put(name, ...buttons);
  }

  /** Call `show` and `pick` with the cell under the pointer on moves and clicks; cellAt returns null outside. */
  function listen(name, cellAt, show, pick) {
    const canvas = id(name);
    const cell = (event) => cellAt(event.offsetX, event.offsetY);
    canvas.addEventListener("pointermove", (event) => { const at = cell(event); if (at) show(...at); });
    canvas.addEventListener("click", (event) => { const at = cell(event); if (at) pick(...at); });
  }
  const within = (value, size) => value >= 0 && value < size;

  /** What arrow keys do in a node. Characters do nothing: people type them, and speech input dictates them. */
  function arrows(node, moves) {
    node.addEventListener("keydown", (event) => {
      const move = moves[(event.shiftKey ? "Shift+" : "") + event.key];
      const field = event.target.closest?.("select, input, textarea, [contenteditable]"); // these use the keys
      if (!move || field || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      event.stopPropagation();
      choose({ [move[0]]: chosen[move[0]] + move[1] });
    });
  }

  const about = `${harmless(data.model)}: ${data.n_layers} layers of ${H} heads (${data.n_kv_heads} for keys and values), ${data.head_dim} entries per head; `
    + `${T} ${T === 1 ? "token" : "tokens"}, computed in ${data.dtype}.`;
  put("about", about);
  const title = headline(data.prompt, answer);
  document.title = `${title.join(" → ")} · clearllama trace`;
  put("title", make("span", { dir: "auto" }, title[0]), make("span", { class: "arrow" }, " → "), make("b", { dir: "auto" }, title[1]));
  put("prompt", plain(data.prompt));
  id("prompt").hidden = title[0] === data.prompt; // the title is the complete text
  if (change) {
    put("changes", make("b", {}, "Changed: "), change.told.join("; "), ". The pictures show the changed model.");
    const before = text(change.before.next_ids[T - 1][0]);
    if (before !== answer) id("changes").append(" The original model predicts ", token(before), ".");
    id("changes").hidden = id("change-section").hidden = false;
  }
  if (patching) {
    const [other, own] = patching.answers.map(token);
    put("patching-reads", "Here: the logit of ", other, " minus that of ", own, ". The other text: ",
      plain(patching.source.join("")));
    id("patching-section").hidden = false;
  }
  id("token").append(...tokens.ids.map((_, t) => make("option", { value: t }, `${t} ${visible(at(t))}`)));
  id("layer").append(...data.layers.map((layer, l) => make("option", { value: l }, layer)));
  id("head").append(...Array.from({ length: H }, (_, h) => make("option", { value: h }, h)));
  for (const key of ["token", "layer", "head"]) id(key).addEventListener("change", () => choose({ [key]: Number(id(key).value) }));
  for (const button of document.querySelectorAll("[data-step]")) {
    button.addEventListener("click", () => choose({ [button.dataset.step]: chosen[button.dataset.step] + Number(button.dataset.by) }));
  }
  buildStrip();
  buildTurns();
  buildChoices("lens-choices", LENS, "lens");
  buildChoices("heads-choices", HEADS, "heads");
  listen("lens", (x, y) => {
    const n = Math.floor((x - lensBox.gutter) / lensBox.cell), m = Math.floor((y - lensBox.top) / lensBox.height);
    return within(n, SHOWN) && within(m, L + 1) ? [m, SKIPPED + n] : null;
  }, showLens, (m, t) => choose({ token: t, stage: m }));
  listen("heads", (x, y) => {
    const l = Math.floor((x - headsBox.gutter) / headsBox.cell), h = Math.floor((y - headsBox.top) / headsBox.cell);
    return within(l, L) && within(h, H) ? [l, h] : null;
  }, showHead, (l, h) => choose({ layer: l, head: h }));
  listen("map", (x, y) => {
    const s = Math.floor((x - mapBox.edge) / mapBox.cell), t = Math.floor((y - mapBox.edge) / mapBox.cell);
    return within(s, T) && within(t, T) ? [t, s] : null;
  }, showMap, (t) => choose({ token: t }));
  arrows(id("lens"), { ArrowUp: ["stage", -1], ArrowDown: ["stage", 1] });
  arrows(id("strip"), { Home: ["token", -T], End: ["token", T] });
  arrows(id("heads"), { ArrowLeft: ["layer", -1], ArrowRight: ["layer", 1], ArrowUp: ["head", -1], ArrowDown: ["head", 1] });
  arrows(id("map"), { ArrowUp: ["token", -1], ArrowDown: ["token", 1] });
  const shifted = { "Shift+ArrowUp": ["layer", -1], "Shift+ArrowDown": ["layer", 1], "Shift+ArrowLeft": ["head", -1], "Shift+ArrowRight": ["head", 1] };
  arrows(document, { ArrowLeft: ["token", -1], ArrowRight: ["token", 1], ...shifted });

  Object.assign(chosen, { layer: opening[0], stage: opening[0] + 1, head: opening[1] });
  const first = bestKey(T - 1);
  put("opened", `The page opens on head ${data.layers[opening[0]]}.${opening[1]}: of all ${L * H} heads it has the largest direct effect on the logit of `,
    token(answer), " minus that of ", token(second), " after ", token(at(T - 1)), `, ${plus(heads.effects[opening[0]][opening[1]])}. There it attends most to `, token(at(first)),
    `, with weight ${weight(root(bytes, T, H, ...opening, T - 1, first))}.`);
  drawAll();
  let waiting = 0;
  const again = () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(drawAll); };
  window.addEventListener("resize", again);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  document.documentElement.dataset.ready = "";
}

if (typeof document !== "undefined") start();
