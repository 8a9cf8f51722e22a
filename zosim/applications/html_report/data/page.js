// The charts of a report. Everything that they show is in the page's JSON block and in its typed columns; nothing is fetched.
"use strict";

const $ = (name, attributes = {}, ...children) => {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
};
const dark = () => matchMedia("(prefers-color-scheme: dark)").matches;
const ink = () => (dark() ? "#e6e6e6" : "#1a1a1a");
const paper = () => (dark() ? "#15181c" : "#ffffff");
const rule = () => (dark() ? "#3a4048" : "#d9dde2");

const scaled = (value, units, base) => {
  let unit = 0;
  while (unit + 1 < units.length && Math.abs(value) >= base) (value /= base), (unit += 1);
  return `${Number(value.toPrecision(4))} ${units[unit]}`;
};
const seconds = (s) => (Math.abs(s) < 1 ? scaled(s * 1e9, ["ns", "us", "ms"], 1e3) : `${Number(s.toPrecision(5))} s`);
const bytes = (size) => scaled(size, ["B", "KiB", "MiB", "GiB", "TiB"], 1024);

async function column(text, type) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new type(await new Response(stream).arrayBuffer());
}

// Columns of a timeline, in its spans' order, as arrays for each row (a stream of a rank): starts and ends in seconds, the
// instruction, the step, and the busy seconds before each span, from which a pixel's density follows.
async function unpacked(timeline) {
  const [gaps, lasts, rows, instructions, steps] = await Promise.all([
    column(timeline.start_gaps, Uint32Array), column(timeline.durations, Uint32Array), column(timeline.rows, Uint16Array),
    column(timeline.instructions, Uint32Array), column(timeline.steps, Uint32Array),
  ]);
  const sizes = new Uint32Array(timeline.row_names.length);
  for (const row of rows) sizes[row] += 1;
  const made = timeline.row_names.map((name, row) => ({
    name, rank: timeline.row_ranks[row], label: timeline.label, timeline,
    start: new Float64Array(sizes[row]), end: new Float64Array(sizes[row]), busy: new Float64Array(sizes[row] + 1),
    instruction: new Uint32Array(sizes[row]), step: new Uint32Array(sizes[row]),
  }));
  const filled = new Uint32Array(sizes.length);
  let ticks = 0;
  for (let span = 0; span < gaps.length; span += 1) {
    ticks += gaps[span];
    const row = made[rows[span]], at = filled[rows[span]]++;
    row.start[at] = timeline.begin_s + ticks * timeline.tick_s;
    row.end[at] = row.start[at] + lasts[span] * timeline.tick_s;
    row.busy[at + 1] = row.busy[at] + (row.end[at] - row.start[at]);
    row.instruction[at] = instructions[span];
    row.step[at] = steps[span];
  }
  return made;
}

// A text, or as much of its beginning as has space.
function fitting(pen, text, width) {
  let length = Math.min(text.length, 300);
  while (length > 1 && pen.measureText(text.slice(0, length)).width > width) length -= 1;
  return length < text.length ? `${text.slice(0, length)}…` : text;
}

// First index whose value is more than `bound`.
function after(values, bound) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > bound) high = middle;
    else low = middle + 1;
  }
  return low;
}

const HEADING = 18;

