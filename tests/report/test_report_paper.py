"""Figures and tables for papers: size, fonts, words, captions, and what is bold."""

import json
import re
from pathlib import Path

import fake
import numpy as np
import pytest
from typer.testing import CliRunner

from kairosfl.cli import app
from kairosfl.errors import UserError
from kairosfl.report.comparison import compare
from kairosfl.report.figures import chart
from kairosfl.report.latex import chosen_columns, paper_table
from kairosfl.report.paper import Page, inches, limits, make_figure
from kairosfl.report.ranking import best_rows
from kairosfl.report.read import chosen_groups, read_groups
from kairosfl.report.words import in_words, renamed
from kairosfl_reproductions.groups import cell_words, read_cells

ROOT = Path(__file__).parents[2]
TOPS = {"fedavg": 0.5, "fedprox(mu=0.01) + alt": 0.7}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return fake.write_sweep(
        tmp_path_factory.mktemp("paper") / "study", algorithms=TOPS, seeds=2, rounds=12
    )


def call(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_a_pdf_has_the_width_that_was_asked_for_and_its_fonts_inside(study, tmp_path):
    done = call("figure", study, "-o", tmp_path / "a.pdf", "--width", "84mm", "--height", "2in")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        f"figure: {tmp_path / 'a.pdf'}",
        "caption: Test accuracy by round. Lines: mean over 2 seeds; bands: ± standard deviation over seeds.",
    ]
    text = (tmp_path / "a.pdf").read_bytes()
    box = re.search(rb"/MediaBox \[ *0 0 ([\d.]+) ([\d.]+) *\]", text)
    assert [float(each) for each in box.groups()] == pytest.approx([84 / 25.4 * 72, 144], abs=1e-3)
    assert b"/FontFile2" in text  # TrueType
    assert b"/Type3" not in text


@pytest.mark.parametrize(
    ("against", "label"),
    [("round", "Round"), ("bytes", "Communication (MB)"), ("epochs", "Client epochs")],
)
def test_axes_are_in_words_and_nothing_has_a_title(study, against, label):
    groups, page = read_groups([study]), Page()
    with page.style():
        figure = make_figure([chart(groups, "", against)], groups, ["FedAvg", "Ours"], page)
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == (label, "Test accuracy (%)")
    assert [axes.get_title(loc=place) for place in ("left", "center", "right")] == ["", "", ""]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["FedAvg", "Ours"]
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 2
    assert len({line.get_linestyle() for line in axes.lines}) == 2  # also without colours


def test_many_megabytes_are_gigabytes(study, tmp_path):
    run = fake.write_run(tmp_path / "run", rounds=4)
    fake.edit(run, bytes_up=4e9, bytes_down=4e9)
    groups, page = read_groups([run]), Page()
    with page.style():
        figure = make_figure([chart(groups, "", "bytes")], groups, ["FedAvg"], page)
    assert figure.axes[0].get_xlabel() == "Communication (GB)"
    assert figure.axes[0].lines[0].get_xdata().tolist() == [8, 16, 24, 32]


def test_panels_share_a_legend_and_the_caption_goes_from_left_to_right(study, tmp_path):
    done = call(
        "figure", study, "-o", tmp_path / "a.svg", "--of", "accuracy", "--of", "loss", "--critical"
    )
    assert "caption: From left to right: Test accuracy by round; Test loss by round." in done.stdout
    assert done.stdout.rstrip().endswith("Strips at the bottom: critical learning periods.")
    svg = (tmp_path / "a.svg").read_text()
    assert "<text" not in svg
    assert svg.count("<!-- FedProx (μ = 0.01) + ALT -->") == 1
    again = call(
        "figure", study, "-o", tmp_path / "b.svg", "--of", "accuracy", "--of", "loss", "--critical"
    )
    assert again.exit_code == 0
    assert (tmp_path / "b.svg").read_text() == svg


