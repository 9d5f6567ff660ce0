// Curves with bands over seeds, critical periods, and a letter at the end of each.
"use strict";

// Each value with its neighbours on both sides, so that a smoothed curve does not lag behind the raw one.
function smoothed(values, window) {
  if (window < 2) return values;
  const half = window >> 1;
  const known = [...values.keys()].filter((i) => values[i] !== null);
  const sums = [0];
  for (const i of known) sums.push(sums[sums.length - 1] + values[i]);
  const out = values.map(() => null);
  known.forEach((i, k) => {
    const from = Math.max(0, k - half), to = Math.min(known.length, k + half + 1);
    out[i] = (sums[to] - sums[from]) / (to - from);
  });
  return out;
}

class LineChart extends Chart {
  constructor(figure, spec, page) {
    super(figure, spec, page);
    this.log = false;
    this.logButton = this.button("log", "Logarithmic axis", () => {
      this.log = !this.log;
      this.draw();
    });
    this.logButton.hidden = spec.percent || spec.series.some((s) => s.mean.some((v) => v !== null && v <= 0));
  }

  kept() {
    return { own: this.own, log: this.log };
  }

  // What the server decided is shown as it was: a mean of cohort sizes was never a cohort.
  get window() {
    return this.spec.steps ? 1 : this.page.smooth;
  }

  // For a file of numbers: one line for each point of each curve that is shown.
  rows() {
    const { groups } = this.page;
    const points = (s) => s.x.map((x, i) => [x, groups[s.group].label, s.name, s.mean[i], s.deviation?.[i], s.count[i]]);
    const shown = this.spec.series.filter((s) => !this.page.off(s.group));
    return [[this.spec.x_label, "group", "curve", "mean", "deviation", "seeds"], ...shown.flatMap(points).map((p) => p.map((v) => v?.toString()))];
  }

  whole() {
    const series = this.spec.all;
    const firsts = series.map((s) => s.x[0]), lasts = series.map((s) => s.x[s.x.length - 1]);
    const low = this.linked ? Math.min(...firsts) : 0;
    const high = Math.max(...lasts);
    return high > low ? [low, high] : [low - 0.5, high + 0.5];
  }

  // The curves that are shown, smoothed as the page asks.
  curves(series) {
    const { spread } = this.page;
    const smooth = this.window;
    return series.filter((s) => !this.page.off(s.group)).map((s) => {
      const mean = smoothed(s.mean, smooth);
      const deviation = s.deviation && spread === "band" ? smoothed(s.deviation, smooth) : null;
      const seeds = s.seeds && spread === "seeds" ? s.seeds.map((each) => smoothed(each, smooth)) : [];
      const signed = s.seeds && s.seeds.some((each) => each.some((v) => v < 0));
      return { ...s, mean, deviation, seeds, signed, raw: smooth > 1 ? s.mean : null };
    });
  }

  // The band at a point: not below zero if no seed is, and no share above one.
  edges(s, i) {
    const low = s.mean[i] - s.deviation[i], high = s.mean[i] + s.deviation[i];
    return [s.signed ? low : Math.max(0, low), this.spec.percent ? Math.min(1, high) : high];
  }

  extent(curves) {
    const [from, to] = this.range;
    let low = Infinity, high = -Infinity;
    const see = (value) => {
      if (value === null || (this.log && value <= 0)) return;
      [low, high] = [Math.min(low, value), Math.max(high, value)];
    };
    for (const s of curves)
      for (const i of s.x.keys()) {
        if (s.x[i] < from || s.x[i] > to || s.mean[i] === null) continue;
        [s.mean[i], ...(s.deviation?.[i] != null ? this.edges(s, i) : []), ...s.seeds.map((each) => each[i])].forEach(see);
      }
    if (low > high) return this.log ? [0.1, 1] : [0, 1];
    if (high - low < 1e-9 * Math.max(Math.abs(low), Math.abs(high))) low = high; // but for rounding
    if (this.log) return [low / 1.1, high * 1.1];
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    const floor = low >= 0 ? 0 : -Infinity;
    return [Math.max(floor, low - room), this.spec.percent ? Math.min(1, high + room) : high + room];
  }

