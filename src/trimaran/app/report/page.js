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
    const plot = plotOf(figure), { low, high, since, by_size } = plot.axis;
    const box = area.getBoundingClientRect(), pointer = figure.querySelector(".pointer");
    const fraction = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const lead = plot.series[plot.series.length - 1].points;
    if (!lead.length) return;
    const at = nearest(lead, low + fraction * (high - low))[0];
    const position = by_size ? size(2 ** at) : since === null ? say("step") + " " + at : span(at - since) + " " + say("after the start");
    const values = plot.series.filter((each) => each.points.length).map((each) => [each.name, ...nearest(each.points, at)])
      .filter(([, where]) => Math.abs(where - at) <= 0.02 * (high - low)).map(([name, , value]) => name + " " + show[plot.unit](value));
    figure.querySelector("output").textContent = [position, ...values.reverse()].join("  ·  ");
    const x = high > low ? (at - low) / (high - low) * 1000 : 0;
    pointer.setAttribute("x1", x);
    pointer.setAttribute("x2", x);
    figure.classList.add("active");
    active = figure;
  };
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
