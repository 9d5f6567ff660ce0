// Heat maps: clients by rounds and clients by classes.
"use strict";

// Viridis at nine points: lightness rises evenly, so it is readable in grey and for colour-blind readers.
const VIRIDIS = ["440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30", "fde725"].map((hex) =>
  [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16)));

function viridis(share) {
  const place = Math.max(0, Math.min(1, share)) * (VIRIDIS.length - 1);
  const i = Math.min(VIRIDIS.length - 2, Math.floor(place));
  return VIRIDIS[i].map((c, k) => Math.round(c + (VIRIDIS[i + 1][k] - c) * (place - i)));
}

class HeatChart extends Chart {
  constructor(figure, spec, page) {
    super(figure, spec, page);
    this.whole_x = true;
    this.tallness = spec.cells ? 0.05 * spec.rows : spec.y_label === "class" && spec.x_label === "client" ? 0.36 : 0.6;
    this.cells = spec.cells ?? this.unpacked(spec);
    this.image = this.paint();
  }

  unpacked({ data, low, high }) {
    const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
    return Float64Array.from(new Uint16Array(bytes.buffer), (q) => (q ? low + ((q - 1) / 65534) * (high - low) : NaN));
  }

  // For a file of numbers: one line for each cell that has a value.
  rows() {
    const { spec } = this;
    const lines = [...this.cells].map((value, i) => [this.row(Math.floor(i / spec.columns)), this.column(i % spec.columns), value]);
    return [[spec.y_label, spec.x_label, spec.value_label], ...lines.filter((line) => !Number.isNaN(line[2])).map((l) => l.map(String))];
  }

  row(i) {
    return this.spec.names[i] || this.span(this.spec.y_range, this.spec.rows, i);
  }

  column(i) {
    return this.spec.x_names?.[i] ?? this.span(this.spec.x_range, this.spec.columns, i);
  }

  title() {
    const { groups, inside } = this.page;
    return groups.length > 1 && !this.spec.cells ? `${super.title()}: ${groups[inside].label}` : super.title();
  }

  share(value) {
    return ((value - this.spec.low) / (this.spec.high - this.spec.low || 1)) ** this.spec.power;
  }

  paint() {
    const { rows, columns } = this.spec;
    const canvas = html("canvas", { width: columns, height: rows });
    const context = canvas.getContext("2d");
    const pixels = context.createImageData(columns, rows);
    for (let r = 0; r < rows; r++)
      for (let c = 0; c < columns; c++) {
        const value = this.cells[r * columns + c];
        if (Number.isNaN(value)) continue;
        pixels.data.set([...viridis(this.share(value)), 255], 4 * ((rows - 1 - r) * columns + c));
      }
    context.putImageData(pixels, 0, 0);
    return canvas.toDataURL();
  }

  whole() {
    return this.spec.x_range;
  }

  draw() {
    const { spec } = this;
    const [low, high] = spec.y_range;
    const names = spec.names.length && spec.names.length <= 24 ? spec.names : null;
    const longest = names ? Math.min(16, Math.max(...names.map((n) => n.length))) : String(Math.round(high)).length;
    this.frame(16 + 6.6 * Math.max(3, longest), 64, 40);
    const { left, top, width, height } = this.at;
    this.y = (value) => top + height - ((value - low) / (high - low)) * height;
    node("rect", { class: "blank", x: left, y: top, width: Math.max(0, width), height }, this.svg);
    const inside = node("g", { "clip-path": `url(#${this.clip})` }, this.svg);
    const [a, b] = spec.x_range.map(this.x);
    const place = { x: a, y: top, width: b - a, height, preserveAspectRatio: "none", class: "heat" };
    node("image", { ...place, href: this.image }, inside);
    const { values } = names ? { values: names.map((_, i) => i) } : ticks(low, high, 5, true);
    const text = (v) => (names ? (names[v].length > 16 ? `${names[v].slice(0, 15)}…` : names[v]) : number(v, 1));
    const axis = this.axes(values, this.y, text, 0);
    axis.classList.add("plain");
    node("text", { class: "label", x: left, y: top + height + 33 }, axis, `↑ ${spec.y_label}`);
    this.bar(left + width + 14);
    if (spec.cells) this.numbers();
    this.finish();
  }

  // The values in their cells, where these are few.
  numbers() {
    const { spec } = this;
    if (spec.rows * spec.columns > 150) return;
    this.cells.forEach((value, i) => {
      if (Number.isNaN(value)) return;
      const place = { x: this.x(i % spec.columns), y: this.y(Math.floor(i / spec.columns)) + 4, "text-anchor": "middle" };
      const ink = this.share(value) > 0.6 ? "#1a1d21" : "#fff";
      node("text", { ...place, style: `fill:${ink}` }, this.svg, spec.percent ? (100 * value).toFixed(1) : number(value));
    });
  }

  bar(x) {
    const { top, height } = this.at;
    const { low, high, power, value_label } = this.spec;
    const id = `fill-${this.figure.id}`;
    const fill = node("linearGradient", { id, x1: 0, x2: 0, y1: 1, y2: 0 }, this.svg.querySelector("defs"));
    for (let i = 0; i <= 8; i++) node("stop", { offset: i / 8, "stop-color": `rgb(${viridis(i / 8)})` }, fill);
    const bar = node("g", { class: "axis" }, this.svg);
    node("rect", { x, y: top + 16, width: 9, height: height - 16, fill: `url(#${id})` }, bar);
    node("text", { class: "label", x: x - 2, y: top + 7 }, bar, value_label);
    for (const share of [0, 0.5, 1]) {
      const value = (low + (high - low) * share ** (1 / power)) * (this.spec.percent ? 100 : 1);
      node("text", { x: x + 13, y: top + height - share * (height - 16) + (share === 1 ? 8 : share ? 4 : 0) }, bar,
        Number(value.toPrecision(2)).toLocaleString("en", { maximumSignificantDigits: 2 }));
    }
  }

  mark(value, event) {
    this.cross.replaceChildren();
    const [low, high] = this.range;
    if (value === null || value < low || value > high) return;
    const { top, height } = this.at;
    node("line", { x1: this.x(value), x2: this.x(value), y1: top, y2: top + height }, this.cross);
    this.cross.setAttribute("visibility", "visible");
    if (!event) return;
    const box = this.svg.getBoundingClientRect();
    const pixel = (event.clientY - box.top) * (this.svg.viewBox.baseVal.height / box.height);
    const { spec } = this;
    const row = Math.floor(((top + height - pixel) / height) * spec.rows);
    const [a, b] = spec.x_range;
    const column = Math.min(spec.columns - 1, Math.floor(((value - a) / (b - a)) * spec.columns));
    if (row < 0 || row >= spec.rows) return;
    const cell = this.cells[row * spec.columns + column];
    tip.show(event.clientX, event.clientY, (into) => {
      const name = spec.names[row] && !spec.cells ? spec.names[row] : `${spec.y_label} ${this.row(row)}`;
      html("b", {}, into, `${name}, ${spec.x_label} ${this.column(column)}`);
      html("div", {}, into, Number.isNaN(cell) ? "–" : `${spec.value_label} ${number(cell)}`);
    });
  }

  // Which clients or rounds a cell covers.
  span([a, b], parts, i) {
    const size = Math.round((b - a) / parts), first = Math.round(a + 0.5 + i * size);
    return size > 1 ? `${first}–${first + size - 1}` : `${first}`;
  }
}
