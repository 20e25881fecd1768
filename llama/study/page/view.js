/* The view of the page: controls, five pictures, the guided path. All numbers come from rope.js; shared.js stands before. */
"use strict";

(() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent); // {reference: rows, q: [256], k: [256]}
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  const narrow = matchMedia("(max-width: 899px)");
  const dark = matchMedia("(prefers-color-scheme: dark)");

  const SHORT = { default: "none", linear: "linear (PI)", ntk: "NTK-aware", dynamic: "dynamic", yarn: "YaRN", llama3: "llama3" };
  const LABEL = { default: "unscaled", linear: "PI", ntk: "NTK-aware", dynamic: "dynamic NTK", yarn: "YaRN", llama3: "llama3" };
  const DASH = { default: "1.5 4", linear: "12 4", ntk: "6 4", dynamic: "8 3 2 3", yarn: "12 3 2 3 2 3", llama3: "3 3" };

  // --------------------------------------------------------------------------------------------- numbers as text
  const integer = (x) => Math.round(x).toLocaleString("en-US");
  const times = (x) => String(Number(x.toPrecision(3)));
  const turns = (count) => `${figures(count)} ${count === 1 ? "turn" : "turns"}`;
  const short = (x) => (x >= 1e6 ? `${times(x / 1e6)}M` : x >= 1e3 ? `${times(x / 1e3)}k` : integer(x));
  const signed = (x, digits) => x.toFixed(digits).replace("-", "−");
  function span(flags) {
    const which = flags.flatMap((flag, i) => (flag ? [i] : []));
    const [first, last] = [which[0], which[which.length - 1]];
    if (which.length === 1) return `pair ${first}`;
    return which.length === last - first + 1 ? `pairs ${first} to ${last}` : `${which.length} pairs from ${first} to ${last}`;
  }
  const count = (flags) => flags.filter(Boolean).length;

  // ------------------------------------------------------------------------------------------------------ drawing
  const tag = (name, attributes, ...inside) =>
    `<${name}${Object.entries(attributes)
      .map(([key, value]) => ` ${key}="${typeof value === "number" ? Number(value.toFixed(2)) : value}"`)
      .join("")}>${inside.join("")}</${name}>`;
  const text = (x, y, words, attributes = {}) => tag("text", { x, y, ...attributes }, words);
  const line = (x1, y1, x2, y2, kind, more = {}) => tag("line", { x1, y1, x2, y2, class: kind, ...more });
  const dot = (x, y, r, kind, more = {}) => tag("circle", { cx: x, cy: y, r, class: kind, ...more });
  const path = (points, kind, more = {}) =>
    tag("path", { d: points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join(""), class: kind, ...more });
  const closed = (points, kind) => path(points, kind).replace('" class', 'Z" class');

  const linear = (from, to, low, high) => (x) => low + ((x - from) / (to - from || 1)) * (high - low);
  const log = (from, to, low, high) => (x) => linear(Math.log(from), Math.log(to), low, high)(Math.log(x));

  const COLUMN = 6;
  /** The range [top, bottom] of a curve in each column of COLUMN pixels, null where the curve is absent. */
  function heights(points, box) {
    const columns = Array.from({ length: Math.ceil((box.right - box.left) / COLUMN) + 1 }, () => null);
    for (let i = 1; i < points.length; i++) {
      const [[x0, y0], [x1, y1]] = [points[i - 1], points[i]];
      const steps = Math.max(1, Math.ceil(Math.abs(x1 - x0) / COLUMN) * 2);
      for (let j = 0; j <= steps; j++) {
        const c = Math.floor((x0 + ((x1 - x0) * j) / steps - box.left) / COLUMN);
        const y = y0 + ((y1 - y0) * j) / steps;
        if (c >= 0 && c < columns.length) columns[c] = columns[c] ? [Math.min(columns[c][0], y), Math.max(columns[c][1], y)] : [y, y];
      }
    }
    return columns;
  }

  /** Positions for the labels of curves: next to their own curve, and not over a curve or another label. */
  function placeLabels(curves, box, occupied = []) {
    const height = 15;
    const boxes = [...occupied];
    const all = curves.map(({ points }) => heights(points, box));
    return curves.map(({ words }, owner) => {
      const w = words.length * 6.9 + 6;
      let best = null;
      all[owner].forEach((range, column) => {
        if (!range) return;
        const [x, up, down] = [box.left + (column + 0.5) * COLUMN, range[0] - height - 4, range[1] + 4];
        for (const [left, top] of [[x - w / 2, up], [x - w / 2, down], [x + 6, down - 2], [x - w - 6, up + 2], [x + 6, up + 2], [x - w - 6, down - 2]]) {
          if (left < box.left || left + w > box.right || top < box.top - 12 || top + height > box.bottom - 4) continue;
          let cost = 400 * boxes.filter((b) => left < b[0] + b[2] && b[0] < left + w && top < b[1] + b[3] && b[1] < top + height).length;
          let nearest = 40; // distance to the nearest other curve, which the label must not seem to name
          const [from, to] = [Math.max(0, Math.floor((left - box.left) / COLUMN) - 1), Math.floor((left + w - box.left) / COLUMN) + 1];
          for (let other = 0; other < all.length; other++) {
            for (let c = from; c <= to; c++) {
              const at = all[other][c];
              if (!at) continue;
              const gap = Math.max(at[0] - top - height, top - at[1], 0);
              if (gap < 2) cost += other === owner ? 10 : 14;
              if (other !== owner) nearest = Math.min(nearest, gap);
            }
          }
          cost -= nearest;
          if (!best || cost < best.cost) best = { cost, left, top };
        }
      });
      if (best) boxes.push([best.left, best.top, w, height]);
      return best;
    });
  }

  /** A picture's frame: axes with ticks and titles. x, y are {at, ticks, name(tick), title}. */
  function frame(box, x, y) {
    return [
      ...y.ticks.map((t) => line(box.left, y.at(t), box.right, y.at(t), "grid") + text(box.left - 8, y.at(t) + 4, y.name(t), { "text-anchor": "end" })),
      line(box.left, box.bottom, box.right, box.bottom, "axis"),
      ...x.ticks.map((t) => line(x.at(t), box.bottom, x.at(t), box.bottom + 5, "axis") + text(x.at(t), box.bottom + 19, x.name(t), { "text-anchor": "middle" })),
      text(0, box.top - 14, y.title),
      text(box.right, box.bottom + 38, x.title, { "text-anchor": "end" }),
    ].join("");
  }

  function picture(width, height, inside) {
    return `<svg viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" role="img">${inside.join("")}</svg>`;
  }

  const svgWidth = (id) => Math.max(280, Math.floor(document.querySelector(`#${id} .plot`).clientWidth));

  /** x of the first and of the last pair: half a bar from the edges. */
  function ends(box, pairs) {
    const inset = Math.max(6, (box.right - box.left) / (2 * pairs));
    return [box.left + inset, box.right - inset];
  }

  function pairAxis(box, pairs) {
    const ticks = niceTicks(0, pairs - 1, box.right - box.left < 420 ? 4 : 8).filter((t) => Number.isInteger(t));
    return { at: linear(0, pairs - 1, ...ends(box, pairs)), ticks, name: String, title: "pair i (0 is the fastest)" };
  }

  function pickArea(box, pairs) {
    const [left, right] = ends(box, pairs);
    return tag("rect", {
      x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top,
      class: "pick", "data-pick": pairs, "data-left": left, "data-right": right,
    });
  }

  // ------------------------------------------------------------------------------------------- picture 1: the clock
  const FAST = [0.125, 0.25, 0.375, 0.5, 0.64, 0.9, 0.07]; // parts of the pairs, for picture 1
  const SLOW = [0.25, 0.5, 0.75, 0.64, 0.1, 0.9, 0.35]; // for picture 4
  /** The pairs that have a dial: six, or all if there are fewer; the first, the last, the selected and those at `parts`. */
  function dials(state, parts = SLOW) {
    const pairs = state.dim / 2;
    const shown = new Set([0, pairs - 1, state.pair]);
    for (const part of parts) if (shown.size < 6) shown.add(Math.floor(part * pairs));
    return [...shown].sort((a, b) => a - b);
  }

  function dialGrid(width, count, caption) {
    const columns = Math.min(count, width < 560 ? 3 : 6);
    const cell = width / columns;
    const radius = Math.min(cell / 2 - (width < 560 ? 10 : 13), 62);
    const rowHeight = 2 * radius + caption;
    return { columns, radius, height: rowHeight * Math.ceil(count / columns), center: (k) => [(k % columns) * cell + cell / 2, Math.floor(k / columns) * rowHeight + radius + 10] };
  }

  /** An arrow from the centre (x, y), its letter at the tip, and the area in which a pointer can take it. */
  function arrow(x, y, r, angle, name, letter, pair) {
    const [neck, left, right] = [polar(x, y, r - 9, angle), polar(x, y, r - 10, angle + 5 / r), polar(x, y, r - 10, angle - 5 / r)];
    const tip = polar(x, y, r, angle);
    const grip = { "data-arrow": name, "data-pair": pair, "data-x": x, "data-y": y };
    return {
      shape: line(x, y, ...neck, `arrow-${name}`) + closed([tip, left, right], `head-${name}`),
      letter: text(...letter, name, { class: `halo arrow-name${name === "q" ? " new-text" : " strong"}`, "text-anchor": "middle", "dominant-baseline": "central" }),
      grip: line(x, y, ...tip, "grip", grip) + dot(...tip, 13, "grip", grip),
    };
  }

  /** For example ", 5 under PI"; empty without a scaling. */
  const under = (state, words) => (state.method === "default" ? "" : `, ${words} under ${LABEL[state.method]}`);

  const polar = (x, y, r, angle) => [x + r * Math.cos(angle), y - r * Math.sin(angle)]; // counter-clockwise from the right

  const pictures = {
    /** `at` is {m, n} as drawn, which are not whole numbers while the arrows move from one token to the next. */
    clock(state, now, at = state) {
      const shown = dials(state, FAST);
      const width = svgWidth("clock");
      const grid = dialGrid(width, shown.length, 82);
      const unscaled = state.method === "default";
      const distance = at.m - at.n;
      const inside = shown.map((pair, k) => {
        const [x, y] = grid.center(k);
        const w = now.invFreq[pair];
        const [outer, r] = [grid.radius + 4, grid.radius - 4];
        const [q, key] = [at.m * w, at.n * w];
        const between = Rope.reduced(distance * w);
        const steps = Array.from({ length: 25 }, (_, j) => polar(x, y, 0.42 * r, key + (between * j) / 24));
        const whole = tag("circle", { cx: x, cy: y, r: outer, class: "turn-both", "data-arrow": "both", "data-pair": pair, "data-x": x, "data-y": y });
        const parts = [whole, dot(x, y, r, "grid"), line(x, y, x + r, y, "grid"), closed([[x, y], ...steps], "band")];
        for (let back = Math.min(7, Math.floor(at.m)); back >= 0; back--) {
          const fade = { opacity: 1 - back * 0.1 };
          if (!unscaled) parts.push(dot(...polar(x, y, outer + 2, (at.m - back) * now.before[pair]), 2.6, "dot-old", fade));
          parts.push(dot(...polar(x, y, r, (at.m - back) * w), 3, "dot-new", fade));
        }
        const side = between < 0 ? 1 : -1; // the letter of k on the side away from q
        const arrows = [
          arrow(x, y, 0.74 * r, key, "k", polar(x, y, 0.62 * r, key + side * (14 / (0.62 * r))), pair),
          arrow(x, y, r - 1, q, "q", polar(x, y, 0.84 * r, q - side * (13 / r)), pair),
        ];
        parts.push(...arrows.map((a) => a.shape), dot(x, y, 2.5, "dot-new"), ...arrows.map((a) => a.letter), ...arrows.map((a) => a.grip).reverse());
        const below = y + grid.radius + 25;
        const angle = Math.abs((between * 180) / Math.PI);
        const few = width < 560 ? 2 : 3;
        const step = (radians) => `${figures((radians * 180) / Math.PI, few)}°`;
        parts.push(text(x, below, `pair ${pair}`, { "text-anchor": "middle", class: pair === state.pair ? "strong" : "" }));
        parts.push(text(x, below + 17, unscaled ? `${step(w)} a token` : `${step(now.before[pair])} → ${step(w)}`, { "text-anchor": "middle" }));
        parts.push(text(x, below + 34, `cos ${angle >= 1 ? Math.round(angle) : figures(angle, 2)}° = ${signed(Math.cos(between), 2)}`, { "text-anchor": "middle", class: "new-text" }));
        return parts.join("");
      });
      const pairs = state.dim / 2;
      const box = { left: width < 480 ? 26 : 32, right: width - 4, top: grid.height + 30, bottom: grid.height + 98 };
      const x = pairAxis(box, pairs);
      const y = { at: linear(-1, 1, box.bottom, box.top), ticks: [-1, 0, 1], name: (t) => signed(t, 0), title: width < 480 ? "what each pair adds: cos((m − n) ωᵢ)" : "what each of the pairs adds to q · k: cos((m − n) ωᵢ)" };
      const half = Math.min(6, (0.76 * (x.at(1) - x.at(0))) / 2);
      inside.push(frame(box, x, y));
      now.invFreq.forEach((w, i) => {
        const top = y.at(Math.cos(distance * w));
        inside.push(tag("rect", { x: x.at(i) - half, width: 2 * half, y: Math.min(top, y.at(0)), height: Math.abs(top - y.at(0)), class: shown.includes(i) ? "bar" : "bar soft", "data-value": Math.cos(distance * w).toPrecision(9) }));
      });
      inside.push(line(box.left, y.at(0), box.right, y.at(0), "axis"), pickArea(box, pairs));
      const s = times(state.stretch);
      const last = state.dim / 2 - 1;
      const name = LABEL[state.method];
      const [kept, divided] = [now.divisors.map((d) => d < 1 + 1e-9), now.divisors.map((d) => d > state.stretch * (1 - 1e-9))];
      const fastest = `pair 0 turns ${degrees(now.before[0])} per token`;
      const nothing = now.divisors.every((d) => Math.abs(d - 1) < 1e-9);
      const claims = {
        default: () => `Each pair is a hand: ${fastest}, pair ${last} only ${degrees(now.before[last])}`,
        linear: () => `PI slows every hand ${s} times: pair 0 turns ${degrees(now.invFreq[0])} per token instead of ${degrees(now.before[0])}`,
        ntk: () => `NTK-aware slows the slowest hand ${s} times and leaves the fastest unchanged`,
        dynamic: () => `At ${integer(state.length)} tokens the slowest hand is slowed ${times(now.divisors[last])} times, and the fastest is unchanged`,
        yarn: () => slowed(),
        llama3: () => slowed(),
      };
      const hands = (many, kind) => (many > 1 ? `the ${many} ${kind} hands` : many ? `the ${kind} hand` : "no hand");
      const slowed = () => `${name} leaves ${hands(count(kept), "fastest")} unchanged and slows ${hands(count(divided), "slowest")} ${s} times`;
      const claim = nothing && state.method !== "default" ? `${name} changes nothing here: every hand keeps its speed` : claims[state.method]();
      const [a, b] = [now.before[state.pair], now.invFreq[state.pair]];
      const dot_ = Rope.product(state.m, state.n, now.invFreq, now.attentionFactor);
      return {
        claim,
        svg: picture(width, box.bottom + 44, inside),
        label: `${shown.length} dials, each with the arrows of q at position ${integer(state.m)} and k at position ${integer(state.n)}. ${shown
          .map((pair) => `Pair ${pair}: ${degrees(now.before[pair])} per token unscaled${under(state, degrees(now.invFreq[pair]))}, cosine ${signed(Math.cos((state.m - state.n) * now.invFreq[pair]), 3)}`)
          .join(". ")}. The sum over all ${last + 1} pairs is ${signed(dot_.sum, 2)}.`,
        readout: `<b class="sum">q · k = ${signed(dot_.sum, 3)}</b> of at most ${times(dot_.most)}: ${now.attentionFactor === 1 ? "the sum" : `a² = ${figures(now.attentionFactor ** 2, 5)} times the sum`} over ${last + 1} pairs at distance <i>m</i> − <i>n</i> = ${integer(state.m - state.n)}. Pair ${state.pair} of q is at ${figures(state.m * a, 4)} rad${unscaled ? "" : ` unscaled, ${figures(state.m * b, 4)} rad under ${name}`}.`,
      };
    },

    // ----------------------------------------------------------------------------------------- picture 2: wavelengths
    waves(state, now) {
      const width = svgWidth("waves");
      const box = { left: width < 480 ? 40 : 52, right: width - 8, top: 34, bottom: 330 };
      const end = Rope.target(state);
      const top = Math.max(...now.waves, ...now.wavesAfter, end) * 2;
      const y = { at: log(4, top, box.bottom, box.top), name: short, title: "wavelength (tokens for one full turn, logarithmic)" };
      y.ticks = [10, 100, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9].filter((t) => t <= top);
      const x = pairAxis(box, state.dim / 2);
      const [old, after] = [now.waves, now.wavesAfter].map((waves) => waves.map((wave, i) => [x.at(i), y.at(wave)]));
      const first = now.unfinished.indexOf(true);
      const inside = [frame(box, x, y)];
      if (first >= 0) {
        const from = first ? (x.at(first - 1) + x.at(first)) / 2 : box.left;
        inside.push(tag("rect", { x: from, y: y.at(state.trained), width: box.right - from, height: box.bottom - y.at(state.trained), class: "seen", opacity: 0.35 }));
        const words = "no full turn in training";
        if (box.right - from > words.length * 6.6) inside.push(text((from + box.right) / 2, box.bottom - 12, words, { "text-anchor": "middle" }));
      }
      const limits = [{ at: state.trained, words: `trained: L = ${integer(state.trained)}`, kind: "limit" }];
      if (end > state.trained) limits.push({ at: end, words: `target: s · L = ${integer(end)}`, kind: "limit-far" });
      for (const { at, kind } of limits) inside.push(line(box.left, y.at(at), box.right, y.at(at), kind));
      inside.push(line(x.at(state.pair), box.top, x.at(state.pair), box.bottom, "cursor"));
      inside.push(path(old, "old"), path(after, "new"));
      inside.push(dot(...old[state.pair], 4, "dot-old"), dot(...after[state.pair], 5, "dot-new"));
      const tooNear = limits.length === 2 && y.at(state.trained) - y.at(end) < 17;
      limits.forEach(({ at, words }, k) => inside.push(text(box.left + 4, y.at(at) + (tooNear && k === 0 ? 15 : -6), words, { class: "strong halo" })));
      const curves = [{ points: old, words: "unscaled" }];
      const same = now.divisors.every((d) => d < 1.02);
      if (!same) curves.push({ points: after, words: LABEL[state.method] });
      const occupied = limits.map(({ at, words }) => [box.left, y.at(at) - 20, words.length * 7.4, 36]);
      placeLabels(curves, box, occupied).forEach((spot, k) => {
        if (spot) inside.push(text(spot.left + 3, spot.top + 12, same && state.method !== "default" ? `unscaled = ${LABEL[state.method]}` : curves[k].words, { class: k || same ? "new-text halo" : "halo" }));
      });
      inside.push(pickArea(box, state.dim / 2));
      const slow = count(now.unfinished);
      const [pairs, i] = [state.dim / 2, state.pair];
      return {
        claim: slow
          ? `${slow} of ${pairs} pairs do not finish a turn within the trained ${integer(state.trained)} tokens`
          : `Every pair finishes a turn within the trained ${integer(state.trained)} tokens`,
        svg: picture(width, box.bottom + 44, inside),
        label: `Wavelength by pair, logarithmic. Unscaled from ${figures(now.waves[0])} tokens at pair 0 to ${figures(now.waves[pairs - 1])} at pair ${pairs - 1}${under(state, `${figures(now.wavesAfter[0])} to ${figures(now.wavesAfter[pairs - 1])}`)}. Pair ${i}: ${figures(now.waves[i], 4)} tokens unscaled${under(state, `${figures(now.wavesAfter[i], 4)} tokens`)}. Lines at the trained ${integer(state.trained)} and the target ${integer(end)} tokens. ${slow} of ${pairs} pairs are above the trained length.`,
        readout: `Pair ${i} makes a full turn every <b>${figures(now.waves[i], 4)} tokens</b> unscaled${under(state, `every <b>${figures(now.wavesAfter[i], 4)} tokens</b>`)}. Within the trained length it makes ${turns(now.turnsSeen[i])}.`,
      };
    },

    // -------------------------------------------------------------------------------------------- picture 3: divisors
    divisors(state, now) {
      const width = svgWidth("divisors");
      const box = { left: width < 480 ? 32 : 40, right: width - 8, top: 34, bottom: 300 };
      const pairs = state.dim / 2;
      const all = Object.fromEntries(Rope.METHODS.map((method) => [method, method === state.method ? now.divisors : Rope.pairs(state, method).divisors]));
      const top = Math.max(2, ...Object.values(all).flat());
      const y = { at: log(0.93, top * 1.18, box.bottom, box.top), name: (t) => times(t), title: "divisor ω / ω′ (logarithmic)" };
      y.ticks = [1, 2, 4, 8, 16, 32].filter((t) => t <= top * 1.01);
      const s = state.stretch;
      if (!y.ticks.some((t) => Math.abs(Math.log2(t / s)) < 0.3)) y.ticks.push(s);
      const x = pairAxis(box, pairs);
      const points = (method) => all[method].map((d, i) => [x.at(i), y.at(d)]);
      const groups = []; // methods with the same curve share one label
      for (const method of Rope.METHODS) {
        const twin = groups.find(([other]) => all[other].every((d, i) => Math.abs(d / all[method][i] - 1) < 0.005));
        if (twin) twin.push(method);
        else groups.push([method]);
      }
      const inside = [frame(box, x, y)];
      const needed = (now.end - 1) / state.trained; // the divisor that keeps the last token within the angles of training
      if (now.beyond.includes(true)) {
        const hatched = now.beyond.flatMap((flag, i) => (flag ? [i] : []));
        const half = (x.at(1) - x.at(0)) / 2;
        for (const i of hatched) {
          const low = y.at(now.divisors[i]);
          inside.push(tag("rect", { x: x.at(i) - half, y: y.at(Math.max(needed, 1)), width: 2 * half + 0.3, height: Math.max(0, low - y.at(needed)), class: "unseen" }));
        }
      }
      inside.push(line(x.at(state.pair), box.top, x.at(state.pair), box.bottom, "cursor"));
      for (const [method] of groups) {
        const chosen = groups.find((g) => g[0] === method).includes(state.method);
        if (!chosen) inside.push(path(points(method), "other", { "stroke-dasharray": DASH[method], "data-method": method }));
      }
      inside.push(path(points(state.method), "new", { "data-method": state.method }));
      inside.push(dot(...points(state.method)[state.pair], 5, "dot-new"));
      const name = (group) => (group.length === Rope.METHODS.length ? "all six methods" : group.map((m) => SHORT[m]).join(" = "));
      const curves = groups.map((group) => ({ points: points(group[0]), words: name(group), chosen: group.includes(state.method) }));
      curves.sort((a, b) => b.chosen - a.chosen);
      placeLabels(curves, box).forEach((spot, k) => {
        if (spot) inside.push(text(spot.left + 3, spot.top + 12, curves[k].words, { class: `halo ${curves[k].chosen ? "new-text" : ""}` }));
      });
      inside.push(pickArea(box, pairs));

      const kept = now.divisors.map((d) => d < 1 + 1e-9);
      const full = now.divisors.map((d) => d > s * (1 - 1e-9));
      const given = now.divisors.filter((_, i) => now.beyond[i]);
      const required = times(Math.max(1, now.end / state.trained));
      const range = given.length > 1 && times(Math.min(...given)) !== times(Math.max(...given)) ? `${times(Math.min(...given))} to ${times(Math.max(...given))}` : times(given[0] ?? 1);
      const few = (method) => `${span(now.beyond).replace("p", "P")} ${given.length > 1 ? "need" : "needs"} ${required}; ${method} divides by ${range}`;
      const ramp = () => {
        const parts = [];
        if (count(kept)) parts.push(`leaves ${span(kept)} unchanged`);
        if (count(full)) parts.push(`divides ${span(full)} by ${times(s)}`);
        if (count(kept) + count(full) < pairs) parts.push(parts.length > 1 ? "ramps between" : "ramps over the others");
        return `${LABEL[state.method]} ${parts.join(", ")}`;
      };
      const nothing = kept.every(Boolean);
      const claims = {
        default: () => (given.length ? `Unscaled, ${span(now.beyond)} ${given.length > 1 ? "are" : "is"} divided by 1 and would need ${required}` : "Unscaled, every pair is divided by 1, and no pair needs more"),
        linear: () => `PI divides every pair by ${times(s)}, even the pairs that need no divisor`,
        ntk: () => (given.length ? few("NTK-aware") : `NTK-aware divides by 1 at pair 0, rising to ${times(s)} at the last pair`),
        dynamic: () => (given.length ? few(`dynamic NTK at ${integer(state.length)} tokens`) : `Dynamic NTK at ${integer(state.length)} tokens divides by 1 to ${times(now.divisors[pairs - 1])}`),
        yarn: ramp,
        llama3: ramp,
      };
      const i = state.pair;
      return {
        claim: nothing && state.method !== "default" ? `${LABEL[state.method]} divides by 1 here: nothing changes` : claims[state.method](),
        svg: picture(width, box.bottom + 44, inside),
        label: `Divisor by pair for six methods, logarithmic. Selected: ${LABEL[state.method]}. ${dials(state).map((pair) => `Pair ${pair}: ${figures(now.divisors[pair], 4)}`).join(", ")}. ${count(now.beyond) ? `Too small in ${span(now.beyond)}.` : "Large enough in every pair."}`,
        readout: `Pair ${i} is divided by ${Rope.METHODS.map((m) => (m === state.method ? `<b>${figures(all[m][i])} (${LABEL[m]})</b>` : `${figures(all[m][i])} (${LABEL[m]})`)).join(", ")}. ${state.method === "yarn" ? `YaRN also multiplies cos and sin by a = <b>${figures(now.attentionFactor, 5)}</b>, so every score by a² = ${figures(now.attentionFactor ** 2, 5)}.` : ""}`,
      };
    },

    // -------------------------------------------------------------------------------------------- picture 4: seen arcs
    arcs(state, now) {
      const width = svgWidth("arcs");
      const shown = dials(state);
      const grid = dialGrid(width, shown.length, 82);
      const pairs = state.dim / 2;
      const arc = (x, y, r, from, to) => {
        const steps = Math.max(2, Math.ceil(((to - from) / Rope.TURN) * 72));
        return Array.from({ length: steps + 1 }, (_, j) => polar(x, y, r, from + ((to - from) * j) / steps));
      };
      const inside = shown.map((pair, k) => {
        const [x, y] = grid.center(k);
        const r = grid.radius - 7;
        const [seen, met] = [now.seen[pair], now.met[pair]];
        const parts = [dot(x, y, r, "grid")];
        parts.push(closed([[x, y], ...arc(x, y, r, 0, seen)], "seen"));
        if (now.beyond[pair]) parts.push(closed([[x, y], ...arc(x, y, r, seen, met)], "unseen"));
        parts.push(path(arc(x, y, r + 6, 0, Math.min(seen, met)), "new"));
        if (now.beyond[pair]) parts.push(path(arc(x, y, r + 6, seen, met), "unseen-edge", { "stroke-dasharray": "5 3" }));
        const below = y + grid.radius + 22;
        parts.push(text(x, below, `pair ${pair}`, { "text-anchor": "middle", class: pair === state.pair ? "strong" : "" }));
        parts.push(text(x, below + 17, `seen ${figures(now.turnsSeen[pair])}`, { "text-anchor": "middle" }));
        parts.push(text(x, below + 34, `met ${figures(now.turnsMet[pair])}`, { "text-anchor": "middle", class: now.beyond[pair] ? "unseen-text" : "new-text" }));
        return parts.join("");
      });
      const top = grid.height + 44;
      const box = { left: width < 480 ? 32 : 40, right: width - 8, top, bottom: top + 190 };
      const y = { at: linear(0, Rope.TURN, box.bottom, box.top), ticks: [0, 0.25, 0.5, 0.75, 1].map((t) => t * Rope.TURN), name: (t) => ({ 0: "0", 0.25: "¼", 0.5: "½", 0.75: "¾", 1: "1" })[t / Rope.TURN], title: "arc from position 0 to the last (turns, at most one)" };
      const x = pairAxis(box, pairs);
      inside.push(frame(box, x, y));
      const half = (x.at(1) - x.at(0)) / 2;
      const stairs = (arcs) => arcs.flatMap((arc, i) => [[x.at(i) - half, y.at(arc)], [x.at(i) + half, y.at(arc)]]);
      inside.push(closed([[x.at(0) - half, box.bottom], ...stairs(now.seen), [x.at(pairs - 1) + half, box.bottom]], "seen"));
      for (let i = 0; i < pairs; i++) {
        const column = { x: x.at(i) - half, width: 2 * half + 0.3 };
        if (now.beyond[i]) inside.push(tag("rect", { ...column, y: y.at(now.met[i]), height: y.at(now.seen[i]) - y.at(now.met[i]), class: "unseen" }));
      }
      inside.push(line(x.at(state.pair), box.top, x.at(state.pair), box.bottom, "cursor"));
      inside.push(path(stairs(now.met), "new"));
      const words = now.beyond.includes(true) ? "met, not seen" : null;
      if (words) {
        // next to the hatched pairs, since text on a hatch is hard to read
        const first = x.at(now.beyond.indexOf(true)) - half;
        inside.push(text(first - 8, y.at(Rope.TURN * 0.3), words, { "text-anchor": "end", class: "unseen-text" }));
      }
      inside.push(text(box.left + 12, y.at(Rope.TURN * 0.5), "seen in training", { class: "strong" }));
      inside.push(pickArea(box, pairs));
      const out = count(now.beyond);
      const i = state.pair;
      return {
        claim: out
          ? `At ${integer(now.end)} tokens ${out} of ${pairs} pairs meet angles that did not occur in training`
          : `At ${integer(now.end)} tokens no pair meets an angle that did not occur in training`,
        svg: picture(width, box.bottom + 44, inside),
        label: `${shown.length} circles, and the arcs of all pairs. ${shown.map((pair) => `Pair ${pair}: seen ${turns(now.turnsSeen[pair])} in training, met ${turns(now.turnsMet[pair])}`).join(". ")}. ${out ? `New angles in ${span(now.beyond)}.` : "No pair meets new angles."}`,
        readout: `Under each circle: turns seen by position ${integer(state.trained - 1)} in training, and met by position ${integer(now.end - 1)}. Pair ${i}: <b>${turns(now.turnsSeen[i])}</b> seen, <b>${turns(now.turnsMet[i])}</b> met${now.beyond[i] ? ", so some angles are new" : now.unfinished[i] ? ", so no angle is new" : "; it has seen every angle"}.`,
      };
    },

    // ------------------------------------------------------------------------------------------------ picture 5: score
    scores(state, now) {
      const width = svgWidth("scores");
      const end = Rope.target(state);
      const distance = state.m - state.n;
      const { old, after, buckets } = scoreCurves(state, now, width);
      const boxes = [0, 1].map((k) => ({ left: width < 480 ? 40 : 46, right: width - 8, top: 34 + k * 254, bottom: 214 + k * 254 }));
      const at = linear(0, Math.log1p(end - 1), boxes[0].left, boxes[0].right);
      const x = { at: (d) => at(Math.log1p(d)), ticks: [0, 1, 10, 100, 1e3, 1e4, 1e5, 1e6].filter((t) => t < end), name: short, title: "distance m − n (tokens; 0, then logarithmic)" };
      const titles = ["mean cosine over pairs (no unit)", "q · k / √D of one fixed, random q and k (no unit)"];
      const name = LABEL[state.method];
      const same = state.method === "default" || (now.divisors.every((d) => Math.abs(d - 1) < 1e-9) && now.attentionFactor === 1);
      const exact = [Rope.scoresAt(distance, now.before, parts(state, 1), [0, 0]), Rope.scoresAt(distance, now.invFreq, parts(state, now.attentionFactor), [0, 0])];
      const inside = boxes.map((box, k) => {
        const values = [...old[k].low, ...old[k].high, ...after[k].low, ...after[k].high, exact[0][k], exact[1][k]];
        const low = Math.min(0, ...values);
        const high = Math.max(k ? 0.1 : 1, ...values);
        const pad = (high - low) * 0.06;
        const y = { at: linear(low - pad, high + pad, box.bottom, box.top), name: (t) => String(t).replace("-", "−"), title: titles[k] };
        y.ticks = niceTicks(low - pad, high + pad, 5);
        const band = (curve, kind) => closed([...buckets.map((b, j) => [x.at(b.x), y.at(curve.high[j])]), ...buckets.map((b, j) => [x.at(b.x), y.at(curve.low[j])]).reverse()], kind);
        const mean = (curve, kind) => path(buckets.map((b, j) => [x.at(b.x), y.at(curve.mean[j])]), kind);
        const parts = [frame(box, x, y), line(box.left, y.at(0), box.right, y.at(0), "axis")];
        const limit = x.at(state.trained);
        if (limit < box.right) parts.push(line(limit, box.top - 4, limit, box.bottom, "limit-far"), text(limit - 5, box.top + 6, "L", { class: "strong halo", "text-anchor": "end" }));
        parts.push(same ? "" : band(old[k], "band-old"), band(after[k], "band"), same ? "" : mean(old[k], "old"), mean(after[k], "new thin"));
        parts.push(line(x.at(distance), box.top - 4, x.at(distance), box.bottom, "cursor"));
        if (!same) parts.push(dot(x.at(distance), y.at(exact[0][k]), 4, "dot-old"));
        parts.push(dot(x.at(distance), y.at(exact[1][k]), 5, "dot-new"));
        const right = x.at(distance) > (box.left + box.right) / 2;
        parts.push(text(x.at(distance) + (right ? -7 : 7), box.bottom - 7, `m − n = ${integer(distance)}`, { class: "strong halo", "text-anchor": right ? "end" : "start" }));
        if (k === 0) {
          const curves = [after, ...(same ? [] : [old])].map((curve, j) => ({ points: buckets.map((b, i) => [x.at(b.x), y.at(curve[0].mean[i])]), words: j ? "unscaled" : name }));
          placeLabels(curves, box, [[x.at(distance) - (right ? 100 : 0), box.bottom - 22, 100, 20], [limit - 4, box.top, 8, box.bottom - box.top]]).forEach((spot, j) => {
            if (spot) parts.push(text(spot.left + 3, spot.top + 12, curves[j].words, { class: `halo ${j ? "" : "new-text"}` }));
          });
        }
        return parts.join("");
      });
      for (const box of boxes) {
        inside.push(tag("rect", { x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top, class: "pick", "data-distance": end, "data-pick": 0, "data-left": box.left, "data-right": box.right }));
      }
      const shift = state.shift;
      const direct = (by) => Rope.score(data.q, data.k, state.m + by, state.n + by, now.invFreq, now.attentionFactor);
      const [here, there] = [direct(0), direct(shift)];
      const row = (words, values) => `<tr><th scope="row">${words}</th>${values.map((v) => `<td>${signed(v, 5)}</td>`).join("")}</tr>`;
      const difference = Math.abs(there - here);
      return {
        claim: `The score depends on m and n only through their distance, here ${integer(distance)}`,
        svg: picture(width, boxes[1].bottom + 44, inside),
        label: `Two curves by distance, logarithmic: mean cosine over pairs, and the score of one fixed random query and key. At distance ${integer(distance)} the mean cosine is ${exact[0][0].toFixed(4)} unscaled${under(state, exact[1][0].toFixed(4))}; the score is ${exact[0][1].toFixed(4)} unscaled${under(state, exact[1][1].toFixed(4))}.`,
        readout: `<table><tr><th scope="col">m = ${integer(state.m)}, n = ${integer(state.n)}</th><td>mean cosine</td><td>q · k / √D</td></tr>${row("unscaled", exact[0])}${same ? "" : row(name, exact[1])}</table>
          Computed by rotating q and k: score at (${integer(state.m)}, ${integer(state.n)}) <b id="score-here">${signed(here, 9)}</b>, at (${integer(state.m + shift)}, ${integer(state.n + shift)}) <b id="score-there">${signed(there, 9)}</b>. ${difference ? `The difference, ${difference.toExponential(0)}, is rounding: shifting` : "Shifting"} both by ${integer(shift)} changes nothing${state.method === "dynamic" ? `, if the frequencies stay those of ${integer(state.length)} tokens; dynamic NTK changes all of them as the text grows` : ""}.`,
      };
    },
  };

  const parts = (state, factor) => Rope.scoreParts(data.q, data.k, state.dim / 2, factor);

  let curvesFor = {};
  /** Both scores over all distances, in columns of 1.5 pixels; cached while only m, n and pair change. */
  function scoreCurves(state, now, width) {
    const key = JSON.stringify([state.base, state.dim, state.trained, state.stretch, state.method, state.length, width]);
    if (curvesFor.key === key) return curvesFor;
    const end = Rope.target(state);
    const columns = Math.floor(width / 1.5);
    const buckets = [];
    const edge = (c) => Math.expm1((Math.log1p(end - 1) * c) / columns);
    for (let c = 0; c <= columns; c++) {
      const [from, to] = [Math.ceil(edge(c - 0.5)), Math.min(Math.ceil(edge(c + 0.5)), end)];
      const room = to - from;
      if (room <= 0) continue;
      const most = 8; // distances evaluated per column; the golden ratio spreads them without a period
      const values = room <= most ? Array.from({ length: room }, (_, j) => from + j) : Array.from({ length: most }, (_, j) => from + Math.floor(((j + ((c * 0.618034) % 1)) / most) * room));
      buckets.push({ x: room === 1 ? from : edge(c), values });
    }
    const out = [0, 0];
    const curves = (invFreq, factor) => {
      const both = [0, 1].map(() => ({ low: [], high: [], mean: [] }));
      const split = parts(state, factor);
      for (const { values } of buckets) {
        const scores = values.map((d) => [...Rope.scoresAt(d, invFreq, split, out)]);
        both.forEach((curve, k) => {
          const column = scores.map((pair) => pair[k]);
          curve.low.push(Math.min(...column));
          curve.high.push(Math.max(...column));
          curve.mean.push(column.reduce((a, b) => a + b) / column.length);
        });
      }
      return both;
    };
    curvesFor = { key, buckets, old: curves(now.before, 1), after: curves(now.invFreq, now.attentionFactor) };
    return curvesFor;
  }

  // ------------------------------------------------------------------------------------------ the table of all numbers
  function table(state, now) {
    const columns = [
      ["pair", (i) => i],
      ["ω (rad/token)", (i) => now.before[i].toPrecision(8)],
      ["ω′ (rad/token)", (i) => now.invFreq[i].toPrecision(8)],
      ["divisor", (i) => now.divisors[i].toPrecision(8)],
      ["wavelength (tokens)", (i) => now.waves[i].toPrecision(8)],
      ["stretched wavelength", (i) => now.wavesAfter[i].toPrecision(8)],
      ["turns seen", (i) => now.turnsSeen[i].toPrecision(8)],
      ["turns met", (i) => now.turnsMet[i].toPrecision(8)],
      ["new angles", (i) => (now.beyond[i] ? "yes" : "no")],
    ];
    const head = columns.map(([name]) => `<th scope="col">${name}</th>`).join("");
    const rows = now.before.map((_, i) => `<tr>${columns.map(([, value]) => `<td>${value(i)}</td>`).join("")}</tr>`);
    return `<table><thead><tr>${head}</tr></thead><tbody>${rows.join("")}</tbody></table>`;
  }

  // -------------------------------------------------------------------------------------------------------- controls
  const SAME = { to: Number, from: Number };
  const threeDigits = (x) => Number(x.toPrecision(3));
  // slider positions: logarithmic where the setting spans decades
  const SLIDERS = {
    base: { hint: "", low: 3, high: 7, step: 0.01, to: Math.log10, from: (t) => threeDigits(10 ** t) },
    dim: { hint: "entries", step: 2, ...SAME },
    trained: { hint: "tokens", low: 7, high: 17, step: 0.25, to: Math.log2, from: (t) => Math.round(2 ** t) },
    stretch: { hint: "", low: 0, high: 5, step: 0.125, to: Math.log2, from: (t) => threeDigits(2 ** t) },
    length: { hint: "tokens", step: 1, ...SAME },
    m: { hint: "", step: 1, ...SAME },
    n: { hint: "", step: 1, ...SAME },
    pair: { hint: "selected", step: 1, ...SAME },
    shift: { hint: "tokens", step: 1, ...SAME },
  };

  let state = { ...Rope.START };

  function buildControls() {
    for (const method of Rope.METHODS) {
      const swatch = `<svg width="26" height="8" aria-hidden="true"><line x1="0" y1="4" x2="26" y2="4" class="other" stroke-dasharray="${DASH[method]}"></line></svg>`;
      byId("methods").insertAdjacentHTML("beforeend", `<label>${swatch}<input type="radio" name="method" value="${method}"><span>${SHORT[method]}</span></label>`);
    }
    for (const [name, slider] of Object.entries(SLIDERS)) {
      const hint = slider.hint ? ` <small>${slider.hint}</small>` : "";
      byId({ shift: "shifting", m: "positions", n: "positions" }[name] ?? "fields").insertAdjacentHTML(
        "beforeend",
        `<div class="field" data-field="${name}"><label for="${name}" id="${name}-label">${Rope.NAMES[name]}${hint}</label>
          <input type="number" id="${name}" aria-describedby="${name}-error" step="${name === "base" ? 1000 : name === "stretch" ? 0.5 : slider.step}">
          <input type="range" id="${name}-slider" aria-labelledby="${name}-label" step="${slider.step}">
          <p class="error" id="${name}-error" role="alert"></p></div>`,
      );
      if (name === "stretch") {
        byId(`${name}-error`).insertAdjacentHTML("beforebegin", `<p class="remark" id="stretch-remark" hidden>Under dynamic, s only limits how long the text can get (the ranges of t, m and n); a full text grows with it. The frequencies are those of factor 1 at t tokens, for any s.</p>`);
        for (const input of [byId(name), byId(`${name}-slider`)]) input.setAttribute("aria-describedby", `${name}-error stretch-remark`);
      }
      byId(name).addEventListener("input", () => {
        const { value, error } = Rope.read(name, byId(name).value, state, byId(name).validity.badInput);
        complain(name, error);
        if (value !== undefined) set({ [name]: value }, name);
      });
      byId(`${name}-slider`).addEventListener("input", () => {
        complain(name);
        const [low, high] = Rope.limits(name, state);
        set({ [name]: Math.min(Math.max(slider.from(Number(byId(`${name}-slider`).value)), low), high) });
      });
    }
    byId("methods").addEventListener("change", (event) => set({ method: event.target.value }));
  }

  function complain(name, error = "") {
    byId(`${name}-error`).textContent = error && `${error}; the pictures show ${state[name]}`;
    byId(name).setAttribute("aria-invalid", String(Boolean(error)));
  }

  /** Update the controls from the state, except the field in which the user is typing. */
  function showControls(typing) {
    for (const [name, slider] of Object.entries(SLIDERS)) {
      const [low, high] = Rope.limits(name, state);
      const [field, range] = [byId(name), byId(`${name}-slider`)];
      [field.min, field.max] = [low, high];
      [range.min, range.max] = [slider.low ?? low, slider.high ?? high];
      range.value = slider.to(state[name]);
      range.setAttribute("aria-valuetext", `${figures(state[name], 6)} ${slider.hint}`.trim());
      if (name !== typing && field.value !== String(state[name])) {
        field.value = state[name];
        complain(name);
      }
    }
    document.querySelector('[data-field="length"]').hidden = state.method !== "dynamic"; // no other method uses it
    byId("stretch-remark").hidden = state.method !== "dynamic";
    byId("key-old").hidden = state.method === "default";
    document.querySelector(`input[value="${state.method}"]`).checked = true;
    const summary = `${SHORT[state.method]}, s = ${times(state.stretch)}, θ = ${integer(state.base)}, D = ${state.dim}, L = ${integer(state.trained)}`;
    byId("summary").textContent = [SHORT[state.method], `s ${times(state.stretch)}`, `θ ${short(state.base)}`, `D ${state.dim}`, `L ${integer(state.trained)}`].join(" · ");
    byId("print-setting").textContent = `Setting: method ${summary}, m = ${integer(state.m)}, n = ${integer(state.n)}, pair ${state.pair}`;
    const entry = document.querySelector(`#glossary [data-method="${state.method}"]`);
    if (byId("explanation").dataset.method !== state.method) {
      byId("explanation").innerHTML = entry.nextElementSibling.innerHTML;
      byId("explanation").dataset.method = state.method;
    }
    document.querySelectorAll(".method-name").forEach((span) => (span.textContent = state.method === "default" ? "no scaling" : LABEL[state.method]));
  }

  // ----------------------------------------------------------------------------------------------------------- state
  let queued = 0;
  let saving = 0;
  function set(changes, typing) {
    state = Rope.change(state, changes);
    showControls(typing);
    if (!queued) queued = requestAnimationFrame(draw);
    clearTimeout(saving);
    saving = setTimeout(save, 150); // browsers limit how often an address may change
  }

  function save() {
    history.replaceState(null, "", `#${Rope.toHash(state)}`);
  }

  const show = (node, html) => {
    if (node.shown !== html) node.innerHTML = node.shown = html;
  };

  function draw() {
    cancelAnimationFrame(queued);
    queued = 0;
    const now = Rope.pairs(state);
    follow();
    const made = Object.entries(pictures).map(([id, make]) => [id, make(state, now, id === "clock" ? seen : state)]); // drawing changes the layout, so all pictures are made before one is drawn
    for (const [id, { claim, svg, label, readout }] of made) {
      const section = byId(id);
      show(section.querySelector(".plot"), svg);
      show(section.querySelector(".readout"), readout);
      section.querySelector(".claim").textContent = claim;
      section.querySelector(".plot svg").setAttribute("aria-label", label);
    }
    if (byId("numbers").open) byId("numbers").querySelector(".table").innerHTML = table(state, now);
  }

  function load() {
    const { state: given, ignored } = Rope.fromHash(location.hash);
    byId("status").textContent = ignored.length ? `ignored in the address: ${ignored.join(", ").slice(0, 80)}` : "";
    set(given);
  }

  // -------------------------------------------------------------------------------------------------------- animation
  let motion = 0;
  /** Change to another setting: animated, or at once if the reader prefers reduced motion. */
  function glide(target) {
    cancelAnimationFrame(motion);
    const from = state;
    const moving = ["base", "stretch"].filter((key) => from[key] !== target[key]);
    if (calm.matches || !moving.length) {
      set(target);
      return;
    }
    const began = performance.now();
    const step = (time) => {
      const part = Math.min(1, Math.max(0, (time - began) / 700));
      const eased = part * part * (3 - 2 * part);
      const between = Object.fromEntries(moving.map((key) => [key, from[key] ** (1 - eased) * target[key] ** eased]));
      set(part < 1 ? { ...target, ...between } : target);
      if (part < 1) motion = requestAnimationFrame(step);
    };
    motion = requestAnimationFrame(step);
  }

  // Picture 1 draws the arrows at `seen`, which follows m and n of the state over a short time, token by token.
  const [TOKEN, FAR, OPENING] = [250, 16, 10]; // ms for one step, tokens that are not followed, tokens of the opening
  let seen = null; // {m, n} as drawn
  let goal = null; // where `seen` is going
  let following = 0;
  function follow() {
    const to = { m: state.m, n: state.n };
    if (following && goal.m === to.m && goal.n === to.n && !calm.matches) return;
    cancelAnimationFrame(following);
    const from = seen ?? to;
    const far = Math.max(Math.abs(to.m - from.m), Math.abs(to.n - from.n));
    [seen, goal, following] = [from, to, 0];
    if (calm.matches || dragging || far === 0 || far > FAR) {
      seen = to;
      return;
    }
    const began = performance.now();
    const step = (time) => {
      const part = Math.min(1, Math.max(0, (time - began) / TOKEN));
      seen = part < 1 ? { m: from.m + part * (to.m - from.m), n: from.n + part * (to.n - from.n) } : to;
      const { svg, label } = pictures.clock(state, Rope.pairs(state), seen);
      const plot = document.querySelector("#clock .plot");
      show(plot, svg);
      plot.firstElementChild.setAttribute("aria-label", label);
      following = part < 1 ? requestAnimationFrame(step) : 0;
    };
    following = requestAnimationFrame(step);
  }

  const PLAY = { both: { run: "Move both tokens", step: "Move both by one token" }, q: { run: "Move q away from k", step: "Move q by one token" } };
  const players = [...document.querySelectorAll("[data-play]")];
  let running = 0;
  let played = "";
  function stop() {
    clearInterval(running);
    running = 0;
    nameOfPlay();
  }
  /** Move by one token every TOKEN ms until position `end`; a second call with the same name stops. */
  function play(what, end = Infinity) {
    const on = () => {
      if (state.m + 1 < Math.min(Rope.target(state), end + 1)) set({ m: state.m + 1, n: what === "both" ? state.n + 1 : state.n });
      else stop();
    };
    const again = running && played === what;
    stop();
    if (again) return;
    played = what;
    on();
    if (!calm.matches) running = setInterval(on, TOKEN); // reduced motion: one token per click
    nameOfPlay();
  }
  function nameOfPlay() {
    for (const button of players) {
      const names = PLAY[button.dataset.play];
      button.textContent = running && played === button.dataset.play ? "Stop" : calm.matches ? names.step : names.run;
    }
  }

  // Drag in picture 1: turn an arrow of a pair, or both of them, and with them their tokens.
  let dragging = null; // {arrow, w, x, y, from: {m, n}, at, angle}
  const angleAt = (event, { x, y }) => {
    const svg = document.querySelector("#clock .plot svg").getBoundingClientRect();
    return Math.atan2(svg.top + y - event.clientY, event.clientX - svg.left - x);
  };
  function hold(event) {
    const grip = event.target.closest?.("[data-arrow]");
    if (!grip || event.button !== 0) return;
    stop();
    const { arrow: name, pair, x, y } = grip.dataset;
    dragging = { arrow: name, w: Rope.pairs(state).invFreq[pair], x: Number(x), y: Number(y), from: { m: state.m, n: state.n }, angle: 0 };
    dragging.at = angleAt(event, dragging);
    byId("clock").querySelector(".plot").setPointerCapture(event.pointerId); // the picture is replaced while it moves
    byId("clock").classList.add("dragging");
    event.preventDefault(); // no selection of text
  }
  function drag(event) {
    if (!dragging) return;
    const at = angleAt(event, dragging);
    dragging.angle += Rope.reduced(at - dragging.at);
    dragging.at = at;
    const last = state.method === "dynamic" ? state.length - 1 : Rope.target(state) - 1;
    set(Rope.turned(dragging.from, dragging.arrow, dragging.angle, dragging.w, last));
  }
  function release() {
    dragging = null;
    byId("clock").classList.remove("dragging");
  }

  // ------------------------------------------------------------------------------------------------------ guided path
  const steps = [...document.querySelectorAll(".path li")];
  let step = 0;
  function go(to) {
    step = to;
    const item = steps[step];
    const note = byId("note");
    note.querySelector(".note-head").textContent = `${step + 1} of ${steps.length}: ${item.querySelector("h3").textContent}`;
    note.querySelector(".note-text").textContent = item.querySelector(".look").textContent.replace(/\s+/g, " ");
    note.querySelector('[data-go="-1"]').disabled = step === 0;
    note.querySelector('[data-go="1"]').disabled = step === steps.length - 1;
    note.hidden = false;
    byId(item.dataset.figure).before(note);
    glide(Rope.fromHash(item.dataset.set).state);
    note.focus({ preventScroll: true });
    note.scrollIntoView({ behavior: calm.matches ? "auto" : "smooth", block: "start" });
  }

  function buildPath() {
    steps.forEach((item, k) => {
      const title = item.querySelector("h3");
      title.innerHTML = `<button type="button">${title.innerHTML}</button>`;
      title.firstElementChild.addEventListener("click", () => go(k));
    });
    byId("note").addEventListener("click", (event) => {
      const by = event.target.dataset.go;
      if (by === "0") {
        byId("note").hidden = true;
        steps[step].querySelector("button").focus();
      } else if (by) go(step + Number(by));
    });
  }

  /** Click or drag in a picture: select that pair, or set n to that distance. The sliders do the same by keyboard. */
  function pick(event) {
    const area = event.target.closest?.("[data-pick]");
    if (!area || (event.type === "pointermove" && event.buttons !== 1)) return;
    const svg = area.ownerSVGElement.getBoundingClientRect();
    const [left, right] = [Number(area.dataset.left), Number(area.dataset.right)];
    const part = Math.min(1, Math.max(0, (event.clientX - svg.left - left) / (right - left)));
    if (area.dataset.distance) {
      const distance = Math.round(Math.expm1(part * Math.log1p(Number(area.dataset.distance) - 1)));
      set(distance <= state.m ? { n: state.m - distance } : { m: distance, n: 0 });
    } else set({ pair: Math.round(part * (Number(area.dataset.pick) - 1)) });
  }

  // ----------------------------------------------------------------------------------------------------------- theme
  function theme(name) {
    document.documentElement.dataset.theme = name;
    const other = name === "dark" ? "light" : "dark";
    byId("theme").textContent = other === "dark" ? "Dark page" : "Light page";
  }
  const remembered = () => {
    try {
      return localStorage.getItem("clearllama-theme");
    } catch {
      return null; // a browser may refuse storage to files
    }
  };

  async function copy() {
    save();
    try {
      await navigator.clipboard.writeText(location.href);
      byId("status").textContent = "Link copied. It includes this setting.";
    } catch {
      byId("status").textContent = "The address of this page now includes this setting.";
    }
  }

  // ------------------------------------------------------------------------------------------------------- self-check
  function check() {
    const node = byId("check");
    let result = { agrees: false, settings: 0, worst: NaN };
    try {
      result = Rope.selfCheck(data.reference);
    } catch (error) {
      result.error = error.message;
    }
    node.classList.toggle("bad", !result.agrees);
    node.setAttribute("role", result.agrees ? "status" : "alert");
    if (!result.agrees) document.querySelector("header").append(node); // above everything
    node.textContent = result.agrees
      ? `numbers agree with the library (${result.settings} settings, largest relative difference ${result.worst.toExponential(1)}, which is the library's rounding to float32)`
      : `numbers DISAGREE with the library (${result.error ?? `${result.settings} settings, relative difference ${result.worst}`}): do not trust this page`;
  }

  // ----------------------------------------------------------------------------------------------------------- begin
  theme(remembered() ?? (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", () => remembered() ?? theme(dark.matches ? "dark" : "light"));
  byId("theme").addEventListener("click", () => {
    const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    theme(name);
    try {
      localStorage.setItem("clearllama-theme", name);
    } catch {
      // without storage the choice lasts until the page is closed
    }
  });
  buildControls();
  buildPath();
  check();
  const fold = () => (byId("panel").open = !narrow.matches);
  fold();
  narrow.addEventListener("change", fold);
  nameOfPlay();
  calm.addEventListener("change", () => {
    stop();
  });
  for (const button of players) button.addEventListener("click", () => play(button.dataset.play));
  const dials_ = document.querySelector("#clock .plot");
  dials_.addEventListener("pointerdown", hold);
  dials_.addEventListener("pointermove", drag);
  for (const kind of ["pointerup", "pointercancel", "lostpointercapture"]) dials_.addEventListener(kind, release);
  byId("reset").addEventListener("click", () => glide({ ...Rope.START }));
  byId("copy").addEventListener("click", copy);
  byId("numbers").addEventListener("toggle", () => set({}));
  for (const kind of ["pointerdown", "pointermove"]) document.querySelector("main").addEventListener(kind, pick);
  addEventListener("hashchange", () => {
    stop();
    load();
  });
  let lastWidth = document.querySelector("#clock .plot").clientWidth;
  new ResizeObserver(() => {
    const width = document.querySelector("#clock .plot").clientWidth;
    if (width !== lastWidth) set({});
    lastWidth = width;
  }).observe(document.querySelector("main"));
  addEventListener("beforeprint", () => draw());
  const opens = !location.hash && !calm.matches; // then both tokens move to their start
  load();
  if (opens) {
    set({ m: state.m - OPENING, n: state.n - OPENING });
    play("both", Rope.START.m);
    const end = (event) => {
      for (const kind of ["pointerdown", "keydown"]) removeEventListener(kind, end);
      if (!event.target.closest?.("[data-play]")) stop(); // those buttons stop it themselves
    };
    for (const kind of ["pointerdown", "keydown"]) addEventListener(kind, end);
  }
  draw();
  document.documentElement.dataset.ready = "yes";
})();
