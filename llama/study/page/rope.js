/* The page's numbers: the formulas of llama/rope_scaling.py and llama/study/measures.py in float64.

   Pure functions without a browser, so that a test can run this file in V8 and compare it with the library. Names
   follow Python's. A head of D entries has D/2 pairs; pair i of a token at position m has the angle m * invFreq[i]. */
"use strict";

const Rope = (() => {
  const TURN = 2 * Math.PI;
  const METHODS = ["default", "linear", "ntk", "dynamic", "yarn", "llama3"];

  // ------------------------------------------------------------------------------------------ inverse frequencies
  function clamp(x, low, high) {
    return Math.min(Math.max(x, low), high);
  }

  /** Radians per position of each pair under a method, and the factor of cos and sin: llama.inverse_frequencies. */
  function frequencies({ dim, base, trained, stretch, length }, method) {
    const plain = (by) => Array.from({ length: dim / 2 }, (_, i) => Math.pow(base * by, (-2 * i) / dim));
    const wider = (times) => plain(Math.pow(times, dim / (dim - 2))); // the last pair is slowed this many times
    const ramp = (slow) => plain(1).map((w, i) => (1 - slow(w, i)) * w + (slow(w, i) * w) / stretch); // 0 keep, 1 divide
    const pairThatTurns = (times) => (dim * Math.log(trained / (times * TURN))) / (2 * Math.log(base));
    const low = Math.max(Math.floor(pairThatTurns(32)), 0), high = Math.min(Math.ceil(pairThatTurns(1)), dim - 1);
    const methods = {
      default: () => plain(1),
      linear: () => plain(1).map((w) => w / stretch),
      ntk: () => wider(stretch),
      dynamic: () => wider(Math.max(length, trained) / trained), // with factor 1
      yarn: () => ramp((w, i) => clamp((i - low) / (high - low || 0.001), 0, 1)),
      llama3: () => ramp((w) => 1 - clamp(((trained * w) / TURN - 1) / (4 - 1), 0, 1)), // by full turns in training
    };
    return { invFreq: methods[method](), attentionFactor: method === "yarn" ? 0.1 * Math.log(stretch) + 1 : 1 };
  }

  // -------------------------------------------------------------------------------------------------- measures
  /** Positions that each pair needs for one full turn. */
  const wavelengths = (invFreq) => invFreq.map((w) => TURN / w);

  /** Full turns of each pair over positions 0 .. length - 1. */
  const turnsPassed = (invFreq, length) => invFreq.map((w) => ((length - 1) * w) / TURN);

  /** Arc that each pair covers over positions 0 .. length - 1, in radians, at most 2 pi. */
  const seenArc = (invFreq, length) => invFreq.map((w) => Math.min((length - 1) * w, TURN));

  /** The divisor of each frequency. */
  const divisors = (before, after) => before.map((w, i) => w / after[i]);

  /** x (D) rotated to `position` and multiplied by `factor`; entries 2i and 2i + 1 are pair i. */
  function rotate(x, position, invFreq, factor = 1) {
    return invFreq.flatMap((w, i) => {
      const [a, b, cos, sin] = [x[2 * i], x[2 * i + 1], Math.cos(position * w), Math.sin(position * w)];
      return [factor * (a * cos - b * sin), factor * (a * sin + b * cos)];
    });
  }

  /** The attention score q . k / sqrt(D), with q rotated to position m and k to position n. */
  function score(q, k, m, n, invFreq, factor = 1) {
    const [turnedQ, turnedK] = [rotate(q, m, invFreq, factor), rotate(k, n, invFreq, factor)];
    return turnedQ.reduce((sum, x, i) => sum + x * turnedK[i], 0) / Math.sqrt(2 * invFreq.length);
  }

  /** The angle x reduced to (-pi, pi]. */
  function reduced(x) {
    const rest = x - TURN * Math.floor(x / TURN); // [0, 2 pi)
    return rest > Math.PI ? rest - TURN : rest;
  }

  /** q . k of two vectors with one unit arrow per pair, all along the first axis: {each (D/2), sum, most}.

      q is rotated to position m and k to position n, both multiplied by `factor`. most is the value at m = n. */
  function product(m, n, invFreq, factor = 1) {
    const arrows = invFreq.flatMap(() => [1, 0]);
    const [q, k] = [rotate(arrows, m, invFreq, factor), rotate(arrows, n, invFreq, factor)];
    const each = invFreq.map((_, i) => q[2 * i] * k[2 * i] + q[2 * i + 1] * k[2 * i + 1]);
    return { each, sum: each.reduce((a, b) => a + b, 0), most: factor * factor * invFreq.length };
  }

  /** The positions {m, n} after an arrow of a pair with frequency w was turned by `angle`: "q", "k" or "both".

      A token sees only itself and earlier ones, so q pushes k down and k pushes q up; `last` is the last position. */
  function turned({ m, n }, arrow, angle, w, last) {
    const by = Math.round(angle / w) || 0; // not -0
    const [lowest, highest] = { q: [-m, last - m], k: [-n, last - n], both: [-n, last - m] }[arrow];
    const tokens = clamp(by, lowest, highest);
    if (arrow === "both") return { m: m + tokens, n: n + tokens };
    return arrow === "q" ? { m: m + tokens, n: Math.min(n, m + tokens) } : { m: Math.max(m, n + tokens), n: n + tokens };
  }

  /** Coefficients of a score: it is the sum over i of  along[i] cos(distance w_i) + across[i] sin(distance w_i). */
  function scoreParts(q, k, pairs, factor = 1) {
    const scale = (factor * factor) / Math.sqrt(2 * pairs);
    const indices = Array.from({ length: pairs }, (_, i) => 2 * i);
    return {
      along: indices.map((i) => scale * (q[i] * k[i] + q[i + 1] * k[i + 1])),
      across: indices.map((i) => scale * (q[i] * k[i + 1] - q[i + 1] * k[i])),
    };
  }

  /** Mean cosine and score at a distance, written to `out` as [mean cosine, score]. */
  function scoresAt(distance, invFreq, parts, out) {
    let [mean, dot] = [0, 0];
    for (let i = 0; i < invFreq.length; i++) {
      const cos = Math.cos(distance * invFreq[i]);
      mean += cos;
      dot += parts.along[i] * cos + parts.across[i] * Math.sin(distance * invFreq[i]);
    }
    out[0] = mean / invFreq.length;
    out[1] = dot;
    return out;
  }

  // --------------------------------------------------------------------------------------------- the page's settings
  const START = { base: 10000, dim: 128, trained: 2048, stretch: 4, method: "default", m: 100, n: 88, pair: 41, shift: 1000, length: 8192 };
  const NAMES = {
    base: "base θ",
    dim: "head_dim D",
    trained: "trained length L",
    stretch: "stretch s",
    length: "text so far t",
    m: "query position m",
    n: "key position n",
    pair: "pair i",
    shift: "shift both by",
  };

  /** Tokens of the stretched context: s times the trained length. */
  const target = (state) => Math.max(state.trained, Math.round(state.stretch * state.trained));

  /** [smallest, largest, step] of a setting; step 0 means any number. */
  function limits(name, state) {
    return {
      base: [1e3, 1e7, 0],
      dim: [8, 256, 2],
      trained: [128, 131072, 1],
      stretch: [1, 32, 0],
      length: [1, target(state), 1],
      m: [0, target(state) - 1, 1],
      n: [0, target(state) - 1, 1],
      pair: [0, state.dim / 2 - 1, 1],
      shift: [0, target(state) - 1, 1],
    }[name];
  }

  /** Parse the text of a field: {value}, or {error} in one sentence.

      unread: the field has a text that the browser can't convert to a number, so that `text` is "". */
  function read(name, text, state, unread = false) {
    const [low, high, step] = limits(name, state);
    const kind = step === 2 ? "an even integer" : step === 1 ? "an integer" : "a number";
    const expected = `${NAMES[name]} must be ${kind} from ${low} to ${high}`;
    const trimmed = String(text).trim();
    if (trimmed === "") {
      return { error: `${expected}; ${unread ? "the text is too large or not a number" : "the field is empty"}` };
    }
    const value = Number(trimmed);
    if (!/^[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i.test(trimmed) || !(value >= low && value <= high) || (step && value % step)) {
      return { error: `${expected}; got ${trimmed.slice(0, 20)}` };
    }
    return { value };
  }

  /** The state after one change, with the other settings adjusted to their ranges: n <= m < target, pair < D/2. */
  function change(state, changes) {
    const full = state.length === target(state) && !("length" in changes);
    const next = { ...state, ...changes };
    const end = target(next);
    next.pair = Math.min(next.pair, next.dim / 2 - 1);
    next.shift = Math.min(next.shift, end - 1);
    next.length = full ? end : Math.min(next.length, end); // a full text stays full
    const last = next.method === "dynamic" && "length" in changes ? next.length - 1 : end - 1;
    [next.m, next.n] = [Math.min(next.m, last), Math.min(next.n, last)];
    if (next.n > next.m) {
      // a token sees only itself and earlier ones; the setting that was changed moves the other
      if ("n" in changes && !("m" in changes)) next.m = next.n;
      else next.n = next.m;
    }
    if (next.method === "dynamic") next.length = Math.max(next.length, next.m + 1); // position m is in the text
    return next;
  }

  /** All numbers per pair that the pictures draw, for one method; lengths in tokens, angles in radians. */
  function pairs(state, method = state.method) {
    const before = frequencies(state, "default").invFreq, { invFreq, attentionFactor } = frequencies(state, method);
    // dynamic's frequencies are valid for a text of state.length tokens, so later positions do not occur with them
    const end = method === "dynamic" ? Math.max(state.length, state.trained) : target(state);
    const waves = wavelengths(before);
    return {
      before,
      invFreq,
      attentionFactor,
      end,
      divisors: divisors(before, invFreq),
      waves,
      wavesAfter: wavelengths(invFreq),
      seen: seenArc(before, state.trained),
      met: seenArc(invFreq, end),
      turnsSeen: turnsPassed(before, state.trained),
      turnsMet: turnsPassed(invFreq, end),
      // no full turn in training, and the end of the text is more than one token beyond the angles of training
      unfinished: waves.map((wave) => wave > state.trained),
      beyond: before.map((w, i) => waves[i] > state.trained && (end - 1) * invFreq[i] > state.trained * w * (1 + 1e-12)),
    };
  }

  /** The part of the page's address after #, which stores a setting. */
  const toHash = (state) =>
    Object.keys(START)
      .filter((key) => key !== "length" || state.length !== target(state)) // a full text is the default
      .map((key) => `${key}=${state[key]}`)
      .join("&");

  /** The setting of an address, starting from `start`; `ignored` lists the keys that are invalid or out of range. */
  function fromHash(hash, start = START) {
    const given = Object.fromEntries(
      hash
        .replace(/^#/, "")
        .split("&")
        .filter(Boolean)
        .map((part) => [part.split("=")[0], part.split("=").slice(1).join("=")]),
    );
    const ignored = Object.keys(given).filter((key) => !Object.hasOwn(START, key));
    const values = {};
    let state = { ...start };
    if (METHODS.includes(given.method)) state.method = given.method;
    else if ("method" in given) ignored.push("method");
    for (const key of Object.keys(NAMES)) {
      // in the order of NAMES, since the range of a setting depends on earlier ones
      const { value, error } = key in given ? read(key, given[key], state) : {};
      if (error) ignored.push(key);
      if (value === undefined) continue;
      values[key] = value;
      state = change(state, key === "n" && given.m ? { m: state.m, n: value } : { [key]: value });
    }
    // add each setting that a later setting changed again, for example n above m
    ignored.push(...Object.keys(values).filter((key) => state[key] !== values[key]));
    return { state, ignored };
  }

  // ------------------------------------------------------------------------------------------------- the self-check
  /** Compare the formulas above with the library's results: rows {dim, base, trained, stretch, length, method, factor, invFreq}.

      Returns {settings, worst, agrees}; worst is the largest relative difference. The library's float32 has about 6e-8. */
  function selfCheck(rows, tolerance = 1e-6) {
    let worst = 0;
    for (const row of rows) {
      const { invFreq, attentionFactor } = frequencies(row, row.method);
      const off = (ours, theirs) => Math.abs(ours - theirs) / Math.abs(theirs);
      const differences = [off(attentionFactor, row.factor), ...row.invFreq.map((w, i) => off(invFreq[i], Math.fround(w)))];
      worst = row.invFreq.length === invFreq.length ? Math.max(worst, ...differences) : Infinity; // NaN stays NaN
      if (!(worst <= tolerance)) break;
    }
    return { settings: rows.length, worst, agrees: rows.length > 0 && worst <= tolerance };
  }

  return {
    TURN, METHODS, START, NAMES,
    reduced, product, turned, score, scoreParts, scoresAt, pairs, target, limits, read, change, toHash, fromHash, selfCheck,
  };
})();
