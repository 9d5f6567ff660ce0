// What all charts share: an SVG that fills its figure, axes, zoom, a crosshair, and saving as a file.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

function filled(made, attributes, parent, text) {
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  parent?.append(made);
  return made;
}

const node = (name, ...rest) => filled(document.createElementNS(SVG, name), ...rest);
const html = (name, ...rest) => filled(document.createElement(name), ...rest);

// A round number of round steps between two values.
function ticks(low, high, wanted, whole) {
  const rough = (high - low || 1) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const steps = whole ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10];
  let step = power * steps.find((m) => m * power >= rough * 0.999);
  if (whole) step = Math.max(1, step);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return { values: found, step };
}

function logTicks(low, high) {
  const found = [];
  const wide = Math.log10(high / low) > 3;
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++)
    for (const m of wide ? [1] : [1, 2, 5]) {
      const value = m * 10 ** p;
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  return { values: found, step: 0 };
}

function number(value, step) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(1).replace("e+", "e").replace(".0e", "e");
  if (step) {
    const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9)));
    const extra = Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-6 ? 1 : 0;
    return value.toLocaleString("en", { minimumFractionDigits: digits + extra, maximumFractionDigits: digits + extra });
  }
  return value.toLocaleString("en", { maximumSignificantDigits: size >= 1000 ? 6 : 4 });
}

// The index of the value nearest to x in an ascending list.
function nearest(list, x) {
  let low = 0, high = list.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (list[middle] < x) low = middle;
    else high = middle;
  }
  return Math.abs(list[low] - x) <= Math.abs(list[high] - x) ? low : high;
}

// Offers a file to save: text, or a data URL.
function offer(name, content, type) {
  const link = html("a", { download: name });
  link.href = type ? URL.createObjectURL(new Blob([content], { type })) : content;
  link.click();
  if (type) URL.revokeObjectURL(link.href);
  return content;
}

