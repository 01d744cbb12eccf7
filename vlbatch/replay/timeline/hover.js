"use strict";
// Shows what lies under the pointer: the cell inside the panel, the step below it. A click keeps
// the request highlighted until the next click.
const data = JSON.parse(document.getElementById("data").textContent);
const picture = document.getElementById("picture");
const hover = document.getElementById("hover");
const highlight = document.head.appendChild(document.createElement("style"));
let pinned = null;

function place(event) {
  const point = new DOMPoint(event.clientX, event.clientY);
  return point.matrixTransform(picture.getScreenCTM().inverse());
}

function stepAt(x) {
  const column = Math.floor((x - data.left) / data.cellWidth);
  const inside = (x - data.left) / data.cellWidth - column;
  const step = column * data.stepsPerColumn + Math.floor(inside * data.stepsPerColumn);
  return column >= 0 && step < data.steps.length ? step : null;
}

function cellAt(step, y) {
  const row = Math.floor(((y - data.top) / data.cellHeight) * data.rowsPerBand);
  const cells = data.steps[step].cells;
  if (row < 0 || 4 * row >= cells.length) return null;
  const [request, region, first, stop] = cells.slice(4 * row, 4 * row + 4);
  return { row, request, region: data.regions[region], first, stop };
}

function aboutCell(step, cell) {
  const [lines, faults] = (data.steps[step].more || {})[cell.row] || [[], []];
  const tokens = cell.stop > cell.first ? `tokens [${cell.first}, ${cell.stop})` : "no tokens";
  return {
    title: `${data.requests[cell.request]}: ${cell.region}`,
    lines: [`step ${step + 1}, row ${cell.row}, ${tokens}`, ...lines],
    faults,
  };
}

function aboutStep(step) {
  const column = data.steps[step];
  const lines = [`line ${column.line}`];
  if (column.moved) lines.push(`rows moved: ${column.moved}`);
  for (const what of ["admitted", "resumed", "encoded", "hits", "evicted", "preempted", "finished"])
    if (column[what]) lines.push(`${what}: ${column[what].join(", ")}`);
  if (column.failed) lines.push(`failed: ${column.failed.join(", ")}`);
  return { title: `step ${step + 1}`, lines, faults: column.faults || [] };
}

function show(about, event) {
  const line = (tag, text) => {
    const element = document.createElement(tag);
    element.textContent = text;
    return element;
  };
  hover.replaceChildren(
    line("b", about.title),
    about.lines.join("\n"),
    ...about.faults.map((fault) => line("em", `\n${fault}`)),
  );
  hover.hidden = false;
  const { width, height } = hover.getBoundingClientRect();
  const x = event.clientX + 16 + width < innerWidth ? event.clientX + 16 : event.clientX - 16 - width;
  const y = Math.min(event.clientY + 16, innerHeight - height - 8);
  hover.style.left = `${Math.max(x, 8)}px`;
  hover.style.top = `${Math.max(y, 8)}px`;
}

function emphasise(request) {
  highlight.textContent = request === null ? "" : `.t:not(.r${request}){opacity:.1}`;
}

picture.addEventListener("mousemove", (event) => {
  const { x, y } = place(event);
  const step = stepAt(x);
  const cell = step === null ? null : cellAt(step, y);
  emphasise(pinned ?? (cell && cell.request));
  if (cell) show(aboutCell(step, cell), event);
  else if (step !== null && y > data.top - 24) show(aboutStep(step), event);
  else hover.hidden = true;
});
picture.addEventListener("mouseleave", () => {
  hover.hidden = true;
  emphasise(pinned);
});
picture.addEventListener("click", (event) => {
  const { x, y } = place(event);
  const step = stepAt(x);
  const cell = step === null ? null : cellAt(step, y);
  pinned = cell && cell.request !== pinned ? cell.request : null;
  emphasise(pinned);
});
