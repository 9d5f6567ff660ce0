// Tables: sorted by a column, saved as a file, and the numbers in them as the server writes them.
"use strict";

// As the server writes it: mean, deviation if values differ, a count if it is not all of them.
function spread(values, asked, digitsOf) {
  if (!values.length) return "–";
  const digits = digitsOf(d3.mean(values));
  const differ = values.some((value) => value !== values[0]);
  const text = d3.mean(values).toFixed(digits) + (differ ? ` ± ${d3.deviation(values).toFixed(digits)}` : "");
  return values.length === asked ? text : `${text} (${values.length} of ${asked})`;
}

function sort(head, down) {
  const body = head.closest("table").tBodies[0];
  page.sorted[head.closest("table").id] = { column: head.cellIndex, down };
  for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const text = (row) => row.cells[head.cellIndex].textContent.trim();
  const found = (row) => parseFloat(text(row).replace("−", "-"));
  const words = head.cellIndex === 0 || [...body.rows].every((row) => Number.isNaN(found(row)));
  const last = down ? -Infinity : Infinity; // what was never reached
  const value = (row) => (words ? text(row) : Number.isNaN(found(row)) ? last : found(row));
  const rows = [...body.rows].sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0));
  body.append(...(down ? rows.reverse() : rows));
}

async function copy(button) {
  const text = byId(button.dataset.from).textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "copied";
  } catch {
    // Without leave to write to the clipboard, the text is at least selected.
    getSelection().selectAllChildren(byId(button.dataset.from));
    button.textContent = "selected";
  }
  setTimeout(() => (button.textContent = "copy"), 1500);
}

// What is shown of a table, as a file of numbers.
function saveTable(id) {
  const shown = (each) => each.offsetParent !== null;
  const text = (cell) => [...cell.childNodes].map((each) => (each.className?.startsWith("key") ? "" : each.textContent)).filter(Boolean).join(" ");
  const rows = [...byId(id).rows].filter(shown).map((row) => [...row.cells].filter(shown).map(text));
  return offer(`${id}.csv`, `${d3.csvFormatRows(rows)}\n`, "text/csv");
}