def test_smoothing_takes_the_mean_of_each_seed_and_says_so(tmp_path):
    for seed, shift in ((0, 0.0), (1, 0.2)):
        run = fake.write_run(tmp_path / f"s{seed}", seed=seed, rounds=5)
        fake.edit(run, accuracy=[0.1 + shift, 0.4 + shift, 0.1 + shift, 0.4 + shift, 0.1 + shift])
    groups, page = read_groups([tmp_path]), Page(smooth=3)
    with page.style():
        figure = make_figure([chart(groups, "")], groups, ["FedAvg"], page)
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), [35, 30, 40, 30, 35])
    done = call("figure", tmp_path, "-o", tmp_path / "a.png", "--smooth", 3)
    assert "Every point is the mean of 3 neighbouring ones." in done.stdout


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["-o", "a.eps"], "a.eps does not end in .pdf, .svg or .png"),
        (["--width", "3"], "'3' is not a length for a figure; give one with its unit"),
        (["--width", "9000pt"], "is not a length for a figure"),
        (["--of", "cohrt"], "'cohrt' is not a curve; did you mean 'cohort'?"),
        (["--of", "fedfim"], "Fisher trace cannot be drawn: the FedFIM detector did not run"),
        (["--only", "fedavgn"], "No group is called 'fedavgn'; did you mean 'fedavg'?"),
        (["--name", "fedavgg=A"], "did you mean 'fedavg'?"),
        (["--y-range", "7"], "'7' is not a range of the y-axis; give LOW:HIGH"),
        (["--font", "comic"], "font = 'comic' is not known; use sans or serif"),
        (["--smooth", "0"], "smooth = 0 is not a number of points"),
    ],
)
def test_a_wrong_option_is_refused_in_a_sentence(study, tmp_path, monkeypatch, options, sentence):
    monkeypatch.chdir(tmp_path)
    done = call("figure", study, *options)
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_lengths_and_ranges():
    assert [
        round(inches(text), 4) for text in ("3.25in", "8.255 cm", "82.55mm", "234.8775pt", "234bp")
    ] == [3.25] * 5
    assert limits("60:75.5") == (60, 75.5)
    for text in ("nan:1", "1:inf", "2:1", "a:b", ":"):
        with pytest.raises(UserError, match="not a range"):
            limits(text)


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("fedavg", "FedAvg"),
        ("fedprox(mu=0.01) + fedcl + alt", "FedProx (μ = 0.01) + FedCL + ALT"),
        ("vrlsgd + trimmedmean(share=0.2)", "VRL-SGD + trimmed mean (share = 0.2)"),
        ("fedavg · lr=0.05, alpha=0.1", "FedAvg · learning rate = 0.05, α = 0.1"),
        ("my.module.HighLoss(q=2) + fedcl()", "my.module.HighLoss(q = 2) + FedCL"),
        ("fedavg · cifar10, alpha=0.1", "FedAvg · cifar10, α = 0.1"),
    ],
)
def test_labels_in_words(label, words):
    assert in_words(label) == words


def test_groups_are_chosen_in_order_and_renamed(study):
    groups = read_groups([study])
    chosen = chosen_groups(groups, ["*alt", "fedavg"])
    labels = [group.label for group in chosen]
    assert labels == ["fedprox(mu=0.01) + alt", "fedavg"]
    assert renamed(labels, ["fedprox(mu=0.01) + alt=Ours = best"], ["a", "b"]) == [
        "Ours = best",
        "b",
    ]


def test_results_of_a_paper_are_drawn_like_runs(tmp_path):
    groups = read_cells(ROOT / "results" / "alt-figure2.json")
    stored = json.loads((ROOT / "results" / "alt-figure2.json").read_text())["cells"][
        "cifar10-moon"
    ]["runs"]
    (moon,) = chosen_groups(groups, ["cifar10-moon"])
    series = chart([moon], "").series[0]
    values = np.array([run["curves"]["accuracy"]["value"] for run in stored])
    np.testing.assert_allclose(series.mean, values.mean(0))
    np.testing.assert_allclose(series.deviation, values.std(0, ddof=1))
    names = ["cifar10-fedavg", "cifar10-fedavg-alt", "cifar10-moon"]
    assert cell_words(names) == ["FedAvg", "FedAvg + ALT", "MOON"]
    assert cell_words(["cifar10-moon", "mnist-moon"]) == ["CIFAR-10, MOON", "MNIST, MOON"]
    refused = call("figure", tmp_path / "no.json", "-o", tmp_path / "a.pdf")
    assert "no.json does not exist" in refused.stderr


