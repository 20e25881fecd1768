/* Numbers and ticks of all pages. */
"use strict";

/** A number with `digits` significant digits, as people write it. */
function figures(x, digits = 3) {
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= Math.min(1000, 10 ** digits) && size < 1e7) return Math.round(x).toLocaleString("en-US").replace("-", "−");
  const short = size < 1e-4 || size >= 1e7 ? x.toExponential(digits - 1) : String(Number(x.toPrecision(digits)));
  return short.replaceAll("-", "−");
}

/** An angle in degrees, from radians. */
function degrees(radians) {
  return `${figures((radians * 180) / Math.PI)}°`;
}

/** About `about` round numbers within from .. to, for an axis; with `cover`, also the next one above `to`. */
function niceTicks(from, to, about, cover = false) {
  if (!(to > from)) return [from];
  const rough = (to - from) / about;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * unit).find((one) => one >= rough);
  const first = Math.ceil(from / step - 1e-9), last = cover ? Math.ceil(to / step - 1e-9) : Math.floor(to / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}