class TimelineChart {
  constructor(root, rows, memory) {
    Object.assign(this, { root, rows, memory, hover: null, chosen: null, query: "", found: [], at: -1 });
    this.first = Math.min(...rows.filter((row) => row.start.length).map((row) => row.start[0]));
    this.last = Math.max(...rows.filter((row) => row.end.length).map((row) => row.end[row.end.length - 1]));
    [this.low, this.high] = [this.first, this.last];
    this.rowHeight = rows.length > 40 ? 12 : 20;
    // Rows of a timeline stand under its name.
    this.headings = rows.flatMap((row, number) => (!number || rows[number - 1].label !== row.label ? [number] : []));
    this.tops = rows.map((_, number) => 4 + number * this.rowHeight + HEADING * this.headings.filter((first) => first <= number).length);
    this.height = 28 + rows.length * this.rowHeight + HEADING * this.headings.length;
    this.build();
    this.resize();
    new ResizeObserver(() => this.resize()).observe(this.canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  build() {
    const button = (text, title, act) => {
      const made = $("button", { type: "button", title, "aria-label": title }, text);
      made.addEventListener("click", act);
      return made;
    };
    this.search = $("input", { type: "search", placeholder: "search instructions", "aria-label": "search instructions" });
    this.search.addEventListener("input", () => this.find(this.search.value));
    this.search.addEventListener("keydown", (event) => event.key === "Enter" && this.next(event.shiftKey ? -1 : 1));
    this.count = $("output", { class: "count" });
    this.canvas = $("canvas", { tabindex: "0", role: "application",
      "aria-label": "timeline of all ranks and streams; its numbers are in the table below. Keys: plus and minus zoom, arrows pan, 0 shows all; Enter in the search goes to the next instruction found" });
    this.tip = $("div", { class: "tip", hidden: "" });
    this.details = $("div", { class: "details", "aria-live": "polite" }, "Click a bar to see what it waited for and what it cost.");
    const colours = new Map(this.rows.flatMap((row) => row.timeline.instruction_table.map((known) => [known.label, known.colour])));
    const legend = $("div", { class: "legend" });
    for (const [label, colour] of colours) {
      const mark = $("i");
      mark.style.background = colour;
      legend.append($("span", {}, mark, label));
    }
    this.root.prepend(
      $("div", { class: "tools" }, button("+", "zoom in", () => this.zoom(0.5)), button("−", "zoom out", () => this.zoom(2)),
        button("◀", "earlier", () => this.pan(-0.25)), button("▶", "later", () => this.pan(0.25)),
        button("all", "show all", () => this.view(this.first, this.last)), this.search, this.count),
      $("div", { class: "chart" }, this.canvas, this.tip), legend, this.details,
    );
    this.listen();
  }

  listen() {
    const { canvas } = this;
    const pointers = new Map();
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan((event.deltaX || event.deltaY) / 1000);
      else this.zoom(Math.exp(event.deltaY / 400), this.time(event.offsetX));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      pointers.set(event.pointerId, event.offsetX);
      this.travelled = 0;
    });
    canvas.addEventListener("pointermove", (event) => {
      const before = pointers.get(event.pointerId);
      if (before === undefined) return this.point(event.offsetX, event.offsetY);
      if (pointers.size === 2) {
        const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
        const [was, is] = [Math.abs(before - other), Math.abs(event.offsetX - other)];
        if (was > 4 && is > 4) this.zoom(was / is, this.time((event.offsetX + other) / 2));
      } else this.pan((before - event.offsetX) / this.width);
      this.travelled += Math.abs(event.offsetX - before);
      pointers.set(event.pointerId, event.offsetX);
    });
    const release = (event) => {
      if (pointers.delete(event.pointerId) && this.travelled < 4) this.choose(this.hit(event.offsetX, event.offsetY));
    };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", (event) => pointers.delete(event.pointerId));
    canvas.addEventListener("pointerleave", () => this.point(-1, -1));
    canvas.addEventListener("dblclick", () => this.view(this.first, this.last));
    canvas.addEventListener("keydown", (event) => {
      const act = { "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.view(this.first, this.last),
        ArrowLeft: () => this.pan(-0.1), ArrowRight: () => this.pan(0.1) }[event.key];
      if (act) event.preventDefault(), act();
    });
  }

  get margin() { return this.canvas.clientWidth < 600 ? 64 : 150; }
  get width() { return this.canvas.clientWidth - this.margin; }
  time(x) { return this.low + ((x - this.margin) / this.width) * (this.high - this.low); }
  x(time) { return this.margin + ((time - this.low) / (this.high - this.low)) * this.width; }

  view(low, high) {
    const least = (this.last - this.first) * 1e-7;
    const length = Math.min(Math.max(high - low, least), this.last - this.first);
    this.low = Math.min(Math.max(low, this.first), this.last - length);
    this.high = this.low + length;
    this.draw();
    for (const chart of this.memory) chart.setScale("x", { min: this.low, max: this.high });
  }

  zoom(factor, about = (this.low + this.high) / 2) {
    this.view(about - (about - this.low) * factor, about + (this.high - about) * factor);
  }

