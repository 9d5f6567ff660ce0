"""The pages of results, written from the files in `results/`, with the words of their items: always
the same pages.

`make results` rewrites those of this repository: `python -m kairosfl_reproductions.page results
docs/results.md`. The page itself can be read in a minute; a page for every paper, in the folder of
the same name, has tables, curves and remarks.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kairosfl.errors import UserError
from kairosfl.runs.files import write
from kairosfl_reproductions.catalogue import ITEMS
from kairosfl_reproductions.curves import draw_curves
from kairosfl_reproductions.details import section
from kairosfl_reproductions.overview import draw_overview
from kairosfl_reproductions.results import read, worded
from kairosfl_reproductions.summary import TITLES, WIDE, chapter, summary

STUDY = "studies/against-pfl.json"  # what `benchmarks/speed/against_pfl.py --out` writes
DETAILS = """[All results](../{page}) · Values are our mean ± sample standard deviation over the seeds that got
furthest; columns that end in *published* are the paper's.

- *Rounds* and *seeds* show what a row is based on: `40 of 500` means that 40 of the published 500 rounds were run, so
  the row is not compared with the published value; with `1 of 2` seeds, the other run was interrupted or diverged.
- A *reading* other than *text* follows another passage of the paper or its released code.
- Test accuracies are in per cent; *final 10 %* is the mean of the evaluations in the final 10 % of rounds.
- *name* is the cell's name for `kairosfl reproduce ITEM --cells NAME`.
"""


def write_results_page(results: Path, page: Path) -> Path:
    """Write the page, and one for every paper, from every JSON file in a folder; `ITEM.md` is put
    below its tables.

    Figures are saved to `assets/results` next to the page; searches have none.
    """
    order = {item.replace("/", "-"): number for number, item in enumerate(ITEMS)}
    files = sorted(
        results.glob("*.json"), key=lambda path: (order.get(path.stem, len(order)), path.stem)
    )
    if not files:
        raise UserError(
            f"{results} contains no results (no .json file); run `kairosfl reproduce` with --results."
        )
    everything = {path: worded(read(path)) for path in files}
    remarks = {
        found["item"]: path.with_suffix(".md").read_text(encoding="utf-8")
        for path, found in everything.items()
        if path.with_suffix(".md").is_file()
    }
    pages: dict[str, list[str]] = {}
    for path, found in everything.items():
        picture = f"assets/results/{path.stem}.svg"
        if "/search" in found["item"] or not draw_curves(found, page.parent / picture):
            picture = ""
        text = section(found, remarks.get(found["item"], ""), f"../{picture}" if picture else "")
        pages.setdefault(chapter(found), []).append(text)
    for name, sections in pages.items():
        head = [*WIDE, f"# {TITLES.get(name, name)}", "", DETAILS.format(page=page.name)]
        write(page.parent / page.stem / f"{name}.md", "\n".join([*head, *sections]))
    items = list(everything.values())
    drawn = draw_overview(items, page.parent / "assets" / "results" / "overview.svg")
    picture = "assets/results/overview.svg" if drawn else ""
    write(page, "\n".join(summary(items, remarks, page.stem, picture, results / STUDY)))
    return page


if __name__ == "__main__":
    write_results_page(*map(Path, sys.argv[1:]))
