"""Reports and comparisons of runs that are judged by something else than accuracy."""

import csv
import json
import math

import fake
import numpy as np
import pytest
import torch
from test_report_browser import ask, find, settle
from torch import nn
from typer.testing import CliRunner

import kairosfl
from kairosfl.cli import app
from kairosfl.errors import UserError
from kairosfl.report.comparison import compare
from kairosfl.report.export import export_figures, export_tables
from kairosfl.report.figures import chart, figures
from kairosfl.report.page import page, verdict, write_report
from kairosfl.report.read import read_groups, read_study
from kairosfl.report.static import draw_comparison
from kairosfl.report.tables import default_target, paired_tests, results
from kairosfl.report.watch import LivePage, serve
from kairosfl.runs.folder import Folder
from kairosfl.runs.score import Score, usual

ROUNDS = 6
SETTINGS = {"clients": 8, "cohort": 4, "rounds": ROUNDS, "client_accuracy": True, "progress": False}
LOOP = {"engine": "loop", "device": "cpu"}


class Bigram(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.scores = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, tokens):
        return self.scores(self.embedding(tokens))


@pytest.fixture(scope="module")
def regression(tmp_path_factory):
    """Two algorithms with three seeds each; the second learns faster."""
    folder, generator = tmp_path_factory.mktemp("regression"), torch.Generator().manual_seed(0)
    x = torch.randn(240, 5, generator=generator)
    y = x @ torch.randn(5, generator=generator)
    for algorithm in ("fedavg", "fedavgm"):
        for seed in range(3):
            torch.manual_seed(seed)
            out, data = folder / f"{algorithm}-{seed}", ((x[:160], y[:160]), (x[160:], y[160:]))
            kairosfl.simulate(
                nn.Linear(5, 1),
                *data,
                algorithm=algorithm,
                lr=0.02,
                seed=seed,
                out=out,
                **SETTINGS,
                **LOOP,
            )
    return folder


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    folder, generator = tmp_path_factory.mktemp("language"), torch.Generator().manual_seed(0)
    text = (torch.randint(0, 12, (120, 1), generator=generator) + torch.arange(9)) % 12
    x, y = text[:, :-1], text[:, 1:]
    torch.manual_seed(0)
    data = ((x[:80], y[:80]), (x[80:], y[80:]))
    kairosfl.simulate(
        Bigram(), *data, kind="language", lr=0.5, out=folder / "run", **SETTINGS, **LOOP
    )
    return folder


def judged(folder, name, values, *, better="lower", percent=False, **options):
    """A made-up run whose only metric is this one, with these values."""
    run = fake.write_run(folder, rounds=len(values), **options)
    about = json.loads((run / "run.json").read_text())
    about["metrics"] = [{"name": name, "better": better, "percent": percent}]
    (run / "run.json").write_text(json.dumps(about))
    fake.edit(run, metric=name, evaluated=True, **{name: list(values)})
    return run


