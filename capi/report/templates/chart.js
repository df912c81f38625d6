// Draws the curves of a report from the data inside the page, and lets one zoom and read them. Text only ever enters the
// page as text. Runs before report.js, in the same scope.
const SVG = "http://www.w3.org/2000/svg";
const settings = JSON.parse(document.getElementById("settings").textContent);
let data = JSON.parse(document.getElementById("data").textContent);
// Steps shown by all curves together; null means all.
let range = null;
const views = new Map();

const make = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
const draw = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);
function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// ---- numbers

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const spokenStep = (step) => step.toLocaleString("en");
// What lies to the right of a chart: steps, or anything else, also as a logarithm to base 10.
const SIZES = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
function short(value) {
  const found = SIZES.find(([size]) => Math.abs(value) >= size);
  return found ? `${+(value / found[0]).toPrecision(3)}${found[1]}` : String(+value.toPrecision(3));
}
function shortStep(step) {
  if (step >= 1e6) return `${+(step / 1e6).toPrecision(4)}M`;
  return step >= 1e4 ? `${+(step / 1e3).toPrecision(4)}k` : spokenStep(step);
}
function spokenValue(value, percent) {
  if (value === null || value === undefined) return "NaN";
  if (percent) return `${(value * 100).toFixed(2)} %`;
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(+value.toPrecision(4));
}
function niceTicks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough * 0.999);
  const ticks = [];
  // Counted, since adding up would gather rounding errors.
  for (let index = Math.ceil(low / size - 1e-9); index * size <= high + size * 1e-9; index++) ticks.push(index * size);
  return { ticks, size };
}
function logTicks(low, high) {
  const found = [];
  const decades = Math.log10(high / low);
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const factor of decades > 3 ? [1] : [1, 2, 5]) {
      const tick = factor * 10 ** power;
      if (tick >= low && tick <= high) found.push(tick);
    }
  }
  if (found.length < 2) return niceTicks(low, high, 4).ticks;
  const every = Math.ceil(found.length / 6);
  return found.filter((_, index) => index % every === 0);
}
function tickLabels(ticks, size, percent) {
  const scale = percent ? 100 : 1;
  const largest = Math.max(...ticks.map(Math.abs)) * scale;
  const step = (size || Math.min(...ticks.filter(Boolean).map(Math.abs))) * scale;
  const digits = clamp(-Math.floor(Math.log10(step) + 1e-9), 0, 20);
  const scientific = largest > 0 && (largest < 1e-2 || largest >= 1e6);
  return ticks.map((tick) => {
    if (tick === 0) return percent ? "0 %" : "0";
    const value = tick * scale;
    // Digits that tell neighbours apart, also where they differ little.
    const needed = clamp(Math.ceil(Math.log10(Math.abs(value) / step) - 1e-9), 0, 6);
    const shown = scientific ? (+value.toPrecision(needed + 1)).toExponential() : size ? value.toFixed(digits) : String(+value.toPrecision(3));
    return percent ? `${shown} %` : shown;
  });
}
// Index of the step that is nearest.
function nearest(steps, wanted) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low > 0 && wanted - steps[low - 1] <= steps[low] - wanted ? low - 1 : low;
}

// ---- the range of steps

