"""Plot a partition: how many samples of each class every client holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kairosfl.errors import UserError
from kairosfl.tasks.dataset import DataSet, Ints
from kairosfl.tasks.heterogeneity import Floats, describe, label_counts
from kairosfl.tasks.population import Population

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DISCS = 60  # up to this many clients are drawn as discs; more are drawn as columns of a heat map
COLUMNS = 800  # with more clients than this, neighbours share a column
NAMED = 25  # up to this many classes are labelled


def draw_partition(path: str | os.PathLike[str], dataset: DataSet, population: Population) -> None:
    """Draw the clients by classes and save the figure as PNG, SVG or PDF, as the path ends."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import PowerNorm
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise UserError(
            "drawing a partition needs matplotlib, which is not installed; "
            'pip install "kairosfl[cli]"'
        ) from None
    labels = dataset.labels_of_train
    if labels is None:
        raise UserError(
            f"data set {dataset.name!r} has no class for each sample, which the picture would show."
        )
    counts = label_counts(labels, population, dataset.classes)
    few = len(population) <= DISCS
    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    top, main = figure.subplots(2, 1, sharex=True, height_ratios=(1, 4))
    if few:
        _discs(main, counts)
        top.bar(np.arange(len(counts)), counts.sum(axis=1), width=0.8, color="tab:gray")
    else:
        counts = counts[_by_main_class(counts)]
        shares, sizes, edges = _columns(counts)
        # The square root makes small shares visible: with many classes all of them are small.
        colours = PowerNorm(0.5, vmin=0, vmax=1)
        mesh = main.pcolormesh(edges, np.arange(dataset.classes + 1) - 0.5, shares.T, norm=colours)
        mesh.set_rasterized(True)
        figure.colorbar(mesh, ax=main, label="share of the client's samples", pad=0.01)
        top.stairs(sizes, edges, fill=True, color="tab:gray")
    main.set_xlabel(_clients(len(population)))
    main.xaxis.set_major_locator(MaxNLocator(integer=True))
    main.set_ylabel("class")
    main.set_ylim(dataset.classes - 0.5, -0.5)
    if dataset.classes <= NAMED:
        names = [_short(label) for label in dataset.labels]
        if not names:
            names = [str(number) for number in range(dataset.classes)]
        main.set_yticks(range(dataset.classes), names)
    top.set_ylabel("samples")
    top.set_title(_title(describe(dataset, population)), fontsize="medium")
    target = Path(path)
    if target.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"{target} is not a .png, .svg or .pdf file; change its extension.")
    part = target.with_name(f".{os.getpid()}.{target.name}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(part, dpi=150)
        os.replace(part, target)
    except OSError as error:
        raise UserError(
            f"Cannot write {target}: {error.strerror or error}; choose another path."
        ) from None


def _discs(axes: Axes, counts: Ints) -> None:
    """A disc for each client and class, with an area proportional to the number of samples."""
    client, label = np.nonzero(counts)
    across = 0.9 * min(560 / len(counts), 300 / counts.shape[1])  # points between neighbours
    areas = counts[client, label] / counts.max() * across**2
    axes.scatter(client, label, s=areas, color="tab:blue", linewidths=0)
    axes.set_xlim(-0.7, len(counts) - 0.3)
    axes.grid(alpha=0.2)


def _by_main_class(counts: Ints) -> Ints:
    """Order clients by their most frequent class, the purest first."""
    main = counts.argmax(axis=1)
    purity = counts.max(axis=1) / np.maximum(counts.sum(axis=1), 1)
    return np.lexsort((-purity, main))


def _columns(counts: Ints) -> tuple[Floats, Floats, Floats]:
    """Mean shares and sizes of neighbouring clients, and the edges of their columns."""
    cuts = np.unique(np.linspace(0, len(counts), min(COLUMNS, len(counts)) + 1).astype(np.int64))
    width = np.diff(cuts)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    together: Floats = np.add.reduceat(shares, cuts[:-1], axis=0) / width[:, None]
    sizes: Floats = np.add.reduceat(counts.sum(axis=1), cuts[:-1]) / width
    return together, sizes, cuts.astype(np.float64) - 0.5


def _clients(count: int) -> str:
    if count <= DISCS:
        return "client"
    merged = ""
    if count > 1.5 * COLUMNS:
        merged = f"; a column is the mean of about {count / COLUMNS:.0f}"
    return f"{count:,} clients, sorted by their main class{merged}"


def _title(facts: dict[str, Any]) -> str:
    return (
        f"{facts['name']}: {facts['clients']:,} clients, {facts['smallest_client']:,} to "
        f"{facts['largest_client']:,} samples, size Gini {facts['size_gini']:.2f}\n"
        f"label entropy {facts['label_entropy']:.2f} of {facts['label_entropy_of_all']:.2f} bits, "
        f"earth mover's distance {facts['earth_movers_distance']:.2f}, "
        f"{facts['classes_per_client']:.1f} classes per client"
    )


def _short(label: str) -> str:
    if len(label) <= 16:
        return label
    return label[:15] + "…"