  draw() {
    if (this.logButton.hidden) this.log = false; // a value that has no logarithm has come in
    this.logButton.setAttribute("aria-pressed", this.log);
    const hero = this.figure.classList.contains("hero");
    const { series, all } = this.spec;
    const curves = this.curves(series);
    const [low, high] = this.extent(series === all ? curves : this.curves(all)); // facets share their axes
    const scale = this.spec.percent ? 100 : 1;
    const { values, step } = this.log ? logTicks(low, high) : ticks(low * scale, high * scale, hero ? 7 : 5);
    const shown = values.map((v) => v / scale);
    const text = (v) => number(v * scale, step) + (this.spec.percent ? " %" : "");
    const strips = this.strips(curves);
    const words = Math.max(hero && strips.length > 1 ? 6 : 3, ...shown.map((v) => text(v).length)); // "critical"
    const left = 14 + 6.6 * words;
    const rows = strips.length > 1 && strips.length <= (hero ? 12 : 4) ? strips.length : 0;
    const below = rows && rows * 6 + 3;
    const badges = this.page.groups.length > 1;
    this.frame(left, badges ? 24 : 10, 40 + below);
    const { top, height } = this.at;
    const f = this.log ? Math.log : (v) => v;
    this.y = (v) => top + height - ((f(Math.max(v, this.log ? low : v)) - f(low)) / (f(high) - f(low) || 1)) * height;
    this.shade(strips, rows);
    this.axes(shown, this.y, text, below);
    this.goal(low, high);
    const inside = node("g", { "clip-path": `url(#${this.clip})` }, this.svg);
    for (const s of curves) this.curve(s, inside);
    if (badges) this.badges(curves);
    this.drawn = curves;
    this.finish();
    this.figure.querySelector(".shading").textContent = this.shading();
  }

  // Critical periods belong to rounds; each shown group has a strip, a single one shades the whole height.
  strips(curves) {
    if (!this.linked) return [];
    const groups = [...new Set(curves.map((s) => s.group))];
    return groups.filter((g) => this.page.groups[g].critical.length);
  }

  shade(strips, rows) {
    const { left, top, width, height } = this.at;
    const draw = (kind, group, y, tall) => {
      for (const [a, b, share] of this.page.groups[group].critical) {
        const [x, end] = [Math.max(left, this.x(a)), Math.min(left + width, this.x(b))];
        const box = { x, y, width: Math.max(0, end - x), height: tall };
        node("rect", { class: `${kind} g${group}`, ...box, style: `--share:${share}` }, this.svg);
      }
    };
    const full = strips.length === 1 ? strips : strips.filter((g) => this.page.focus.includes(g));
    for (const group of full) draw("critical", group, top, height);
    if (!rows) return;
    strips.forEach((group, row) => draw("strip", group, top + height + 4 + row * 6, 4));
    if (this.figure.classList.contains("hero"))
      node("text", { class: "hint", x: left - 7, y: top + height + 16, "text-anchor": "end" }, this.svg, "critical");
  }

  // The explanation of the shading: only what is currently drawn.
  shading() {
    const { band, critical } = this.page.data.words;
    const drawn = (kind) => this.svg.querySelector(kind);
    return [
      drawn(".band") ? `Bands: ${band}.` : "",
      drawn(".critical") ? `Shaded: ${critical}.` : "",
      drawn(".strip") ? `Strips below: ${critical}.` : "",
    ].filter(Boolean).join(" ");
  }

  goal(low, high) {
    const goal = this.page.target;
    if (!this.figure.dataset.target || !(goal > low && goal < high)) return;
    const { left, width } = this.at;
    const y = this.y(goal);
    node("line", { class: "goal", x1: left, x2: left + width, y1: y, y2: y }, this.svg);
    const words = `target ${this.spec.percent ? `${number(goal * 100)} %` : number(goal)}`;
    node("text", { class: "hint", x: left + 4, y: y - 5 }, this.svg, words);
  }

