"""Commands that train, and export what was trained: run, resume, sweep, export."""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from kairosfl.cli import complete
from kairosfl.cli.common import (
    Device,
    Engine,
    Json,
    Out,
    Quiet,
    RayAddress,
    Set,
    Verbose,
    asked,
    command,
    friendly,
    print_summary,
    print_table,
    run_sweep,
    warn,
)
from kairosfl.errors import UserError


def run(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="TOML configuration, task file (.py), or the name of a preset; if omitted, use "
            "the defaults.",
            autocompletion=complete.file,
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            help="A predefined configuration; see `kairosfl list presets`.",
            autocompletion=complete.preset,
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            "--task", help="A function that makes the task: file.py, file.py:name or module:name."
        ),
    ] = None,
    changes: Set = [],  # noqa: B006
    out: Out = None,
    engine: Engine = None,
    device: Device = None,
    ray_address: RayAddress = None,
    origin: Annotated[
        Path | None, typer.Option("--from", help="A run folder whose model is the first one.")
    ] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Run one experiment. With --engine flower, clients are separate processes on this machine."""
    silent = quiet or as_json
    with friendly():
        if preset and file:
            raise UserError("Give a file or --preset, not both; override single keys with --set.")
        file, preset = found(file, preset, quiet=silent)
    from kairosfl.runs.config import read, resolve, task_table

    if task is not None:
        of_task = [f"task.{key}={json.dumps(text)}" for key, text in task_table(task).items()]
        changes = [*of_task, *changes]
    if engine == "flower":
        from kairosfl.cli.deploy import rehearse

        with friendly():
            if file is None and task is not None and ".py" in task:
                file = Path(task)
            if file is None:
                raise UserError(
                    "--engine flower needs a TOML file, because its nodes read it, too; give one."
                )
        return rehearse(file, changes=changes, out=out, quiet=quiet, as_json=as_json)
    if origin is not None:
        changes = [*changes, f"model.start={json.dumps(str(origin.absolute()))}"]
    folder = out
    with friendly(lambda: how_to_resume(folder), verbose):
        if ray_address and engine is None:
            engine = "ray"
        options = asked(engine=engine, device=device, ray_address=ray_address)
        tables = {}
        if file:
            tables = read(file)
        config = resolve(tables, [*changes, *options])
        from kairosfl.progress import RunProgress
        from kairosfl.runs.experiment import start
        from kairosfl.runs.lock import forget
        from kairosfl.runs.sensible import unused

        if not silent:
            warn(unused([config]))
        if folder is None:
            folder = fresh(_name(preset, file, task))
        try:
            critical = config.follows_detector
            with RunProgress(config.train.rounds, quiet=silent, critical=critical) as show:
                summary = start(config, folder, command=command(), notify=show, say=show.say)
        finally:
            forget(folder)
    print_summary(folder, summary, as_json)


def resume(
    folder: Annotated[Path, typer.Argument(help="Run folder.")],
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Resume a run from its last checkpoint."""
    with friendly(verbose=verbose):
        check_recorded(folder)
        from kairosfl.progress import RunProgress
        from kairosfl.runs import experiment
        from kairosfl.runs.folder import Folder

    with friendly(lambda: how_to_resume(folder), verbose):
        begun = Folder(folder)
        config = begun.config()
        done = begun.rounds_done()
        show = RunProgress(
            config.train.rounds,
            quiet=quiet or as_json,
            done=0 if done is None else done,
            critical=config.follows_detector,
        )
        with show:
            summary = experiment.resume(folder, notify=show, say=show.say)
    print_summary(folder, summary, as_json)


