/* The view of the page: controls, five pictures, the guided path. All numbers come from rope.js; shared.js and tokens.js
   stand before. */
"use strict";

(() => {
  const data = JSON.parse(id("data").textContent); // {reference: rows, q: [256], k: [256]}
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  const narrow = matchMedia("(max-width: 899px)");

  const SHORT = { default: "none", linear: "linear (PI)", ntk: "NTK-aware", dynamic: "dynamic", yarn: "YaRN", llama3: "llama3" };
  const LABEL = { default: "unscaled", linear: "PI", ntk: "NTK-aware", dynamic: "dynamic NTK", yarn: "YaRN", llama3: "llama3" };
  const DASH = { default: "1.5 4", linear: "12 4", ntk: "6 4", dynamic: "8 3 2 3", yarn: "12 3 2 3 2 3", llama3: "3 3" };

  // --------------------------------------------------------------------------------------------- numbers as text
  const integer = (x) => Math.round(x).toLocaleString("en-US");
  const times = (x) => String(Number(x.toPrecision(3)));
  const turns = (count) => `${figures(count)} ${count === 1 ? "turn" : "turns"}`;
  const short = (x) => (x >= 1e6 ? `${times(x / 1e6)}M` : x >= 1e3 ? `${times(x / 1e3)}k` : integer(x));
  function span(flags) {
    const which = flags.flatMap((flag, i) => (flag ? [i] : []));
    const [first, last] = [which[0], which[which.length - 1]];
    if (which.length === 1) return `pair ${first}`;
    return which.length === last - first + 1 ? `pairs ${first} to ${last}` : `${which.length} pairs from ${first} to ${last}`;
  }
  const count = (flags) => flags.filter(Boolean).length;

  // ------------------------------------------------------------------------------------------------------ drawing
  const rule = (x1, y1, x2, y2, kind, more = {}) => make("line", { class: kind, x1, y1, x2, y2, ...more });
  const box = (x, y, width, height, kind, more = {}) => make("rect", { class: kind, x, y, width, height, ...more });
  const dot = (x, y, r, kind, more = {}) => make("circle", { class: kind, cx: x, cy: y, r, ...more });
  const words = (x, y, text, kind = "", anchor = "start") => make("text", { class: kind, x, y, "text-anchor": anchor }, text);
  const path = (points, kind, more = {}, end = "") =>
    make("path", { class: kind, d: `M${points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")}${end}`, ...more });
  const closed = (points, kind) => path(points, kind, {}, "Z");
  const bold = (text) => make("b", {}, text);
  const across = (plot, y, kind) => rule(plot.left, y, plot.left + plot.width, y, kind);
  const up = (plot, x, kind) => rule(x, plot.top, x, plot.bottom, kind);

  /** A chart with the pairs on its x axis; x(i) is the middle of pair i. */
  function pairChart(name, pairs, options) {
    const plot = chart(name, { height: 350, left: narrow.matches ? 32 : 46, xLabel: "pair i (0 is the fastest)", ...options });
    axisLabels(plot, pairs);
    plot.svg.append(across(plot, plot.bottom, "base"));
    return { ...plot, x: (i) => plot.left + (plot.width * (i + 0.5)) / pairs, half: plot.width / pairs / 2 };
  }

  /** The area for clicks: a click selects the pair or distance under the pointer. It is drawn last, over its picture. */
  const pickArea = (plot, of) => box(plot.left, plot.top, plot.width, plot.bottom - plot.top, "pick", of);

  /** Points on a curve, at most 6 pixels apart. */
  const dense = (points) => points.flatMap(([x, y], i) => {
    const [a, b] = points[i + 1] ?? [x, y], steps = Math.ceil(Math.hypot(a - x, b - y) / 6) || 1;
    return Array.from({ length: steps }, (_, j) => [x + ((a - x) * j) / steps, y + ((b - y) * j) / steps]);
  });

  /** Write the names of curves [{points, name, kind}] beside them: not over a curve or `taken` [[x, y, width, height]],
      and as far from the other curves as possible. */
  function nameCurves(plot, curves, taken = []) {
    const all = curves.map(({ points }) => dense(points)), height = 15;
    curves.forEach(({ name, kind }, owner) => {
      const width = 6.9 * name.length + 6, step = Math.ceil(all[owner].length / 60);
      let best = { cost: Infinity };
      for (const [x, y] of all[owner].filter((_, i) => i % step === 0)) for (const [left, top] of [
        [x - width / 2, y - height - 6], [x - width / 2, y + 6], [x + 8, y], [x - width - 8, y - height], [x + 8, y - height], [x - width - 8, y]]) {
        if (left < plot.left || left + width > plot.left + plot.width || top < plot.top - 4 || top + height > plot.bottom - 4) continue;
        const apart = ([a, b]) => Math.max(left - a, a - left - width, top - b, b - top - height); // below 0: inside
        const near = all.map((points) => points.map(apart)), others = near.filter((_, i) => i !== owner).flat();
        const over = taken.filter(([a, b, w, h]) => left < a + w && a < left + width && top < b + h && b < top + height);
        const cost = 400 * over.length + 10 * near.flat().filter((d) => d < 2).length - Math.min(40, ...others);
        if (cost < best.cost) best = { cost, left, top };
      }
      if (best.cost === Infinity) return;
      taken = [...taken, [best.left, best.top, width, height]];
      plot.svg.append(words(best.left + 3, best.top + 12, name, `halo ${kind}`));
    });
  }

  const polar = (x, y, r, angle) => [x + r * Math.cos(angle), y - r * Math.sin(angle)]; // counter-clockwise from the right

  const FAST = [0.125, 0.25, 0.375, 0.5, 0.64, 0.9, 0.07]; // parts of the pairs, for picture 1
  const SLOW = [0.25, 0.5, 0.75, 0.64, 0.1, 0.9, 0.35]; // for picture 4
  /** The pairs that have a dial: six, or all if there are fewer; the first, the last, the selected and those at `parts`. */
  function dials(state, parts = SLOW) {
    const pairs = state.dim / 2;
    const shown = new Set([0, pairs - 1, state.pair]);
    for (const part of parts) if (shown.size < 6) shown.add(Math.floor(part * pairs));
    return [...shown].sort((a, b) => a - b);
  }

  /** A dial for each pair: draw(pair, x, y, radius) returns shapes, two lines of text, and the second line's class. */
  function dialSheet(name, shown, selected, draw) {
    const width = id(name).clientWidth, few = width < 560, columns = Math.min(shown.length, few ? 3 : 6), cell = width / columns;
    const radius = Math.min(cell / 2 - (few ? 10 : 13), 62), tall = 2 * radius + 82, height = tall * Math.ceil(shown.length / columns);
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img" });
    shown.forEach((pair, k) => {
      const [x, y] = [((k % columns) + 0.5) * cell, Math.floor(k / columns) * tall + radius + 10], below = y + radius + 25;
      const [shapes, first, second, kind] = draw(pair, x, y, radius);
      svg.append(...shapes, words(x, below, `pair ${pair}`, pair === selected ? "strong" : "", "middle"),
        words(x, below + 17, first, "", "middle"), words(x, below + 34, second, kind, "middle"));
    });
    return svg;
  }

  // ------------------------------------------------------------------------------------------- picture 1: the clock
  /** An arrow from the centre (x, y), its letter at the tip, and the area in which a pointer can take it. */
  function arrow(x, y, r, angle, name, [a, b], pair) {
    const [neck, left, right] = [polar(x, y, r - 9, angle), polar(x, y, r - 10, angle + 5 / r), polar(x, y, r - 10, angle - 5 / r)];
    const tip = polar(x, y, r, angle), grip = { "data-arrow": name, "data-pair": pair, "data-x": x, "data-y": y };
    return {
      shapes: [rule(x, y, ...neck, `arrow-${name}`), closed([tip, left, right], `head-${name}`)],
      letter: words(a, b + 4, name, `halo arrow-name name-${name}`, "middle"),
      grips: [rule(x, y, ...tip, "grip", grip), dot(...tip, 13, "grip", grip)],
    };
  }

  /** For example ", 5 under PI"; empty without a scaling. */
  const under = (state, text) => (state.method === "default" ? "" : `, ${text} under ${LABEL[state.method]}`);

  const pictures = {
    /** `at` is {m, n} as drawn, which are not whole numbers while the arrows move from one token to the next. */
    clock(state, now, at = state) {
      const shown = dials(state, FAST), pairs = state.dim / 2, last = pairs - 1;
      const unscaled = state.method === "default";
      const distance = at.m - at.n, cosines = now.invFreq.map((w) => Math.cos(distance * w));
      const step = (radians) => `${figures((radians * 180) / Math.PI, narrow.matches ? 2 : 3)}°`;
      const sheet = dialSheet("clock-plot", shown, state.pair, (pair, x, y, radius) => {
        const w = now.invFreq[pair];
        const [outer, r] = [radius + 4, radius - 4];
        const [q, key] = [at.m * w, at.n * w];
        const between = Rope.reduced(distance * w);
        const band = Array.from({ length: 25 }, (_, j) => polar(x, y, 0.42 * r, key + (between * j) / 24));
        const whole = dot(x, y, outer, "turn-both", { "data-arrow": "both", "data-pair": pair, "data-x": x, "data-y": y });
        const shapes = [whole, dot(x, y, r, "grid"), rule(x, y, x + r, y, "grid"), closed([[x, y], ...band], "band")];
        for (let back = Math.min(7, Math.floor(at.m)); back >= 0; back--) {
          const fade = { opacity: 1 - back * 0.1 };
          if (!unscaled) shapes.push(dot(...polar(x, y, outer + 2, (at.m - back) * now.before[pair]), 2.6, "dot-old", fade));
          shapes.push(dot(...polar(x, y, r, (at.m - back) * w), 3, "dot-new", fade));
        }
        const side = between < 0 ? 1 : -1; // the letter of k on the side away from q
        const arrows = [
          arrow(x, y, 0.74 * r, key, "k", polar(x, y, 0.62 * r, key + side * (14 / (0.62 * r))), pair),
          arrow(x, y, r - 1, q, "q", polar(x, y, 0.84 * r, q - side * (13 / r)), pair),
        ];
        shapes.push(...arrows.flatMap((a) => a.shapes), dot(x, y, 2.5, "dot-new"), ...arrows.map((a) => a.letter), ...arrows.flatMap((a) => a.grips));
        const angle = Math.abs((between * 180) / Math.PI);
        return [shapes, unscaled ? `${step(w)} a token` : `${step(now.before[pair])} → ${step(w)}`,
          `cos ${angle >= 1 ? Math.round(angle) : figures(angle, 2)}° = ${fixed(Math.cos(between))}`, "new-text"];
      });
      const plot = pairChart("clock-plot", pairs, { height: 124, yMin: -1, yMax: 1, yTicks: [-1, 0, 1], left: 32,
        yLabel: narrow.matches ? "what each pair adds: cos((m − n) ωᵢ)" : "what each of the pairs adds to q · k: cos((m − n) ωᵢ)" });
      const dialled = (i) => (shown.includes(i) ? "bar" : "bar soft");
      bars(plot, cosines, { kind: dialled, inset: Math.max(0.12, 0.5 - 3 / plot.half), tooltip: (i) => `pair ${i}: ${fixed(cosines[i], "", 6)}` });
      plot.svg.append(across(plot, plot.y(0), "base"), pickArea(plot, { "data-pick": pairs }));
      const s = times(state.stretch);
      const name = LABEL[state.method];
      const [kept, divided] = [now.divisors.map((d) => d < 1 + 1e-9), now.divisors.map((d) => d > state.stretch * (1 - 1e-9))];
      const nothing = now.divisors.every((d) => Math.abs(d - 1) < 1e-9);
      const hands = (many, kind) => (many > 1 ? `the ${many} ${kind} hands` : many ? `the ${kind} hand` : "no hand");
      const slowed = () => `${name} leaves ${hands(count(kept), "fastest")} unchanged and slows ${hands(count(divided), "slowest")} ${s} times`;
      const claims = {
        default: () => `Each pair is a hand: pair 0 turns ${degrees(now.before[0])} per token, pair ${last} only ${degrees(now.before[last])}`,
        linear: () => `PI slows every hand ${s} times: pair 0 turns ${degrees(now.invFreq[0])} per token instead of ${degrees(now.before[0])}`,
        ntk: () => `NTK-aware slows the slowest hand ${s} times and leaves the fastest unchanged`,
        dynamic: () => `At ${integer(state.length)} tokens the slowest hand is slowed ${times(now.divisors[last])} times, and the fastest is unchanged`,
        yarn: slowed,
        llama3: slowed,
      };
      const [a, b] = [now.before[state.pair], now.invFreq[state.pair]];
      const { sum, most } = Rope.product(state.m, state.n, now.invFreq, now.attentionFactor);
      const each = shown.map((pair) => `Pair ${pair}: ${degrees(now.before[pair])} per token unscaled${under(state, degrees(now.invFreq[pair]))}, cosine ${fixed(Math.cos((state.m - state.n) * now.invFreq[pair]), "", 3)}`);
      return {
        claim: nothing && !unscaled ? `${name} changes nothing here: every hand keeps its speed` : claims[state.method](),
        plots: [sheet, plot.svg],
        label: `${shown.length} dials, each with the arrows of q at position ${integer(state.m)} and k at position ${integer(state.n)}. ${each.join(". ")}. The sum over all ${pairs} pairs is ${fixed(sum)}.`,
        readout: [make("b", { class: "sum" }, `q · k = ${fixed(sum, "", 3)}`), ` of at most ${times(most)}: ${now.attentionFactor === 1 ? "the sum" : `a² = ${figures(now.attentionFactor ** 2, 5)} times the sum`} over ${pairs} pairs at distance `,
          make("i", {}, "m"), " − ", make("i", {}, "n"), ` = ${integer(state.m - state.n)}. Pair ${state.pair} of q is at ${figures(state.m * a, 4)} rad${unscaled ? "" : ` unscaled, ${figures(state.m * b, 4)} rad under ${name}`}.`],
      };
    },

    // ----------------------------------------------------------------------------------------- picture 2: wavelengths
    waves(state, now) {
      const end = Rope.target(state), pairs = state.dim / 2, i = state.pair;
      const top = Math.max(...now.waves, ...now.wavesAfter, end) * 2;
      const plot = pairChart("waves-plot", pairs, { scale: Math.log, yMin: 4, yMax: top, yName: short, left: 46,
        yTicks: [10, 100, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9].filter((t) => t <= top), yLabel: "wavelength (tokens for one full turn, logarithmic)" });
      const first = now.unfinished.indexOf(true), right = plot.left + plot.width;
      if (first >= 0) {
        const from = plot.x(first) - plot.half, y = plot.y(state.trained), text = "no full turn in training";
        plot.svg.append(box(from, y, right - from, plot.bottom - y, "seen", { opacity: 0.35 }));
        if (right - from > text.length * 6.6) plot.svg.append(words((from + right) / 2, plot.bottom - 12, text, "", "middle"));
      }
      const limits = [[state.trained, `trained: L = ${integer(state.trained)}`, "limit"]];
      if (end > state.trained) limits.push([end, `target: s · L = ${integer(end)}`, "limit-far"]);
      plot.svg.append(...limits.map(([at, , kind]) => across(plot, plot.y(at), kind)), up(plot, plot.x(i), "cursor"));
      line(plot, now.waves, "old");
      line(plot, now.wavesAfter, "new");
      plot.svg.append(dot(plot.x(i), plot.y(now.waves[i]), 4, "dot-old"), dot(plot.x(i), plot.y(now.wavesAfter[i]), 5, "dot-new"));
      const tooNear = limits.length === 2 && plot.y(state.trained) - plot.y(end) < 17;
      limits.forEach(([at, text], k) => plot.svg.append(words(plot.left + 4, plot.y(at) + (tooNear && k === 0 ? 15 : -6), text, "strong halo")));
      const points = (waves) => waves.map((wave, k) => [plot.x(k), plot.y(wave)]);
      const same = now.divisors.every((d) => d < 1.02), name = LABEL[state.method];
      nameCurves(plot, [{ points: points(now.waves), name: same && state.method !== "default" ? `unscaled = ${name}` : "unscaled", kind: same ? "new-text" : "" },
        ...(same ? [] : [{ points: points(now.wavesAfter), name, kind: "new-text" }])],
      limits.flatMap(([at, text]) => [[plot.left, plot.y(at) - 20, text.length * 7.4, 36], [plot.left, plot.y(at) - 1, plot.width, 2]]));
      plot.svg.append(pickArea(plot, { "data-pick": pairs }));
      const slow = count(now.unfinished), [long, longer] = [now.waves, now.wavesAfter].map((waves) => `${figures(waves[i], 4)} tokens`);
      return {
        claim: slow
          ? `${slow} of ${pairs} pairs do not finish a turn within the trained ${integer(state.trained)} tokens`
          : `Every pair finishes a turn within the trained ${integer(state.trained)} tokens`,
        plots: [plot.svg],
        label: `Wavelength by pair, logarithmic. Unscaled from ${figures(now.waves[0])} tokens at pair 0 to ${figures(now.waves[pairs - 1])} at pair ${pairs - 1}${under(state, `${figures(now.wavesAfter[0])} to ${figures(now.wavesAfter[pairs - 1])}`)}. Pair ${i}: ${long} unscaled${under(state, longer)}. Lines at the trained ${integer(state.trained)} and the target ${integer(end)} tokens. ${slow} of ${pairs} pairs are above the trained length.`,
        readout: [`Pair ${i} makes a full turn every `, bold(long), " unscaled", ...(state.method === "default" ? [] : [", every ", bold(longer), ` under ${name}`]),
          `. Within the trained length it makes ${turns(now.turnsSeen[i])}.`],
      };
    },

    // -------------------------------------------------------------------------------------------- picture 3: divisors
    divisors(state, now) {
      const pairs = state.dim / 2, s = state.stretch, i = state.pair;
      const all = Object.fromEntries(Rope.METHODS.map((method) => [method, method === state.method ? now.divisors : Rope.pairs(state, method).divisors]));
      const top = Math.max(2, ...Object.values(all).flat()), yTicks = [1, 2, 4, 8, 16, 32].filter((t) => t <= top * 1.01);
      if (!yTicks.some((t) => Math.abs(Math.log2(t / s)) < 0.3)) yTicks.push(s);
      const plot = pairChart("divisors-plot", pairs, { height: 320, scale: Math.log, yMin: 0.93, yMax: top * 1.18, yTicks, yName: times,
        yLabel: "divisor ω / ω′ (logarithmic)" });
      const groups = []; // methods with the same curve share one label
      for (const method of Rope.METHODS) {
        const twin = groups.find(([other]) => all[other].every((d, k) => Math.abs(d / all[method][k] - 1) < 0.005));
        if (twin) twin.push(method);
        else groups.push([method]);
      }
      const needed = (now.end - 1) / state.trained; // the divisor that keeps the last token within the angles of training
      now.beyond.forEach((beyond, k) => {
        const [high, low] = [plot.y(Math.max(needed, 1)), plot.y(now.divisors[k])];
        if (beyond) plot.svg.append(box(plot.x(k) - plot.half, high, 2 * plot.half + 0.3, Math.max(0, low - high), "unseen"));
      });
      plot.svg.append(up(plot, plot.x(i), "cursor"));
      for (const group of groups) if (!group.includes(state.method)) line(plot, all[group[0]], "other", { "stroke-dasharray": DASH[group[0]] });
      line(plot, now.divisors, "new");
      plot.svg.append(dot(plot.x(i), plot.y(now.divisors[i]), 5, "dot-new"));
      const name = (group) => (group.length === Rope.METHODS.length ? "all six methods" : group.map((m) => SHORT[m]).join(" = "));
      const curves = groups.map((group) => ({ points: all[group[0]].map((d, k) => [plot.x(k), plot.y(d)]), name: name(group), kind: group.includes(state.method) ? "new-text" : "" }));
      nameCurves(plot, curves.sort((a, b) => b.kind.length - a.kind.length));
      plot.svg.append(pickArea(plot, { "data-pick": pairs }));

      const kept = now.divisors.map((d) => d < 1 + 1e-9);
      const full = now.divisors.map((d) => d > s * (1 - 1e-9));
      const given = now.divisors.filter((_, k) => now.beyond[k]);
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
      const claims = {
        default: () => (given.length ? `Unscaled, ${span(now.beyond)} ${given.length > 1 ? "are" : "is"} divided by 1 and would need ${required}` : "Unscaled, every pair is divided by 1, and no pair needs more"),
        linear: () => `PI divides every pair by ${times(s)}, even the pairs that need no divisor`,
        ntk: () => (given.length ? few("NTK-aware") : `NTK-aware divides by 1 at pair 0, rising to ${times(s)} at the last pair`),
        dynamic: () => (given.length ? few(`dynamic NTK at ${integer(state.length)} tokens`) : `Dynamic NTK at ${integer(state.length)} tokens divides by 1 to ${times(now.divisors[pairs - 1])}`),
        yarn: ramp,
        llama3: ramp,
      };
      return {
        claim: kept.every(Boolean) && state.method !== "default" ? `${LABEL[state.method]} divides by 1 here: nothing changes` : claims[state.method](),
        plots: [plot.svg],
        label: `Divisor by pair for six methods, logarithmic. Selected: ${LABEL[state.method]}. ${dials(state).map((pair) => `Pair ${pair}: ${figures(now.divisors[pair], 4)}`).join(", ")}. ${count(now.beyond) ? `Too small in ${span(now.beyond)}.` : "Large enough in every pair."}`,
        readout: [`Pair ${i} is divided by `, ...Rope.METHODS.flatMap((m, k) => [k ? ", " : "", make(m === state.method ? "b" : "span", {}, `${figures(all[m][i])} (${LABEL[m]})`)]), ". ",
          ...(state.method === "yarn" ? ["YaRN also multiplies cos and sin by a = ", bold(figures(now.attentionFactor, 5)), `, so every score by a² = ${figures(now.attentionFactor ** 2, 5)}.`] : [])],
      };
    },

    // -------------------------------------------------------------------------------------------- picture 4: seen arcs
    arcs(state, now) {
      const shown = dials(state), pairs = state.dim / 2, i = state.pair;
      const arc = (x, y, r, from, to) => {
        const steps = Math.max(2, Math.ceil(((to - from) / Rope.TURN) * 72));
        return Array.from({ length: steps + 1 }, (_, j) => polar(x, y, r, from + ((to - from) * j) / steps));
      };
      const sheet = dialSheet("arcs-plot", shown, i, (pair, x, y, radius) => {
        const [seen, met, r, beyond] = [now.seen[pair], now.met[pair], radius - 7, now.beyond[pair]];
        const shapes = [dot(x, y, r, "grid"), closed([[x, y], ...arc(x, y, r, 0, seen)], "seen"),
          ...(beyond ? [closed([[x, y], ...arc(x, y, r, seen, met)], "unseen")] : []), path(arc(x, y, r + 6, 0, Math.min(seen, met)), "new"),
          ...(beyond ? [path(arc(x, y, r + 6, seen, met), "unseen-edge", { "stroke-dasharray": "5 3" })] : [])];
        return [shapes, `seen ${figures(now.turnsSeen[pair])}`, `met ${figures(now.turnsMet[pair])}`, beyond ? "unseen-text" : "new-text"];
      });
      const plot = pairChart("arcs-plot", pairs, { height: 246, yMax: Rope.TURN, yTicks: [0, 0.25, 0.5, 0.75, 1].map((t) => t * Rope.TURN),
        yName: (t) => ["0", "¼", "½", "¾", "1"][Math.round((4 * t) / Rope.TURN)], yLabel: "arc from position 0 to the last (turns, at most one)" });
      const stairs = (arcs) => arcs.flatMap((one, k) => [[plot.x(k) - plot.half, plot.y(one)], [plot.x(k) + plot.half, plot.y(one)]]);
      plot.svg.append(closed([[plot.left, plot.bottom], ...stairs(now.seen), [plot.left + plot.width, plot.bottom]], "seen"));
      now.beyond.forEach((beyond, k) => {
        const [high, low] = [plot.y(now.met[k]), plot.y(now.seen[k])];
        if (beyond) plot.svg.append(box(plot.x(k) - plot.half, high, 2 * plot.half + 0.3, low - high, "unseen"));
      });
      plot.svg.append(up(plot, plot.x(i), "cursor"), path(stairs(now.met), "new"));
      const out = count(now.beyond); // the words are next to the hatched pairs, since text on a hatch is hard to read
      if (out) plot.svg.append(words(plot.x(now.beyond.indexOf(true)) - plot.half - 8, plot.y(Rope.TURN * 0.3), "met, not seen", "unseen-text", "end"));
      plot.svg.append(words(plot.left + 12, plot.y(Rope.TURN * 0.5), "seen in training", "strong"), pickArea(plot, { "data-pick": pairs }));
      return {
        claim: out
          ? `At ${integer(now.end)} tokens ${out} of ${pairs} pairs meet angles that did not occur in training`
          : `At ${integer(now.end)} tokens no pair meets an angle that did not occur in training`,
        plots: [sheet, plot.svg],
        label: `${shown.length} circles, and the arcs of all pairs. ${shown.map((pair) => `Pair ${pair}: seen ${turns(now.turnsSeen[pair])} in training, met ${turns(now.turnsMet[pair])}`).join(". ")}. ${out ? `New angles in ${span(now.beyond)}.` : "No pair meets new angles."}`,
        readout: [`Under each circle: turns seen by position ${integer(state.trained - 1)} in training, and met by position ${integer(now.end - 1)}. Pair ${i}: `,
          bold(turns(now.turnsSeen[i])), " seen, ", bold(turns(now.turnsMet[i])),
          ` met${now.beyond[i] ? ", so some angles are new" : now.unfinished[i] ? ", so no angle is new" : "; it has seen every angle"}.`],
      };
    },

    // ------------------------------------------------------------------------------------------------ picture 5: score
    scores(state, now) {
      const end = Rope.target(state), distance = state.m - state.n, name = LABEL[state.method];
      const { old, after, buckets } = scoreCurves(state, now, id("scores-plot").clientWidth);
      const same = state.method === "default" || (now.divisors.every((d) => Math.abs(d - 1) < 1e-9) && now.attentionFactor === 1);
      const exact = [[now.before, 1], [now.invFreq, now.attentionFactor]].map(([invFreq, factor]) => Rope.scoresAt(distance, invFreq, split(state, factor), [0, 0]));
      const titles = ["mean cosine over pairs (no unit)", "q · k / √D of one fixed, random q and k (no unit)"];
      const plots = titles.map((yLabel, k) => {
        const values = [...old[k].low, ...old[k].high, ...after[k].low, ...after[k].high, exact[0][k], exact[1][k]];
        const [low, high] = [Math.min(0, ...values), Math.max(k ? 0.1 : 1, ...values)], pad = (high - low) * 0.06;
        const plot = chart("scores-plot", { height: 240, left: narrow.matches ? 32 : 46, yMin: low - pad, yMax: high + pad, yTicks: niceTicks(low - pad, high + pad, 5),
          yLabel, xLabel: "distance m − n (tokens; 0, then logarithmic)" });
        const x = (d) => plot.left + (plot.width * Math.log1p(d)) / Math.log1p(end - 1), right = plot.left + plot.width, limit = x(state.trained);
        const points = (side) => buckets.map((b, j) => [x(b.x), plot.y(side[j])]);
        const band = (curve, kind) => closed([...points(curve.high), ...points(curve.low).reverse()], kind);
        const add = (...shapes) => plot.svg.append(...shapes);
        for (const d of [0, 1, 10, 100, 1e3, 1e4, 1e5, 1e6]) if (d < end) add(words(x(d), plot.bottom + 15, short(d), "", "middle"));
        add(across(plot, plot.y(0), "base"));
        if (limit < right) add(up(plot, limit, "limit-far"), words(limit - 5, plot.top + 6, "L", "strong halo", "end"));
        add(...(same ? [] : [band(old[k], "band-old")]), band(after[k], "band"), ...(same ? [] : [path(points(old[k].mean), "old")]), path(points(after[k].mean), "new thin"));
        add(up(plot, x(distance), "cursor"), ...(same ? [] : [dot(x(distance), plot.y(exact[0][k]), 4, "dot-old")]), dot(x(distance), plot.y(exact[1][k]), 5, "dot-new"));
        const far = x(distance) > (plot.left + right) / 2;
        add(words(x(distance) + (far ? -7 : 7), plot.bottom - 7, `m − n = ${integer(distance)}`, "strong halo", far ? "end" : "start"));
        if (k === 0) nameCurves(plot, [{ points: points(after[k].mean), name, kind: "new-text" }, ...(same ? [] : [{ points: points(old[k].mean), name: "unscaled", kind: "" }])],
          [[x(distance) - (far ? 100 : 0), plot.bottom - 22, 100, 20], [limit - 4, plot.top, 8, plot.bottom - plot.top]]);
        add(pickArea(plot, { "data-distance": end }));
        return plot.svg;
      });
      const shift = state.shift;
      const [here, there] = [0, shift].map((by) => Rope.score(data.q, data.k, state.m + by, state.n + by, now.invFreq, now.attentionFactor));
      const difference = Math.abs(there - here);
      const row = (head, cells) => make("tr", {}, make("th", { scope: "row" }, head), ...cells.map((cell) => make("td", {}, cell)));
      const five = (values) => [...values].map((value) => fixed(value, "", 5));
      return {
        claim: `The score depends on m and n only through their distance, here ${integer(distance)}`,
        plots,
        label: `Two curves by distance, logarithmic: mean cosine over pairs, and the score of one fixed random query and key. At distance ${integer(distance)} the mean cosine is ${exact[0][0].toFixed(4)} unscaled${under(state, exact[1][0].toFixed(4))}; the score is ${exact[0][1].toFixed(4)} unscaled${under(state, exact[1][1].toFixed(4))}.`,
        readout: [make("table", {}, row(`m = ${integer(state.m)}, n = ${integer(state.n)}`, ["mean cosine", "q · k / √D"]), row("unscaled", five(exact[0])), ...(same ? [] : [row(name, five(exact[1]))])),
          `Computed by rotating q and k: score at (${integer(state.m)}, ${integer(state.n)}) `, make("b", { id: "score-here" }, fixed(here, "", 9)),
          `, at (${integer(state.m + shift)}, ${integer(state.n + shift)}) `, make("b", { id: "score-there" }, fixed(there, "", 9)),
          `. ${difference ? `The difference, ${difference.toExponential(0)}, is rounding: shifting` : "Shifting"} both by ${integer(shift)} changes nothing${state.method === "dynamic" ? `, if the frequencies stay those of ${integer(state.length)} tokens; dynamic NTK changes all of them as the text grows` : ""}.`],
      };
    },
  };

  const split = (state, factor) => Rope.scoreParts(data.q, data.k, state.dim / 2, factor);

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
      const parts = split(state, factor);
      for (const { values } of buckets) {
        const scores = values.map((d) => [...Rope.scoresAt(d, invFreq, parts, out)]);
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
    const columns = {
      "pair": now.before.keys(), "ω (rad/token)": now.before, "ω′ (rad/token)": now.invFreq, "divisor": now.divisors, "wavelength (tokens)": now.waves,
      "stretched wavelength": now.wavesAfter, "turns seen": now.turnsSeen, "turns met": now.turnsMet, "new angles": now.beyond.map((beyond) => (beyond ? "yes" : "no")),
    };
    const [pair, ...others] = Object.values(columns).map((column) => [...column]);
    const rows = pair.map((i) => [i, ...others.map((column) => (typeof column[i] === "number" ? column[i].toPrecision(8) : column[i]))]);
    return make("table", {}, make("thead", {}, make("tr", {}, ...Object.keys(columns).map((name) => make("th", { scope: "col" }, name)))),
      make("tbody", {}, ...rows.map((cells) => make("tr", {}, ...cells.map((cell) => make("td", {}, cell))))));
  }

  // -------------------------------------------------------------------------------------------------------- controls
  const SAME = { to: Number, from: Number };
  const threeDigits = (x) => Number(x.toPrecision(3));
  // slider positions: logarithmic where the setting spans decades; typed: the step of the field beside it
  const SLIDERS = {
    base: { hint: "", low: 3, high: 7, step: 0.01, typed: 1000, to: Math.log10, from: (t) => threeDigits(10 ** t) },
    dim: { hint: "entries", step: 2, ...SAME },
    trained: { hint: "tokens", low: 7, high: 17, step: 0.25, to: Math.log2, from: (t) => Math.round(2 ** t) },
    stretch: { hint: "", low: 0, high: 5, step: 0.125, typed: 0.5, to: Math.log2, from: (t) => threeDigits(2 ** t) },
    length: { hint: "tokens", step: 1, ...SAME },
    m: { hint: "", step: 1, ...SAME },
    n: { hint: "", step: 1, ...SAME },
    pair: { hint: "selected", step: 1, ...SAME },
    shift: { hint: "tokens", step: 1, ...SAME },
  };

  let state = { ...Rope.START };

  function buildControls() {
    for (const method of Rope.METHODS) {
      const swatch = make("svg", { "aria-hidden": true }, rule(0, 4, 26, 4, "other", { "stroke-dasharray": DASH[method] }));
      id("methods").append(make("label", {}, swatch, make("input", { type: "radio", name: "method", value: method }), make("span", {}, SHORT[method])));
    }
    for (const [name, { hint, step, typed = step, from }] of Object.entries(SLIDERS)) {
      const described = { "aria-describedby": `${name}-error${name === "stretch" ? " stretch-remark" : ""}` };
      const field = make("input", { type: "number", id: name, step: typed, ...described });
      const slider = make("input", { type: "range", id: `${name}-slider`, "aria-labelledby": `${name}-label`, step, ...described });
      const remark = name !== "stretch" ? "" : make("p", { class: "remark", id: "stretch-remark", hidden: "" }, "Under dynamic, s only limits how long the text can get (the ranges of t, m and n); a full text grows with it. The frequencies are those of factor 1 at t tokens, for any s.");
      id({ shift: "shifting", m: "positions", n: "positions" }[name] ?? "fields").append(make("div", { class: "field", "data-field": name },
        make("label", { for: name, id: `${name}-label` }, `${Rope.NAMES[name]} `, make("small", {}, hint)), field, slider, remark,
        make("p", { class: "error", id: `${name}-error`, role: "alert" })));
      field.addEventListener("input", () => {
        const { value, error } = Rope.read(name, field.value, state, field.validity.badInput);
        complain(name, error);
        if (value !== undefined) set({ [name]: value }, name);
      });
      slider.addEventListener("input", () => {
        complain(name);
        const [low, high] = Rope.limits(name, state);
        set({ [name]: Math.min(Math.max(from(Number(slider.value)), low), high) });
      });
    }
    id("methods").addEventListener("change", (event) => set({ method: event.target.value }));
  }

  function complain(name, error = "") {
    put(`${name}-error`, error && `${error}; the pictures show ${state[name]}`);
    id(name).setAttribute("aria-invalid", String(Boolean(error)));
  }

  /** Update the controls from the state, except the field in which the user is typing. */
  function showControls(typing) {
    for (const [name, slider] of Object.entries(SLIDERS)) {
      const [low, high] = Rope.limits(name, state);
      const [field, range] = [id(name), id(`${name}-slider`)];
      [field.min, field.max] = [low, high];
      [range.min, range.max] = [slider.low ?? low, slider.high ?? high];
      range.value = slider.to(state[name]);
      range.setAttribute("aria-valuetext", `${figures(state[name], 6)} ${slider.hint}`.trim());
      if (name !== typing && field.value !== String(state[name])) {
        field.value = state[name];
        complain(name);
      }
    }
    const { method, stretch, base, dim, trained, m, n, pair } = state;
    document.querySelector('[data-field="length"]').hidden = method !== "dynamic"; // no other method uses it
    id("stretch-remark").hidden = method !== "dynamic";
    id("key-old").hidden = method === "default";
    document.querySelector(`input[value="${method}"]`).checked = true;
    put("summary", [SHORT[method], `s ${times(stretch)}`, `θ ${short(base)}`, `D ${dim}`, `L ${integer(trained)}`].join(" · "));
    put("print-setting", `Setting: method ${SHORT[method]}, s = ${times(stretch)}, θ = ${integer(base)}, D = ${dim}, L = ${integer(trained)}, m = ${integer(m)}, n = ${integer(n)}, pair ${pair}`);
    const entry = document.querySelector(`#glossary [data-method="${method}"]`);
    if (id("explanation").dataset.method !== method) put("explanation", ...entry.nextElementSibling.cloneNode(true).childNodes);
    id("explanation").dataset.method = method;
    document.querySelectorAll(".method-name").forEach((node) => (node.textContent = method === "default" ? "no scaling" : LABEL[method]));
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

  function show(name, { claim, plots, label, readout }) {
    plots[0].setAttribute("aria-label", label);
    put(`${name}-plot`, ...plots);
    put(`${name}-readout`, ...readout);
    put(`${name}-title`, claim);
  }

  function draw() {
    cancelAnimationFrame(queued);
    queued = 0;
    const now = Rope.pairs(state);
    follow();
    const made = Object.keys(pictures).map((name) => [name, pictures[name](state, now, name === "clock" ? seen : state)]);
    for (const [name, picture] of made) show(name, picture); // showing a picture changes the layout, so all are made first
    if (id("numbers").open) id("numbers").querySelector(".table").replaceChildren(table(state, now));
  }

  function load() {
    const { state: given, ignored } = Rope.fromHash(location.hash);
    put("status", ignored.length ? `ignored in the address: ${ignored.join(", ").slice(0, 80)}` : "");
    set(given);
  }

  // -------------------------------------------------------------------------------------------------------- animation
  const moving = {}; // name -> its next frame
  /** Call show(part) with part from 0 to 1, once a frame for some ms, and stop an earlier animation of this name. */
  function move(name, ms, show) {
    const began = performance.now();
    const step = (time) => {
      const part = Math.min(1, Math.max(0, (time - began) / ms));
      moving[name] = part < 1 ? requestAnimationFrame(step) : 0;
      show(part);
    };
    cancelAnimationFrame(moving[name]);
    moving[name] = requestAnimationFrame(step);
  }

  /** Change to another setting: animated, or at once if the reader prefers reduced motion. */
  function glide(target) {
    cancelAnimationFrame(moving.glide);
    const from = state, keys = ["base", "stretch"].filter((key) => from[key] !== target[key]);
    if (calm.matches || !keys.length) set(target);
    else move("glide", 700, (part) => {
      const eased = part * part * (3 - 2 * part);
      const between = Object.fromEntries(keys.map((key) => [key, from[key] ** (1 - eased) * target[key] ** eased]));
      set(part < 1 ? { ...target, ...between } : target);
    });
  }

  // Picture 1 draws the arrows at `seen`, which follows m and n of the state over a short time, token by token.
  const [TOKEN, FAR, OPENING] = [250, 16, 10]; // ms for one step, tokens that are not followed, tokens of the opening
  let seen = null; // {m, n} as drawn
  let goal = null; // where `seen` is going
  function follow() {
    const to = { m: state.m, n: state.n };
    if (moving.arrows && goal.m === to.m && goal.n === to.n && !calm.matches) return;
    cancelAnimationFrame(moving.arrows);
    const from = seen ?? to;
    const far = Math.max(Math.abs(to.m - from.m), Math.abs(to.n - from.n));
    [seen, goal, moving.arrows] = [from, to, 0];
    if (calm.matches || dragging || far === 0 || far > FAR) seen = to;
    else move("arrows", TOKEN, (part) => {
      seen = part < 1 ? { m: from.m + part * (to.m - from.m), n: from.n + part * (to.n - from.n) } : to;
      show("clock", pictures.clock(state, Rope.pairs(state), seen));
    });
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
    const svg = id("clock-plot").firstElementChild.getBoundingClientRect();
    return Math.atan2(svg.top + y - event.clientY, event.clientX - svg.left - x);
  };
  function hold(event) {
    const grip = event.target.closest?.("[data-arrow]");
    if (!grip || event.button !== 0) return;
    stop();
    const { arrow: name, pair, x, y } = grip.dataset;
    dragging = { arrow: name, w: Rope.pairs(state).invFreq[pair], x: Number(x), y: Number(y), from: { m: state.m, n: state.n }, angle: 0 };
    dragging.at = angleAt(event, dragging);
    id("clock-plot").setPointerCapture(event.pointerId); // the picture is replaced while it moves
    id("clock").classList.add("dragging");
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
    id("clock").classList.remove("dragging");
  }

  /** Click or drag in a picture: select that pair, or set n to that distance. The sliders do the same by keyboard. */
  function pick(event) {
    const area = event.target.closest?.(".pick");
    if (!area || (event.type === "pointermove" && event.buttons !== 1)) return;
    const { left, width } = area.getBoundingClientRect(), part = Math.min(0.999, Math.max(0, (event.clientX - left) / width));
    if (area.dataset.pick) return set({ pair: Math.floor(part * area.dataset.pick) });
    const distance = Math.round(Math.expm1(part * Math.log1p(area.dataset.distance - 1)));
    set(distance <= state.m ? { n: state.m - distance } : { m: distance, n: 0 });
  }

  // ------------------------------------------------------------------------------------------------------ guided path
  const steps = [...document.querySelectorAll(".path li")];
  let step = 0;
  function go(to) {
    step = to;
    const item = steps[step];
    const note = id("note");
    note.querySelector(".note-head").textContent = `${step + 1} of ${steps.length}: ${item.querySelector("h3").textContent}`;
    note.querySelector(".note-text").textContent = item.querySelector(".look").textContent.replace(/\s+/g, " ");
    note.querySelector('[data-go="-1"]').disabled = step === 0;
    note.querySelector('[data-go="1"]').disabled = step === steps.length - 1;
    note.hidden = false;
    id(item.dataset.figure).before(note);
    glide(Rope.fromHash(item.dataset.set).state);
    note.focus({ preventScroll: true });
    note.scrollIntoView({ behavior: calm.matches ? "auto" : "smooth", block: "start" });
  }

  function buildPath() {
    for (const [k, title] of steps.map((item) => item.querySelector("h3")).entries()) title.replaceChildren(press(title.textContent, () => go(k)));
    id("note").addEventListener("click", (event) => {
      const by = event.target.dataset.go;
      if (by === "0") {
        id("note").hidden = true;
        steps[step].querySelector("button").focus();
      } else if (by) go(step + Number(by));
    });
  }

  async function copy() {
    save();
    const copied = navigator.clipboard?.writeText(location.href) ?? Promise.reject();
    put("status", await copied.then(() => "Link copied. It includes this setting.", () => "The address of this page now includes this setting."));
  }

  // ------------------------------------------------------------------------------------------------------- self-check
  function check() {
    const node = id("check");
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
  buildControls();
  buildPath();
  check();
  const fold = () => (id("panel").open = !narrow.matches);
  fold();
  narrow.addEventListener("change", fold);
  nameOfPlay();
  calm.addEventListener("change", stop);
  for (const button of players) button.addEventListener("click", () => play(button.dataset.play));
  const dialled = id("clock-plot");
  dialled.addEventListener("pointerdown", hold);
  dialled.addEventListener("pointermove", drag);
  for (const kind of ["pointerup", "pointercancel", "lostpointercapture"]) dialled.addEventListener(kind, release);
  id("reset").addEventListener("click", () => glide({ ...Rope.START }));
  id("copy").addEventListener("click", copy);
  id("numbers").addEventListener("toggle", () => set({}));
  for (const kind of ["pointerdown", "pointermove"]) document.querySelector("main").addEventListener(kind, pick);
  addEventListener("hashchange", () => {
    stop();
    load();
  });
  let lastWidth = dialled.clientWidth;
  new ResizeObserver(() => {
    if (dialled.clientWidth !== lastWidth) set({});
    lastWidth = dialled.clientWidth;
  }).observe(document.querySelector("main"));
  addEventListener("beforeprint", draw);
  const opens = !location.hash && !calm.matches; // the page opens with both tokens moving to their start
  load();
  if (opens) {
    set({ m: state.m - OPENING, n: state.n - OPENING });
    play("both", Rope.START.m);
    const end = (event) => {
      for (const kind of ["pointerdown", "keydown"]) removeEventListener(kind, end);
      if (!event.target.closest?.("[data-play]")) stop(); // a click on such a button stops the movement itself
    };
    for (const kind of ["pointerdown", "keydown"]) addEventListener(kind, end);
  }
  draw();
  document.documentElement.dataset.ready = "yes";
})();
