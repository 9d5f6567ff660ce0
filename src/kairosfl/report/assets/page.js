// The page around the charts: which groups are shown and how, the target, the baseline, and fresh data during a run.
"use strict";

// The value of a field, and the same only where the reader has set it. What fields hold is kept nowhere else.
const value = (id) => byId(id)?.value ?? "";
const chosen = (id) => (byId(id)?.matches("[data-touched]") ? value(id) : "");

// A list as the server shortened it, written out.
function written(list) {
  if (!list || Array.isArray(list)) return list;
  return Array.from({ length: list.length }, (_, i) => list.first + i * list.step);
}

const page = {
  ...sweep,
  hidden: new Set(), // groups by number
  filtered: new Set(), // those that the filter leaves out
  focus: [], // the groups whose chip is under the pointer
  range: null, // rounds shown in all charts over rounds
  cursor: null,
  charts: [],
  late: [], // charts that are still to be drawn
  sorted: {}, // by table

  load() {
    this.data = JSON.parse(byId("data").textContent);
    this.groups = this.data.groups;
    for (const s of [...this.data.lines.flatMap((spec) => spec.series), ...this.data.runs]) {
      for (const key of ["x", "mean", "count", "deviation", "round"]) s[key] = written(s[key]);
      s.seeds = s.seeds?.map(written);
    }
    this.update();
    for (const [id, { column, down }] of Object.entries(this.sorted)) {
      const head = document.querySelectorAll(`#${id} th`)[column]; // none any more
      if (head) sort(head, down);
    }
    this.draw();
  },

  // Everything that follows from the data and the fields.
  update() {
    this.facet = value("facet");
    this.paint();
    this.filter();
    this.compare();
    const hide = (box) => `#results :is([data-name="${box.dataset.column}"],[data-column="${box.dataset.column}"]){display:none}`;
    byId("columns").textContent = [...document.querySelectorAll("#choose input:not(:checked)")].map(hide).join("");
    const inside = value("inside-select") || "0";
    for (const each of document.querySelectorAll("[data-inside]")) each.hidden = each.dataset.inside !== inside;
    this.build();
    this.shown();
  },

  build() {
    const kept = new Map(this.charts.map(({ spec, own, log }) => [spec.key, { own, log }]));
    this.charts = [];
    for (const each of document.querySelectorAll("figure.facet, figure .tools")) each.remove();
    const make = (kind, figure, spec) => this.charts.push(Object.assign(new kind(figure, spec, this), kept.get(spec.key)));
    for (const spec of this.data.lines) this.facets(byId(`fig-${spec.key}`), spec, make);
    for (const spec of this.data.heats) make(HeatChart, byId(`fig-${spec.key}`), spec);
  },

  // The chart of some curves, or one for every value of the parameter that the main charts are split by.
  facets(figure, spec, make) {
    const levels = this.facet && figure.dataset.target ? this.levels(this.facet) : [];
    figure.hidden = levels.length > 0;
    if (!levels.length) return make(LineChart, figure, { ...spec, all: spec.series });
    levels.forEach((level, i) => {
      const series = spec.series.filter((s) => this.data.varied[this.facet][s.group] === level);
      if (!series.length) return;
      const own = figure.cloneNode(true);
      Object.assign(own, { id: `${figure.id}-${i}`, className: "facet", hidden: false });
      own.dataset.title = own.querySelector("b").textContent = `${figure.dataset.title}, ${this.facet} = ${level}`;
      figure.before(own);
      make(LineChart, own, { ...spec, key: `${spec.key}-${i}`, series, all: spec.series });
    });
  },

  off(group) {
    return this.hidden.has(group) || this.filtered.has(group);
  },

  // Others fade only while a group that is shown is pointed at.
  dims(group) {
    return this.focus.some((each) => !this.off(each)) && !this.focus.includes(group);
  },

  // The charts that can be seen at once, the others after them, one at a time.
  draw() {
    cancelAnimationFrame(this.waiting);
    clearTimeout(this.later);
    this.waiting = undefined;
    this.width = innerWidth;
    const shown = this.charts.filter((chart) => !chart.figure.hidden);
    for (const chart of shown) chart.measure(); // all before the first is drawn, or each would lay out the page anew
    this.late = shown.filter((chart) => !chart.seen);
    for (const chart of shown) if (!this.late.includes(chart)) chart.draw();
    const next = () => {
      this.late.shift()?.draw();
      if (this.late.length) this.later = setTimeout(next);
    };
    this.later = setTimeout(next);
  },

  // Many events in a row, one drawing.
  redraw() {
    this.waiting ??= requestAnimationFrame(() => this.draw());
  },

  point(chart, x, event) {
    this.cursor = x;
    for (const each of this.charts) {
      const linked = each === chart || (each.linked && chart?.linked);
      if (each.svg && !each.figure.hidden) each.mark(linked ? x : null, each === chart ? event : null);
    }
  },

  // Hides or shows groups, or shows them alone.
  toggle(groups, alone) {
    const others = [...this.groups.keys()].filter((group) => !groups.includes(group));
    const hide = groups.some((group) => !this.hidden.has(group));
    if (alone) this.hidden = new Set(String(others) === String(d3.sort(this.hidden)) ? [] : others);
    else for (const group of groups) this.hidden[hide ? "add" : "delete"](group);
    this.shown();
  },

  shown() {
    for (const chip of document.querySelectorAll(".chip")) {
      const members = this.members(chip);
      chip.setAttribute("aria-pressed", members.some((group) => !this.hidden.has(group)));
      chip.hidden = members.every((group) => this.filtered.has(group));
    }
    for (const row of document.querySelectorAll("tr[data-group]")) {
      row.classList.toggle("off", this.hidden.has(Number(row.dataset.group)));
      row.hidden = this.filtered.has(Number(row.dataset.group));
    }
    this.grid();
    this.redraw();
  },

  // The difference of each group to the baseline on its data, and the target, which is what the baseline reaches.
  compare() {
    const { versus, words, metric, target } = this.data;
    const base = chosen("baseline"), { goal, reached } = this.groups[base || -1] ?? {}, typed = chosen("target");
    for (const [i, cells] of Object.entries(versus[base] ?? {}))
      cells.forEach((text, k) => (this.cell(i, ["vs. baseline", "p (Holm)"][k]).innerHTML = text)); // as the server wrote it
    this.target = typed ? Number(typed) / metric.scale : goal ?? target;
    if (byId("clear")) byId("clear").hidden = !document.querySelector("#results .clear");
    if (byId("goal-words")) byId("goal-words").textContent = typed ? "as typed here" : goal != null ? reached : words.target;
    this.reach();
  },

  cell(group, name) {
    return document.querySelector(`#results tr[data-group="${group}"] [data-column="${name}"]`);
  },

  // Rounds and bytes to the target, for the target that is set now.
  reach() {
    const { target, data } = this;
    const { scale, sign } = data.metric;
    const field = byId("target");
    if (field && target !== null && document.activeElement !== field) field.value = Number((scale * target).toPrecision(12));
    this.groups.forEach((_, group) => {
      const runs = data.runs.filter((run) => run.group === group);
      const seeds = [...new Set(this.groups[group].seeds)]; // of which unfinished runs may be left out
      const put = (name, cost, digits) => {
        const spent = (run) => cost(run)[run.score.findIndex((s) => target !== null && sign * s >= sign * target)];
        const known = seeds.map((seed) => d3.mean(runs.filter((run) => run.seed === seed), spent)); // repeated: as one
        const cell = this.cell(group, name);
        cell.textContent = cell.title = spread(known.filter((each) => each !== undefined), seeds.length, digits);
      };
      put("rounds to target", (run) => run.round, () => 0);
      put("MB to target", (run) => run.mb, (mean) => (mean >= 1 ? 1 : 3));
    });
  },
};

