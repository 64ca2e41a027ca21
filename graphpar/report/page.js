"use strict";
// Tooltips for every shape that has a title, keys that go from shape to shape, and a zoom of the charts over time.
(() => {
  const WHOLE = 100000;
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.setAttribute("role", "status");
  tip.setAttribute("aria-live", "polite");
  document.body.append(tip);
  document.documentElement.classList.add("script");

  for (const title of document.querySelectorAll(".chart title")) {
    title.parentNode.dataset.tip = title.textContent; // in place of the browser's own tooltip
    title.parentNode.setAttribute("aria-label", title.textContent);
    title.remove();
  }

  const show = (text, x, y) => {
    tip.textContent = text;
    tip.style.display = "block";
    const wide = tip.offsetWidth, tall = tip.offsetHeight;
    tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - wide - 6)) + "px";
    tip.style.top = (y + 18 + tall > innerHeight ? Math.max(4, y - tall - 10) : y + 18) + "px";
  };
  const hide = () => { tip.style.display = "none"; };
  const texted = (length) => {
    const units = [["ns", 1e-9], ["us", 1e-6], ["ms", 1e-3], ["s", 1]].filter(([, unit]) => length >= unit * 0.9995);
    const [name, unit] = units.length ? units[units.length - 1] : ["ns", 1e-9];
    return `${+(length / unit).toPrecision(3)} ${name}`;
  };

  // ---- keys: a chart is one stop of Tab; arrows go from one shape to the next ----

  const current = new Map();
  const mark = (chart, shape) => {
    const before = current.get(chart);
    if (before) before.classList.remove("cur");
    current.delete(chart);
    if (!shape) return hide();
    shape.classList.add("cur");
    current.set(chart, shape);
    const box = shape.getBoundingClientRect(), own = chart.getBoundingClientRect();
    const x = Math.min(Math.max(box.left + box.width / 2, own.left), own.right - 10);
    show(shape.dataset.tip, x, box.bottom - 8);
  };

  for (const chart of document.querySelectorAll(".chart")) {
    chart.addEventListener("pointermove", (event) => {
      if (event.buttons) return;
      const shape = event.target.closest("[data-tip],[data-w]");
      if (!shape || !chart.contains(shape)) return hide();
      show(shape.dataset.tip || found(shape, event), event.clientX, event.clientY);
    });
    chart.addEventListener("pointerleave", hide);
    chart.addEventListener("blur", () => mark(chart, null));
  }

  for (const chart of document.querySelectorAll(".chart.plans")) {
    const plans = [...chart.querySelectorAll(".plan")];
    const middle = (shape) => { const box = shape.getBoundingClientRect(); return [box.left + box.width / 2, box.top + box.height / 2]; };
    chart.addEventListener("focus", () => mark(chart, chart.querySelector(".plan.chosen") || plans[0]));
    chart.addEventListener("keydown", (event) => {
      const way = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 1], ArrowUp: [1, -1] }[event.key];
      if (event.key === "Escape") return mark(chart, null);
      if (!way || !plans.length) return;
      event.preventDefault();
      const order = plans.map((shape) => [middle(shape), shape]).sort((a, b) => a[0][way[0]] - b[0][way[0]] || a[0][1 - way[0]] - b[0][1 - way[0]]);
      const place = order.findIndex(([, shape]) => shape === current.get(chart));
      mark(chart, order[Math.max(0, Math.min(order.length - 1, place + way[1]))][1]);
    });
  }

  // ---- zoom: all charts over time show the same part of the step ----

  const timeline = document.querySelector("svg.timeline");
  if (!timeline) return;
  const chart = timeline.closest(".chart");
  const zooms = [...document.querySelectorAll("svg.zoom")];
  const own = timeline.querySelector("svg.zoom");
  const left = +timeline.dataset.left, tall = +timeline.dataset.tall, length = +timeline.dataset.length;
  const inSeconds = timeline.dataset.seconds === "1", wide = own.width.baseVal.value;
  const labels = timeline.querySelector(".labels"), ticks = timeline.querySelector(".ticks");
  const boxes = [...own.querySelectorAll(".row rect")].map((rect) => ({
    rect, start: rect.x.baseVal.value, end: rect.x.baseVal.value + rect.width.baseVal.value, y: rect.y.baseVal.value,
  }));
  let from = 0, to = WHOLE;

  const element = (name, attributes, text) => {
    const made = document.createElementNS(timeline.namespaceURI, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const at = (time) => left + (time - from) / (to - from) * wide;

  const draw = () => {
    for (const svg of zooms) {
      const [, , , height] = svg.getAttribute("viewBox").split(" ");
      svg.setAttribute("viewBox", `${from} 0 ${to - from} ${height}`);
    }
    labels.replaceChildren(...boxes.flatMap(({ rect, start, end, y }) => {
      const text = rect.dataset.n, a = Math.max(at(start), left), b = Math.min(at(end), left + wide);
      return text && b - a > 6.1 * text.length + 3 ? [element("text", { x: (a + b) / 2, y: y + 15 }, text)] : [];
    }));
    if (ticks && inSeconds) {
      const seconds = length / WHOLE, wanted = (to - from) * seconds / 10, power = 10 ** Math.floor(Math.log10(wanted));
      const step = [1, 2, 5, 10].map((times) => times * power).find((each) => each >= wanted * (1 - 1e-9));
      const [unit, name] = [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]].find(([each]) => step >= each * 0.1) || [1e-9, "ns"];
      const shapes = [];
      for (let n = Math.ceil(from * seconds / step); n * step <= to * seconds; n++) {
        const x = at(n * step / seconds);
        if (x > left + wide - 14) break;
        shapes.push(element("path", { d: `M${x} ${tall}v4` }), element("text", { class: "axis", x, y: tall + 14 }, `${+(n * step / unit).toPrecision(6)} ${name}`));
      }
      ticks.replaceChildren(...shapes);
    }
    const whole = from <= 0 && to >= WHOLE;
    const said = document.querySelector(".zoomed");
    if (said) said.textContent = whole ? "the full step" : inSeconds ? `${texted((to - from) / WHOLE * length)} of ${texted(length)}` : `${(100 * (to - from) / WHOLE).toPrecision(3)}% of the step`;
    chart.dataset.zoom = (WHOLE / (to - from)).toPrecision(4);
  };
  const view = (a, b) => {
    const size = Math.max(1, Math.min(WHOLE, b - a)), start = Math.max(0, Math.min(WHOLE - size, a));
    [from, to] = [start, start + size];
    draw();
  };
  const zoom = (times, around = (from + to) / 2) => view(around - (around - from) / times, around + (to - around) / times);
  const pan = (share) => view(from + share * (to - from), to + share * (to - from));
  const timeAt = (x) => {
    const box = own.getBoundingClientRect(), outer = timeline.getBoundingClientRect(), scale = outer.width / timeline.viewBox.baseVal.width;
    const begin = box.width ? outer.left + left * scale : 0;
    return from + Math.max(0, Math.min(1, (x - begin) / (wide * scale))) * (to - from);
  };

  // A row's spans of one kind are one shape in a long schedule: find the one under the pointer.
  const intervals = new WeakMap();
  const found = (shape, event) => {
    if (!intervals.has(shape)) intervals.set(shape, [...shape.getAttribute("d").matchAll(/M(\d+) [\d.]+h(\d+)/g)].map((m) => [+m[1], +m[1] + +m[2]]));
    const time = timeAt(event.clientX);
    const span = intervals.get(shape).find(([a, b]) => a <= time && time <= b);
    if (!span) return shape.dataset.w;
    const [a, b] = span.map((each) => each / WHOLE * length);
    return inSeconds ? `${shape.dataset.w}: about ${texted(b - a)}, from ${texted(a)}` : shape.dataset.w;
  };

  for (const svg of document.querySelectorAll("svg.timeline, svg.memory")) {
    svg.addEventListener("wheel", (event) => {
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) { event.preventDefault(); return pan(event.deltaX / 1000); }
      if (event.deltaY > 0 && to - from >= WHOLE) return; // nothing to zoom out of: let the page scroll
      event.preventDefault();
      hide();
      zoom(Math.exp(-event.deltaY / 300), timeAt(event.clientX));
    }, { passive: false });
    let start = null, box = null;
    svg.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      start = event.shiftKey ? { pan: event.clientX, from, to } : { time: timeAt(event.clientX), x: event.clientX };
      svg.setPointerCapture(event.pointerId);
      hide();
    });
    svg.addEventListener("pointermove", (event) => {
      if (!start) return;
      if ("pan" in start) {
        const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
        const by = (start.pan - event.clientX) / (wide * scale) * (start.to - start.from);
        return view(start.from + by, start.to + by);
      }
      if (!box) svg.append(box = element("rect", { class: "select", y: 0, height: svg.viewBox.baseVal.height }));
      const [a, b] = [start.time, timeAt(event.clientX)].sort((p, q) => p - q);
      box.setAttribute("x", at(a));
      box.setAttribute("width", at(b) - at(a));
    });
    const end = (event) => {
      if (start && "time" in start && Math.abs(event.clientX - start.x) > 4 && event.type === "pointerup") {
        const [a, b] = [start.time, timeAt(event.clientX)].sort((p, q) => p - q);
        if (b > a) view(a, b);
      }
      if (box) box.remove();
      start = box = null;
    };
    svg.addEventListener("pointerup", end);
    svg.addEventListener("pointercancel", end);
    svg.addEventListener("dblclick", () => view(0, WHOLE));
  }

  const step = (row, along) => {
    const shown = boxes.filter(({ rect }) => rect.dataset.tip);
    if (!shown.length) return;
    const known = boxes.find(({ rect }) => rect === current.get(chart));
    let next = shown.find(({ start, end }) => start >= from && end <= to) || shown[0];
    if (known) {
      const rows = [...new Set(shown.map(({ y }) => y))];
      const y = rows[Math.max(0, Math.min(rows.length - 1, rows.indexOf(known.y) + row))];
      const same = shown.filter((each) => each.y === y);
      const middle = (known.start + known.end) / 2;
      const place = along ? same.indexOf(known) + along : same.findIndex((each) => each.end > middle);
      next = same[Math.max(0, Math.min(same.length - 1, place < 0 ? same.length - 1 : place))];
    }
    if (next.end < from || next.start > to || next.start < from || next.end > to) {
      const size = Math.min(WHOLE, Math.max(to - from, 1.2 * (next.end - next.start)));
      const middle = (next.start + next.end) / 2;
      view(middle - size / 2, middle + size / 2);
    }
    mark(chart, next.rect);
  };
  const keys = {
    "+": () => zoom(1.5, around()), "=": () => zoom(1.5, around()), "-": () => zoom(1 / 1.5, around()), "0": () => view(0, WHOLE),
    Home: () => view(0, to - from), End: () => view(WHOLE - (to - from), WHOLE), Escape: () => mark(chart, null),
    ArrowRight: () => step(0, 1), ArrowLeft: () => step(0, -1), ArrowDown: () => step(1, 0), ArrowUp: () => step(-1, 0),
    PageDown: () => pan(0.5), PageUp: () => pan(-0.5),
  };
  const around = () => {
    const known = boxes.find(({ rect }) => rect === current.get(chart));
    return known ? Math.max(from, Math.min(to, (known.start + known.end) / 2)) : undefined;
  };
  chart.addEventListener("keydown", (event) => {
    const act = keys[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
  for (const button of document.querySelectorAll(".controls button")) {
    button.addEventListener("click", () => ({ in: () => zoom(1.5), out: () => zoom(1 / 1.5), all: () => view(0, WHOLE), back: () => pan(-0.5), on: () => pan(0.5) })[button.dataset.do]());
  }
  addEventListener("beforeprint", () => { hide(); view(0, WHOLE); });
  draw();
})();