function wholeRange(charts = data.charts) {
  let low = Infinity, high = -Infinity;
  for (const chart of charts) for (const line of chart.lines) {
    low = Math.min(low, line.steps[0]);
    high = Math.max(high, line.steps[line.steps.length - 1]);
  }
  return low > high ? [0, 1] : low === high ? [low - 1, high + 1] : [low, high];
}
const shownRange = () => range || wholeRange();
function zoomTo(low, high) {
  const [first, last] = wholeRange();
  const from = clamp(Math.round(Math.min(low, high)), first, last), to = clamp(Math.round(Math.max(low, high)), first, last);
  range = to - from < 1 || (from <= first && to >= last) ? null : [from, to];
  redraw();
}
const showAll = () => { range = null; redraw(); };
function redraw() {
  const [low, high] = shownRange();
  if (document.activeElement !== bar.from) bar.from.value = Math.max(low, 0);
  if (document.activeElement !== bar.to) bar.to.value = high;
  bar.all.disabled = range === null;
  for (const view of views.values()) view.draw();
}
const bar = (() => {
  const from = make("input", { type: "number", min: 0, "aria-label": "First step shown" });
  const to = make("input", { type: "number", min: 0, "aria-label": "Last step shown" });
  const all = make("button", { type: "button" }, "Show all");
  const change = () => zoomTo(Number(from.value), Number(to.value));
  from.addEventListener("change", change);
  to.addEventListener("change", change);
  all.addEventListener("click", showAll);
  const element = make("div", { class: "zoombar", role: "group", "aria-label": "Steps shown by all curves" },
    make("span", {}, "Steps "), from, make("span", {}, " to "), to, all);
  const hint = make("p", { class: "soft" }, "Drag across a curve, or type steps, to zoom all curves; a double click shows all. Hovering, touching and arrow keys read values.");
  return { element, hint, from, to, all };
})();

// ---- one chart

class View {
  constructor(chart) {
    this.logarithmic = false;
    this.cursor = null;
    this.drag = null;
    this.title = make("h3");
    this.log = make("button", { type: "button", "aria-pressed": "false" }, "log scale");
    this.log.addEventListener("click", () => {
      this.logarithmic = !this.logarithmic;
      this.log.setAttribute("aria-pressed", String(this.logarithmic));
      this.draw();
    });
    this.meaning = make("p", { class: "soft" });
    this.svg = draw("svg", { class: "axes", "aria-hidden": "true" });
    this.plot = make("div", { class: "plot", tabindex: "0", role: "img" }, this.svg);
    this.legend = make("ul", { class: "legend" });
    this.live = make("p", { class: "soft", "aria-live": "polite" });
    this.table = make("div", { class: "box", tabindex: "0" });
    this.details = make("details", {}, make("summary", {}, "Table of values"), this.table);
    this.details.addEventListener("toggle", () => this.fillTable());
    this.element = make("figure", { class: "card chart" }, make("header", {}, this.title, this.log), this.meaning,
      this.plot, this.legend, this.live, this.details);
    this.listen();
    this.update(chart);
  }

  // Charts over different things have each its own range.
  range() { return data.apart ? wholeRange([this.chart]) : shownRange(); }
  at(step) { return this.chart.logarithmic ? short(10 ** step) : data.apart ? short(step) : spokenStep(step); }

  update(chart) {
    this.chart = chart;
    this.across = chart.across || "step";
    this.steps = [...new Set(chart.lines.flatMap((line) => line.steps))].sort((one, other) => one - other);
    this.title.textContent = chart.title;
    this.element.dataset.chart = chart.key;
    this.meaning.textContent = chart.meaning;
    const values = chart.lines.flatMap((line) => line.values).filter((value) => value !== null);
    // A logarithm wants numbers above zero, and says little where all are alike.
    this.log.hidden = !(values.length > 1 && values.every((value) => value > 0) && !chart.percent);
    const notes = chart.healthy ? [`Healthy: ${chart.healthy} (shaded where it is in view).`] : [];
    const records = Math.max(...chart.lines.map((line) => line.records));
    if (chart.lines.some((line) => line.steps.length < line.records))
      notes.push(`Drawn are the lowest and highest values of stretches of ${spokenStep(records)} records.`);
    const missing = chart.lines.reduce((sum, line) => sum + line.missing, 0);
    if (missing) notes.push(`${spokenStep(missing)} value${missing === 1 ? " is" : "s are"} NaN (marked ×).`);
    if (!values.length) notes.push("There is nothing to draw yet.");
    this.note = notes.join(" ");
    this.plot.setAttribute("aria-label", this.summary());
  }

