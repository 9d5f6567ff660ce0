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
  const table = head.closest("table"), body = table.tBodies[0], column = head.cellIndex;
  page.sorted[table.id] = { column, down };
  for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const text = (row) => row.cells[column].textContent.trim();
  const found = (row) => parseFloat(text(row).replace("−", "-"));
  const words = column === 0 || [...body.rows].every((row) => Number.isNaN(found(row)));
  // Last comes what was never reached, which is not a number.
  body.append(...d3.sort(body.rows, words ? (row) => text(row) : (row) => (down ? -found(row) : found(row))));
  if (words && down) body.append(...[...body.rows].reverse());
}

async function copy(button) {
  const from = byId(button.dataset.from);
  getSelection().selectAllChildren(from); // which is all that is done without leave to write to the clipboard
  const written = navigator.clipboard?.writeText(from.textContent) ?? Promise.reject();
  button.textContent = await written.then(() => "copied", () => "selected");
  setTimeout(() => (button.textContent = "copy"), 1500);
}

// What is shown of a table, as a file of numbers.
function saveTable(id) {
  const shown = (each) => each.offsetParent !== null;
  const texts = (cell) => [...cell.childNodes].filter((each) => !each.className?.startsWith("key")).map((each) => each.textContent);
  const text = (cell) => texts(cell).filter(Boolean).join(" ");
  const rows = [...byId(id).rows].filter(shown).map((row) => [...row.cells].filter(shown).map(text));
  return offer(`${id}.csv`, `${d3.csvFormatRows(rows)}\n`, "text/csv");
}