  // A line through the points; a decision holds for its whole round, so it is drawn in steps.
  path(x, y) {
    let text = "", last = null;
    for (let i = 0; i < x.length; i++) {
      if (y[i] === null) continue;
      const at = this.x(x[i]), level = this.y(y[i]).toFixed(1);
      if (last !== null && this.spec.steps) text += `H${((last + at) / 2).toFixed(1)}V${level}H${at.toFixed(1)}`;
      else text += `${last === null ? "M" : "L"}${at.toFixed(1)} ${level}`;
      last = at;
    }
    return text;
  }

  curve(s, parent) {
    const dim = this.page.dims(s.group) ? " dim" : "";
    const kind = `g${s.group}${s.dashed ? " dashed" : ""}${dim}`;
    const g = node("g", { class: `series ${kind}`, "data-group": s.group }, parent);
    if (s.deviation && s.deviation.some((v) => v > 0)) {
      const i = [...s.x.keys()].filter((k) => s.deviation[k] !== null && s.mean[k] !== null);
      const upper = this.path(i.map((k) => s.x[k]), i.map((k) => this.edges(s, k)[1]));
      i.reverse();
      const lower = this.path(i.map((k) => s.x[k]), i.map((k) => this.edges(s, k)[0]));
      if (upper) node("path", { class: "band", d: `${upper}${lower.replace("M", "L")}Z` }, g);
    }
    if (s.raw) node("path", { class: "raw", d: this.path(s.x, s.raw) }, g);
    for (const each of s.seeds) node("path", { class: "seed", d: this.path(s.x, each) }, g);
    node("path", { class: "line", d: this.path(s.x, s.mean) }, g);
    if (s.x.length === 1) node("circle", { class: "dot", cx: this.x(s.x[0]), cy: this.y(s.mean[0]), r: 3 }, g);
  }

  legend(copy, top) {
    const { groups } = this.page;
    const named = groups.length > 1 || this.drawn.length > 1 ? this.drawn : [];
    const { fill, fontFamily } = getComputedStyle(this.svg.querySelector("text"));
    const pen = document.createElement("canvas").getContext("2d");
    pen.font = `12px ${fontFamily}`;
    const lines = [...this.svg.querySelectorAll(".series .line")].map((line) => getComputedStyle(line));
    const font = `fill:${fill};font:${pen.font}`.replaceAll('"', "'");
    const widths = named.map((s, row) => {
      const y = top + 8 + 17 * row;
      const { stroke, strokeDasharray } = lines[row];
      const look = `stroke:${stroke};stroke-width:2;stroke-dasharray:${strokeDasharray}`;
      node("line", { x1: 6, x2: 30, y1: y, y2: y, style: look }, copy);
      const group = groups.length > 1 ? `${groups[s.group].letter}  ${groups[s.group].label}` : "";
      const words = [group, s.name].filter(Boolean).join(", ");
      node("text", { x: 38, y: y + 4, style: font }, copy, words);
      return 46 + pen.measureText(words).width;
    });
    const words = this.shading();
    if (words) {
      node("text", { x: 6, y: top + 12 + 17 * named.length, style: font }, copy, words);
      widths.push(14 + pen.measureText(words).width);
    }
    return widths.length ? { width: Math.max(...widths), height: 17 * widths.length + 8 } : { width: 0, height: 0 };
  }

  // Letters at the right end; where curves end close together, each column of letters is pushed apart.
  badges(curves) {
    const { left, top, width, height } = this.at;
    const ends = curves.map((s) => {
      let i = s.x.length - 1;
      while (i > 0 && (s.x[i] > this.range[1] + 1e-9 || s.mean[i] === null)) i--;
      const x = this.x(s.x[i]);
      return { s, y: this.y(s.mean[i]), x, place: this.linked ? left + width : Math.min(left + width, x) };
    }).filter((end) => end.x >= left - 1 && end.y > top - 20 && end.y < top + height + 20);
    if (height < 11 * ends.length) return; // so many that letters would only cover each other
    ends.sort((a, b) => a.place - b.place);
    while (ends.length) {
      const near = ends.findIndex((end) => end.place - ends[0].place >= 15);
      this.column(ends.splice(0, near < 0 ? ends.length : near).sort((a, b) => a.y - b.y));
    }
  }

