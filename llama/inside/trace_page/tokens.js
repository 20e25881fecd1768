/* What the pages of a trace, of the server and about RoPE draw with: numbers, tokens, elements, shades and charts. */
"use strict";

/** Format a probability or weight. */
function share(p) {
  if (p >= 0.0995) return p.toFixed(2);
  if (p >= 0.00095) return p.toFixed(3);
  return p === 0 ? "0" : p.toExponential(0).replace("-", "−");
}

/** The parts of a token's text, with invisible characters replaced by signs: [[text, is a sign], ...]. */
function parts(text) {
  const signs = new Map([[" ", "␣"], ["\n", "⏎"], ["\t", "⇥"], ["\r", "␍"], ["\u00a0", "⍽"], ["", "∅"]]);
  const inner = text === "" ? [""] : text.match(/[ \n\t\r\u00a0]|[^ \n\t\r\u00a0]+/g);
  return inner.map((part) => {
    return signs.has(part) ? [signs.get(part), true] : [harmless(part), false];
  });
}

/** Replace control characters, characters without width and those that change the text direction by their codes. */
function harmless(text) {
  return text.replace(/[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g,
    (c) => `U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}`);
}

/** A complete text in which only characters without width and those that change the text direction are replaced. */
function plain(text) {
  return text.split(/([\n\t\u200c\u200d])/).map((part, i) => (i % 2 ? part : harmless(part))).join("");
}

/** `parts` as one string. */
function visible(text) {
  return parts(text).map(([part]) => part).join("");
}

/** A number with two decimals, or with `digits` decimals. */
function fixed(x, plus = "", digits = 2) {
  return (x < 0 ? "−" : plus) + Math.abs(x).toFixed(digits);
}
const signed = (x) => fixed(x, "+");

/** A number with its sign. */
function plus(x) {
  return (x < 0 ? "−" : "+") + figures(Math.abs(x));
}

function id(name) {
  return document.getElementById(name);
}

/** An element. Strings are added as text nodes, so that no token can become markup. */
function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "rect", "line", "circle", "path", "text", "title"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.map((child) => (typeof child === "number" ? String(child) : child)));
  return node;
}

function token(content) {
  const node = make("span", { class: "token", dir: "auto" });
  for (const [part, sign] of parts(content)) node.append(sign ? make("span", { class: "mark" }, part) : part);
  return node;
}

/** A button with a text and what it does. */
function press(text, action, attributes = {}) {
  const button = make("button", { type: "button", ...attributes }, text);
  button.addEventListener("click", action);
  return button;
}

/** A bar for a share of the width. */
function track(part, kind = "fill") {
  const fill = make("div", { class: kind });
  fill.style.width = `${100 * part}%`;
  return make("div", { class: "track" }, fill);
}

/** A node with a background, and a text colour that can be read on it. */
function shaded(node, colour) {
  node.style.background = rgb(colour);
  node.style.color = readable(colour);
  return node;
}

function put(name, ...children) {
  id(name).replaceChildren(...children);
}

const colours = () => {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  return { paper: of("--paper"), raised: of("--raised"), heat: of("--heat"), ink: of("--ink"), soft: of("--soft"),
    line: of("--line"), accent: of("--accent"), second: of("--second") };
};
const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

/** value 0..1 -> [r, g, b] between the background and the heat colour; lightness alone shows the order. */
function ramp() {
  const { raised, heat } = colours();
  const from = channels(raised), to = channels(heat);
  return (value) => from.map((c, i) => Math.round(c + (to[i] - c) * Math.min(1, Math.max(0, value))));
}
const rgb = (colour) => `rgb(${colour.join(",")})`;

/** The text colour with more contrast on a background, at least 4.5 (WCAG 2). */
function readable(colour) {
  const light = colour.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0.05);
  return light / 0.05 > 1.05 / light ? "#000000" : "#ffffff";
}

/** An empty chart with its axes: the svg, y of a value, and the box of the plot. scale: Math.log for a logarithmic axis. */
function chart(name, { height, yMin = 0, yMax, yTicks, yName = figures, yLabel, xLabel, scale = (value) => value,
  left = 52, right = 10, top = 20, bottom = 34 }) {
  const width = id(name).clientWidth;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${yLabel}; ${xLabel}` });
  const y = (value) => height - bottom - ((scale(value) - scale(yMin)) / (scale(yMax) - scale(yMin))) * (height - top - bottom);
  for (const tick of yTicks) {
    svg.append(make("line", { class: "axis", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }),
      make("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, yName(tick)));
  }
  svg.append(make("text", { x: 0, y: 11 }, yLabel),
    make("text", { x: width - right, y: height - 2, "text-anchor": "end" }, xLabel));
  return { svg, y, left, width: width - left - right, top, bottom: height - bottom, height };
}

/** Labels below an axis of `count` values, as many as fit. */
function axisLabels(plot, count, label = (i) => i) {
  const step = [1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64].find((s) => (plot.width / count) * s >= 26) || 128;
  for (let i = 0; i < count; i += step) {
    plot.svg.append(make("text", { x: plot.left + (plot.width * (i + 0.5)) / count, y: plot.bottom + 15,
      "text-anchor": "middle" }, label(i)));
  }
}

function bars(plot, values, { cls = "bar", inset = 0.15, marked = -1, tooltip = (i) => figures(values[i]),
  kind = (i) => (i === marked ? "chosen" : values[i] < 0 ? "less" : cls) } = {}) {
  const step = plot.width / values.length;
  values.forEach((value, i) => {
    const top = plot.y(Math.max(0, value));
    plot.svg.append(make("rect", { class: kind(i), x: plot.left + step * (i + inset),
      width: Math.max(0.5, step * (1 - 2 * inset)), y: top, height: Math.max(0, plot.y(Math.min(0, value)) - top) },
    make("title", {}, tooltip(i))));
  });
}

/** A line through the middles of the bars that `bars` draws. */
function line(plot, values, cls = "line", more = {}) {
  const step = plot.width / values.length;
  const points = values.map((value, i) => `${(plot.left + step * (i + 0.5)).toFixed(1)} ${plot.y(value).toFixed(1)}`);
  if (points.length) plot.svg.append(make("path", { class: cls, d: `M${points.join("L")}`, ...more }));
}
