"use strict";
const SVG = "http://www.w3.org/2000/svg";
const data = JSON.parse(document.getElementById("data").textContent);

function svg(parent, name, attributes = {}, text = null) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  parent.appendChild(node);
  return node;
}

function duration(s) {
  if (s === 0) return "0 s";
  if (s < 1e-3) return +(s * 1e6).toPrecision(3) + " µs";
  if (s < 1) return +(s * 1e3).toPrecision(3) + " ms";
  if (s < 60) return +s.toPrecision(3) + " s";
  const whole = Math.round(s), two = (n) => String(n).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} min` + (whole % 60 ? ` ${two(whole % 60)} s` : "");
  if (whole < 86400) return `${Math.floor(whole / 3600)} h` + (whole % 3600 >= 60 ? ` ${two(Math.floor(whole % 3600 / 60))} min` : "");
  return `${Math.floor(whole / 86400)} d` + (whole % 86400 >= 3600 ? ` ${two(Math.floor(whole % 86400 / 3600))} h` : "");
}

const number = (n) => n.toLocaleString("en-US");
const compact = (n) => n >= 1e6 ? +(n / 1e6).toPrecision(4) + " M" : n >= 1e4 ? +(n / 1e3).toPrecision(4) + " k" : number(n);

function ticks(low, high, count, times = false) {
  const rough = (high - low) / count;
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const steps = times && rough > 10
    ? [15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000, 2592000]
    : [power, 2 * power, 5 * power, 10 * power];
  const step = steps.find((one) => one >= rough) || Math.ceil(rough / 86400) * 86400, found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(+(n * step).toPrecision(12));
  return found;
}

function tooltip(plot) {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  plot.appendChild(tip);
  return {
    show(x, y, text) {
      tip.textContent = text;
      tip.hidden = false;
      tip.style.left = Math.max(0, Math.min(x + 12, plot.clientWidth - tip.offsetWidth)) + "px";
      tip.style.top = y + "px";
    },
    hide() { tip.hidden = true; },
  };
}

function timeline(plot, run) {
  const cells = run.pictures.timeline, wall = cells.length ? cells[cells.length - 1].end : 0;
  const height = 118, top = 22, bar = 62;
  let low = 0, high = wall, drag = null;
  const root = svg(plot, "svg", { height, role: "img", "aria-label": "timeline of all attempts", style: "touch-action: pan-y; cursor: crosshair" });
  const tip = tooltip(plot);
  const at = (event) => {
    const share = (event.clientX - root.getBoundingClientRect().left) / plot.clientWidth;
    return low + Math.max(0, Math.min(1, share)) * (high - low);
  };
  function draw() {
    const width = plot.clientWidth, x = (t) => (t - low) / (high - low || 1) * width;
    root.replaceChildren();
    root.setAttribute("viewBox", `0 0 ${width} ${height}`);
    root.dataset.low = low;
    root.dataset.high = high;
    const paths = {}, seconds = {}, attempts = new Map();
    for (const cell of cells) {
      const lane = attempts.get(cell.attempt) || { start: cell.start };
      attempts.set(cell.attempt, Object.assign(lane, { end: cell.end }));
      for (const [name, value] of Object.entries(cell.seconds)) seconds[name] = (seconds[name] || 0) + value;
      if (cell.end < low || cell.start > high || cell.end <= cell.start) continue;
      const left = Math.max(-2, x(cell.start)), right = Math.min(width + 2, x(cell.end));
      const whole = Object.values(cell.seconds).reduce((a, b) => a + b, 0) || 1;
      let y = top;
      for (const name of data.categories) {
        if (!cell.seconds[name]) continue;
        const tall = bar * cell.seconds[name] / whole;
        paths[name] = (paths[name] || "") + `M${left.toFixed(2)} ${y.toFixed(2)}H${right.toFixed(2)}v${tall.toFixed(2)}H${left.toFixed(2)}z`;
        y += tall;
      }
    }
    for (const name of data.categories) {
      if (seconds[name]) svg(root, "path", { d: paths[name] || "", fill: data.colors[name], "data-category": name, "data-seconds": seconds[name] });
    }
    let odd = false;
    for (const [attempt, lane] of attempts) {
      const left = Math.max(0, x(lane.start)), right = Math.min(width, x(lane.end));
      odd = !odd;
      if (right <= left) continue;
      svg(root, "rect", { x: left, y: top + bar + 2, width: Math.max(0.5, right - left), height: 15, class: odd ? "lane" : "lane odd" });
      const label = right - left > 68 ? `attempt ${attempt}` : String(attempt);
      if (right - left > label.length * 7 + 4) svg(root, "text", { x: (left + right) / 2, y: top + bar + 14, "text-anchor": "middle" }, label);
    }
    for (const one of run.incidents) {
      if (one.at < low || one.at > high + 1e-5) continue; // ends of cells are rounded to microseconds
      const px = Math.max(5, Math.min(width - 5, x(one.at)));
      svg(root, "path", { d: `M${px - 5} 8h10l-5 10z`, fill: data.kinds[one.kind] || data.kinds.failed, "data-incident": one.kind, "data-at": one.at });
    }
    for (const t of ticks(low, high, Math.max(2, width / 130), true)) {
      const px = x(t), anchor = px < 20 ? "start" : px > width - 30 ? "end" : "middle";
      svg(root, "line", { x1: px, x2: px, y1: top + bar + 18, y2: top + bar + 22, class: "grid" });
      svg(root, "text", { x: px, y: height - 2, "text-anchor": anchor }, duration(t));
    }
    if (drag && Math.abs(x(drag.to) - x(drag.from)) > 3) {
      const left = Math.min(x(drag.from), x(drag.to));
      svg(root, "rect", { x: left, y: top, width: Math.abs(x(drag.to) - x(drag.from)), height: bar, class: "select" });
    }
  }
  function zoom(from, to) {
    const least = Math.min(wall, Math.max(wall * 1e-6, 1e-3)), length = Math.min(wall, Math.max(least, to - from));
    low = Math.max(0, Math.min(wall - length, from));
    high = low + length;
    tip.hide();
    draw();
  }
  function find(t) {
    let first = 0, last = cells.length - 1;
    while (first < last) {
      const middle = (first + last) >> 1;
      if (cells[middle].end < t) first = middle + 1; else last = middle;
    }
    return cells[first];
  }
  root.addEventListener("pointerdown", (event) => { drag = { from: at(event), to: at(event) }; root.setPointerCapture(event.pointerId); });
  root.addEventListener("pointercancel", () => { drag = null; draw(); });
  root.addEventListener("pointerup", (event) => {
    const chosen = drag;
    drag = null;
    if (!chosen) return;
    const from = Math.min(chosen.from, at(event)), to = Math.max(chosen.from, at(event));
    if ((to - from) / (high - low) * plot.clientWidth > 6) zoom(from, to); else draw();
  });
  root.addEventListener("dblclick", () => zoom(0, wall));
  root.addEventListener("pointerleave", () => tip.hide());
  root.addEventListener("pointermove", (event) => {
    if (drag) { drag.to = at(event); draw(); }
    const cell = find(at(event));
    if (!cell) return;
    const parts = Object.entries(cell.seconds).sort((a, b) => b[1] - a[1]).map(([name, value]) => `${name}  ${duration(value)}`);
    const steps = cell.first == null ? "" : cell.first === cell.last ? `, step ${number(cell.first)}` : `, steps ${number(cell.first)} to ${number(cell.last)}`;
    const x = event.clientX - root.getBoundingClientRect().left;
    tip.show(x, top + bar + 20, `attempt ${cell.attempt}${steps}\nafter ${duration(cell.start)}\n${parts.join("\n")}`);
  });
  const actions = {
    in: () => zoom(low + (high - low) / 4, high - (high - low) / 4),
    out: () => zoom(low - (high - low) / 2, high + (high - low) / 2),
    left: () => zoom(low - (high - low) / 2, high - (high - low) / 2),
    right: () => zoom(low + (high - low) / 2, high + (high - low) / 2),
    all: () => zoom(0, wall),
  };
  for (const button of plot.parentNode.querySelectorAll("button")) button.addEventListener("click", actions[button.dataset.do]);
  return draw;
}

function chart(plot, columns, series, height) {
  const root = svg(plot, "svg", { height, role: "img", "aria-label": plot.dataset.label });
  const tip = tooltip(plot), left = 62, right = 10, top = 8, bottom = 38;
  const points = columns.first.map((first, i) => (first + columns.last[i]) / 2);
  const known = series.flatMap((one) => [...one.values.min, ...one.values.max]).filter((v) => v !== null);
  const middle = series.flatMap((one) => one.values.median).filter((v) => v !== null).sort((a, b) => a - b);
  const positive = known.filter((v) => v > 0), most = positive.reduce((a, b) => Math.max(a, b), 0);
  const usual = middle.length ? middle[middle.length >> 1] : 0;
  const isLog = positive.length > 0 && most > 20 * Math.max(usual, 1e-12);
  const least = positive.reduce((a, b) => Math.min(a, b), Infinity);
  const domain = isLog ? [10 ** Math.floor(Math.log10(least)), 10 ** Math.ceil(Math.log10(most))] : [0, most * 1.05 || 1];
  const span = points.length > 1 ? [columns.first[0], columns.last[points.length - 1]] : [(points[0] || 1) - 1, (points[0] || 1) + 1];
  Object.assign(root.dataset, { low: domain[0], high: domain[1], first: span[0], last: span[1], log: isLog, left, right, top, bottom });
  let width = 0;
  const x = (step) => left + (step - span[0]) / (span[1] - span[0] || 1) * (width - left - right);
  const y = (v) => {
    const share = isLog ? Math.log10(Math.max(v, domain[0]) / domain[0]) / Math.log10(domain[1] / domain[0]) : v / domain[1];
    return height - bottom - share * (height - top - bottom);
  };
  function line(values) {
    let path = "", up = false;
    values.forEach((v, i) => {
      if (v === null) { up = false; return; }
      path += `${up ? "L" : "M"}${x(points[i]).toFixed(3)} ${y(v).toFixed(3)}`;
      up = true;
    });
    return path;
  }
  function draw() {
    width = plot.clientWidth;
    root.replaceChildren();
    root.setAttribute("viewBox", `0 0 ${width} ${height}`);
    root.dataset.width = width;
    let levels = ticks(domain[0], domain[1], 4);
    if (isLog) {
      const decades = Math.round(Math.log10(domain[1] / domain[0])), every = Math.ceil(decades / 5);
      levels = Array.from({ length: Math.floor(decades / every) + 1 }, (_, i) => domain[0] * 10 ** (i * every));
    }
    for (const v of levels) {
      svg(root, "line", { x1: left, x2: width - right, y1: y(v), y2: y(v), class: "grid" });
      svg(root, "text", { x: left - 6, y: y(v) + 4, "text-anchor": "end" }, duration(v));
    }
    for (const step of ticks(span[0], span[1], Math.max(2, width / 110)).filter(Number.isInteger)) {
      const px = x(step);
      svg(root, "text", { x: px, y: height - bottom + 16, "text-anchor": px > width - 24 ? "end" : "middle" }, compact(step));
    }
    svg(root, "text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, isLog ? "step (vertical scale: logarithmic)" : "step");
    if (!points.length) svg(root, "text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "nothing was recorded");
    for (const one of series) {
      const { min, median, max } = one.values, band = [];
      let area = "";
      const flush = () => {
        if (band.length > 1) area += "M" + band.map((i) => `${x(points[i]).toFixed(1)} ${y(max[i]).toFixed(1)}`).join("L") + "L" + [...band].reverse().map((i) => `${x(points[i]).toFixed(1)} ${y(min[i]).toFixed(1)}`).join("L") + "z";
        band.length = 0;
      };
      median.forEach((v, i) => { if (v === null) flush(); else band.push(i); });
      flush();
      svg(root, "path", { d: area, fill: one.color, "fill-opacity": 0.25 });
      svg(root, "path", { d: line(median), fill: "none", stroke: one.color, "stroke-width": 1.6, "stroke-linejoin": "round", "data-series": one.name });
      if (points.length <= 60) {
        median.forEach((v, i) => { if (v !== null) svg(root, "circle", { cx: x(points[i]), cy: y(v), r: 2.6, fill: one.color }); });
      }
    }
  }
  root.addEventListener("pointerleave", () => tip.hide());
  root.addEventListener("pointermove", (event) => {
    if (!points.length) return;
    const px = event.clientX - root.getBoundingClientRect().left;
    const step = span[0] + (px - left) / (width - left - right) * (span[1] - span[0]);
    let best = 0;
    points.forEach((one, i) => { if (Math.abs(one - step) < Math.abs(points[best] - step)) best = i; });
    const first = columns.first[best], last = columns.last[best];
    const lines = series.map(({ name, values: { min, median, max } }) => median[best] === null ? `${name}  unknown`
      : first === last ? `${name}  ${duration(median[best])}`
      : `${name}  median ${duration(median[best])} (${duration(min[best])} to ${duration(max[best])})`);
    tip.show(px, 4, `${first === last ? "step " + number(first) : `steps ${number(first)} to ${number(last)}`}\n${lines.join("\n")}`);
  });
  return draw;
}

const draws = [];
for (const plot of document.querySelectorAll(".plot")) {
  const run = data.runs[plot.dataset.run], { steps, checkpoints } = run.pictures, color = data.colors;
  if (plot.dataset.picture === "timeline") draws.push(timeline(plot, run));
  else if (plot.dataset.picture === "steps") {
    draws.push(chart(plot, steps, [
      { name: "step", values: steps.step, color: color.productive },
      { name: "fetch", values: steps.fetch, color: color.data_wait },
    ], 250));
  } else {
    const name = plot.dataset.picture;
    draws.push(chart(plot, checkpoints, [{ name, values: checkpoints[name], color: name === "age" ? color.lost : color.checkpoint }], 180));
  }
}
function drawAll() { for (const draw of draws) draw(); }
let pending = 0;
window.addEventListener("resize", () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(drawAll); });
drawAll();
document.documentElement.dataset.ready = "true";
