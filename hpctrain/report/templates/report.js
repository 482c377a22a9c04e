"use strict";
(function () {
  const root = document.documentElement;

  // Light or dark, against what the system prefers.
  const theme = document.getElementById("theme");
  const isDark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const label = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
  theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; label(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", label);
  label();

  // Runs are shown and hidden in all figures at once.
  const hidden = new Set();
  for (const button of document.querySelectorAll("[data-run]")) {
    button.addEventListener("click", () => {
      const run = Number(button.dataset.run);
      if (!hidden.delete(run)) hidden.add(run);
      button.setAttribute("aria-pressed", String(!hidden.has(run)));
      for (const part of document.querySelectorAll(`.run${run}`)) part.style.display = hidden.has(run) ? "none" : "";
    });
  }

  // The nearest value of a figure follows the pointer.
  for (const figure of document.querySelectorAll("figure[data-values]")) {
    const values = JSON.parse(document.getElementById(figure.dataset.values).textContent);
    const svg = figure.querySelector("svg");
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    figure.append(tip);
    const [left, top, right, bottom] = values.box;
    const x = (value) => left + (value - values.xlim[0]) / (values.xlim[1] - values.xlim[0]) * (right - left);
    const y = (value) => bottom - (value - values.ylim[0]) / (values.ylim[1] - values.ylim[0]) * (bottom - top);
    svg.addEventListener("pointerleave", () => { tip.hidden = true; });
    svg.addEventListener("pointermove", (event) => {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      let best = null;
      for (const curve of values.curves) {
        if (hidden.has(curve.run)) continue;
        curve.xs.forEach((value, i) => {
          const distance = Math.hypot(x(value) - at.x, y(curve.ys[i]) - at.y);
          if (best === null || distance < best.distance) best = { distance, curve, i };
        });
      }
      tip.hidden = best === null || best.distance > 40;
      if (tip.hidden) return;
      const { curve, i } = best;
      const number = curve.ys[i];
      const text = values.percent ? `${(100 * number).toFixed(2)} %` : String(Number(number.toPrecision(5)));
      tip.textContent = `${values.names[curve.run]}, ${curve.part}: ${text} at epoch ${Number(curve.xs[i].toPrecision(5))}`;
      const box = figure.getBoundingClientRect();
      const place = event.clientX - box.left;
      tip.style.left = `${Math.max(0, Math.min(place + 12, box.width - tip.offsetWidth))}px`;
      tip.style.top = `${event.clientY - box.top + 14}px`;
    });
  }
})();
