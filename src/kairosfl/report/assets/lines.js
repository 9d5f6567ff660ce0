// Curves with bands over seeds, critical periods, and a letter at the end of each.
"use strict";

// Each value with its neighbours on both sides, so that a smoothed curve does not lag behind the raw one.
function smoothed(values, window) {
  if (window < 2) return values;
  const known = [...values.keys()].filter((i) => values[i] !== null);
  const sums = [0, ...d3.cumsum(known, (i) => values[i])];
  const out = [...values];
  known.forEach((i, k) => {
    const from = Math.max(0, k - (window >> 1)), to = Math.min(known.length, k + (window >> 1) + 1);
    out[i] = (sums[to] - sums[from]) / (to - from);
  });
  return out;
}

class LineChart extends Chart {
  constructor(figure, spec, page) {
    super(figure, spec, page);
    this.scale = spec.percent ? 100 : 1;
    this.unit = spec.percent ? " %" : "";
    this.logButton = this.button("log", "Logarithmic axis", () => {
      this.log = !this.log;
      this.draw();
    });
    this.logButton.hidden = spec.percent || spec.series.some((s) => s.mean.some((v) => v !== null && v <= 0));
  }

  // What the server decided is shown as it was: a mean of cohort sizes was never a cohort.
  get window() {
    return this.spec.steps ? 1 : Number(value("smooth"));
  }

  // For a file of numbers: one line for each point of each curve that is shown.
  rows() {
    const { groups } = this.page;
    const points = (s) => s.x.map((x, i) => [x, groups[s.group].label, s.name, s.mean[i], s.deviation?.[i], s.count[i]]);
    const shown = this.spec.series.filter((s) => !this.page.off(s.group));
    return [[this.spec.x_label, "group", "curve", "mean", "deviation", "seeds"], ...shown.flatMap(points)];
  }

  whole() {
    const low = this.linked ? d3.min(this.spec.all, (s) => s.x[0]) : 0;
    const high = d3.max(this.spec.all, (s) => s.x.at(-1));
    return high > low ? [low, high] : [low - 0.5, high + 0.5];
  }

  // The curves that are shown.
  curves(series) {
    const made = `${this.window} ${value("spread")}`;
    for (const s of series) if (s.made !== made) Object.assign(s, { made, ...this.points(s) });
    return series.filter((s) => s.points.length && !this.page.off(s.group));
  }

  // The points of a curve, and of those of its seeds, smoothed as the page asks, in the unit of the axis.
  points(s) {
    const read = (values) => smoothed(values, this.window).map((v) => (v === null ? null : this.scale * v));
    const joined = (values, more) => d3.zip(s.x, values).map(([x, mean], i) => ({ x, mean, ...more?.(i) })).filter((p) => p.mean !== null);
    const mean = read(s.mean), deviation = s.deviation && value("spread") === "band" ? read(s.deviation) : [];
    // A band does not go below zero if no seed does, and a share not above one.
    const floor = s.seeds?.some((each) => d3.min(each) < 0) ? -Infinity : 0, ceiling = this.unit ? 100 : Infinity;
    const points = joined(mean, (i) => {
      const point = { raw: this.scale * s.mean[i], deviation: deviation[i] ?? null, count: s.count[i] };
      if (point.deviation === null) return point;
      return { ...point, low: Math.max(floor, mean[i] - deviation[i]), high: Math.min(ceiling, mean[i] + deviation[i]) };
    });
    return { points, ofSeeds: value("spread") === "seeds" && s.seeds ? s.seeds.map((each) => joined(read(each))) : [] };
  }

  extent(curves) {
    const [from, to] = this.range;
    const shown = curves.flatMap((s) => [s.points, ...s.ofSeeds].flat()).filter((p) => p.x >= from && p.x <= to);
    const seen = shown.flatMap((p) => [p.mean, p.low, p.high]);
    let [low, high] = d3.extent(this.log ? seen.filter((v) => v > 0) : seen);
    if (low === undefined) return this.log ? [0.1, 1] : [0, 1];
    if (high - low < 1e-9 * Math.max(Math.abs(low), Math.abs(high))) low = high; // but for rounding
    if (this.log) return [low / 1.1, high * 1.1];
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    return [low < 0 ? low - room : Math.max(0, low - room), this.unit ? Math.min(100, high + room) : high + room];
  }

