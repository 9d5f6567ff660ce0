"""The command about the papers: reproduce."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kairosfl.cli.common import Device, Engine, Json, Out, Quiet, Set, asked, command, friendly, print_pairs, print_rows


def reproduce(
    item: Annotated[str | None, typer.Argument(help="PAPER/ITEM; without it, all items are listed.")] = None,
    cells: Annotated[
        list[str], typer.Option("--cells", help="A cell, or words of its name as in 'cifar10 fed*'; repeatable.")
    ] = [],  # noqa: B006
    seeds: Annotated[int | None, typer.Option("--seeds", help="How many seeds.")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", help="Rounds instead of the paper's.")] = None,
    changes: Set = [],  # noqa: B006
    out: Out = None,
    engine: Engine = None,
    device: Device = None,
    results: Annotated[Path | None, typer.Option("--results", help="Also add the results to this folder.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run a table or figure of a paper and print ours beside the printed value."""
    from kairosfl.progress import ShowSweep

    with friendly(lambda: "The same command goes on where it was."):
        from kairosfl import papers
        from kairosfl.papers.curves import draw_curves
        from kairosfl.papers.reproduce import reproduce as reproduce_item
        from kairosfl.papers.results import save, table

        if item is None:
            print_pairs(papers.list_items(), as_json)
            return
        out = out or Path("runs") / "reproduce" / item.replace("/", "-")
        found = reproduce_item(
            papers.find(item),
            cells=cells,
            seeds=seeds,
            rounds=rounds,
            changes=[*changes, *asked(engine=engine, device=device)],
            out=out,
            say=lambda line: None if as_json else typer.echo(line, err=True),
            watch=lambda planned: ShowSweep(planned, quiet=quiet or as_json),
            command=command(),
        )
        if results:
            save(found, results)
        if as_json:
            typer.echo(json.dumps(found))
        else:
            print_rows(table(found))
            drawn = draw_curves(found, out / "curves.svg")
            typer.echo(f"curves: {drawn}; more: kairosfl report {out}" if drawn else "no curves yet", err=True)
