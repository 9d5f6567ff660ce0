// Renders the `math` blocks of a page with KaTeX; without JavaScript, they stay as plain text.
document.addEventListener("DOMContentLoaded", () => {
  for (const place of document.querySelectorAll(".arithmatex")) {
    const tex = place.textContent.trim().replace(/^\\\[|\\\]$/g, "");
    katex.render(tex, place, { displayMode: true, fleqn: true });
  }
});