  draw() {
    if (this.logButton.hidden) this.log = false; // a value that has no logarithm has come in
    this.logButton.setAttribute("aria-pressed", this.log);
    const { series, all } = this.spec;
    const { groups, focus } = this.page;
    const hero = this.figure.classList.contains("hero"), wanted = hero ? 6 : 4;
    this.drawn = this.curves(series);
    const domain = this.extent(series === all ? this.drawn : this.curves(all)); // facets share their axes
    const axis = this.log ? d3.scaleLog(domain, [0, 1]) : d3.scaleLinear(domain, [0, 1]);
    const format = axis.tickFormat(wanted, domain[1] >= 1e6 ? "~e" : this.log ? "," : undefined);
    const ticks = axis.ticks(wanted).filter((tick) => format(tick)), tickFormat = (tick) => format(tick) + this.unit;
    // Critical periods belong to rounds; each shown group has a strip, the only one on a chart shades the whole height.
    const critical = new Set(this.drawn.map((s) => s.group).filter((g) => this.linked && groups[g].critical.length));
    const alone = new Set(this.drawn.map((s) => s.group)).size === 1;
    const strips = !alone && critical.size && critical.size <= (hero ? 12 : 4) ? [...critical] : [];
    const shaded = [...critical].filter((group) => alone || focus.includes(group));
    const below = strips.length && strips.length * 6 + 3;
    const letters = Math.max(hero && below ? 6 : 3, ...ticks.map((tick) => tickFormat(tick).length)); // "critical"
    const hint = { frameAnchor: "bottom-left", textAnchor: "end", dx: -7, dy: 16, className: "hint" };
    this.show({
      tallness: hero ? 0.46 : 0.56,
      below,
      marginLeft: 14 + 6.6 * letters,
      marginRight: groups.length > 1 ? 24 : 10,
      y: { type: this.log ? "log" : "linear", domain },
      marks: [
        shaded.map((group) => this.periods(group, Plot.rect, { fillOpacity: ([, , share]) => 0.11 * share, className: "critical" })),
        strips.map((group, row) => {
          const look = { y: () => domain[0], dy: 6 + 6 * row, strokeOpacity: ([, , share]) => 0.85 * share, className: "strip" };
          return this.periods(group, Plot.ruleY, look);
        }),
        hero && below ? Plot.text(["critical"], hint) : null,
        Plot.gridY(ticks, { className: "grid" }),
        Plot.axisY(ticks, { tickSize: 0, tickPadding: 7, tickFormat, label: null }),
        this.goal(domain),
        this.drawn.map((s) => this.curve(s, domain[0])),
      ],
    });
    if (groups.length > 1) this.badges();
    this.figure.querySelector(".shading").textContent = this.shading();
  }

  periods(group, mark, { className, ...look }) {
    const [low, high] = this.range;
    const shown = this.page.groups[group].critical.filter(([from, to]) => from < high && to > low);
    const ends = { x1: ([from]) => Math.max(low, from), x2: ([, to]) => Math.min(high, to) };
    return mark(shown, { ...ends, ...look, className: `${className} g${group}` });
  }

  // The explanation of the shading: only what is currently drawn.
  shading() {
    const { band, critical } = this.page.data.words;
    const said = { ".band": `Bands: ${band}.`, ".critical": `Shaded: ${critical}.`, ".strip": `Strips below: ${critical}.` };
    return Object.keys(said).filter((kind) => this.svg.querySelector(kind)).map((kind) => said[kind]).join(" ");
  }

  goal([low, high]) {
    const goal = this.scale * this.page.target;
    if (!this.figure.dataset.target || !(goal > low && goal < high)) return null;
    const place = { y: [goal], frameAnchor: "left", textAnchor: "start", dx: 4, dy: -8, className: "hint" };
    return [Plot.ruleY([goal], { className: "goal" }), Plot.text([`target ${number(goal)}${this.unit}`], place)];
  }

  // A decision holds for its whole round, so it is drawn in steps.
  curve({ points, ofSeeds, group, dashed }, low) {
    const kind = `g${group}${dashed ? " dashed" : ""}${this.page.dims(group) ? " dim" : ""}`;
    const look = (name) => ({ x: "x", y: "mean", curve: this.spec.steps ? "step" : "linear", clip: true, className: `${name} ${kind}` });
    const band = points.filter((p) => p.deviation !== null), edges = { y: undefined, y1: (p) => Math.max(low, p.low), y2: "high" };
    return [
      band.some((p) => p.deviation > 0) ? Plot.areaY(band, { ...look("band"), ...edges }) : null,
      this.window > 1 ? Plot.line(points, { ...look("raw"), y: "raw" }) : null,
      ofSeeds.map((each) => Plot.line(each, look("seed"))),
      Plot.line(points, look("line series")),
      points.length === 1 ? Plot.dot(points, { ...look("dot"), r: 3 }) : null,
    ];
  }