const quoted = (value) => (/[",\n]/.test(value ?? "") ? `"${value.replaceAll('"', '""')}"` : value ?? "");
const csv = (rows) => rows.map((row) => `${row.map(quoted).join(",")}\n`).join("");

const tip = {
  show(x, y, fill) {
    const box = document.getElementById("tip");
    box.replaceChildren();
    fill(box);
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const left = x + 16 + width < innerWidth ? x + 16 : Math.max(4, x - 16 - width);
    box.style.left = `${left}px`;
    box.style.top = `${Math.max(4, Math.min(innerHeight - height - 4, y - height / 2))}px`;
  },
  hide() {
    document.getElementById("tip").hidden = true;
  },
};

class Chart {
  constructor(figure, spec, page) {
    Object.assign(this, { figure, spec, page, own: null, touches: new Map() });
    this.linked = spec.x_label === "round";
    this.plot = figure.querySelector(".plot");
    this.tools = html("span", { class: "tools" }, figure.querySelector("figcaption"));
    this.back = this.button("↺ reset", "Show the whole range (double-click, or 0)", () => this.zoom(null));
    this.back.hidden = true;
    for (const kind of ["svg", "png", "csv"])
      this.button(kind.toUpperCase(), kind === "csv" ? "Save the numbers" : "Save this picture", () => this.save(kind));
  }

  button(text, title, act) {
    return Object.assign(html("button", { type: "button", title }, this.tools, text), { onclick: act });
  }

  get range() {
    return (this.linked ? this.page.range : this.own) || this.whole();
  }

  zoom(range) {
    if (range) {
      const [low, high] = this.whole();
      const least = this.linked ? 2 : (high - low) / 500;
      const middle = (range[0] + range[1]) / 2;
      const half = Math.max(least, range[1] - range[0]) / 2;
      range = [Math.max(low, middle - half), Math.min(high, middle + half)];
      if (range[0] <= low && range[1] >= high) range = null;
    }
    if (this.linked) this.page.setRange(range);
    else {
      this.own = range;
      this.draw();
    }
  }

  // The frame: an empty SVG of the figure's width with the plot area at `at`.
  frame(left, right, below) {
    const large = this.figure.matches(".hero, .wide");
    const width = this.page.printing ? (large ? 700 : 340) : Math.max(260, this.plot.clientWidth);
    const tall = this.figure.classList.contains("hero") ? 0.46 : this.tallness || 0.56;
    const height = Math.round(Math.min(420, Math.max(190, width * tall))) + below;
    this.at = { left, top: 8, width: width - left - right, height: height - 8 - below };
    const box = { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0, "aria-label": this.figure.dataset.title };
    this.svg = node("svg", box);
    const [low, high] = this.range;
    this.x = (value) => left + ((value - low) / (high - low || 1)) * this.at.width;
    this.value = (pixel) => low + ((pixel - left) / this.at.width) * (high - low);
    this.back.hidden = !(this.linked ? this.page.range : this.own);
    this.clip = `clip-${this.figure.id}`;
    const clip = node("clipPath", { id: this.clip }, node("defs", {}, this.svg));
    node("rect", { x: left, y: 8, width: Math.max(0, this.at.width), height: this.at.height }, clip);
  }

  axes(yTicks, y, yText, below) {
    const { left, top, width, height } = this.at;
    const axis = node("g", { class: "axis" }, this.svg);
    for (const value of yTicks) {
      node("line", { class: "grid", x1: left, x2: left + width, y1: y(value), y2: y(value) }, axis);
      node("text", { x: left - 7, y: y(value) + 4, "text-anchor": "end" }, axis, yText(value));
    }
    node("line", { class: "tick", x1: left, x2: left + width, y1: top + height, y2: top + height }, axis);
    const names = this.spec.x_names;
    const { values, step } = names ? { values: names.keys() } : ticks(...this.range, width / 64, this.linked || this.whole_x);
    for (const value of values) {
      const x = this.x(value);
      node("line", { class: "tick", x1: x, x2: x, y1: top + height + below, y2: top + height + below + 4 }, axis);
      node("text", { x, y: top + height + below + 17, "text-anchor": "middle" }, axis, names ? names[value] : number(value, step));
    }
    const label = { class: "label", x: left + width, y: top + height + below + 33, "text-anchor": "end" };
    node("text", label, axis, this.spec.x_label);
    return axis;
  }

  // The pieces that move with the pointer, above everything else.
  finish() {
    const { left, top, width, height } = this.at;
    this.brush = node("rect", { class: "brush", y: top, height, width: 0, visibility: "hidden" }, this.svg);
    this.cross = node("g", { class: "cross", visibility: "hidden" }, this.svg);
    const area = { class: "area", x: left, y: top, width: Math.max(0, width), height, fill: "transparent" };
    this.area = node("rect", area, this.svg);
    this.listen();
    const focused = this.plot.contains(document.activeElement);
    this.plot.replaceChildren(this.svg);
    if (focused) this.svg.focus({ preventScroll: true });
  }

  pixel(event) {
    const box = this.svg.getBoundingClientRect();
    return (event.clientX - box.left) * (this.svg.viewBox.baseVal.width / box.width);
  }

  listen() {
    const acts = { down: this.down, move: this.move, up: this.up, cancel: this.up, leave: this.leave };
    for (const name in acts) this.area[`onpointer${name}`] = acts[name].bind(this);
    this.area.ondblclick = () => this.zoom(null);
    this.area.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.svg.onkeydown = (event) => this.key(event);
    this.svg.onblur = () => this.leave();
  }

  down(event) {
    this.touches.set(event.pointerId, this.pixel(event));
    if (event.pointerType === "mouse" && event.button === 0) {
      this.from = this.pixel(event);
      this.area.setPointerCapture(event.pointerId);
      event.preventDefault();
      this.svg.focus({ preventScroll: true });
    }
    if (this.touches.size === 2) {
      const ends = [...this.touches.values()].sort((a, b) => a - b);
      this.pinch = ends.map(this.value);
    }
  }

  move(event) {
    const pixel = this.pixel(event);
    if (this.touches.has(event.pointerId)) this.touches.set(event.pointerId, pixel);
    if (this.pinch && this.touches.size === 2) {
      // Keep the two values that were first touched under the fingers.
      const [a, b] = [...this.touches.values()].sort((p, q) => p - q);
      const scale = (this.pinch[1] - this.pinch[0]) / Math.max(12, b - a);
      const low = this.pinch[0] - (a - this.at.left) * scale;
      this.next = [low, low + this.at.width * scale];
      this.select(this.x(Math.max(this.next[0], this.range[0])), this.x(Math.min(this.next[1], this.range[1])));
      return;
    }
    if (this.from !== undefined && Math.abs(pixel - this.from) > 4) {
      this.select(this.from, pixel);
      tip.hide();
      return;
    }
    this.page.point(this, this.value(Math.max(this.at.left, Math.min(this.at.left + this.at.width, pixel))), event);
  }

  select(a, b) {
    const { left, width } = this.at;
    const [low, high] = [a, b].sort((p, q) => p - q).map((p) => Math.max(left, Math.min(left + width, p)));
    filled(this.brush, { x: low, width: high - low, visibility: "visible" });
  }

  up(event) {
    const pixel = this.pixel(event);
    this.touches.delete(event.pointerId);
    const { from, next } = this;
    this.from = this.pinch = this.next = undefined;
    this.brush.setAttribute("visibility", "hidden");
    if (next) this.zoom(next);
    else if (from !== undefined && Math.abs(pixel - from) > 4)
      this.zoom([this.value(Math.min(from, pixel)), this.value(Math.max(from, pixel))]);
  }

  leave() {
    this.touches.clear();
    tip.hide();
    this.page.point(null, null);
  }

  // With Ctrl or ⌘ only, and from a trackpad's pinch: a bare wheel is for scrolling the page.
  wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    this.scaleBy(Math.exp(Math.sign(event.deltaY) * 0.25), this.value(this.pixel(event)));
  }

  scaleBy(factor, about) {
    const [low, high] = this.range;
    this.zoom([about - (about - low) * factor, about + (high - about) * factor]);
  }

  key(event) {
    const [low, high] = this.range;
    const step = this.linked ? Math.max(1, Math.round((high - low) / 100)) : (high - low) / 100;
    const about = this.page.cursor ?? (low + high) / 2;
    const act = {
      ArrowLeft: () => this.pointAt(Math.max(low, about - step)),
      ArrowRight: () => this.pointAt(Math.min(high, about + step)),
      "+": () => this.scaleBy(0.7, about),
      "-": () => this.scaleBy(1 / 0.7, about),
      0: () => this.zoom(null),
      Escape: () => this.zoom(null),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  // As if the pointer were there: the numbers show beside the crosshair.
  pointAt(value) {
    const box = this.svg.getBoundingClientRect();
    const scale = box.width / this.svg.viewBox.baseVal.width;
    const place = { clientX: box.left + this.x(value) * scale, clientY: box.top + box.height / 2 };
    this.page.point(this, value, place);
  }

  // What the reader set, for the chart that replaces this one when the page is updated.
  kept() {
    return { own: this.own };
  }

  title() {
    return this.figure.dataset.title;
  }

  // The legend below a saved picture; returns the height that it takes.
  legend() {
    return { width: 0, height: 0 };
  }

  // As a file: the picture, or its numbers.
  save(kind = "svg") {
    const name = `${this.figure.id.slice(4)}.${kind}`;
    if (kind === "csv") return offer(name, csv(this.rows()), "text/csv");
    const { text, width, height } = this.picture();
    if (kind === "svg") return offer(name, text, "image/svg+xml");
    const canvas = html("canvas", { width: 2 * width, height: 2 * height });
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
    const from = [this.svg, ...this.svg.querySelectorAll("*")];
    const to = [copy, ...copy.querySelectorAll("*")];
    const kept = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-opacity", "opacity",
      "font-family", "font-size", "font-weight", "image-rendering"];
    from.forEach((each, i) => {
      const style = getComputedStyle(each);
      to[i].setAttribute("style", kept.map((key) => `${key}:${style.getPropertyValue(key)}`).join(";"));
    });
    copy.querySelectorAll(".area, .brush, .cross").forEach((each) => each.remove());
    const { width, height } = this.svg.viewBox.baseVal;
    const below = this.legend(copy, height);
    const whole = { x: -12, y: -24, width: Math.max(width, below.width) + 12, height: height + 24 + below.height };
    const { width: across, height: down } = whole;
    filled(copy, { xmlns: SVG, width: across, height: down, viewBox: Object.values(whole).join(" ") });
    const { backgroundColor: paper, color, fontFamily } = getComputedStyle(document.body);
    const style = `fill:${color};font:600 13px ${fontFamily}`.replaceAll('"', "'");
    node("text", { x: 4, y: -8, style }, copy, this.title());
    copy.prepend(node("rect", { ...whole, style: `fill:${paper}` }));
    return { text: new XMLSerializer().serializeToString(copy), width: across, height: down };
  }
}
