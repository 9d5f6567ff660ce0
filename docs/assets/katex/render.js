// Draws the equations of a page: fences called `math`, which are text where there are no scripts.
document.addEventListener("DOMContentLoaded", () => {
  for (const place of document.querySelectorAll(".arithmatex")) {
    const tex = place.textContent.trim().replace(/^\\\[|\\\]$/g, "");
    katex.render(tex, place, { displayMode: true, fleqn: true });
  }
});
