"""Whatever is shaded in a picture is explained in its legend or its caption, and nothing else is."""

import fake
import pytest

from kairosfl.report import static
from kairosfl.report.figures import figures
from kairosfl.report.page import write_report
from kairosfl.report.paper import Page, caption, make_figure
from kairosfl.report.payload import payload
from kairosfl.report.read import read_groups
from kairosfl.report.tables import results

BANDS = "bands: ± standard deviation over seeds"
STRIPS = "strips: critical learning periods"
SHADED = "shaded: critical learning periods"


def write(folder, algorithms, seeds, *, critical=True):
    for algorithm in algorithms:
        for seed in range(seeds):
            run = fake.write_run(
                folder / f"{algorithm}{seed}", algorithm=algorithm, seed=seed, rounds=4
            )
            if not critical:
                fake.edit(run, critical=False)
    return folder


def legend(figure):
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
    return [text.get_text() for each in legends for text in each.get_texts()]


def drawn(key, groups):
    """Legend and caption of one picture of the report, as it is exported."""
    (picture,) = [each for each in figures(groups)[0] if each.key == key]
    names, page = [group.label for group in groups], Page(critical=True)
    with page.style():
        return legend(make_figure([picture], groups, names, page)), caption(
            [picture], groups, names, page
        )


@pytest.mark.parametrize(
    ("algorithms", "seeds", "critical", "over_rounds", "over_bytes"),
    [
        (["fedavg"], 1, True, [SHADED], []),
        (["fedavg"], 1, False, [], []),
        (["fedavg"], 2, True, [SHADED], []),
        (["fedavg"], 2, False, [], []),
        (["fedavg", "alt"], 1, True, ["fedavg", "alt", STRIPS], ["fedavg", "alt"]),
        (["fedavg", "alt"], 2, True, ["fedavg", "alt", STRIPS], ["fedavg", "alt"]),
        ([f"rule{i}" for i in range(5)], 1, True, [*(f"rule{i}" for i in range(5)), STRIPS], None),
    ],
)
def test_legend_and_caption_of_a_picture_say_what_is_shaded(
    tmp_path, algorithms, seeds, critical, over_rounds, over_bytes
):
    groups = read_groups([write(tmp_path, algorithms, seeds, critical=critical)])
    groups.sort(key=lambda group: algorithms.index(group.label))
    shown, text = drawn("accuracy", groups)
    assert shown == over_rounds
    assert (BANDS in text) == (seeds > 1)
    assert ("critical learning periods" in text) == critical
    if over_bytes is not None:
        shown, text = drawn("accuracy-bytes", groups)
        assert shown == over_bytes
        assert (BANDS in text) == (seeds > 1)
        assert "critical learning periods" not in text


def test_seeds_that_agree_have_no_band_to_explain(tmp_path):
    folder = write(tmp_path, ["fedavg"], 2, critical=False)
    for seed in (0, 1):
        fake.edit(folder / f"fedavg{seed}", accuracy=[0.1, 0.2, 0.3, 0.4])
    assert drawn("accuracy", read_groups([folder])) == ([], "Accuracy by round. Mean over 2 seeds.")


@pytest.mark.parametrize(
    ("seeds", "critical", "words"),
    [(1, False, []), (2, True, [BANDS, STRIPS]), (2, False, [BANDS])],
)
def test_the_quick_look_explains_its_shading_once(tmp_path, monkeypatch, seeds, critical, words):
    drawn = []
    monkeypatch.setattr(static, "save", lambda figure, path, kind: drawn.append(figure))
    static.draw_comparison(
        [write(tmp_path, ["fedavg", "pa3fed"], seeds, critical=critical)], tmp_path / "look.png"
    )
    assert legend(drawn[0]) == ["A  fedavg", "B  pa3fed", *words]


def test_the_page_has_the_words_as_data_and_leaves_it_to_what_is_drawn_to_say_them(tmp_path):
    groups = read_groups([write(tmp_path, ["fedavg"], 2)])
    assert payload(groups, results(groups, 0.5), [], 0.5, given=True, varied={})["words"] == {
        "band": "± standard deviation over seeds",
        "critical": "critical learning periods",
        "target": "as given",
    }
    text = write_report([tmp_path], tmp_path / "report.html").read_text()
    body = text.partition("<body>")[2].partition("<script")[0]
    assert "hading" not in body.replace('class="about shading"', "")
    assert "critical learning periods" not in body
    assert (
        body.count('<span class="about shading"></span>') == body.count("<figure") - 2
    )  # heat maps have none


def test_that_shaded_tests_are_explained_only_where_there_are_any(tmp_path):
    for top, shaded in ((0.51, False), (0.9, True)):
        folder = fake.write_sweep(
            tmp_path / str(top), seeds=3, algorithms={"alt": 0.5, "fedavg": top}, rounds=20
        )
        text = write_report([folder], tmp_path / "report.html").read_text()
        assert ("Shaded: p &lt; 0.05." in text) == shaded