def sweep(
    file: Annotated[
        Path,
        typer.Argument(help="TOML configuration with lists in a [sweep] section, or a task file."),
    ],
    changes: Set = [],  # noqa: B006
    out: Out = None,
    engine: Engine = None,
    device: Device = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, help="Seeds 0 to N - 1 for every combination.")
    ] = None,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="Batched engine: every run is bit-identical to running it alone.",
        ),
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Run every combination of the lists under [sweep]; run it again to resume."""
    from kairosfl.runs.combinations import check
    from kairosfl.runs.config import change, read
    from kairosfl.runs.keys import updated

    folder = Path("runs") / file.stem if out is None else out
    if out is None and (folder / "config.toml").exists():  # from a single run of the same file
        folder = folder.with_name(f"{file.stem}-sweep")
    with friendly(lambda: f"Resume with the same command: {command()}", verbose):
        options = asked(engine=engine, device=device)
        if deterministic:
            options += asked(deterministic="true")
        tables = change(read(file), [*changes, *options])
        if seeds is not None:
            tables = updated(tables, {"sweep.seed": list(range(seeds))})
        if not tables.get("sweep"):
            raise UserError(
                f"{file} has no [sweep] section with lists of values; add one, give --seeds, or "
                "use `kairosfl run`."
            )
        check(tables)
        summaries = run_sweep(tables, folder, quiet or as_json)
        if as_json:
            typer.echo(json.dumps({"folder": str(folder), "runs": summaries}))
        else:
            print_table([folder])
            typer.echo(f"runs in {folder}")


def export(
    folder: Annotated[Path, typer.Argument(help="Run folder.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="File to write, by default model.safetensors, or an .onnx file; for peft's "
            "adapters a directory, by default adapter.",
        ),
    ] = None,
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Write ONNX instead of safetensors.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    client: Annotated[
        int | None, typer.Option("--client", help="Number of the client whose own model it is.")
    ] = None,
) -> None:
    """Write the trained model of a run to a file, for use without Kairos."""
    with friendly():
        check_recorded(folder)
        from kairosfl.runs.export import export as write

        typer.echo(f"model: {write(folder, out, force=force, onnx=onnx, client=client)}")


def found(file: Path | None, preset: str | None, *, quiet: bool) -> tuple[Path | None, str | None]:
    """The file to run, and the name of the preset if it is one, as in `kairosfl run kairos`."""
    from kairosfl import presets

    if file is None or file.is_file() or ".py" in file.suffix:
        if preset:
            return presets.path(preset), preset
        return file, None
    if str(file) in presets.names():
        if not quiet:
            typer.echo(f"running the preset {str(file)!r}", err=True)
        return presets.path(str(file)), str(file)
    if not file.exists():
        hint = presets.guess(file)
        if hint:
            raise UserError(f"{file} does not exist; {hint}")
    return file, None


def check_recorded(folder: Path) -> None:
    """Refuse a folder without a run, and mistakes in its configuration, without torch."""
    from kairosfl.runs.config import checked, read
    from kairosfl.runs.files import recorded

    checked(read(recorded(folder)))


def _name(preset: str | None, file: Path | None, task: str | None) -> str:
    """What to call the folder of a run: after its preset, its file or its task."""
    if preset:
        return preset
    if file is None and task:
        file = Path(task.replace(":", "-"))
    if file is None:
        return "default"
    if file.stem == "config" and file.parent.name:
        return file.parent.name
    return file.stem


def fresh(stem: str) -> Path:
    """A new folder of this name under runs/, with a number if there is one."""
    home = Path("runs")
    try:
        for number in itertools.count(1):
            folder = home / stem
            if number > 1:
                folder = home / f"{stem}-{number}"
            with contextlib.suppress(FileExistsError):  # also of another run that starts right now
                folder.mkdir(parents=True)
                return folder
    except OSError as error:
        raise UserError(f"Cannot write into {home}: {error.strerror}; give an --out.") from None
    raise AssertionError


def how_to_resume(folder: Path | None) -> str:
    if folder is not None and any((folder / "checkpoint").glob("checkpoint-*.json")):
        from kairosfl.runs.folder import Folder

        saved = Folder(folder).rounds_done()
        if saved is None:
            saved = 0
        done = "1 round is saved" if saved == 1 else f"{saved:,} rounds are saved"
        return f"{done}. Resume with: kairosfl resume {shlex.quote(str(folder))}"
    return "Nothing has been trained yet."
