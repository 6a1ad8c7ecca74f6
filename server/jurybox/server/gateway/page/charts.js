// Small charts as inline SVG. Every function replaces what an <svg> shows; sizes are the element's own pixels.

const NS = "http://www.w3.org/2000/svg";

function put(parent, name, attributes, text) {
  const node = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function begin(svg) {
  const { width, height } = svg.getBoundingClientRect();
  svg.setAttribute("viewBox", `0 0 ${Math.max(1, width)} ${Math.max(1, height)}`);
  svg.replaceChildren();
  return [width, height];
}

// Lines over `points` places, the newest at the right edge; a null is a gap. `words` says the values at top and bottom,
// left of the lines. With `fit` the bottom is the lowest value, and not 0.
export function sparkline(svg, series, { points, words, logarithmic = false, floor = 0, fit = false }) {
  const [width, height] = begin(svg);
  const scale = logarithmic ? Math.log10 : (value) => value;
  const values = series.flat().filter((value) => value !== null);
  if (!values.length) return;
  const lowest = Math.min(...values), most = fit ? Math.max(...values) : Math.max(floor, ...values) || 1;
  const least = logarithmic || fit ? lowest : 0;
  const high = scale(most), low = logarithmic ? scale(least) - 0.2 : least;
  const y = (value) => height - 2 - ((scale(value) - low) / (high - low || 1)) * (height - 5);
  const labels = [...new Set([most, least])].map((value) => [value, y(value)]);
  const left = 6 + 6.2 * Math.max(...labels.map(([value]) => words(value).length));
  const x = (at, length) => width - ((length - 1 - at) / (points - 1)) * (width - left);
  for (const [value, at] of labels) {
    put(svg, "line", { x1: left, x2: width, y1: at, y2: at, class: "grid" });
    put(svg, "text", { x: left - 5, y: Math.min(Math.max(at + 3.5, 8), height), "text-anchor": "end", class: "scale" }, words(value));
  }
  series.forEach((line, index) => {
    let path = "", area = "", started = null;
    line.forEach((value, at) => {
      if (value === null) { if (started !== null) area += `L${x(at - 1, line.length)},${height}Z`; started = null; return; }
      const place = `${x(at, line.length).toFixed(1)},${y(value).toFixed(1)}`;
      if (started === null) { area += `M${x(at, line.length)},${height}L${place}`; started = at; path += `M${place}`; }
      else { area += `L${place}`; path += `L${place}`; }
    });
    if (started !== null) area += `L${width},${height}Z`;
    if (index === 0) put(svg, "path", { d: area, class: "area" });
    put(svg, "path", { d: path, class: index ? "line second" : "line" });
  });
}

// For every [name, low, high] a span on one logarithmic axis of seconds; `words` says a value.
export function ranges(svg, spans, words) {
  const [width, height] = begin(svg);
  const left = 62, right = width - 12, bottom = height - 20;
  const known = spans.flatMap(([, low, high]) => [low, high]).filter((value) => value > 0);
  const first = Math.floor(Math.log10(Math.min(1e-4, ...known))), last = Math.ceil(Math.log10(Math.max(1e-2, ...known)));
  const x = (value) => left + ((Math.log10(Math.max(value, 10 ** first)) - first) / (last - first)) * (right - left);
  for (let power = first; power <= last; power++) {
    const at = x(10 ** power);
    put(svg, "line", { x1: at, x2: at, y1: 4, y2: bottom, class: "grid" });
    put(svg, "text", { x: at, y: height - 4, "text-anchor": power === last ? "end" : "middle" }, words(10 ** power));
  }
  spans.forEach(([name, low, high], index) => {
    const y = 6 + ((index + 0.62) / spans.length) * (bottom - 10);
    put(svg, "text", { x: 0, y: y + 4 }, name);
    if (low === null) { put(svg, "text", { x: left + 6, y: y + 4 }, "–"); return; }
    put(svg, "line", { x1: x(low), x2: x(high), y1: y, y2: y, class: "range" });
    put(svg, "circle", { cx: x(low), cy: y, r: 4.2, class: "median" });
    put(svg, "circle", { cx: x(high), cy: y, r: 3.2, class: "tail" });
    const label = `${words(low)} – ${words(high)}`;
    put(svg, "text", { x: Math.min(x(low), right - 110), y: y - 9, class: "value" }, label);
  });
}

// Batches by power of two of their rows.
export function bars(svg, counts) {
  const [width, height] = begin(svg);
  let last = counts.length - 1;
  while (last > 5 && !counts[last]) last--;
  const shown = counts.slice(1, last + 1), total = counts.reduce((sum, count) => sum + count, 0);
  const most = Math.max(1, ...shown), step = width / shown.length, top = 18, bottom = height - 20;
  put(svg, "line", { x1: 0, x2: width, y1: bottom + 0.5, y2: bottom + 0.5, class: "grid" });
  shown.forEach((count, index) => {
    const low = 2 ** index, middle = (index + 0.5) * step, tall = (count / most) * (bottom - top);
    const wide = Math.min(46, step * 0.66);
    if (count) {
      put(svg, "rect", { x: middle - wide / 2, y: bottom - tall, width: wide, height: tall, rx: 3, class: "bar" });
      const share = Math.round((100 * count) / total);
      put(svg, "text", { x: middle, y: bottom - tall - 5, "text-anchor": "middle", class: "value" }, share ? `${share} %` : "<1 %");
    }
    const label = low === 1 ? "1" : step < 44 ? `${low}+` : `${low}–${2 * low - 1}`;
    put(svg, "text", { x: middle, y: height - 4, "text-anchor": "middle" }, label);
  });
}
