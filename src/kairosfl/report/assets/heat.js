// Heat maps: clients by rounds, clients by classes, and the results of two parameters.
"use strict";

class HeatChart extends Chart {
  // The values, unpacked when they are first needed.
  get cells() {
    const { spec } = this, { data, low, high } = spec;
    const steps = () => new Uint16Array(Uint8Array.from(atob(data), (c) => c.charCodeAt(0)).buffer);
    const value = (step) => (step ? low + ((step - 1) / 65534) * (high - low) : NaN);
    return (spec.cells ??= Float64Array.from(steps(), value));
  }

  // For a file of numbers: one line for each cell that has a value.
  rows() {
    const { y_label, x_label, value_label } = this.spec;
    const lines = Array.from(this.cells, (value, i) => [...this.place(i), value]);
    return [[y_label, x_label, value_label], ...lines.filter(([, , value]) => !Number.isNaN(value))];
  }

  // The row and the column of a cell: their names, or which clients or rounds they cover.
  place(cell) {
    const { names, x_names, y_range, x_range, rows, columns } = this.spec;
    const span = ([a, b], parts, i) => {
      const size = Math.round((b - a) / parts), first = Math.round(a + 0.5 + i * size);
      return size > 1 ? `${first}–${first + size - 1}` : `${first}`;
    };
    const [row, column] = [Math.floor(cell / columns), cell % columns];
    return [names[row] || span(y_range, rows, row), x_names?.[column] ?? span(x_range, columns, column)];
  }

  title() {
    const { groups } = this.page;
    return groups.length > 1 && !this.spec.x_names ? `${super.title()}: ${groups[this.figure.dataset.inside].label}` : super.title();
  }

  whole() {
    return this.spec.x_range;
  }

  draw() {
    const { names, x_names, x_range, y_range, rows, columns, low, high, power, ...spec } = this.spec;
    const named = names.length > 0 && names.length <= 24;
    const ticks = named ? d3.range(names.length) : d3.ticks(...y_range, 5).filter(Number.isInteger);
    const tickFormat = (tick) => (!named ? String(tick) : names[tick].length > 16 ? `${names[tick].slice(0, 15)}…` : names[tick]);
    const letters = Math.max(3, ...ticks.map((tick) => tickFormat(tick).length));
    const [[x1, x2], [y1, y2]] = [x_range, y_range];
    const color = { type: "pow", exponent: power, scheme: "viridis", domain: [low, high] };
    const cells = { x1, x2, y1, y2, width: columns, height: rows, fill: Plot.identity, imageRendering: "pixelated", clip: true };
    this.show({
      tallness: x_names ? 0.05 * rows : spec.y_label === "class" && spec.x_label === "client" ? 0.36 : 0.6,
      marginLeft: 16 + 6.6 * letters,
      marginRight: 64,
      ticks: x_names?.map((_, i) => i),
      tickFormat: x_names && ((i) => x_names[i]),
      y: { domain: y_range },
      color,
      marks: [
        Plot.rect([0], { className: "blank" }),
        Plot.raster(this.cells, cells),
        Plot.axisY(ticks, { tickSize: 0, tickPadding: 7, tickFormat, label: null }),
        Plot.text([`↑ ${spec.y_label}`], { frameAnchor: "bottom-left", textAnchor: "start", lineAnchor: "bottom", dy: 35 }),
        x_names && rows * columns <= 150 ? this.numbers(color) : null,
      ],
    });
    this.bar(color);
  }

  // The values in their cells, where these are few.
  numbers(color) {
    const { columns, percent } = this.spec;
    const { apply } = Plot.scale({ color });
    return Plot.text(this.cells, {
      x: (_, i) => i % columns,
      y: (_, i) => Math.floor(i / columns),
      text: (value) => (Number.isNaN(value) ? "" : percent ? (100 * value).toFixed(1) : number(value)),
      fill: (value) => (d3.lab(apply(value)).l > 65 ? "#1a1d21" : "#fff"),
      clip: true,
      className: "value",
    });
  }

  // What the colours mean, to the right of the plot.
  bar(color) {
    const { top, bottom, right } = this.at;
    const { low, high, power, percent, value_label } = this.spec;
    const y = { type: "pow", exponent: power, domain: [low, high], axis: null };
    const tickFormat = (value) => number(Number(((percent ? 100 : 1) * value).toPrecision(2)));
    const ticks = [0, 0.5, 1].map((share) => low + (high - low) * share ** (1 / power));
    const fill = { x1: 0, x2: 1, y1: low, y2: high, width: 1, height: 64, fill: (_, value) => value };
    const bar = Plot.plot({
      width: 64, height: bottom - top + 8, marginTop: 24, marginBottom: 4, marginLeft: 14, marginRight: 41,
      x: { axis: null }, y, color, className: "chart",
      marks: [Plot.raster(fill), Plot.axisY(ticks, { anchor: "right", tickSize: 0, tickPadding: 4, tickFormat, label: null }),
        Plot.text([value_label], { frameAnchor: "top-left", textAnchor: "start", dx: -2, dy: -18 })],
    });
    this.svg.append(bar);
    bar.setAttribute("x", right);
    bar.setAttribute("y", top - 4);
  }

  mark(value, event) {
    if (!this.crossAt(value) || !event) return;
    const { spec } = this;
    const part = (at, [low, high], parts) => Math.min(parts - 1, Math.floor(((at - low) / (high - low)) * parts));
    const up = part(this.svg.scale("y").invert(d3.pointer(event, this.svg)[1]), spec.y_range, spec.rows);
    if (up < 0) return;
    const cell = up * spec.columns + part(value, spec.x_range, spec.columns);
    const [row, column] = this.place(cell);
    tip.show(event, (box) => {
      const name = spec.names[up] && !spec.x_names ? row : `${spec.y_label} ${row}`;
      add(box, "b", {}, `${name}, ${spec.x_label} ${column}`);
      add(box, "div", {}, Number.isNaN(this.cells[cell]) ? "–" : `${spec.value_label} ${number(this.cells[cell])}`);
    });
  }
}