  summary() {
    const said = this.chart.lines.map((line) => {
      const last = line.steps.length - 1;
      const value = (index) => spokenValue(line.values[index], this.chart.percent);
      return `${line.label || "value"} ${value(0)} at ${this.across} ${this.at(line.steps[0])}, ${value(last)} at ${this.across} ${this.at(line.steps[last])}`;
    });
    return `Curve of ${this.chart.title}: ${said.join("; ")}. Arrow keys read values, plus and minus zoom.`;
  }

  classes(line) {
    // Colours stand for runs, or for metrics where there is one run. Dashes tell lines apart without colours: by metric
    // where a chart has several, else by run.
    const alone = data.runs.length < 2, metrics = this.chart.lines.some((one) => one.kind > 0);
    if (line.faint) return `faint run-${line.run % 8}`;
    return `run-${(alone ? line.kind : line.run) % 8} dash-${(metrics ? line.kind : line.run) % 4}`;
  }

  draw() {
    const width = this.plot.clientWidth, height = 224;
    if (!width) return;
    const [low, high] = this.range();
    const values = this.visible(low, high);
    const logarithmic = this.logarithmic && !this.log.hidden;
    const [bottom, top] = this.heights(values, logarithmic);
    const { ticks, size } = logarithmic ? { ticks: logTicks(bottom, top), size: 0 } : niceTicks(bottom, top, 5);
    const labels = tickLabels(ticks, size, this.chart.percent);
    const left = Math.max(...labels.map((label) => label.length), 1) * 7 + 10;
    const area = { left, top: 8, width: Math.max(width - left - 14, 10), height: height - 8 - 38 };
    const across = (step) => (step - low) / (high - low) * area.width;
    const change = logarithmic ? Math.log : (value) => value;
    const up = (value) => area.height * (1 - (change(value) - change(bottom)) / (change(top) - change(bottom)));
    this.geometry = { area, across, low, high };
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    // A little larger than the area, so that points on its edge are whole.
    const around = 4, inside = draw("g", { transform: `translate(${around} ${around})` });
    const clip = draw("svg", { x: area.left - around, y: area.top - around, width: area.width + 2 * around,
      height: area.height + 2 * around, class: "inside" }, inside);
    this.svg.replaceChildren(...this.axes(area, ticks, labels, up, across, low, high), clip);
    inside.append(...this.band(area, up, bottom, top));
    for (const tick of ticks) inside.append(draw("line", { class: "grid", x1: 0, x2: area.width, y1: up(tick), y2: up(tick) }));
    for (const line of this.chart.lines) inside.append(...this.curve(line, across, up, area, low, high));
    this.selection = draw("rect", { class: "selection", height: area.height, width: 0 });
    this.pointer = draw("line", { class: "cursor", y1: 0, y2: area.height, visibility: "hidden" });
    inside.append(this.selection, this.pointer);
    this.read();
    this.fillTable();
  }

  // Values between two steps, or all where there is none.
  visible(low, high) {
    const found = [];
    for (const line of this.chart.lines) line.steps.forEach((step, index) => {
      if (step >= low && step <= high && line.values[index] !== null) found.push(line.values[index]);
    });
    return found;
  }

  heights(values, logarithmic) {
    if (!values.length) return logarithmic ? [1, 10] : [0, 1];
    let bottom = Infinity, top = -Infinity;
    for (const value of values) { bottom = Math.min(bottom, value); top = Math.max(top, value); }
    if (logarithmic) return bottom === top ? [bottom / 2, top * 2] : [bottom / (top / bottom) ** 0.05, top * (top / bottom) ** 0.05];
    const margin = top > bottom ? (top - bottom) * 0.06 : Math.abs(top) * 0.1 || 1;
    // Counts and shares do not go below zero, so neither does their axis.
    return [bottom >= 0 ? Math.max(bottom - margin, 0) : bottom - margin, top + margin];
  }

