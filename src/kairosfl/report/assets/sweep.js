// Many groups: the parameters of a sweep, colours and chips by one of them, the filter, and the heat map of two.
"use strict";

const sweep = {
  // The values of a parameter, numbers in their order.
  levels(name) {
    return [...new Set(this.data.varied[name])].sort(new Intl.Collator("en", { numeric: true }).compare).sort((a, b) => a - b || 0);
  },

  // A colour for every group, or for every value of a parameter: numbers from dark to light.
  paint() {
    const { groups } = this, colour = (this.colour = value("colour"));
    const values = colour ? this.data.varied[colour] : [...groups.keys()];
    const levels = colour ? this.levels(colour) : values;
    const ordered = colour && levels.every((level) => level === "–" || !Number.isNaN(Number(level)));
    const style = levels.map((_, i) => {
      const share = i / Math.max(1, levels.length - 1);
      const [dark, light] = [0.8 * share, 0.3 + 0.7 * share].map(d3.interpolateViridis);
      if (ordered) return `--c:light-dark(${dark},${light});--dash:none`;
      return `--c:var(--c${i % 7});--dash:${["none", "7 3", "2 3"][Math.floor(i / 7) % 3]}`;
    });
    const box = document.querySelector(".chips");
    if (!box) return; // nothing to show yet
    byId("colours").textContent = values.map((value, i) => `.g${i}{${style[levels.indexOf(value)]}}`).join("");
    for (const each of document.querySelectorAll(".chip[data-level]")) each.remove();
    box.classList.toggle("levels", colour !== "");
    for (const [i, level] of (colour ? levels : []).entries()) {
      const title = "click: hide or show; double-click: show only these";
      const chip = add(box, "button", { type: "button", class: "chip", "data-level": level, style: style[i], title });
      add(chip, "i", { class: "key" });
      add(chip, "span", {}, `${colour} ${level}`);
    }
  },

  // The groups of a chip: one, or those with its value.
  members({ dataset: { group, level } }) {
    return group !== undefined ? [Number(group)] : [...this.groups.keys()].filter((i) => this.data.varied[this.colour][i] === level);
  },

  // All words must be in a group's name, or be true of its parameters: fedprox lr>0.05
  filter() {
    const { varied } = this.data;
    const holds = (word, i) => {
      const [, name, sign, value] = /^([^<>=]+)(<=|>=|<|>|=)(.+)$/.exec(word) ?? [];
      const key = Object.keys(varied).find((each) => each.toLowerCase() === name || each.toLowerCase().endsWith(`.${name}`));
      if (!key) return this.groups[i].label.toLowerCase().includes(word);
      const own = varied[key][i].toLowerCase();
      const [a, b] = [Number(own), Number(value)];
      return { "=": own === value || a === b, "<": a < b, ">": a > b, "<=": a <= b, ">=": a >= b }[sign];
    };
    const asked = value("filter").toLowerCase().split(/\s+/).filter(Boolean);
    this.filtered = new Set([...this.groups.keys()].filter((i) => !asked.every((word) => holds(word, i))));
    const left = this.groups.length - this.filtered.size;
    if (byId("found")) byId("found").textContent = asked.length ? `${left} of ${this.groups.length} groups` : "";
  },

  // The final result by two parameters: the best of the groups in a cell.
  grid() {
    const figure = byId("fig-grid");
    if (!figure) return;
    this.charts = this.charts.filter((chart) => chart.figure !== figure);
    figure.querySelector(".tools")?.remove();
    const { varied, metric } = this.data;
    const [x, y] = [value("grid-across"), value("grid-up")];
    const [x_names, names] = [this.levels(x), this.levels(y)];
    const problem = value("grid-data") || this.groups[0].problem;
    const apart = [x, y].some((name) => problem.includes(`${name}=`)); // the data are an axis
    const cells = new Array(names.length * x_names.length).fill(NaN);
    this.groups.forEach(({ final, problem: own }, i) => {
      if (final === null || this.off(i) || (own !== problem && !apart)) return;
      const at = names.indexOf(varied[y][i]) * x_names.length + x_names.indexOf(varied[x][i]);
      if (!(metric.sign * cells[at] > metric.sign * final)) cells[at] = final;
    });
    const [low = 0, high = 1] = d3.extent(cells);
    const [rows, columns] = [names.length, x_names.length];
    const ranges = { x_range: [-0.5, columns - 0.5], y_range: [-0.5, rows - 0.5] };
    const labels = { x_label: x, y_label: y, value_label: metric.percent ? "%" : metric.words };
    const spec = { key: "grid", names, x_names, cells, low, high, power: 1, percent: metric.percent, rows, columns };
    this.charts.push(new HeatChart(figure, { ...spec, ...ranges, ...labels }, this));
  },
};
