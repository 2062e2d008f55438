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

// Sorting: the headings of sortable tables become buttons.
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
    const button = document.createElement("button");
    button.type = "button";
    button.title = "Sort by this column";
    button.append(...heading.childNodes);
    button.addEventListener("click", () => sort(heading, column));
    heading.append(button);
  });
}

// Values under the pointer, or by the arrow keys: read off the figure's own table, whose first column is the axis.
for (const svg of document.querySelectorAll("svg[data-range]")) {
  const figure = svg.closest("figure");
  const table = document.getElementById(svg.dataset.table) ?? figure.querySelector(".numbers table");
  const [start, end, ...ends] = svg.dataset.range.split(",").map(Number);
  const across = svg.dataset.axis !== "y";
  const bent = svg.dataset.axis === "log" ? Math.log : (value) => value;
  const [first, last] = ends.map(bent);
  const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  const named = figure.dataset.rows?.split(" ").map((k) => document.getElementById(`r${k}`));
  const value = (row, k) => (across ? valueOf(row.cells[0]) : named ? k + 1 : k);
  const place = (value) => start + ((bent(value) - first) / (last - first)) * (end - start);
  const rows = (named ?? [...table.tBodies[0].rows])
    .map((row, k) => [value(row, k), row])
    .filter(([value]) => value !== null)
    .map(([value, row]) => [place(value), row]);
  if (!rows.length) continue;
  const readout = document.createElement("dl");
  readout.className = "readout";
  readout.setAttribute("role", "status");
  svg.after(readout);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  line.setAttribute("class", "crosshair");
  let shown = -1;
  const leave = () => { line.remove(); readout.replaceChildren(); shown = -1; };
  const show = (k) => {
    shown = Math.min(Math.max(k, 0), rows.length - 1);
    const [at, row] = rows[shown];
    const { width, height } = svg.viewBox.baseVal;
    const where = across ? { x1: at, x2: at, y1: 0, y2: height } : { x1: 0, x2: width, y1: at, y2: at };
    for (const [name, position] of Object.entries(where)) line.setAttribute(name, position);
    svg.append(line);
    const told = (tag, text) => Object.assign(document.createElement(tag), { textContent: text });
    readout.replaceChildren(...[...row.cells].flatMap((cell, k) => [told("dt", names[k]), told("dd", cell.firstChild?.textContent ?? "")]));
    const box = svg.getBoundingClientRect();
    const beside = (at, size, room) => Math.min(Math.max(at * 2 < room ? at + 12 : at - 12 - size, 0), Math.max(room - size, 0));
    const px = (at * box.width) / width;
    readout.style.left = `${across ? beside(px, readout.offsetWidth, box.width) : box.width - readout.offsetWidth}px`;
    readout.style.top = across ? "0" : `${beside(px, readout.offsetHeight, box.height)}px`;
  };
  const nearest = (at) => rows.reduce((best, [place], k) => (Math.abs(place - at) < Math.abs(rows[best][0] - at) ? k : best), 0);
  const move = (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((across ? event.clientX - box.left : event.clientY - box.top) * svg.viewBox.baseVal.width) / box.width;
    if (at < Math.min(start, end) || at > Math.max(start, end)) leave();
    else show(nearest(at));
  };
  svg.addEventListener("pointermove", move);
  svg.addEventListener("pointerdown", move);
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.tabIndex = 0;
  const steps = across ? { ArrowLeft: -1, ArrowRight: 1 } : { ArrowUp: -1, ArrowDown: 1 };
  svg.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return leave();
    const to = { Home: 0, End: rows.length - 1 }[event.key] ?? (event.key in steps ? shown + steps[event.key] : null);
    if (to === null) return;
    event.preventDefault();
    show(to);
  });
}

// A link into folded numbers unfolds them.
const reveal = () => {
  const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  if (target) target.scrollIntoView({ block: "center" });
};
addEventListener("hashchange", reveal);
reveal();