def test_a_latex_table_has_the_chosen_columns_the_best_in_bold_a_caption_and_a_label(
    study, tmp_path
):
    path = tmp_path / "t.tex"
    options = [
        "--columns",
        "final 10, MB",
        "--label",
        "tab:main",
        "--name",
        "fedavg=FedAvg & co",
        "--target",
        "0.4",
    ]
    done = call("compare", study, "-o", path, *options)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[0].split("  ")[0] == "algorithm"
    lines = path.read_text().splitlines()
    assert lines[:2] == ["\\begin{table}[t]", "\\centering"]
    assert lines[2].startswith(
        "\\caption{Mean $\\pm$ standard deviation over 2 seeds. Accuracy: mean over the final 10 \\%"
    )
    assert lines[2].endswith("Bold: best.}")
    assert lines[3] == "\\label{tab:main}"
    assert lines[6] == "Algorithm & Accuracy (\\%) & MB \\\\"
    assert lines[8].startswith("FedAvg \\& co & 5")
    assert re.match(
        r"FedProx \(\$\\mu\$ = 0.01\) \+ ALT & \\textbf\{\d+\.\d\d \$\\pm\$ \d\.\d\d\} & ", lines[9]
    )
    call("compare", study, "-o", path, "--caption", "Ours at $\\alpha = 1$.")
    assert "\\caption{Ours at $\\alpha = 1$.}" in path.read_text()
    refused = call("compare", study, "-o", tmp_path / "t.docx")
    assert "t.docx does not end in .tex or .csv" in refused.stderr
    assert (
        "'bets' is not a column of results; did you mean 'best'?"
        in call("compare", study, "--columns", "bets").stderr
    )


def test_passes_are_a_column_if_asked_for_and_a_dash_where_they_were_not_recorded(tmp_path):
    for name, algorithm in (("a", "fedavg"), ("b", "fedprox(mu=0.01)")):
        fake.write_run(tmp_path / name, algorithm=algorithm, rounds=10, planned=10)
    lines = (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        del row["passes"]  # as in runs of version 0.2
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "b" / "metrics.jsonl").write_text(text)

    found = compare([tmp_path], 0.45)
    texts = [row["passes"] for row in found.table(["passes"])]
    assert texts == ["90000", "–"]  # 10 rounds, 10 clients, 3 epochs, 300 passes each
    assert "passes" not in found.table()[0]
    assert [row["passes"]["count"] for row in found.numbers()] == [1, 0]


def test_what_cannot_be_ranked_is_not_bold(tmp_path):
    fake.write_run(tmp_path / "a", algorithm="fedavg", top=0.5)
    fake.write_run(tmp_path / "b", algorithm="alt", top=0.9, rounds=20, planned=40, done=False)
    found = compare([tmp_path], 0.45)
    assert all(
        not best_rows(found.rows, name)
        for name in ("final 10 %", "best", "rounds to target", "MB", "seeds")
    )
    assert "Bold" not in paper_table(found.rows, 0.45, ["a", "b"])
    (tmp_path / "b" / "summary.json").write_text('{"rounds": 20}')
    found = compare([tmp_path], 0.45)
    best = {
        name: {found.rows[i].label for i in best_rows(found.rows, name)}
        for name in ("best", "rounds to target")
    }
    assert best == {"best": {"alt"}, "rounds to target": {"alt"}}
    assert chosen_columns("MB to target,mb, final 10%") == ("MB to target", "MB", "final 10 %")


def test_runs_that_diverged_are_not_bold(tmp_path):
    for name, top in (("fedavg", 0.5), ("alt", 0.6), ("moon", 0.9)):
        fake.write_run(tmp_path / name, algorithm=name, top=top)
    lines = (tmp_path / "moon" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1]) | {"evaluated": True, "loss": None}  # not finite
    (tmp_path / "moon" / "metrics.jsonl").write_text(
        "\n".join([*lines[:-1], json.dumps(last)]) + "\n"
    )
    rows = compare([tmp_path], 0.45).rows
    assert [row.label for row in rows if row.diverged] == ["moon"]
    assert {rows[i].label for i in best_rows(rows, "best")} == {"alt"}
