// The page around the charts: which groups are shown and how, the target, the baseline, and fresh data during a run.
"use strict";

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
  colour: "", // the parameter that curves are coloured by; "": one colour each
  facet: "", // the parameter that the main charts are split by; "": none
  picked: new Set(), // which of the two the reader has chosen
  words: "", // of the filter
  base: null, // the baseline, where the reader has chosen one
  without: null, // columns of the table that are not shown
  range: null, // rounds shown in all charts over rounds
  cursor: null,
  smooth: null, // points in a mean; the data says how many to begin with
  spread: "band",
  inside: 0, // the group whose heat maps are shown
  charts: [],
  sorted: {}, // by table

  load() {
    const data = JSON.parse(byId("data").textContent);
    for (const s of [...data.lines.flatMap((spec) => spec.series), ...data.runs]) {
      for (const key of ["x", "mean", "count", "deviation", "round"]) s[key] = written(s[key]);
      s.seeds = s.seeds?.map(written);
    }
    const fresh = { data, groups: data.groups, target: this.chosen ?? data.target, focus: [] };
    Object.assign(this, fresh); // the chip under the pointer is gone, and cannot say that it was left
    this.smooth ??= data.smooth;
    if (data.groups.length) this.without ??= new Set([...data.extra, ...Object.keys(data.varied).map((name) => `=${name}`)]);
    this.arrange();
    if (this.inside >= this.groups.length) this.inside = 0;
    this.paint();
    this.wire();
    this.compare();
    this.build();
    for (const [id, { column, down }] of Object.entries(this.sorted)) {
      const head = document.querySelectorAll(`#${id} th`)[column]; // none any more
      if (head) sort(head, down);
    }
    document.documentElement.dataset.ready = "yes";
  },

  build() {
    this.kept = new Map(this.charts.map((chart) => [chart.spec.key, { own: chart.own, log: chart.log }]));
    this.charts = [];
    for (const each of document.querySelectorAll("figure.facet, figure .tools")) each.remove();
    for (const spec of this.data.lines) this.add({ ...spec, all: spec.series }, LineChart);
    for (const spec of this.data.heats) this.add(spec, HeatChart);
    this.look(this.inside);
    this.draw();
    this.grid();
  },

  add(spec, kind) {
    const figure = byId(`fig-${spec.key}`);
    if (!figure) return;
    const levels = this.facet && figure.dataset.target ? this.levels(this.facet) : [];
    if (figure.dataset.target) figure.hidden = levels.length > 0;
    if (!levels.length) this.charts.push(Object.assign(new kind(figure, spec, this), this.kept.get(spec.key)));
    levels.forEach((level, i) => {
      const series = spec.series.filter((s) => this.data.varied[this.facet][s.group] === level);
      if (!series.length) return;
      const own = figure.cloneNode(true);
      Object.assign(own, { id: `${figure.id}-${i}`, className: "facet", hidden: false });
      own.dataset.title = own.querySelector("b").textContent = `${figure.dataset.title}, ${this.facet} = ${level}`;
      figure.parentNode.insertBefore(own, figure);
      const key = `${spec.key}-${i}`;
      this.charts.push(Object.assign(new kind(own, { ...spec, key, series }, this), this.kept.get(key)));
    });
  },

  off(group) {
    return this.hidden.has(group) || this.filtered.has(group);
  },

  // Others fade only while a group that is shown is pointed at.
  dims(group) {
    return this.focus.some((each) => !this.off(each)) && !this.focus.includes(group);
  },

  draw() {
    cancelAnimationFrame(this.waiting);
    this.waiting = undefined;
    const shown = this.charts.filter((chart) => !chart.figure.hidden);
    for (const chart of shown) chart.measure(); // all before the first is drawn, or each would lay out the page anew
    for (const chart of shown) chart.draw();
  },

  // Many events in a row, one drawing.
  redraw() {
    this.waiting ??= requestAnimationFrame(() => this.draw());
  },

  point(chart, value, event) {
    this.cursor = value;
    for (const each of this.charts) {
      if (each.figure.hidden || !each.cross) continue;
      if (!chart) each.mark(null);
      else if (each === chart) each.mark(value, event);
      else if (each.linked && chart.linked) each.mark(value);
    }
  },

  toggle(groups) {
    const hide = groups.some((group) => !this.hidden.has(group));
    for (const group of groups) hide ? this.hidden.add(group) : this.hidden.delete(group);
    this.shown();
  },

  only(groups) {
    const alone = this.hidden.size === this.groups.length - groups.length && !groups.some((group) => this.hidden.has(group));
    this.hidden = new Set(alone ? [] : [...this.groups.keys()].filter((group) => !groups.includes(group)));
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
    const { versus, words, target } = this.data;
    if (this.base !== null && versus[this.base]) {
      const { problem, label, goal } = this.groups[this.base];
      const put = (i, name, text) => {
        const cell = document.querySelector(`#results tr[data-group="${i}"] [data-column="${name}"]`);
        if (cell) cell.innerHTML = text; // numbers, as the server wrote them
      };
      this.groups.forEach((group, i) => {
        if (group.problem !== problem) return;
        const [difference, p] = versus[this.base][i] ?? ["–", "–"];
        put(i, "vs. baseline", difference);
        put(i, "p (Holm)", p);
      });
      const own = goal !== null && this.groups.every((group) => group.problem === problem) && words.target !== "as given";
      this.target = this.chosen ?? (own ? goal : target);
      if (own) words.target = `what ${label}, the baseline, reaches in the final 10 % of its rounds, rounded`;
    }
    if (byId("clear")) byId("clear").hidden = !document.querySelector("#results .clear");
    const said = byId("goal-words");
    if (said) said.textContent = this.chosen === undefined ? words.target : "as typed here";
    this.reach();
    this.redraw();
  },

  columns() {
    const rule = (name) => `#results :is([data-name=${name}],[data-column=${name}]){display:none}`;
    byId("columns").textContent = [...this.without].map((name) => rule(JSON.stringify(name))).join("");
  },

  // Which run the heat maps are of.
  look(group) {
    this.inside = group;
    for (const each of document.querySelectorAll("[data-inside]")) {
      const was = each.hidden;
      each.hidden = Number(each.dataset.inside) !== group;
      const chart = was && !each.hidden && this.charts.find((c) => c.figure === each);
      if (chart) chart.draw();
    }
    const select = byId("inside-select");
    if (select) select.value = group;
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
        const spent = (run) => cost(run)[run.score.findIndex((s) => target !== null && sign * s >= sign * target)] ?? null;
        const known = seeds.map((seed) => runs.filter((run) => run.seed === seed).map(spent).filter((v) => v !== null));
        const values = known.filter((each) => each.length).map((each) => d3.mean(each)); // runs that repeat a seed count as one
        const cell = document.querySelector(`tr[data-group="${group}"] [data-column="${name}"]`);
        if (cell) cell.textContent = cell.title = spread(values, seeds.length, digits);
      };
      put("rounds to target", (run) => run.round, () => 0);
      put("MB to target", (run) => run.mb, (value) => (value >= 1 ? 1 : 3));
    });
  },

  wire() {
    this.filter(this.words);
    bind("filter", this.words, (value) => this.filter(value));
    for (const name of ["colour", "facet"])
      this.keep(name, name, () => {
        this.picked.add(name);
        this.paint();
        this.shown();
        this.build();
      });
    for (const id of ["grid-across", "grid-up", "grid-data"]) this.keep(id, id, () => this.grid());
    this.keep("baseline", "base", () => this.compare());
    this.keep("smooth", "smooth", () => this.redraw(), Number);
    this.keep("spread", "spread", () => this.redraw());
    this.choices();
    for (const button of document.querySelectorAll(".save-table"))
      button.onclick = () => saveTable(button.dataset.table);
    bind("inside-select", String(this.inside), (value) => this.look(Number(value)));
    bind("target", null, (value) => {
      if (value === "" || Number.isNaN(Number(value))) return;
      this.target = this.chosen = Number(value) / this.data.metric.scale;
      this.compare();
    });
    for (const head of document.querySelectorAll("table.sortable th"))
      head.querySelector("button").onclick = () => sort(head, head.getAttribute("aria-sort") !== "descending");
    for (const button of document.querySelectorAll("button.copy")) button.onclick = () => copy(button);
  },

  // A field whose value is kept under this name when the page is updated.
  keep(id, name, act, read = String) {
    bind(id, this[name] ?? null, (value) => {
      this[name] = read(value);
      act();
    });
  },

  // A box for every column but the first.
  choices() {
    const box = document.querySelector("#choose > div");
    if (!box) return;
    for (const head of [...document.querySelectorAll("#results th")].slice(1)) {
      const label = add(box, "label");
      const tick = add(label, "input", { type: "checkbox" });
      const column = head.dataset.name;
      tick.checked = !this.without.has(column);
      label.append(head.textContent);
      tick.onchange = () => {
        this.without[tick.checked ? "delete" : "add"](column);
        this.columns();
      };
    }
    this.columns();
  },
};