  pan(part) {
    const shift = part * (this.high - this.low);
    this.view(this.low + shift, this.high + shift);
  }

  hit(x, y) {
    const row = this.rows[after(this.tops, y) - 1];
    if (!row || x < this.margin || y >= this.tops[this.rows.indexOf(row)] + this.rowHeight) return null;
    const pixel = (this.high - this.low) / this.width;
    const index = after(row.end, this.time(x) - 2 * pixel);
    return index < row.start.length && row.start[index] <= this.time(x) + 2 * pixel ? { row, index } : null;
  }

  instruction({ row, index }) { return row.timeline.instruction_table[row.instruction[index]]; }

  describe(span) {
    const { row, index } = span, known = this.instruction(span);
    return `${known.id} (${known.label}${known.segment ? ", " + known.segment : ""}), step ${row.step[index]}: ${seconds(row.end[index] - row.start[index])}`;
  }

  point(x, y) {
    this.hover = this.hit(x, y);
    this.tip.hidden = !this.hover;
    if (this.hover) {
      this.tip.textContent = this.describe(this.hover);
      this.tip.style.left = `${Math.max(0, Math.min(x + 12, this.canvas.clientWidth - this.tip.offsetWidth))}px`;
      this.tip.style.top = `${y + 16}px`;
    }
    this.cursor = x >= this.margin ? x : null;
    for (const chart of this.memory) {
      const left = this.cursor === null ? -10 : chart.valToPos(this.time(x), "x");
      chart.setCursor({ left, top: left < 0 ? -10 : 10 }, false);
    }
    this.draw();
  }

  // Where a span that an instruction waits for is: the same rank's, `distance` steps before.
  span(row, name, step) {
    const wanted = row.timeline.instruction_table.findIndex((known) => known.id === name && known.role === this.role(row));
    for (const other of this.rows) {
      if (other.timeline !== row.timeline || other.rank !== row.rank) continue;
      for (let index = 0; index < other.start.length; index += 1)
        if (other.step[index] === step && other.instruction[index] === wanted) return { row: other, index };
    }
    return null;
  }

  role(row) { return row.timeline.instruction_table[row.instruction[0]].role; }

  choose(span) {
    this.chosen = span;
    this.details.replaceChildren();
    if (!span) return this.details.append("Click a bar to see what it waited for and what it cost."), this.draw();
    const { row, index } = span, known = this.instruction(span), list = $("dl");
    const fact = (name, ...what) => list.append($("dt", {}, name), $("dd", {}, ...what));
    fact("instruction", `${known.id}, ${known.label}${known.segment ? " of " + known.segment : ""}`);
    fact("where", `${row.label}, ${row.name}, step ${row.step[index]}`);
    fact("time", `${seconds(row.end[index] - row.start[index])}, from ${seconds(row.start[index])} to ${seconds(row.end[index])}`);
    if (known.limiter) fact("limited by", known.limiter);
    if (known.work) fact("work", known.work);
    for (const other of this.rows) {
      if (other.timeline === row.timeline || other.rank !== row.rank) continue;
      const same = [...other.instruction.keys()].find((i) => other.timeline.instruction_table[other.instruction[i]].id === known.id && other.step[i] > 0);
      if (same !== undefined) fact(other.label, seconds(other.end[same] - other.start[same]));
    }
    const waits = known.after.map(([name, distance]) => this.span(row, name, row.step[index] - distance)).filter(Boolean);
    if (index > 0) waits.unshift({ row, index: index - 1 });
    waits.sort((a, b) => b.row.end[b.index] - a.row.end[a.index]);
    for (const [place, wait] of waits.slice(0, 6).entries()) {
      const gap = row.start[index] - wait.row.end[wait.index];
      const jump = $("button", { type: "button" }, this.describe(wait));
      jump.addEventListener("click", () => this.show(wait));
      fact(place ? "also waited for" : "waited for", jump, ` ended ${seconds(Math.max(0, gap))} before`);
    }
    this.details.append(list);
    this.draw();
  }

  show(span) {
    const middle = (span.row.start[span.index] + span.row.end[span.index]) / 2, length = this.high - this.low;
    if (middle < this.low || middle > this.high) this.view(middle - length / 2, middle + length / 2);
    this.choose(span);
  }

