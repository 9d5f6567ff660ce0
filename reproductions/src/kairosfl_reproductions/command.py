"""The command about the papers: reproduce."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kairosfl.cli.common import Device, Engine, Json, Out, Quiet, Set, asked, command, friendly
from kairosfl.cli.screen import print_pairs, print_rows


def reproduce(
    item: Annotated[
        str | None, typer.Argument(help="PAPER/ITEM; if omitted, list all items.")
    ] = None,
    cells: Annotated[
        list[str],
        typer.Option(
            "--cells", help="A cell, or words of its name, such as 'cifar10 fed*'; repeatable."
        ),
    ] = [],  # noqa: B006
    seeds: Annotated[int | None, typer.Option("--seeds", help="Number of seeds.")] = None,
    first_seed: Annotated[
        int, typer.Option("--first-seed", min=0, help="The first of them, to add more later.")
    ] = 0,
    rounds: Annotated[
        int | None, typer.Option("--rounds", help="Number of rounds, instead of the paper's.")
    ] = None,
    changes: Set = [],  # noqa: B006
    out: Out = None,
    engine: Engine = None,
    device: Device = None,
    results: Annotated[
        Path | None, typer.Option("--results", help="Also add the results to this directory.")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run a table or figure of a paper and print our values next to the published ones."""
    with friendly(lambda: "Run the same command again to resume."):
        if item is None:
            from kairosfl_reproductions.catalogue import list_items

            print_pairs(list_items(), as_json)
            return
        from kairosfl_reproductions.catalogue import find

        chosen = find(item)
        out = out or Path("runs") / "reproduce" / item.replace("/", "-")
        from kairosfl.progress import SweepProgress

        with SweepProgress(quiet=quiet or as_json) as show:  # before anything that takes time
            show.state("starting")
            from kairosfl_reproductions.reproduce import reproduce as reproduce_item
            from kairosfl_reproductions.results import refuse_altered

            if results:
                refuse_altered(chosen, cells, changes)

            def say(line: str) -> None:
                if as_json:
                    return
                if quiet:
                    typer.echo(line, err=True)
                else:
                    show.say(line)

            reproduced = reproduce_item(
                chosen,
                cells=cells,
                seeds=seeds,
                first_seed=first_seed,
                rounds=rounds,
                changes=[*changes, *asked(engine=engine, device=device)],
                out=out,
                results=results,
                say=say,
                progress=show,
                command=command(),
            )
        from kairosfl_reproductions.curves import draw_curves
        from kairosfl_reproductions.results import table

        if as_json:
            typer.echo(json.dumps(reproduced))
            return
        print_rows(table(reproduced), first_out=("reading", "seeds", "rounds"))
        drawn = draw_curves(reproduced, out / "curves.svg")
        typer.echo(
            f"curves: {drawn}; for more, run: kairosfl report {out}" if drawn else "no curves yet",
            err=True,
        )