def curves(folder):
    """The RMSE of every run by algorithm and seed, from the files alone."""
    found = {}
    for path in sorted(folder.glob("*/metrics.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        algorithm, seed = path.parent.name.rsplit("-", 1)
        found.setdefault(algorithm, {})[int(seed)] = np.array([row["rmse"] for row in rows])
    return found


def test_a_regression_is_ranked_and_tested_by_its_rmse_and_lower_is_better(regression):
    files, groups = curves(regression), read_groups([regression])
    slow, fast = results(groups, target=2.0)
    for row in (slow, fast):
        seeds = files[row.label].values()
        assert row.best.mean == pytest.approx(np.mean([each.min() for each in seeds]), rel=1e-12)
        assert row.last_tenth.mean == pytest.approx(
            np.mean([each[-1] for each in seeds]), rel=1e-12
        )
        there = [np.flatnonzero(each <= 2.0) for each in seeds]
        assert row.rounds_to_target.count == sum(map(bool, map(len, there)))
    assert fast.rounds_to_target.mean == np.mean(
        [1 + np.argmax(each <= 2.0) for each in files["fedavgm"].values()]
    )
    assert fast.last_tenth.mean < slow.last_tenth.mean
    (pair,) = paired_tests(groups)
    gain = np.mean([files["fedavg"][seed][-1] - files["fedavgm"][seed][-1] for seed in range(3)])
    assert (pair.first, pair.second) == ("fedavg", "fedavgm")
    assert pair.difference.mean == pytest.approx(gain, rel=1e-12)
    assert gain > 0  # the second is better
    words = verdict([slow, fast], [pair])
    assert words.startswith("<b>fedavgm</b> reaches an RMSE of <b>")
    assert " below <b>fedavg</b>, the baseline" in words
    assert "%</b>" not in words
    assert "points" not in words


def test_the_page_of_a_regression_never_speaks_of_accuracy(regression):
    text = page(read_study([regression]))
    body = text[text.index("<body>") : text.index('<script type="application/json"')]
    shown = body.replace("run.client_accuracy", "").replace("client_accuracy = true", "")
    assert "ccuracy" not in shown
    for words in (
        "<b>Test RMSE</b>",
        "<b>RMSE against communication</b>",
        "<b>Test MAE</b>",
        "<b>Test R²</b>",
        "RMSE per client, on its training samples",
        "the tenth with the highest RMSE",
        "RMSE (lower is better).",
        'title="Lowest RMSE of any evaluated round"',
        "above zero where a row is better, that is, lower",
        'type="number" step="any"',
        "samples do not have one class each",
    ):
        assert words in body, words


def test_a_language_model_is_judged_by_its_perplexity(language):
    groups = read_groups([language])
    pictures = {each.key: each for each in figures(groups)[0]}
    assert (pictures["perplexity"].title, pictures["perplexity"].percent) == (
        "Test perplexity",
        False,
    )
    assert (pictures["token_accuracy"].title, pictures["token_accuracy"].percent) == (
        "Test token accuracy",
        True,
    )
    mean, worst = pictures["client-perplexity"].series
    assert (worst.mean >= mean.mean).all()
    served = pictures["client-quantiles"].series[0].mean
    assert (np.diff(served) >= 0).all()
    assert served[-1] > 1  # of perplexities, not shares
    (row,) = results(groups, default_target(groups))
    assert row.best.mean == row.final.mean
    assert verdict([row], []).startswith("<b>fedavg</b> reaches a perplexity of <b>")


def test_compare_names_the_metric_and_its_target(regression):
    done = CliRunner().invoke(app, ["compare", str(regression), "--target", "2"])
    assert done.exit_code == 0, done.output
    heads = done.output.splitlines()[0].split("  ")
    assert [head.strip() for head in heads if head.strip()] == [
        *(
            "algorithm",
            "seeds",
            "rounds",
            "RMSE final 10 %",
            "RMSE best",
            "rounds to 2",
            "MB to 2",
            "MB",
            "epochs",
        )
    ]
    shown = json.loads(CliRunner().invoke(app, ["compare", str(regression), "--json"]).stdout)
    assert {row["metric"] for row in shown} == {"rmse"}
    assert shown[1]["best"]["mean"] < shown[0]["best"]["mean"]


def test_exported_tables_and_figures_follow_the_metric(regression, tmp_path):
    export_tables([regression], tmp_path, target=2.0)
    with (tmp_path / "results.csv").open() as handle:
        assert [row["metric"] for row in csv.DictReader(handle)] == ["rmse", "rmse"]
    head = (tmp_path / "tests.tex").read_text().splitlines()[2]
    assert "first $-$ second &" in head
    assert "points" not in head
    names = {path.stem for path in export_figures([regression], tmp_path, "svg")}
    assert names >= {"rmse", "rmse-bytes", "rmse-epochs", "client-rmse", "mae", "r2", "loss"}
    assert "RMSE" in (tmp_path / "rmse.svg").read_text()
    assert draw_comparison([regression], tmp_path / "all.png").stat().st_size > 10_000


def test_a_run_that_its_caller_stopped_at_a_value_of_the_metric_has_finished(tmp_path):
    x = torch.randn(120, 5, generator=torch.Generator().manual_seed(0))
    y = x.sum(1)
    data = ((x[:80], y[:80]), (x[80:], y[80:]))
    torch.manual_seed(0)
    out = tmp_path / "run"
    stopped = kairosfl.simulate(
        nn.Linear(5, 1),
        *data,
        lr=0.05,
        out=out,
        on_round=lambda history: history.score > 1.9,
        **SETTINGS,
        **LOOP,
    )
    values = [row["rmse"] for row in stopped.metrics]
    assert 1 < len(values) < ROUNDS
    assert values[-1] <= 1.9 < values[-2]
    (row,) = results(read_groups([out]), target=1.9)
    assert (row.finished, row.rounds.mean, row.rounds_to_target.mean) == (
        1,
        len(values),
        len(values),
    )


def test_a_damaged_value_is_not_a_round_that_diverged(tmp_path):
    run = fake.write_run(tmp_path / "run", rounds=4)
    fake.edit(run, accuracy=[0.1, 0.2, 0.3, 1.5], loss=[1.0, 1.0, 1.0, None])
    (row,) = results(read_groups([run]), target=0.2)
    assert (row.final.mean, row.last_tenth.mean, row.notes) == (0.3, 0.3, ())


def test_runs_with_different_main_metrics_are_refused_with_both_named(
    regression, language, tmp_path
):
    sentence = (
        r"judged by its RMSE \(lower is better\), but .*run is judged by its perplexity "
        r"\(lower is better\); give"
    )
    for use in (compare, lambda dirs: write_report(dirs, tmp_path / "report.html"), read_groups):
        with pytest.raises(UserError, match=sentence):
            use([regression, language])
    done = CliRunner().invoke(app, ["compare", str(regression), str(language)])
    assert done.exit_code == 2
    assert "give runs with the same main metric" in done.stderr
    judged(tmp_path / "a", "score", [1.0, 2.0])
    judged(tmp_path / "b", "score", [1.0, 2.0], better="higher")
    with pytest.raises(
        UserError, match=r"score \(lower is better\), but .* score \(higher is better\)"
    ):
        compare([tmp_path])


def test_the_target_is_a_value_of_the_metric(regression, tmp_path):
    assert compare([regression], target=60).target == 60
    assert [row.rounds_to_target.mean for row in compare([regression], target=60).rows] == [1, 1]
    assert [row.rounds_to_target.count for row in compare([regression], target=-1).rows] == [0, 0]
    with pytest.raises(UserError, match="target = nan is not an RMSE; give a finite number"):
        compare([regression], target=math.nan)
    judged(tmp_path / "f1", "f1", [0.2, 0.7], better="higher", percent=True)
    with pytest.raises(UserError, match="target = 60 is not an F1; give a fraction, such as"):
        compare([tmp_path], target=60)
    assert compare([tmp_path], target=0.6).rows[0].rounds_to_target.mean == 2
    assert "F1 in per cent." in page(read_study([tmp_path]))


def test_the_default_target_of_a_lower_metric_is_what_the_baseline_reaches(tmp_path):
    for algorithm, bests in {
        "fedavg": (30.1, 31.2),
        "fedavgm": (20.3, 23.4),
        "fedprox": (5.0, 25.0),
    }.items():
        for seed, best in enumerate(bests):
            values = [100.0, best, 2 * best]
            judged(
                tmp_path / f"{algorithm}{seed}",
                "perplexity",
                values,
                algorithm=algorithm,
                seed=seed,
            )
    groups = read_groups([tmp_path])
    assert (
        default_target(groups) == 62
    )  # 61.3, the mean of twice 30.1 and 31.2, rounded to the worse side
    assert [row.rounds_to_target.count for row in results(groups, 62)] == [2, 2, 2]


@pytest.mark.parametrize(
    ("score", "value", "short"),
    [
        (Score("rmse", higher=False), 0.1234, 0.13),
        (Score("rmse", higher=False), 0.13, 0.13),
        (Score("rmse", higher=False), 2340.0, 2400.0),
        (Score("rmse", higher=False), 0.0, 0.0),
        (Score("r2"), 0.816, 0.81),
        (Score("r2"), -0.816, -0.82),
        (Score("accuracy", percent=True), 0.488, 0.48),
        (Score("error", higher=False, percent=True), 0.488, 0.49),
    ],
)
def test_a_target_is_rounded_to_the_worse_side(score, value, short):
    assert score.rounded(value) == pytest.approx(short, rel=1e-12)
    assert score.reached(np.array([value]), score.rounded(value)).all()


def test_a_metric_in_words():
    assert [
        usual(name).with_article
        for name in ("accuracy", "rmse", "f1", "perplexity", "token_accuracy")
    ] == [*("an accuracy", "an RMSE", "an F1", "a perplexity", "a token accuracy")]
    assert usual("iou").title == "IoU"
    assert usual("pixel_accuracy").title == "Pixel accuracy"
    assert [usual(name).higher for name in ("rmse", "mae", "loss", "perplexity", "r2", "dice")] == [
        False
    ] * 4 + [True] * 2
    assert [usual("rmse").digits(size) for size in (0.01234, 0.1234, 1.234, 1234.5, 1e7)] == [
        5,
        4,
        3,
        0,
        0,
    ]
    assert usual("accuracy").digits(12.3) == 2


def test_a_regression_that_diverged_is_not_judged_by_the_rounds_before(tmp_path):
    """Null in an evaluated round is a number that was not finite, not a round that was not
    evaluated.
    """
    run = judged(tmp_path / "run", "rmse", [3.0, 2.0, None, None])
    fake.edit(run, loss=[9.0, 4.0, None, None])
    (row,) = results(read_groups([run]), target=2.5)
    assert (row.final.count, row.last_tenth.count, row.best.mean, row.rounds_to_target.mean) == (
        0,
        0,
        2.0,
        2,
    )
    end = "from there on its test loss is not finite, or has exploded"
    assert row.notes == (f"diverged in round 3 (not compared): {end}",)
    json.loads(
        page(read_study([run])).split('id="data">')[1].split("</script>")[0],
        parse_constant=pytest.fail,
    )
    summary = Folder(run).summarise(4, {"verdicts": []}, {})
    assert (summary["rmse"], summary["loss"], summary["last_tenth_rmse"]) == (None, None, None)
    assert (summary["best_rmse"], summary["best_round"]) == (2.0, 2)


def test_without_run_json_the_lines_name_the_metric_and_its_kind_the_direction(
    regression, tmp_path
):
    run = judged(tmp_path / "run", "rmse", [3.0, 2.0, 2.5])
    (run / "run.json").unlink()
    (row,) = results(read_groups([run]), target=2.5)
    assert (row.score, row.best.mean, row.rounds_to_target.mean) == (
        Score("rmse", higher=False),
        2.0,
        2,
    )
    judged(tmp_path / "other", "rmse", [3.0], algorithm="fedavgm")
    about = json.loads((tmp_path / "other" / "run.json").read_text()) | {
        "metrics": [{"name": "<b>"}]
    }
    (tmp_path / "other" / "run.json").write_text(json.dumps(about))
    study = read_study([tmp_path])
    assert [group.score.name for group in study.groups] == ["rmse", "rmse"]
    assert any("metrics = [{'name': '<b>'}] is not a valid value" in each for each in study.damaged)


def test_a_task_without_metrics_is_judged_by_its_loss_which_is_drawn_once(tmp_path):
    run = judged(tmp_path / "run", "loss", [3.0, 1.0, 2.0])
    groups = read_groups([run])
    keys = [each.key for each in figures(groups)[0]]
    assert keys[:3] == ["loss", "loss-bytes", "loss-epochs"]
    assert len(keys) == len(set(keys))
    (row,) = results(groups, 1.5)
    assert (row.best.mean, row.rounds_to_target.mean) == (1.0, 2)
    assert verdict([row], []).startswith("<b>fedavg</b> reaches a loss of <b>2.000</b>")
    assert draw_comparison([run], tmp_path / "all.png").exists()


def test_a_live_page_takes_any_target_until_it_knows_what_it_is_of(tmp_path):
    serve(tmp_path, port=0, target=25).server_close()
    judged(tmp_path / "run", "rmse", [30.0, 20.0])
    serve(tmp_path, port=0, target=25).server_close()
    assert '"target":25' in LivePage(tmp_path, 25).newer("")
    with pytest.raises(UserError, match="target = inf is not an RMSE"):
        serve(tmp_path, port=0, target=math.inf)


@pytest.fixture
def opened(browser, regression, tmp_path):
    browser.set_window_size(1280, 900)
    browser.get(write_report([regression], tmp_path / "report.html", target=2.0).as_uri())
    settle(browser)
    yield browser
    assert [entry["message"] for entry in browser.get_log("browser")] == []


def test_the_page_counts_down_to_the_target(opened):
    shown = "[...document.querySelectorAll('[data-column$=\"to target\"]')].map(c => c.textContent)"
    made = "[...document.querySelectorAll('[data-column$=\"to target\"]')].map(c => c.title)"
    first = ask(opened, shown)
    assert first == ask(opened, made)
    assert (
        ask(opened, "document.querySelector('#fig-rmse .goal + .hint').textContent") == "target 2"
    )
    cell = "tr[data-group='1'] [data-column='rounds to target']"
    for target, expected in (("0.000001", "–"), ("1000", "1"), ("2", None)):
        opened.execute_script(
            "const t = document.getElementById('target'); t.value = arguments[0]; t.dispatchEvent(new Event('input'))",
            target,
        )
        assert expected in (None, find(opened, cell).text)
    assert ask(opened, shown) == first


def test_every_chart_of_a_regression_is_drawn(opened):
    drawn = "page.charts.filter(c => !c.figure.hidden && !c.svg.querySelector('.line, image')).map(c => c.spec.key)"
    assert ask(opened, drawn) == []
    assert ask(opened, "document.querySelectorAll('#fig-rmse .line').length") == 2
    assert ask(opened, "document.querySelector('#fig-rmse').classList.contains('hero')")
    best = "[...document.querySelectorAll('td.best')].map(c => [c.closest('tr').dataset.group, c.dataset.column])"
    assert ask(opened, best) == [
        ["1", name] for name in ("final 10 %", "final", "best", "worst clients")
    ]


def test_what_a_rule_recorded_is_drawn_without_being_asked_for(tmp_path):
    run = fake.write_run(tmp_path / "run", rounds=4)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    own = [{"my_gap": 0.5 * i, "lud": 1.0, "words": "<b>"} | line for i, line in enumerate(lines)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in own))
    groups = read_groups([run])
    drawn, left = figures(groups)
    (picture,) = (each for each in drawn if each.key == "my-gap")
    assert (picture.section, picture.title, picture.note) == (
        "signals",
        "My gap",
        "Recorded by a rule.",
    )
    assert picture.series[0].mean.tolist() == [0.0, 0.5, 1.0, 1.5]
    assert sum(each.key == "lud" for each in drawn) == 1  # FedAWARE's has its own words
    assert {each.title: each.why for each in left}["Words"] == "metrics.jsonl holds no number"
    assert chart(groups, "my-gap").y_label == chart(groups, "my_gap").y_label == "My gap"
    assert "My gap" in page(read_study([run]))
    done = CliRunner().invoke(
        app, ["figure", str(run), "--of", "my-gap", "-o", str(tmp_path / "gap.svg")]
    )
    assert done.exit_code == 0, done.output
