// Shows the values of a plot under the pointer, and copies commands. The page is complete without it.
(() => {
  "use strict";
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
  for (const figure of document.querySelectorAll("figure[data-plot]")) {
    const plot = JSON.parse(figure.dataset.plot), { low, high, since, by_size } = plot.axis;
    const area = figure.querySelector(".plot-area"), output = figure.querySelector("output");
    const pointer = figure.querySelector(".pointer");
    const move = (event) => {
      const box = area.getBoundingClientRect();
      const fraction = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      const lead = plot.series[plot.series.length - 1].points;
      if (!lead.length) return;
      const at = nearest(lead, low + fraction * (high - low))[0];
      const position = by_size ? size(2 ** at) : since === null ? "step " + at : span(at - since) + " after the start";
      const values = plot.series.filter((each) => each.points.length).map((each) => [each.name, ...nearest(each.points, at)])
        .filter(([, where]) => Math.abs(where - at) <= 0.02 * (high - low)).map(([name, , value]) => name + " " + show[plot.unit](value));
      output.textContent = [position, ...values.reverse()].join("  ·  ");
      const x = high > low ? (at - low) / (high - low) * 1000 : 0;
      pointer.setAttribute("x1", x);
      pointer.setAttribute("x2", x);
      figure.classList.add("active");
    };
    area.addEventListener("pointermove", move);
    area.addEventListener("pointerdown", move);
    area.addEventListener("pointerleave", () => {
      figure.classList.remove("active");
      output.textContent = "";
    });
  }
  for (const command of document.querySelectorAll("pre.command")) {
    const button = document.createElement("button"), around = document.createElement("div");
    button.type = "button";
    button.textContent = "Copy";
    around.className = "copied";
    command.replaceWith(around);
    around.append(command, button);
    button.addEventListener("click", () => {
      getSelection().selectAllChildren(command);
      button.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl+C";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }
})();
