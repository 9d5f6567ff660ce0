"""Shows the notebooks under docs/ as pages of the site, with the outputs that are stored in them: a
hook of mkdocs.

A page is made of every notebook.ipynb, as notebook.md; links to the one in other pages lead to the
other. So the same link works on GitHub, which shows notebooks itself.
"""

from __future__ import annotations

import base64
import html
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            text = page(
                json.loads(Path(str(file.abs_src_path)).read_text(encoding="utf-8")),
                Path(file.src_uri).name,
            )
            files.append(
                File.generated(config, file.src_uri.removesuffix("ipynb") + "md", content=text)
            )
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"(\]\([^)\s:]+)\.ipynb\)", r"\1.md)", markdown)


def page(notebook: dict[str, Any], name: str) -> str:
    """The notebook in Markdown, with a link to itself below its title."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        parts += [f'<div class="shown">{show(output)}</div>' for output in cell["outputs"]]
    title, rest = parts[0].partition("\n")[::2]
    link = f'<p><a href="{name}" download>Download this notebook</a>. Its outputs are those of a run on a CPU.</p>'
    return "\n\n".join(["---\nhide:\n  - toc\n---", title, link, rest.strip(), *parts[1:]])


def show(output: dict[str, Any]) -> str:
    """An output in HTML, on lines that Markdown leaves alone."""
    data = output.get("data", {"text/plain": output.get("text", "")})
    if "image/svg+xml" in data:
        return picture(
            "svg+xml", base64.b64encode("".join(data["image/svg+xml"]).encode()).decode()
        )
    if "image/png" in data:
        return picture("png", "".join(data["image/png"]).strip())
    if "<table" in "".join(data.get("text/html", "")):
        table = re.sub(r"<style.*?</style>", "", "".join(data["text/html"]), flags=re.DOTALL)
        return re.sub(r"\s*\n\s*", "", table).replace(' border="1" class="dataframe"', "")
    text = re.sub(r"\x1b\[[0-9;]*m", "", "".join(data["text/plain"])).rstrip()
    return f"<pre>{html.escape(text).replace(chr(10), '&#10;')}</pre>"


def picture(kind: str, text: str) -> str:
    return f'<img alt="The plot of the code above" src="data:image/{kind};base64,{text}">'
