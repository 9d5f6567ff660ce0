// The page around the charts: which groups are shown, the target, the tables, and fresh data during a run.
"use strict";

const page = {
  hidden: new Set(), // groups by number
  focus: null, // the group whose chip is under the pointer
  range: null, // rounds shown in all charts over rounds
  cursor: null,
  smooth: null, // points in a mean; the data says how many to begin with
  spread: "band",
  inside: 0, // the group whose heat maps are shown
  charts: [],

  load() {
    const data = JSON.parse(document.getElementById("data").textContent);
    this.kept = new Map(this.charts.map((chart) => [chart.spec.key, chart.kept()]));
    const fresh = { data, groups: data.groups, target: this.chosen ?? data.target, charts: [], focus: null };
    Object.assign(this, fresh); // the chip under the pointer is gone, and cannot say that it was left
    this.smooth ??= data.smooth;
    for (const spec of data.lines) this.add(spec, LineChart);
    for (const spec of data.heats) this.add(spec, HeatChart);
    if (this.inside >= this.groups.length) this.inside = 0;
    this.wire();
    this.look(this.inside);
    this.draw();
    this.reach();
    const head = document.querySelectorAll("table.sortable th")[this.sorted?.column]; // none yet, or none any more
    if (head) sort(head, this.sorted.down);
    document.documentElement.dataset.ready = "yes";
  },

  add(spec, kind) {
    const figure = document.getElementById(`fig-${spec.key}`);
    if (figure) this.charts.push(Object.assign(new kind(figure, spec, this), this.kept.get(spec.key)));
  },

  // The highlighted group; a hidden one is not, or the others would fade without a reason.
  get focused() {
    return this.focus === null || this.hidden.has(this.focus) ? null : this.focus;
  },

  dims(group) {
    return this.focused !== null && this.focused !== group;
  },

  draw() {
    for (const chart of this.charts) if (!chart.figure.hidden) chart.draw();
  },

  // Many events in a row, one drawing.
  redraw() {
    this.waiting ??= requestAnimationFrame(() => {
      this.waiting = undefined;
      this.draw();
    });
  },

  setRange(range) {
    this.range = range;
    this.redraw();
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

  toggle(group) {
    if (this.hidden.has(group)) this.hidden.delete(group);
    else this.hidden.add(group);
    this.shown();
  },

  only(group) {
    const alone = this.hidden.size === this.groups.length - 1 && !this.hidden.has(group);
    this.hidden = new Set(alone ? [] : this.groups.keys());
    if (!alone) this.hidden.delete(group);
    this.shown();
  },

  shown() {
    for (const chip of document.querySelectorAll(".chip"))
      chip.setAttribute("aria-pressed", !this.hidden.has(Number(chip.dataset.group)));
    for (const row of document.querySelectorAll("tr[data-group]"))
      row.classList.toggle("off", this.hidden.has(Number(row.dataset.group)));
    this.redraw();
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
    const select = document.getElementById("inside-select");
    if (select) select.value = group;
  },

  // Rounds and bytes to the target, for the target that is set now.
  reach() {
    const { target, data } = this;
    const { scale, sign } = data.metric;
    const field = document.getElementById("target");
    if (field && document.activeElement !== field) field.value = Number((scale * target).toPrecision(12));
    this.groups.forEach((_, group) => {
      const runs = data.runs.filter((run) => run.group === group);
      const seeds = [...new Set(this.groups[group].seeds)]; // of which unfinished runs may be left out
      const put = (name, cost, digits) => {
        const spent = (run) => cost(run)[run.score.findIndex((s) => sign * s >= sign * target)] ?? null;
        const known = seeds.map((seed) => runs.filter((run) => run.seed === seed).map(spent).filter((v) => v !== null));
        const values = known.filter((each) => each.length).map(mean); // runs that repeat a seed count as one
        const cell = document.querySelector(`tr[data-group="${group}"] [data-column="${name}"]`);
        if (cell) cell.textContent = cell.title = spread(values, seeds.length, digits);
      };
      put("rounds to target", (run) => run.round, () => 0);
      put("MB to target", (run) => run.mb, (value) => (value >= 1 ? 1 : 3));
    });
  },

  wire() {
    for (const chip of document.querySelectorAll(".chip")) {
      const group = Number(chip.dataset.group);
      chip.addEventListener("click", () => this.toggle(group));
      chip.addEventListener("dblclick", () => this.only(group));
      const focus = (value) => () => {
        this.focus = value;
        this.redraw();
      };
      chip.addEventListener("mouseenter", focus(group));
      chip.addEventListener("mouseleave", focus(null));
    }
    this.shown();
    bind("smooth", String(this.smooth), (value) => {
      this.smooth = Number(value);
      this.redraw();
    });
    bind("spread", this.spread, (value) => {
      this.spread = value;
      this.redraw();
    });
    bind("inside-select", String(this.inside), (value) => this.look(Number(value)));
    bind("target", null, (value) => {
      if (value === "" || Number.isNaN(Number(value))) return;
      this.target = this.chosen = Number(value) / this.data.metric.scale;
      this.reach();
      this.redraw();
    });
    for (const head of document.querySelectorAll("table.sortable th"))
      head.querySelector("button").addEventListener("click", () => {
        sort(head, head.getAttribute("aria-sort") !== "descending");
      });
    for (const button of document.querySelectorAll("button.copy"))
      button.addEventListener("click", () => copy(button));
  },
};

function bind(id, value, act) {
  const field = document.getElementById(id);
  if (!field) return;
  if (value !== null) field.value = value;
  field.addEventListener(field.tagName === "SELECT" ? "change" : "input", () => act(field.value));
}

const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

// As the server writes it: mean, deviation if values differ, a count if it is not all of them.
function spread(values, asked, digitsOf) {
  if (!values.length) return "–";
  const middle = mean(values);
  const digits = digitsOf(middle);
  let text = middle.toFixed(digits);
  if (values.length > 1) {
    const deviation = Math.sqrt(values.reduce((a, b) => a + (b - middle) ** 2, 0) / (values.length - 1));
    if (values.some((value) => value !== values[0])) text += ` ± ${deviation.toFixed(digits)}`;
  }
  return values.length === asked ? text : `${text} (${values.length} of ${asked})`;
}

function sort(head, down) {
  const body = head.closest("table").tBodies[0];
  page.sorted = { column: head.cellIndex, down };
  for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const value = (row) => {
    const text = row.cells[head.cellIndex].textContent.trim();
    const found = parseFloat(text.replace("−", "-"));
    return head.cellIndex === 0 ? text : Number.isNaN(found) ? (down ? -Infinity : Infinity) : found; // never reached: last
  };
  const rows = [...body.rows].sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0));
  body.append(...(down ? rows.reverse() : rows));
}