  column(ends) {
    const { top, height } = this.at;
    const gap = Math.min(15, height / ends.length);
    ends.forEach((end, i) => (end.at = Math.max(end.y, i ? ends[i - 1].at + gap : top + 6)));
    for (let i = ends.length - 1, lowest = top + height - 4; i >= 0; i--) {
      ends[i].at = Math.min(ends[i].at, lowest);
      lowest = ends[i].at - gap;
    }
    for (const { s, at, place } of ends) {
      const dim = this.page.dims(s.group) ? " dim" : "";
      const badge = node("g", { class: `badge g${s.group}${s.dashed ? " hollow" : ""}${dim}` }, this.svg);
      node("circle", { cx: place + 13, cy: at, r: 7 }, badge);
      node("text", { x: place + 13, y: at + 3.4, "text-anchor": "middle" }, badge, this.page.groups[s.group].letter);
    }
  }

  // The crosshair at a value of x; with an event, also the box of numbers beside the pointer.
  mark(value, event) {
    this.cross.replaceChildren();
    const [low, high] = this.range;
    if (value === null || value < low || value > high || !this.drawn.length) {
      this.cross.setAttribute("visibility", "hidden");
      return;
    }
    const { top, height } = this.at;
    const points = this.drawn.map((s) => s.x[nearest(s.x, value)]).sort((a, b) => Math.abs(a - value) - Math.abs(b - value));
    const spot = this.linked ? points[0] : value; // the round that is nearest in any curve
    node("line", { x1: this.x(spot), x2: this.x(spot), y1: top, y2: top + height }, this.cross);
    const here = this.drawn.filter((s) => s.x[0] <= spot && s.x[s.x.length - 1] >= spot); // begun, and not yet over
    const rows = here.map((s) => ({ s, i: nearest(s.x, spot) })).filter(({ s, i }) => s.mean[i] !== null);
    for (const { s, i } of rows) {
      const y = this.y(s.mean[i]);
      if (y >= top - 1 && y <= top + height + 1)
        node("circle", { class: `g${s.group}`, cx: this.x(s.x[i]), cy: y, r: 3.5 }, this.cross);
    }
    this.cross.setAttribute("visibility", "visible");
    if (!event) return;
    if (!rows.length) return tip.hide();
    rows.sort((a, b) => b.s.mean[b.i] - a.s.mean[a.i]);
    tip.show(event.clientX, event.clientY, (box) => {
      const mean = this.window > 1 ? ` (mean of ${this.window} points)` : "";
      html("b", {}, box, `${this.spec.x_label} ${number(spot)}${mean}`);
      for (const { s, i } of rows.slice(0, 14)) this.row(box, s, i, spot);
      if (rows.length > 14) html("div", { class: "note" }, box, `and ${rows.length - 14} more`);
    });
  }

  row(box, s, i, spot) {
    const group = this.page.groups[s.group];
    const line = html("div", { class: `row g${s.group}` }, box);
    html("i", { class: s.dashed ? "key hollow" : "key" }, line, group.letter);
    const critical = this.linked && group.critical.some(([a, b]) => spot > a && spot < b);
    const name = [this.page.groups.length > 1 || !s.name ? group.label : "", s.name].filter(Boolean).join(", ");
    html("span", { class: "name" }, line, name);
    const scale = this.spec.percent ? 100 : 1;
    const value = (v) => (this.spec.percent ? (v * scale).toFixed(2) : number(v));
    const spread = s.deviation && s.deviation[i] !== null ? ` ± ${value(s.deviation[i])}` : "";
    html("span", { class: "value" }, line, value(s.mean[i]) + spread + (this.spec.percent ? " %" : ""));
    const elsewhere = this.linked && s.x[i] !== spot ? `round ${s.x[i]}` : "";
    const notes = [elsewhere, critical ? "critical" : "", s.count[i] < group.seeds.length ? `${s.count[i]} of ${group.seeds.length} seeds` : ""];
    html("span", { class: "note" }, line, notes.filter(Boolean).join(", "));
  }
}