  axes(area, ticks, labels, up, across, low, high) {
    const marks = ticks.map((tick, index) => draw("text", { x: area.left - 6, y: area.top + up(tick) + 4, "text-anchor": "end" }, labels[index]));
    const { ticks: steps } = niceTicks(low, high, Math.max(Math.floor(area.width / 85), 2));
    const placed = this.chart.logarithmic ? logTicks(10 ** low, 10 ** high).map(Math.log10) : data.apart ? steps : steps.map(Math.round);
    const whole = [...new Set(placed)].filter((step) => step >= low && step <= high);
    const below = area.top + area.height;
    for (const step of whole) {
      const x = area.left + across(step);
      marks.push(draw("line", { class: "grid", x1: x, x2: x, y1: area.top, y2: below }));
      const anchor = across(step) > area.width - 16 ? "end" : "middle";
      marks.push(draw("text", { x: anchor === "end" ? area.left + area.width + 12 : x, y: below + 16, "text-anchor": anchor }, data.apart ? this.at(step) : shortStep(step)));
    }
    marks.push(draw("text", { x: area.left + area.width / 2, y: below + 32, "text-anchor": "middle" }, this.across));
    return marks;
  }

  band(area, up, bottom, top) {
    if (!this.chart.limits) return [];
    const [least, most] = this.chart.limits;
    const lower = least === null ? bottom : Math.max(least, bottom), upper = most === null ? top : Math.min(most, top);
    const parts = [];
    if (upper > lower) parts.push(draw("rect", { class: "band", width: area.width, y: up(upper), height: up(lower) - up(upper) }));
    for (const limit of [least, most]) if (limit !== null && limit > bottom && limit < top)
      parts.push(draw("line", { class: "limit", x1: 0, x2: area.width, y1: up(limit), y2: up(limit) }));
    return parts;
  }

  curve(line, across, up, area, low, high) {
    const parts = [], dots = [], gaps = [];
    let down = false;
    const first = Math.max(nearest(line.steps, low) - 1, 0), last = Math.min(nearest(line.steps, high) + 1, line.steps.length - 1);
    const few = last - first < 40 && !line.faint;
    for (let index = first; index <= last; index++) {
      const x = across(line.steps[index]).toFixed(1), value = line.values[index];
      if (value === null) {
        gaps.push(`M${+x - 3} ${area.height - 9}l6 6m0 -6l-6 6`);
      } else {
        const y = up(value).toFixed(1);
        parts.push(`${down ? "L" : "M"}${x} ${y}`);
        const alone = !down && (index === last || line.values[index + 1] === null);
        if (few || alone) dots.push(draw("circle", { class: `dot ${this.classes(line)}`, cx: x, cy: y, r: 2.2 }));
      }
      down = value !== null;
    }
    const path = draw("path", { class: `line ${this.classes(line)}`, d: parts.join("") });
    return gaps.length ? [path, ...dots, draw("path", { class: "gap", d: gaps.join("") })] : [path, ...dots];
  }

  // The legend says the values at the cursor, or the last ones.
  read() {
    const at = this.cursor;
    const [low, high] = this.range();
    const named = this.chart.lines.filter((line) => !line.faint);
    const rows = named.map((line) => {
      let index = at === null ? line.steps.length - 1 : nearest(line.steps, at);
      const near = at === null || Math.abs(line.steps[index] - at) <= (high - low) * 0.03;
      const value = near ? spokenValue(line.values[index], this.chart.percent) : "–";
      const key = draw("svg", { class: "key", viewBox: "0 0 24 8", "aria-hidden": "true" },
        draw("path", { class: `line ${this.classes(line)}`, d: "M0 4H24" }));
      return line.label ? make("li", {}, key, make("span", {}, line.label), make("b", {}, value)) : make("li", {}, make("b", {}, value));
    });
    const ends = new Set(named.map((line) => line.steps[line.steps.length - 1]));
    const last = ends.size > 1 ? "last values:" : `last, ${this.across} ${this.at([...ends][0])}:`;
    const when = at === null ? last : `${this.across} ${this.at(at)}:`;
    this.legend.replaceChildren(make("li", { class: "when" }, when), ...rows);
    if (this.live.textContent !== this.note) this.live.textContent = this.note;
    if (!this.pointer) return;
    const inView = at !== null && at >= low && at <= high;
    this.pointer.setAttribute("visibility", inView ? "visible" : "hidden");
    if (inView) {
      const x = this.geometry.across(at);
      this.pointer.setAttribute("x1", x);
      this.pointer.setAttribute("x2", x);
    }
  }