async function copy(button) {
  const text = document.getElementById(button.dataset.from).textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "copied";
  } catch {
    // Without leave to write to the clipboard, the text is at least selected.
    getSelection().selectAllChildren(document.getElementById(button.dataset.from));
    button.textContent = "selected";
  }
  setTimeout(() => (button.textContent = "copy"), 1500);
}

// During a run: poll now and then and update what has changed, keeping what the reader chose.
async function refresh() {
  if (page.charts.some((chart) => chart.from !== undefined)) return; // not under a hand that is drawing a range
  const live = document.documentElement.dataset;
  try {
    const answer = await fetch(`/?since=${live.mark}`, { cache: "no-store" });
    if (answer.status === 200) {
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      const open = [...document.querySelectorAll("details[open]")].map((each) => each.id);
      const active = document.activeElement;
      const at = active.id ? `#${active.id}` : active.closest("figure") && `#${active.closest("figure").id} svg`;
      tip.hide();
      document.getElementById("page").replaceWith(fresh.getElementById("page"));
      document.getElementById("data").replaceWith(fresh.getElementById("data"));
      document.title = fresh.title;
      live.mark = fresh.documentElement.dataset.mark;
      for (const id of open) document.getElementById(id)?.setAttribute("open", "");
      page.load();
      const again = at && document.querySelector(at);
      if (again) again.focus({ preventScroll: true });
      if (again?.id === "target") again.value = active.value; // half typed
    }
    document.getElementById("live")?.classList.remove("lost");
  } catch {
    document.getElementById("live")?.classList.add("lost");
  }
}

document.addEventListener("click", (event) => {
  if (!event.target.closest("#theme")) return;
  const style = document.documentElement.style;
  const dark = style.colorScheme ? style.colorScheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  style.colorScheme = dark ? "light" : "dark";
});

// On paper the columns are narrow whatever the window was: draw for them, so that the letters keep their size.
addEventListener("beforeprint", () => {
  page.printing = true;
  page.draw();
});
addEventListener("afterprint", () => {
  page.printing = false;
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