  find(query) {
    this.query = query.trim().toLowerCase();
    this.at = -1;
    this.matches = new Map();
    this.found = [];
    if (this.query)
      for (const row of this.rows) {
        const table = row.timeline.instruction_table;
        if (!this.matches.has(table))
          this.matches.set(table, table.map((known) => `${known.id} ${known.label} ${known.segment}`.toLowerCase().includes(this.query)));
        const does = this.matches.get(table);
        for (let index = 0; index < row.start.length; index += 1) if (does[row.instruction[index]]) this.found.push({ row, index });
      }
    this.found.sort((a, b) => a.row.start[a.index] - b.row.start[b.index]);
    this.count.textContent = this.query ? `${this.found.length} found` : "";
    this.draw();
  }

  next(by) {
    if (!this.found.length) return;
    this.at = (this.at + by + this.found.length) % this.found.length;
    this.count.textContent = `${this.at + 1} of ${this.found.length}`;
    this.show(this.found[this.at]);
  }

  resize() {
    const ratio = devicePixelRatio || 1, width = this.canvas.parentElement.clientWidth;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${this.height}px`;
    this.ratio = ratio;
    this.draw();
  }

  draw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.paint(); });
  }

  paint() {
    const pen = this.canvas.getContext("2d"), width = this.canvas.clientWidth, { margin, rowHeight } = this;
    pen.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    pen.fillStyle = paper();
    pen.fillRect(0, 0, width, this.height);
    this.painted = 0;
    this.rows.forEach((row, number) => {
      const top = this.tops[number];
      pen.fillStyle = ink();
      pen.textBaseline = "middle";
      if (this.headings.includes(number)) {
        pen.font = "bold 11px system-ui, sans-serif";
        pen.fillText(fitting(pen, row.label, width - 20), 2, top - HEADING / 2);
      }
      pen.font = `${Math.min(11, rowHeight - 1)}px system-ui, sans-serif`;
      pen.fillText(width < 600 ? row.name.replace("rank ", "") : row.name, 2, top + rowHeight / 2, margin - 6);
      this.paintRow(pen, row, top, rowHeight - 3);
    });
    this.paintAxis(pen, width);
    if (this.cursor != null) {
      pen.fillStyle = ink();
      pen.fillRect(this.cursor, 0, 1, this.height - 24);
    }
  }

  paintRow(pen, row, top, height) {
    const pixel = (this.high - this.low) / this.width, table = row.timeline.instruction_table;
    const does = this.query ? this.matches.get(table) : null;
    let index = after(row.end, this.low);
    while (index < row.start.length && row.start[index] < this.high) {
      const known = table[row.instruction[index]];
      const x = Math.max(this.margin, this.x(row.start[index]));
      if (row.end[index] - row.start[index] >= pixel) {
        const wide = Math.min(this.margin + this.width, this.x(row.end[index])) - x;
        pen.globalAlpha = does && !does[row.instruction[index]] ? 0.15 : 1;
        pen.fillStyle = known.colour;
        pen.fillRect(x, top, Math.max(1, wide - (wide > 3 ? 0.5 : 0)), height);
        if (known.short && height > 12 && wide > 7 * (known.short.length + 1)) {
          pen.fillStyle = known.dark_text ? "#000000" : "#ffffff";
          pen.fillText(known.short, x + 3, top + height / 2 + 1);
        }
        if (this.chosen && this.chosen.row === row && this.chosen.index === index) {
          pen.globalAlpha = 1;
          pen.strokeStyle = ink();
          pen.lineWidth = 2;
          pen.strokeRect(x, top, wide, height);
        }
        index += 1;
      } else {
        // Below a pixel: one bar for all that starts in it, as dense as it is busy.
        const until = row.start[index] + pixel;
        const next = Math.max(index + 1, after(row.start, until));
        const share = Math.min(1, (row.busy[next] - row.busy[index]) / pixel);
        let shown = !does;
        for (let i = index; does && i < next && !shown; i += 1) shown = does[row.instruction[i]];
        pen.globalAlpha = shown ? 0.25 + 0.75 * share : 0.1;
        pen.fillStyle = known.colour;
        pen.fillRect(x, top, 1.2, height);
        index = next;
      }
      this.painted += 1;
    }
    pen.globalAlpha = 1;
  }

  paintAxis(pen, width) {
    const length = this.high - this.low, step = 10 ** Math.floor(Math.log10(length / 3));
    const every = length / step > 10 ? 5 * step : length / step > 5 ? 2 * step : step;
    pen.fillStyle = ink();
    pen.font = "11px system-ui, sans-serif";
    for (let mark = Math.ceil(this.low / every) * every; mark <= this.high; mark += every) {
      const x = this.x(mark);
      pen.fillStyle = rule();
      pen.fillRect(x, 0, 1, this.height - 22);
      pen.fillStyle = ink();
      if (x < width - 50) pen.fillText(seconds(Math.abs(mark) < every / 1e6 ? 0 : mark), x + 2, this.height - 10);
    }
  }
}

// A chart of lines over a common axis by uPlot; areas are stacked in the order given.
function lines(root, chart, height) {
  const stacked = chart.stacked, columns = chart.columns.map((values) => values.slice());
  if (stacked) for (let at = 1; at < columns.length; at += 1) columns[at] = columns[at].map((value, i) => value + (at > 1 ? columns[at - 1][i] : 0));
  const format = chart.unit === "bytes" ? bytes : chart.unit === "s" ? seconds : (value) => String(Number(value.toPrecision(4)));
  const across = chart.across === "s" ? seconds : (value) => String(Number(value.toPrecision(6)));
  // Marks of bytes stand at powers of two.
  const powers = chart.unit === "bytes" ? { incrs: Array.from({ length: 50 }, (_, power) => 2 ** power) } : {};
  const axis = (show, size, more = {}) => ({ ...more, stroke: ink, grid: { stroke: rule, width: 1 }, ticks: { stroke: rule }, size, values: (_, marks) => marks.map((mark) => (mark === null ? "" : show(mark))) });
  const steps = uPlot.paths.stepped({ align: 1 });
  const series = chart.names.map((name, at) => ({
    label: name, stroke: chart.colours[at], width: 1.5, points: { show: false }, spanGaps: true,
    ...(stacked ? { fill: chart.colours[at], paths: steps } : {}),
    value: (_, value, __, i) => (value == null || i == null ? "" : format(chart.columns[at + 1][i])),
  }));
  // Later sums lie above earlier ones, so they are drawn first.
  const order = series.map((_, at) => at);
  if (stacked) order.reverse();
  const made = new uPlot({
    width: root.clientWidth, height, series: [{ label: chart.across_name, value: (_, value) => (value == null ? "" : across(value)) }, ...order.map((at) => series[at])],
    scales: { x: { time: false }, ...(stacked ? { y: { range: (_, low, high) => [0, 1.05 * high || 1] } } : {}) }, axes: [axis(across, 40), axis(format, 76, powers)], legend: { live: true },
  }, [columns[0], ...order.map((at) => columns[at + 1])], root);
  root.setAttribute("role", "img");
  root.setAttribute("aria-label", `${chart.title}; its numbers are in the table below`);
  new ResizeObserver(() => made.setSize({ width: root.clientWidth, height })).observe(root);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => made.redraw());
  return made;
}

async function begin() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const memory = (data.memory || []).map((chart) => lines(document.getElementById(chart.root), chart, 200));
  for (const chart of data.curves || []) lines(document.getElementById(chart.root), chart, 220);
  let timeline = null;
  if (data.timelines?.length) {
    const rows = (await Promise.all(data.timelines.map(unpacked))).flat();
    timeline = new TimelineChart(document.getElementById("timeline"), rows, memory);
    // Time 0 is where periodic steps begin: the first few are what most readers look for.
    timeline.view(-0.1 * data.step_s, 3 * data.step_s);
  }
  // Keys scroll a table that is wider than the page.
  for (const table of document.querySelectorAll(".wide")) if (table.scrollWidth > table.clientWidth) table.tabIndex = 0;
  document.documentElement.classList.add("drawn");
  return timeline;
}

window.zosim = begin();
