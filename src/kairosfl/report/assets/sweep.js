// Many groups: the parameters of a sweep, colours and chips by one of them, the filter, and the heat map of two.
"use strict";

const MANY = 8; // groups from which on they are coloured and split by parameters to begin with

const sweep = {
  // The values of a parameter, numbers in their order.
  levels(name) {
    return [...new Set(this.data.varied[name])].sort(new Intl.Collator("en", { numeric: true }).compare).sort((a, b) => a - b || 0);
  },

  // Many groups are coloured by one parameter and split by another: the two that tell the most of them apart.
  arrange() {
    const { varied } = this.data;
    const few = this.groups.length > MANY ? Object.keys(varied).filter((name) => this.levels(name).length <= MANY) : [];
    const pairs = few.flatMap((a) => few.filter((b) => b !== a).map((b) => [a, b]));
    const apart = ([a, b]) => new Set(varied[a].map((value, i) => `${value}\n${varied[b][i]}`)).size;
    pairs.sort((p, q) => apart(q) - apart(p));
    const [colour, facet] = pairs[0] ?? [few[0] ?? "", ""];
    const keep = (name) => this.picked.has(name) && (this[name] === "" || this[name] in varied);
    if (!keep("colour")) this.colour = colour;
    if (!keep("facet")) this.facet = facet;
  },

  // A colour for every group, or for every value of a parameter: numbers from dark to light.
  paint() {
    const { colour, groups } = this;
    const values = colour ? this.data.varied[colour] : groups.map((_, i) => i);
    const levels = colour ? this.levels(colour) : values;
    const ordered = colour && levels.every((level) => level === "–" || !Number.isNaN(Number(level)));
    const shade = (share, from, to) => d3.interpolateViridis(from + (to - from) * share);
    const style = levels.map((_, i) => {
      const share = i / Math.max(1, levels.length - 1);
      if (ordered) return `--c:light-dark(${shade(share, 0, 0.8)},${shade(share, 0.3, 1)});--dash:none`;
      return `--c:var(--c${i % 7});--dash:${["none", "7 3", "2 3"][Math.floor(i / 7) % 3]}`;
    });
    const rules = values.map((value, i) => `.g${i}{${style[levels.indexOf(value)]}}`);
    const box = document.querySelector(".chips");
    if (!box) return; // nothing to show yet
    byId("colours").textContent = rules.join("");
    for (const each of document.querySelectorAll(".chip[data-level]")) each.remove();
    box.classList.toggle("levels", colour !== "");
    if (colour)
      levels.forEach((level, i) => {
        const title = "click: hide or show; double-click: show only these";
        const chip = add(box, "button", { type: "button", class: "chip", "data-level": level, style: style[i], title });
        add(chip, "i", { class: "key" });
        add(chip, "span", {}, `${colour} ${level}`);
      });
    for (const chip of document.querySelectorAll(colour ? ".chip[data-level]" : ".chip[data-group]")) this.listen(chip);
  },

  listen(chip) {
    const groups = this.members(chip);
    const focus = (value) => {
      this.focus = value;
      this.redraw();
    };
    chip.onclick = () => this.toggle(groups);
    chip.ondblclick = () => this.only(groups);
    chip.onmouseenter = () => focus(groups);
    chip.onmouseleave = () => focus([]);
  },

  // The groups of a chip: one, or those with its value.
  members(chip) {
    const { group, level } = chip.dataset;
    return group !== undefined ? [Number(group)] : [...this.groups.keys()].filter((i) => this.data.varied[this.colour][i] === level);
  },

  // All words must be in a group's name, or be true of its parameters: fedprox lr>0.05
  filter(words) {
    this.words = words;
    const { varied } = this.data;
    const holds = (word, i) => {
      const [, name, sign, value] = /^([^<>=]+)(<=|>=|<|>|=)(.+)$/.exec(word) ?? [];
      const key = Object.keys(varied).find((each) => each.toLowerCase() === name || each.toLowerCase().endsWith(`.${name}`));
      if (!key) return this.groups[i].label.toLowerCase().includes(word);
      const own = varied[key][i].toLowerCase();
      const [a, b] = [Number(own), Number(value)];
      return { "=": own === value || a === b, "<": a < b, ">": a > b, "<=": a <= b, ">=": a >= b }[sign];
    };
    const asked = words.toLowerCase().split(/\s+/).filter(Boolean);
    this.filtered = new Set([...this.groups.keys()].filter((i) => !asked.every((word) => holds(word, i))));
    const left = this.groups.length - this.filtered.size;
    if (byId("found")) byId("found").textContent = asked.length ? `${left} of ${this.groups.length} groups` : "";
    this.shown();
  },

  // The final result by two parameters: the best of the groups in a cell.
  grid() {
    const figure = byId("fig-grid");
    if (!figure) return;
    this.charts = this.charts.filter((chart) => chart.figure !== figure);
    figure.querySelector(".tools")?.remove();
    const { varied, metric } = this.data;
    const [x, y] = [byId("grid-across").value, byId("grid-up").value];
    const [x_names, names] = [this.levels(x), this.levels(y)];
    const problem = byId("grid-data")?.value ?? this.groups[0].problem;
    const apart = [x, y].some((name) => problem.includes(`${name}=`)); // the data are an axis
    const cells = new Array(names.length * x_names.length).fill(NaN);
    this.groups.forEach(({ final, problem: own }, i) => {
      if (final === null || this.off(i) || (own !== problem && !apart)) return;
      const at = names.indexOf(varied[y][i]) * x_names.length + x_names.indexOf(varied[x][i]);
      if (!(metric.sign * cells[at] > metric.sign * final)) cells[at] = final;
    });
    const known = cells.filter((value) => !Number.isNaN(value));
    const [low, high] = known.length ? [Math.min(...known), Math.max(...known)] : [0, 1];
    const sizes = { rows: names.length, columns: x_names.length };
    const ranges = { x_range: [-0.5, sizes.columns - 0.5], y_range: [-0.5, sizes.rows - 0.5] };
    const labels = { x_label: x, y_label: y, value_label: metric.percent ? "%" : metric.words };
    const spec = { key: "grid", names, x_names, cells, low, high, power: 1, percent: metric.percent };
    this.charts.push(new HeatChart(figure, { ...spec, ...sizes, ...ranges, ...labels }, this));
    this.charts.at(-1).draw();
  },
};
