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
    this.tallness = spec.y_label === "class" ? 0.36 : 0.6;
    this.button("SVG", "Save this picture", () => this.save());
    const bytes = Uint8Array.from(atob(spec.data), (c) => c.charCodeAt(0));
    const steps = new Uint16Array(bytes.buffer);
    this.cells = Float64Array.from(steps, (q) => (q ? spec.low + ((q - 1) / 65534) * (spec.high - spec.low) : NaN));
    this.image = this.paint();
  }

  title() {
    const { groups, inside } = this.page;
    return groups.length > 1 ? `${super.title()}: ${groups[inside].label}` : super.title();
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
    this.axes(values, this.y, text, 0).classList.add("plain");
    this.bar(left + width + 14);
    this.finish();
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
      const value = low + (high - low) * share ** (1 / power);
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
      const name = spec.names[row] || `${spec.y_label} ${this.span(spec.y_range, spec.rows, row)}`;
      html("b", {}, into, `${name}, ${spec.x_label} ${this.span(spec.x_range, spec.columns, column)}`);
      html("div", {}, into, Number.isNaN(cell) ? "–" : `${spec.value_label} ${number(cell)}`);
    });
  }

  // Which clients or rounds a cell covers.
  span([a, b], parts, i) {
    const size = Math.round((b - a) / parts), first = Math.round(a + 0.5 + i * size);
    return size > 1 ? `${first}–${first + size - 1}` : `${first}`;
  }
}