function bind(id, value, act) {
  const field = byId(id);
  if (!field) return;
  if (value !== null) field.value = value;
  field.addEventListener(field.tagName === "SELECT" ? "change" : "input", () => act(field.value));
}

// During a run: poll now and then and update what has changed, keeping what the reader chose.
async function refresh() {
  if (document.querySelector(".selection:not([style*=none])")) return; // not under a hand that is drawing a range
  const live = document.documentElement.dataset;
  try {
    const answer = await fetch(`/?since=${live.mark}`, { cache: "no-store" });
    if (answer.status === 200) {
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      const open = [...document.querySelectorAll("details[open]")].map((each) => each.id);
      const active = document.activeElement;
      const at = active.id ? `#${active.id}` : active.closest("figure") && `#${active.closest("figure").id} svg`;
      tip.hide();
      byId("page").replaceWith(fresh.getElementById("page"));
      byId("data").replaceWith(fresh.getElementById("data"));
      document.title = fresh.title;
      live.mark = fresh.documentElement.dataset.mark;
      for (const id of open) byId(id)?.setAttribute("open", "");
      page.load();
      const again = at && document.querySelector(at);
      if (again) again.focus({ preventScroll: true });
      if (again?.id === "target") again.value = active.value; // half typed
    }
    byId("live")?.classList.remove("lost");
  } catch {
    byId("live")?.classList.add("lost");
  }
}

document.addEventListener("click", (event) => {
  if (!event.target.closest("#theme")) return;
  const style = document.documentElement.style;
  const dark = style.colorScheme ? style.colorScheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  style.colorScheme = dark ? "light" : "dark";
});

// On paper the columns are narrow whatever the window was: draw for them, so that the letters keep their size.
for (const when of ["beforeprint", "afterprint"])
  addEventListener(when, () => {
    page.printing = when === "beforeprint";
    page.draw();
  });

let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return; // a phone's bars coming and going
  width = innerWidth;
  page.redraw();
});
page.load();
if (document.documentElement.dataset.mark) setInterval(refresh, 2000);
