// What all charts share: Observable Plot draws them; here are zoom, the crosshair, the box of numbers, and saving as a file.
"use strict";

const byId = (id) => document.getElementById(id);

// A new element at the end of another, HTML or SVG as that is.
function add(parent, name, attributes = {}, text = "") {
  const made = document.createElementNS(parent.namespaceURI, name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  made.textContent = text;
  parent.append(made);
  return made;
}

function number(value) {
  const size = Math.abs(value);
  const kind = value && (size >= 1e6 || size < 1e-4) ? ".1~e" : size >= 1000 ? ",.6~r" : ",.4~r";
  return d3.format(kind)(value).replace("e+", "e");
}

// Offers a file to save: text, or a data URL.
function offer(name, content, type) {
  const link = document.createElement("a");
  Object.assign(link, { download: name, href: type ? URL.createObjectURL(new Blob([content], { type })) : content });
  link.click();
  if (type) URL.revokeObjectURL(link.href);
  return content;
}

const tip = {
  show({ clientX: x, clientY: y }, fill) {
    const box = byId("tip");
    box.replaceChildren();
    fill(box);
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const left = x + 16 + width < innerWidth ? x + 16 : Math.max(4, x - 16 - width);
    box.style.left = `${left}px`;
    box.style.top = `${Math.max(4, Math.min(innerHeight - height - 4, y - height / 2))}px`;
  },
  hide() {
    byId("tip").hidden = true;
  },
};

class Chart {
  constructor(figure, spec, page) {
    Object.assign(this, { figure, spec, page, own: null, log: false, held: new Set() });
    this.linked = spec.x_label === "round";
    this.plot = figure.querySelector(".plot");
    this.tools = add(figure.querySelector("figcaption"), "span", { class: "tools" });
    this.back = this.button("↺ reset", "Show the whole range (double-click, or 0)", () => this.zoom(null));
    for (const kind of ["svg", "png", "csv"])
      this.button(kind.toUpperCase(), kind === "csv" ? "Save the numbers" : "Save this picture", () => this.save(kind));
    // With Ctrl or ⌘ only, and with two fingers: a bare wheel and one finger are for scrolling the page.
    const asked = (event) => (event.type === "wheel" ? event.ctrlKey || event.metaKey : event.touches?.length > 1);
    const zoomed = ({ transform, sourceEvent }) => sourceEvent && this.zoom(transform.rescaleX(this.unzoomed).domain());
    const plot = d3.select(this.plot).on("touchstart.hold touchend.hold touchcancel.hold", (event) => this.hold(event));
    plot.call(d3.zoom().filter(asked).on("zoom", zoomed)).on("dblclick.zoom", () => this.zoom(null));
  }

  // A gesture goes on only while what it began on is in the page, so that stays, unseen, until the last finger is lifted.
  // Listens before the zoom, which stops the events that it takes.
  hold({ type, target, touches }) {
    const svg = target.closest(".plot > svg");
    if (type === "touchstart" && svg) this.held.add(svg);
    if (touches.length) return;
    for (const each of this.held) if (each !== this.svg) each.remove();
    this.held.clear();
  }

  button(text, title, act) {
    return Object.assign(add(this.tools, "button", { type: "button", title }, text), { onclick: act });
  }

  get chosen() {
    return this.linked ? this.page.range : this.own;
  }

  get range() {
    return this.chosen || this.whole();
  }

  zoom(range) {
    if (range) {
      const [low, high] = this.whole();
      const half = Math.max(this.linked ? 2 : (high - low) / 500, range[1] - range[0]) / 2;
      range = [Math.max(low, d3.mean(range) - half), Math.min(high, d3.mean(range) + half)];
      if (range[0] <= low && range[1] >= high) range = null;
    }
    if (this.linked) this.page.range = range;
    else this.own = range;
    this.page.redraw();
  }

  measure() {
    const { width, top, bottom } = this.plot.getBoundingClientRect();
    const printed = this.figure.matches(".hero, .wide") ? 700 : 340;
    this.width = this.page.printing ? printed : Math.max(260, width);
    this.seen = this.page.printing || (bottom > 0 && top < innerHeight);
  }

  // Draws with these options of Plot; `below` is the room for what is between the plot and its horizontal axis.
  show({ tallness, below = 0, ticks, tickFormat, marks, ...options }) {
    const { width } = this;
    const marginBottom = 40 + below;
    const height = Math.round(Math.min(420, Math.max(190, width * tallness))) + marginBottom;
    const whole = this.linked || !this.spec.series; // rounds, clients and classes are counted
    const fits = (tick) => tick >= this.range[0] && tick <= this.range[1] && (!whole || Number.isInteger(tick));
    ticks = (ticks ?? d3.ticks(...this.range, width / 110)).filter(fits);
    const axis = [Plot.ruleY([options.y.domain[0]]), Plot.axisX(ticks, { tickSize: 4, dy: below, tickFormat, label: null })];
    const place = { frameAnchor: "bottom-right", textAnchor: "end", lineAnchor: "bottom", dy: 35 + below };
    const focused = this.plot.contains(document.activeElement);
    const frame = { width, height, marginTop: 8, marginBottom, x: { domain: this.range }, ariaLabel: this.figure.dataset.title };
    const svg = Plot.plot({ ...frame, ...options, marks: [marks, axis, Plot.text([this.spec.x_label], place)], className: "chart" });
    Object.assign(this, { svg, x: svg.scale("x").apply, value: svg.scale("x").invert, y: svg.scale("y").apply });
    svg.role = "img";
    svg.tabIndex = 0;
    svg.onkeydown = (event) => this.key(event);
    svg.onblur = () => this.leave();
    const [left, right] = svg.scale("x").range, [bottom, top] = svg.scale("y").range;
    this.at = { left, right, top, bottom };
    this.listen();
    this.plot.replaceChildren(svg, ...this.held);
    if (focused) svg.focus({ preventScroll: true });
    this.back.hidden = !this.chosen;
  }

  // Dragging and pointing, and where the zoom of the wheel and of fingers goes on from.
  listen() {
    const { left, right, top, bottom } = this.at;
    const ended = ({ selection, sourceEvent }) => selection && sourceEvent && this.zoom(selection.map(this.value));
    const brush = d3.brushX().extent([[left, top], [right, bottom]]).touchable(false).on("end", ended);
    const pointed = (event) => {
      if (event.pointerType === "mouse" && event.buttons) tip.hide();
      else this.page.point(this, this.value(Math.max(left, Math.min(right, d3.pointer(event)[0]))), event);
    };
    const area = d3.select(this.svg).append("g").attr("class", "brush").call(brush);
    area.on("pointermove", pointed).on("pointerleave pointercancel", () => this.leave());
    this.cross = add(this.svg, "g", { class: "cross" });
    this.unzoomed = d3.scaleLinear(this.whole(), [left, right]);
    const [from, to] = this.range.map(this.unzoomed);
    const scale = (right - left) / (to - from || 1);
    this.plot.__zoom = d3.zoomIdentity.translate(left - scale * from, 0).scale(scale); // where d3-zoom keeps it
  }

  leave() {
    tip.hide();
    this.page.point(null, null);
  }

  key(event) {
    const [low, high] = this.range;
    const step = this.linked ? Math.max(1, Math.round((high - low) / 100)) : (high - low) / 100;
    const about = this.page.cursor ?? (low + high) / 2;
    const scaleBy = (factor) => this.zoom([about - (about - low) * factor, about + (high - about) * factor]);
    const act = {
      ArrowLeft: () => this.pointAt(Math.max(low, about - step)),
      ArrowRight: () => this.pointAt(Math.min(high, about + step)),
      "+": () => scaleBy(0.7),
      "-": () => scaleBy(1 / 0.7),
      0: () => this.zoom(null),
      Escape: () => this.zoom(null),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  // As if the pointer were there: the numbers show next to the crosshair.
  pointAt(value) {
    const box = this.svg.getBoundingClientRect();
    const clientX = box.left + (this.x(value) * box.width) / this.svg.viewBox.baseVal.width;
    this.page.point(this, value, { clientX, clientY: box.top + box.height / 2 });
  }

  // Draws the crosshair at a value of x, if that is shown.
  crossAt(value) {
    const { top, bottom } = this.at;
    this.cross.replaceChildren();
    const [low, high] = this.range;
    if (value === null || value < low || value > high) return false;
    add(this.cross, "line", { x1: this.x(value), x2: this.x(value), y1: top, y2: bottom });
    return true;
  }

  title() {
    return this.figure.dataset.title;
  }

  // The lines of the legend below a saved picture: their words, and the look of a key where there is one.
  legend() {
    return [];
  }

  // As a file: the picture, or its numbers.
  save(kind = "svg") {
    const name = `${this.figure.id.slice(4)}.${kind}`;
    if (kind === "csv") return offer(name, `${d3.csvFormatRows(this.rows())}\n`, "text/csv");
    const { text, width, height } = this.picture();
    if (kind === "svg") return offer(name, text, "image/svg+xml");
    const canvas = Object.assign(document.createElement("canvas"), { width: 2 * width, height: 2 * height });
    const image = new Image();
    image.src = `data:image/svg+xml,${encodeURIComponent(text)}`;
    return image.decode().then(() => {
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      return offer(name, canvas.toDataURL());
    });
  }

  // A standalone SVG that looks the same: the relevant styles are written into it.
  picture() {
    const copy = this.svg.cloneNode(true);
    const to = copy.querySelectorAll("*");
    const kept = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-opacity", "opacity",
      "font-family", "font-size", "font-weight", "image-rendering", "text-anchor"];
    this.svg.querySelectorAll("*").forEach((each, i) => {
      const style = getComputedStyle(each);
      to[i].setAttribute("style", kept.map((key) => `${key}:${style.getPropertyValue(key)}`).join(";"));
    });
    copy.querySelectorAll(".brush, .cross, style").forEach((each) => each.remove());
    let { width, height } = this.svg.viewBox.baseVal;
    const { backgroundColor, color, fontFamily } = getComputedStyle(document.body);
    const write = (x, y, text, font) => {
      const style = `fill:${color};text-anchor:start;font:${font} ${fontFamily.replaceAll('"', "'")}`;
      add(copy, "text", { x, y, style }, text);
    };
    const pen = document.createElement("canvas").getContext("2d");
    pen.font = `12px ${fontFamily}`;
    for (const { words, look } of this.legend()) {
      if (look) add(copy, "path", { d: `M6 ${height + 4}h24`, style: `stroke-width:2;${look}` });
      write(look ? 38 : 6, height + 8, words, "12px");
      width = Math.max(width, pen.measureText(words).width + 46);
      height += 17;
    }
    write(4, -8, this.title(), "600 13px");
    const whole = { x: -12, y: -24, width: width + 12, height: height + 28 };
    copy.prepend(add(copy, "rect", { ...whole, style: `fill:${backgroundColor}` }));
    for (const key of ["width", "height"]) copy.setAttribute(key, whole[key]);
    copy.setAttribute("viewBox", Object.values(whole).join(" "));
    return { ...whole, text: new XMLSerializer().serializeToString(copy) };
  }
}
