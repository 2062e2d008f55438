"use strict";
// Everything below is a convenience: the page is complete without it.

// Theme: follow the system, or light, or dark; the choice is kept where the browser allows it.
(() => {
  const themes = ["auto", "light", "dark"];
  const button = document.getElementById("theme");
  const recall = () => { try { return localStorage.getItem("burstline-theme"); } catch { return null; } };
  const keep = (theme) => { try { localStorage.setItem("burstline-theme", theme); } catch { /* not allowed */ } };
  const apply = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
  };
  let theme = themes.includes(recall()) ? recall() : "auto";
  button.hidden = false;
  button.addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    keep(theme);
    apply(theme);
  });
  apply(theme);
})();

// Numbers as a cell shows them; what is not a number sorts last.
const valueOf = (cell) => {
  const text = cell.firstChild ? cell.firstChild.textContent.replaceAll(",", "").replace("−", "-").replace("#", "") : "";
  const value = text === "∞" ? Infinity : parseFloat(text);
  return Number.isNaN(value) ? null : value;
};

// Sorting: the headings of sortable tables become buttons in all but look.
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  const sort = (heading, column) => {
    const up = heading.getAttribute("aria-sort") === "descending";
    headings.forEach((other) => other.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = (row) => valueOf(row.cells[column]) ?? row.cells[column].textContent;
    const rows = [...table.tBodies[0].rows].map((row) => [key(row), row]);
    rows.sort(([a], [b]) => {
      if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
      return (a < b ? -1 : a > b ? 1 : 0) * (up ? 1 : -1);
    });
    table.tBodies[0].append(...rows.map(([, row]) => row));
  };
  headings.forEach((heading, column) => {
    heading.tabIndex = 0;
    heading.title = "Sort by this column";
    heading.addEventListener("click", () => sort(heading, column));
    heading.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      sort(heading, column);
    });
  });
}

// Values under the pointer: read off the figure's own table, whose first column is the axis.
for (const svg of document.querySelectorAll("svg[data-range]")) {
  const figure = svg.closest("figure");
  const table = document.getElementById(svg.dataset.table) ?? figure.querySelector(".numbers table");
  const [start, end, first, last] = svg.dataset.range.split(",").map(Number);
  const horizontal = svg.dataset.axis === "x";
  const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  const named = figure.dataset.rows?.split(" ").map((k) => document.getElementById(`r${k}`));
  const place = (row, k) => (horizontal ? valueOf(row.cells[0]) : named ? k + 1 : k);
  const rows = (named ?? [...table.tBodies[0].rows]).map((row, k) => [place(row, k), row]);
  const readout = document.createElement("p");
  readout.className = "readout";
  svg.after(readout);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  line.setAttribute("class", "crosshair");
  const nearest = (value) => rows.reduce((a, b) => (Math.abs(b[0] - value) < Math.abs(a[0] - value) ? b : a));
  const move = (event) => {
    const box = svg.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / box.width;
    const at = (horizontal ? event.clientX - box.left : event.clientY - box.top) * scale;
    const [low, high] = start < end ? [start, end] : [end, start];
    if (at < low || at > high || !rows.length) return leave();
    const [value, row] = nearest(first + ((at - start) / (end - start)) * (last - first));
    const where = start + ((value - first) / (last - first)) * (end - start);
    const { width, height } = svg.viewBox.baseVal;
    const ends = horizontal ? { x1: where, x2: where, y1: 0, y2: height } : { x1: 0, x2: width, y1: where, y2: where };
    for (const [name, position] of Object.entries(ends)) line.setAttribute(name, position);
    svg.append(line);
    readout.textContent = [...row.cells].map((cell, k) => `${names[k]} ${cell.firstChild?.textContent ?? ""}`).join("   ·   ");
  };
  const leave = () => { line.remove(); readout.textContent = ""; };
  svg.addEventListener("pointermove", move);
  svg.addEventListener("pointerleave", leave);
}

// A link into folded numbers unfolds them.
const reveal = () => {
  const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  if (target) target.scrollIntoView({ block: "center" });
};
addEventListener("hashchange", reveal);
reveal();