  stepAt(event) {
    const { area, low, high } = this.geometry;
    const x = event.clientX - this.plot.getBoundingClientRect().left - area.left;
    return low + clamp(x / area.width, 0, 1) * (high - low);
  }

  listen() {
    const plot = this.plot;
    plot.addEventListener("pointerdown", (event) => {
      // A finger scrolls and reads; the fields above zoom.
      if (event.pointerType !== "touch" && event.button === 0 && this.geometry) {
        this.drag = { x: event.clientX, step: this.stepAt(event) };
        plot.setPointerCapture(event.pointerId);
      }
    });
    plot.addEventListener("pointermove", (event) => {
      if (!this.geometry) return;
      const step = this.stepAt(event);
      this.cursor = this.steps[nearest(this.steps, step)];
      this.read();
      if (this.drag) {
        const [one, other] = [this.drag.step, step].map(this.geometry.across).sort((a, b) => a - b);
        this.selection.setAttribute("x", one);
        this.selection.setAttribute("width", other - one);
      }
    });
    plot.addEventListener("pointerup", (event) => {
      const drag = this.drag;
      this.drag = null;
      if (this.selection) this.selection.setAttribute("width", 0);
      if (drag && !data.apart && Math.abs(event.clientX - drag.x) > 6) zoomTo(drag.step, this.stepAt(event));
    });
    plot.addEventListener("pointercancel", () => { this.drag = null; });
    plot.addEventListener("pointerleave", () => { if (!this.drag) { this.cursor = null; this.read(); } });
    plot.addEventListener("blur", () => { this.cursor = null; this.read(); });
    plot.addEventListener("dblclick", showAll);
    plot.addEventListener("keydown", (event) => this.press(event));
  }

  press(event) {
    const steps = this.steps, [low, high] = this.range();
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (move) {
      const index = this.cursor === null ? steps.length - 1 : clamp(nearest(steps, this.cursor) + move, 0, steps.length - 1);
      this.cursor = steps[index];
      this.read();
      this.live.textContent = this.legend.textContent;
    } else if (event.key === "+" || event.key === "=" || event.key === "-") {
      const middle = this.cursor === null ? (low + high) / 2 : this.cursor;
      const half = (high - low) * (event.key === "-" ? 1 : 0.25);
      zoomTo(middle - half, middle + half);
    } else if (event.key === "Escape" || event.key === "0") {
      showAll();
    } else return;
    event.preventDefault();
  }

  // Filled when it is opened: nobody opens all of them.
  fillTable() {
    if (!this.details.open) return;
    const [low, high] = this.range();
    const steps = this.steps.filter((step) => step >= low && step <= high), every = Math.ceil(steps.length / 60);
    const chosen = steps.filter((_, index) => (steps.length - 1 - index) % every === 0);
    const heads = this.chart.lines.map((line) => make("th", { scope: "col", class: "number" }, line.label || "value"));
    const rows = chosen.map((step) => make("tr", {}, make("th", { scope: "row", class: "number" }, this.at(step)),
      ...this.chart.lines.map((line) => {
        const index = nearest(line.steps, step);
        return make("td", { class: "number" }, line.steps[index] === step ? spokenValue(line.values[index], this.chart.percent) : "–");
      })));
    this.table.replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, make("th", { scope: "col", class: "number" }, this.across), ...heads)), make("tbody", {}, ...rows)));
  }
}
