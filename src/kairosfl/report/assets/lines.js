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
    this.whole_x = this.linked;
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
    const spread = value("spread") || "band", made = `${this.window} ${spread}`;
    for (const s of series) if (s.made !== made) this.make(s, spread, made);
    return series.filter((s) => s.points.length && !this.page.off(s.group));
  }

  // The points of a curve, smoothed as the page asks, in the unit of the axis.
  make(s, spread, made) {
    const read = (values) => smoothed(values, this.window).map((v) => (v === null ? null : this.scale * v));
    const mean = read(s.mean), deviation = s.deviation && spread === "band" ? read(s.deviation) : [];
    // A band does not go below zero if no seed does, and a share not above one.
    const floor = s.seeds?.some((each) => d3.min(each) < 0) ? -Infinity : 0, ceiling = this.unit ? 100 : Infinity;
    const points = s.x.map((x, i) => {
      const point = { x, mean: mean[i], raw: this.scale * s.mean[i], deviation: deviation[i] ?? null, count: s.count[i] };
      const band = [mean[i] - deviation[i], mean[i] + deviation[i]].map((v) => Math.max(floor, Math.min(ceiling, v)));
      return point.deviation === null ? point : { ...point, low: band[0], high: band[1] };
    });
    const each = spread === "seeds" && s.seeds ? s.seeds.map(read) : [];
    Object.assign(s, { made, each, points: points.filter((p) => p.mean !== null) });
  }

  extent(curves) {
    const [from, to] = this.range;
    const points = (s) => s.points.filter((p) => p.x >= from && p.x <= to).flatMap((p) => [p.mean, p.low, p.high]);
    const seeds = (s) => s.each.flatMap((each) => each.filter((_, i) => s.x[i] >= from && s.x[i] <= to));
    const seen = curves.flatMap((s) => [...points(s), ...seeds(s)]);
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
    const hero = this.figure.classList.contains("hero");
    const { series, all } = this.spec;
    const curves = this.curves(series);
    const domain = this.extent(series === all ? curves : this.curves(all)); // facets share their axes
    const axis = this.log ? d3.scaleLog(domain, [0, 1]) : d3.scaleLinear(domain, [0, 1]);
    const wanted = hero ? 7 : 5;
    const format = axis.tickFormat(wanted, domain[1] >= 1e6 ? "~e" : this.log ? "," : undefined);
    const ticks = axis.ticks(wanted).filter((tick) => format(tick)), tickFormat = (tick) => format(tick) + this.unit;
    const strips = this.strips(curves);
    const rows = strips.length > 1 && strips.length <= (hero ? 12 : 4) ? strips : [];
    const letters = Math.max(hero && rows.length ? 6 : 3, ...ticks.map((tick) => tickFormat(tick).length)); // "critical"
    const badges = this.page.groups.length > 1;
    this.drawn = curves;
    this.show({
      tallness: hero ? 0.46 : 0.56,
      below: rows.length && rows.length * 6 + 3,
      marginLeft: 14 + 6.6 * letters,
      marginRight: badges ? 24 : 10,
      y: { type: this.log ? "log" : "linear", domain },
      marks: [
        this.shade(strips.length === 1 ? strips : strips.filter((g) => this.page.focus.includes(g))),
        rows.map((group, row) => this.strip(group, domain[0], 6 + 6 * row)),
        hero && rows.length ? Plot.text(["critical"], { frameAnchor: "bottom-left", textAnchor: "end", dx: -7, dy: 16, className: "hint" }) : null,
        Plot.gridY(ticks, { className: "grid" }),
        Plot.axisY(ticks, { tickSize: 0, tickPadding: 7, tickFormat, label: null }),
        Plot.ruleY([domain[0]], { className: "base" }),
        this.goal(domain),
        curves.map((s) => this.curve(s, domain[0])),
      ],
    });
    if (badges) this.badges(curves);
    this.figure.querySelector(".shading").textContent = this.shading();
  }

  // Critical periods belong to rounds; each shown group has a strip, a single one shades the whole height.
  strips(curves) {
    const groups = this.linked ? [...new Set(curves.map((s) => s.group))] : [];
    return groups.filter((g) => this.page.groups[g].critical.length);
  }

  shade(groups) {
    const look = (group) => ({ x1: 0, x2: 1, fillOpacity: (c) => 0.11 * c[2], clip: true, className: `critical g${group}` });
    return groups.map((group) => Plot.rect(this.page.groups[group].critical, look(group)));
  }

  strip(group, y, dy) {
    const [low, high] = this.range;
    const shown = this.page.groups[group].critical.filter(([from, to]) => from < high && to > low);
    const ends = { x1: (c) => Math.max(low, c[0]), x2: (c) => Math.min(high, c[1]) };
    return Plot.ruleY(shown, { ...ends, y: () => y, dy, strokeOpacity: (c) => 0.85 * c[2], className: `strip g${group}` });
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
    const text = [`target ${number(goal)}${this.unit}`];
    const place = { y: [goal], frameAnchor: "left", textAnchor: "start", dx: 4, dy: -8 };
    return [Plot.ruleY([goal], { className: "goal" }), Plot.text(text, { ...place, className: "hint" })];
  }

  // A decision holds for its whole round, so it is drawn in steps.
  curve({ points, each, x, group, deviation, dashed }, low) {
    const kind = `g${group}${dashed ? " dashed" : ""}${this.page.dims(group) ? " dim" : ""}`;
    const look = (name) => ({ x: "x", curve: this.spec.steps ? "step" : "linear", clip: true, className: `${name} ${kind}` });
    const along = (values) => ({ ...look("seed"), x: x.filter((_, i) => values[i] !== null), y: values.filter((v) => v !== null) });
    const spread = points.filter((p) => p.deviation !== null);
    return [
      spread.some((p) => p.deviation > 0) ? Plot.areaY(spread, { ...look("band"), y1: (p) => Math.max(low, p.low), y2: "high" }) : null,
      this.window > 1 ? Plot.line(points, { ...look("raw"), y: "raw" }) : null,
      each.map((values) => Plot.line({ length: along(values).x.length }, along(values))),
      Plot.line(points, { ...look("line series"), y: "mean" }),
      points.length === 1 ? Plot.dot(points, { ...look("dot"), y: "mean", r: 3 }) : null,
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

  // Letters at the right end; where curves end close together, each column of letters is pushed apart.
  badges(curves) {
    const { left, right, top, bottom } = this.at;
    const ends = curves.map((s) => {
      const last = s.points.findLast((p) => p.x <= this.range[1] + 1e-9) ?? s.points[0];
      const x = this.x(last.x);
      return { s, y: this.y(last.mean), x, place: this.linked ? right : Math.min(right, x) };
    }).filter((end) => end.x >= left - 1 && end.y > top - 20 && end.y < bottom + 20);
    if (bottom - top < 11 * ends.length) return; // so many that letters would only cover each other
    ends.sort((a, b) => a.place - b.place);
    while (ends.length) {
      const near = ends.findIndex((end) => end.place - ends[0].place >= 15);
      this.column(ends.splice(0, near < 0 ? ends.length : near).sort((a, b) => a.y - b.y));
    }
  }

  column(ends) {
    const { top, bottom } = this.at;
    const gap = Math.min(15, (bottom - top) / ends.length);
    ends.forEach((end, i) => (end.at = Math.max(end.y, i ? ends[i - 1].at + gap : top + 6)));
    for (let i = ends.length - 1, lowest = bottom - 4; i >= 0; i--) {
      ends[i].at = Math.min(ends[i].at, lowest);
      lowest = ends[i].at - gap;
    }
    for (const { s, at, place } of ends) {
      const kind = `g${s.group}${s.dashed ? " hollow" : ""}${this.page.dims(s.group) ? " dim" : ""}`;
      const badge = add(this.svg, "g", { class: `badge ${kind}` });
      add(badge, "circle", { cx: place + 13, cy: at, r: 7 });
      add(badge, "text", { x: place + 13, y: at + 3.4, "text-anchor": "middle" }, this.page.groups[s.group].letter);
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