// During a run: poll now and then and update what has changed, keeping what the reader chose.
async function refresh() {
  if (document.querySelector(".selection:not([style*=none])")) return; // not under a hand that is drawing a range
  const live = document.documentElement.dataset;
  try {
    const answer = await fetch(`/?since=${live.mark}`, { cache: "no-store" });
    if (answer.status === 200) {
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      const kept = document.querySelectorAll("[data-touched], details[open], input:focus");
      const active = document.activeElement;
      const at = active.id ? `#${active.id}` : active.closest("figure") && `#${active.closest("figure").id} svg`;
      tip.hide();
      for (const id of ["page", "data"]) byId(id).replaceWith(fresh.getElementById(id));
      document.title = fresh.title;
      live.mark = fresh.documentElement.dataset.mark;
      for (const each of kept) {
        const { id, value, checked, open } = each;
        if (byId(id)) Object.assign(byId(id), { value, checked, open }).toggleAttribute("data-touched", each.matches("[data-touched]"));
      }
      const focus = () => at && document.querySelector(at)?.focus({ preventScroll: true });
      focus(); // on a target that is half typed, which is then left alone
      page.load();
      focus(); // on a chart
    }
    byId("live")?.classList.remove("lost");
  } catch {
    byId("live")?.classList.add("lost");
  }
}

for (const [type, tag] of [["input", "INPUT"], ["change", "SELECT"]])
  document.addEventListener(type, ({ target }) => {
    if (target.tagName !== tag) return;
    target.toggleAttribute("data-touched", tag === "SELECT" || target.value !== ""); // an empty field is as it was
    page.update();
  }, true);

document.addEventListener("click", ({ target }) => {
  const [chip, head, button] = [".chip", ".sortable th", "button"].map((kind) => target.closest(kind));
  if (chip) page.toggle(page.members(chip));
  else if (head) sort(head, head.getAttribute("aria-sort") !== "descending");
  else if (button?.dataset.table) saveTable(button.dataset.table);
  else if (button?.dataset.from) copy(button);
});
document.addEventListener("dblclick", ({ target }) => {
  if (target.closest(".chip")) page.toggle(page.members(target.closest(".chip")), true);
});
document.addEventListener("mouseover", ({ target }) => {
  const chip = target.closest(".chip"), groups = chip ? page.members(chip) : [];
  if (String(groups) === String(page.focus)) return;
  page.focus = groups;
  page.redraw();
});

// On paper the columns are narrow whatever the window was: draw for them, so that the letters keep their size.
for (const when of ["beforeprint", "afterprint"])
  addEventListener(when, () => {
    page.printing = when === "beforeprint";
    page.draw();
  });

addEventListener("resize", () => {
  if (innerWidth !== page.width) page.redraw(); // not for a phone's bars that come and go
});
page.load();
if (document.documentElement.dataset.mark) setInterval(refresh, 2000);