  legend() {
    const { groups } = this.page;
    const named = groups.length > 1 || this.drawn.length > 1 ? this.drawn : [];
    const lines = [...this.svg.querySelectorAll(".line")].map((line) => getComputedStyle(line));
    const keys = named.map((s, i) => {
      const group = groups.length > 1 ? `${groups[s.group].letter}  ${groups[s.group].label}` : "";
      const look = `stroke:${lines[i].stroke};stroke-dasharray:${lines[i].strokeDasharray}`;
      return { words: [group, s.name].filter(Boolean).join(", "), look };
    });
    return [...keys, { words: this.shading() }].filter(({ words }) => words);
  }

  // Letters where curves end; those that would cover each other are pushed down, and from the lower edge up again.
  badges() {
    const { left, right, top, bottom } = this.at;
    const ends = this.drawn.map((s) => {
      const last = s.points.findLast((p) => p.x <= this.range[1] + 1e-9) ?? s.points[0];
      const [x, y] = [this.x(last.x), this.y(last.mean)];
      return { s, x, y, place: this.linked ? right : Math.min(right, x) };
    }).filter(({ x, y }) => x >= left - 1 && y > top - 20 && y < bottom + 20);
    const gap = Math.min(15, (bottom - top) / ends.length);
    if (gap < 11) return; // so many that letters would only cover each other
    const push = (order, sign, edge) => order.forEach((end, i) => {
      const near = order.slice(0, i).filter(({ place }) => Math.abs(place - end.place) < 15);
      end.y = sign * Math.max(sign * end.y, sign * edge, ...near.map(({ y }) => sign * y + gap));
    });
    push(d3.sort(ends, (end) => end.y), 1, top + 6);
    push(d3.sort(ends, (end) => -end.y), -1, bottom - 4);
    for (const { s, y, place } of ends) {
      const kind = `g${s.group}${s.dashed ? " hollow" : ""}${this.page.dims(s.group) ? " dim" : ""}`;
      const badge = add(this.svg, "g", { class: `badge ${kind}` });
      add(badge, "circle", { cx: place + 13, cy: y, r: 7 });
      add(badge, "text", { x: place + 13, y: y + 3.4, "text-anchor": "middle" }, this.page.groups[s.group].letter);
    }
  }

  // The crosshair at a value of x; with an event, also the box of numbers next to the pointer.
  mark(value, event) {
    const nearest = (s, x) => d3.least(s.points, (p) => Math.abs(p.x - x));
    const closest = d3.least(this.drawn.map((s) => nearest(s, value).x), (x) => Math.abs(x - value));
    const spot = this.linked && value !== null ? closest ?? null : value; // the round that is nearest in any curve
    if (!this.crossAt(spot)) return;
    const here = this.drawn.filter((s) => s.points[0].x <= spot && s.points.at(-1).x >= spot); // begun, and not yet over
    const rows = d3.sort(here.map((s) => [s, nearest(s, spot)]), ([, p]) => -p.mean);
    for (const [s, p] of rows) {
      const cy = this.y(p.mean);
      if (cy >= this.at.top - 1 && cy <= this.at.bottom + 1)
        add(this.cross, "circle", { class: `g${s.group}`, cx: this.x(p.x), cy, r: 3.5 });
    }
    if (!event) return;
    if (!rows.length) return tip.hide();
    tip.show(event, (box) => {
      const mean = this.window > 1 ? ` (mean of ${this.window} points)` : "";
      add(box, "b", {}, `${this.spec.x_label} ${number(spot)}${mean}`);
      for (const [s, p] of rows.slice(0, 14)) this.row(box, s, p, spot);
      if (rows.length > 14) add(box, "div", { class: "note" }, `and ${rows.length - 14} more`);
    });
  }

  row(box, s, p, spot) {
    const group = this.page.groups[s.group];
    const line = add(box, "div", { class: `row g${s.group}` });
    add(line, "i", { class: s.dashed ? "key hollow" : "key" }, group.letter);
    const name = [this.page.groups.length > 1 || !s.name ? group.label : "", s.name].filter(Boolean).join(", ");
    add(line, "span", { class: "name" }, name);
    const value = (v) => (this.unit ? v.toFixed(2) : number(v));
    const spread = p.deviation !== null ? ` ± ${value(p.deviation)}` : "";
    add(line, "span", { class: "value" }, value(p.mean) + spread + this.unit);
    const notes = [
      this.linked && p.x !== spot && `round ${p.x}`,
      this.linked && group.critical.some(([from, to]) => spot > from && spot < to) && "critical",
      p.count < group.seeds.length && `${p.count} of ${group.seeds.length} seeds`,
    ];
    add(line, "span", { class: "note" }, notes.filter(Boolean).join(", "));
  }
}
