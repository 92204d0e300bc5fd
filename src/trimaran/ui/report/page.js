// Shows the values of a plot under the pointer, and copies commands. The page is complete without it.
(() => {
  "use strict";
  const chinese = { step: "步", "after the start": "（自启动起）", Copy: "复制", Copied: "已复制", "Press Ctrl+C": "请按 Ctrl+C" };
  const say = (text) => (document.documentElement.lang.startsWith("zh") && chinese[text]) || text;
  const size = (value) => {
    const units = ["B", "KiB", "MiB", "GiB"];
    let at = 0;
    for (; Math.abs(value) >= 1024 && at < 3; at++) value /= 1024;
    return value.toFixed(at ? 1 : 0) + " " + units[at];
  };
  const count = (value) => {
    const units = ["", "k", "M", "B", "T"];
    let at = 0;
    for (; Math.abs(value) >= 1000 && at < 4; at++) value /= 1000;
    return value.toFixed(at ? 1 : 0) + units[at];
  };
  const span = (value) => {
    if (value < 1) return (value * 1000).toPrecision(3) + " ms";
    if (value < 60) return value.toFixed(1) + " s";
    const minutes = Math.floor(value / 60);
    return minutes < 60 ? minutes + " min " + Math.round(value % 60) + " s" : Math.floor(minutes / 60) + " h " + minutes % 60 + " min";
  };
  const show = {
    number: (value) => String(Number(value.toPrecision(5))),
    count, bytes: size, "bytes/s": (value) => size(value) + "/s", seconds: span,
    share: (value) => (100 * value).toFixed(1) + " %", W: (value) => value.toFixed(0) + " W", C: (value) => value.toFixed(0) + " °C",
  };
  const nearest = (points, at) => {
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < at) low = middle; else high = middle;
    }
    return points[at - points[low][0] < points[high][0] - at ? low : high];
  };
  // The listeners are on the document and a figure's values are read when they are first needed, so that figures that
  // a live page replaces work as those do that were there at the start.
  const plots = new WeakMap();
  const plotOf = (figure) => {
    if (!plots.has(figure)) plots.set(figure, JSON.parse(figure.dataset.plot));
    return plots.get(figure);
  };
  let active = null;
  const leave = () => {
    if (!active) return;
    active.classList.remove("active");
    active.querySelector("output").textContent = "";
    active = null;
  };
  const move = (event) => {
    const area = event.target.closest?.(".plot-area"), figure = area?.closest("figure[data-plot]") ?? null;
    if (figure !== active) leave();
    if (!figure) return;
    const plot = plotOf(figure), { low, high, since, counted, x: across } = plot.axis;
    const box = area.getBoundingClientRect(), pointer = figure.querySelector(".pointer");
    const fraction = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const lead = plot.series[plot.series.length - 1].points;
    if (!lead.length) return;
    const at = nearest(lead, low + fraction * (high - low))[0];
    const position = across ? across.name + " " + show[across.unit](across.log ? 2 ** at : at)
      : counted ? count(at) + " " + counted : since === null ? say("step") + " " + at : span(at - since) + " " + say("after the start");
    const values = plot.series.filter((each) => each.points.length).map((each) => [each.name, ...nearest(each.points, at)])
      .filter(([, where]) => Math.abs(where - at) <= 0.02 * (high - low)).map(([name, , value]) => name + " " + show[plot.unit](value));
    figure.querySelector("output").textContent = [position, ...values.reverse()].join("  ·  ");
    const where = high > low ? (at - low) / (high - low) * 1000 : 0;
    pointer.setAttribute("x1", where);
    pointer.setAttribute("x2", where);
    figure.classList.add("active");
    active = figure;
  };
  // A grid of ranks: the text of the cell under the pointer.
  const showCell = (event) => {
    const grid = event.target.closest?.("svg[data-columns]"), figure = grid?.closest("figure[data-cells]");
    if (!figure) return;
    const box = grid.getBoundingClientRect(), columns = Number(grid.dataset.columns), cell = grid.viewBox.baseVal;
    const [x, y] = [(event.clientX - box.left) / box.width * columns, (event.clientY - box.top) / box.height * Math.round((cell.height + 3) / 23)];
    const at = Math.floor(y) * columns + Math.min(columns - 1, Math.floor(x));
    figure.querySelector("output").textContent = JSON.parse(figure.dataset.cells)[at] ?? "";
  };
  // Dragging over a plot of a live page selects a range of steps, a double click all of them: the page asks the server.
  let drag = null;
  const place = (event, area) => {
    const box = area.getBoundingClientRect();
    return Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  };
  const select = (event) => {
    if (!drag) return;
    const to = place(event, drag.area), rect = drag.figure.querySelector(".selection");
    rect.setAttribute("x", 1000 * Math.min(drag.from, to));
    rect.setAttribute("width", 1000 * Math.abs(to - drag.from));
  };
  const endDrag = (event) => {
    if (!drag) return;
    const { figure, from, area } = drag, to = place(event, area), { low, high } = plotOf(figure).axis;
    drag = null;
    figure.querySelector(".selection").setAttribute("width", 0);
    if (Math.abs(to - from) < 0.01) return;
    const at = (part) => Math.round(low + part * (high - low));
    figure.dispatchEvent(new CustomEvent("zoom", { bubbles: true, detail: { low: at(Math.min(from, to)), high: at(Math.max(from, to)) } }));
  };
  document.addEventListener("pointerdown", (event) => {
    const area = event.target.closest?.("figure[data-zoom] .plot-area");
    if (area && event.button === 0) drag = { area, figure: area.closest("figure"), from: place(event, area) };
  });
  document.addEventListener("pointermove", select);
  document.addEventListener("pointerup", endDrag);
  document.addEventListener("pointercancel", () => { drag = null; });
  document.addEventListener("dblclick", (event) => {
    event.target.closest?.("figure[data-zoom] .plot-area")?.dispatchEvent(new CustomEvent("zoom", { bubbles: true, detail: null }));
  });
  document.addEventListener("pointermove", showCell);
  document.addEventListener("pointerdown", showCell);
  // A tab changes the address without a new page; arrow keys go to the neighbours.
  const openTab = (link) => {
    history.replaceState(null, "", link.href);
    link.dispatchEvent(new CustomEvent("tab", { bubbles: true, detail: link.dataset.tab }));
  };
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[data-tab]");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    openTab(link);
  });
  document.addEventListener("keydown", (event) => {
    const link = event.target.closest?.("a[data-tab]"), step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    const other = step && link?.[step];
    if (!other) return;
    event.preventDefault();
    other.focus();
    openTab(other);
  });
  document.addEventListener("pointermove", move);
  document.addEventListener("pointerdown", move);
  document.documentElement.addEventListener("pointerleave", leave);
  const addButtons = () => {
    for (const command of document.querySelectorAll("pre.command")) {
      if (command.parentNode.className === "copied") continue;
      const button = document.createElement("button"), around = document.createElement("div");
      button.type = "button";
      button.textContent = say("Copy");
      around.className = "copied";
      command.replaceWith(around);
      around.append(command, button);
    }
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.(".copied > button");
    if (!button) return;
    getSelection().selectAllChildren(button.previousElementSibling);
    button.textContent = document.execCommand("copy") ? say("Copied") : say("Press Ctrl+C");
    setTimeout(() => { button.textContent = say("Copy"); }, 2000);
  });
  addButtons();
  new MutationObserver(addButtons).observe(document.documentElement, { childList: true, subtree: true });
})();
