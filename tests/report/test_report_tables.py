"""Means, targets and paired tests, against numbers worked out by hand or by scipy."""

import math
from dataclasses import replace

import fake
import pytest
from scipy import stats

from kairosfl.errors import UserError
from kairosfl.report import parts
from kairosfl.report.comparison import compare
from kairosfl.report.read import read_groups
from kairosfl.report.student import holm, interval, paired_t, student_quantile, student_tail
from kairosfl.report.tables import (
    Spread,
    baselines,
    default_target,
    megabytes,
    paired_tests,
    results,
    signed,
)

# Two algorithms, seeds 0 to 2, ten rounds; the final 10 % is the last round alone.
CURVES = {
    "fedavg": [
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5, 0.5, 0.6, 0.50],
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5, 0.5, 0.6, 0.52],
        [0.1, 0.2, 0.3, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.48],
    ],
    "fedavgm": [
        [0.1, 0.3, 0.5, 0.5, 0.5, 0.6, 0.6, 0.6, 0.7, 0.60],
        [0.1, 0.3, 0.4, 0.5, 0.5, 0.6, 0.6, 0.6, 0.7, 0.60],
        [0.1, 0.3, 0.4, 0.4, 0.5, 0.6, 0.6, 0.6, 0.7, 0.57],
    ],
}


@pytest.fixture
def folder(tmp_path):
    for algorithm, curves in CURVES.items():
        for seed, curve in enumerate(curves):
            run = fake.write_run(
                tmp_path / f"{algorithm}-{seed}", algorithm=algorithm, seed=seed, rounds=10
            )
            fake.edit(
                run,
                accuracy=curve,
                bytes_down=1_000_000,
                bytes_up=500_000,
                epochs_total=30,
                cohort=10,
            )
    return tmp_path


def test_the_table_holds_means_deviations_and_what_the_target_cost(folder):
    first, second = results(read_groups([folder]), target=0.5)
    assert (first.label, first.seeds, first.planned) == ("fedavg", (0, 1, 2), 10)
    assert first.final.mean == pytest.approx(0.5)
    assert first.final.deviation == pytest.approx(0.02)
    assert first.best.mean == pytest.approx((0.6 + 0.6 + 0.48) / 3)
    assert (
        first.rounds_to_target.mean,
        first.rounds_to_target.count,
        first.rounds_to_target.asked,
    ) == (5, 2, 3)
    assert first.bytes_to_target.mean == pytest.approx(5 * 1.5e6)
    assert second.rounds_to_target.mean == pytest.approx((3 + 4 + 5) / 3)
    assert second.bytes.mean == pytest.approx(15e6)
    assert second.epochs.mean == pytest.approx(300)


def test_the_last_tenth_is_a_mean_over_the_evaluated_rounds_only(tmp_path):
    run = fake.write_run(tmp_path / "a", rounds=40)
    curve = [None if i % 2 else i / 100 for i in range(40)]  # twenty values: 0.00, 0.02 ... 0.38
    fake.edit(run, accuracy=curve)
    (row,) = results(read_groups([run]), target=0.2)
    assert row.last_tenth.mean == pytest.approx((0.36 + 0.38) / 2)
    assert row.final.mean == 0.38
    assert row.rounds_to_target.mean == 21


@pytest.mark.parametrize(("since", "score"), [(39, 0.4), (40, 0.4), (36, 0.385), (41, 0.385)])
def test_models_that_are_averaged_since_the_last_tenth_are_scored_after_the_last_round(
    tmp_path, since, score
):
    run = fake.write_run(tmp_path / "a", rounds=40)
    plain = [0.1 if number >= since else None for number in range(1, 41)]
    fake.edit(run, accuracy=[number / 100 for number in range(1, 41)], plain_accuracy=plain)
    (row,) = results(read_groups([run]), target=0.2)
    assert row.last_tenth.mean == pytest.approx(score)
    assert any("scored after the last" in note for note in row.notes) == (score == 0.4)


def test_text_shows_what_is_known():
    assert Spread.of([0.5, 0.6]).text(1, 100) == "55.0 ± 7.1"
    assert Spread.of([0.5, math.nan]).text(1, 100) == "50.0 (1 of 2)"
    assert Spread.of([3.0, 3.0]).text(0) == "3"
    assert Spread.of([math.nan]).text() == "–"
    assert Spread.of([26.0, 27.0]).text(0) == "27 ± 1"  # halves away from nil, as in a browser
    assert [signed(value) for value in (0.126, -0.126, -0.004, 0.0)] == [
        "+0.13",
        "−0.13",
        "0.00",
        "0.00",
    ]
    assert megabytes(Spread.of([64_250.0])) == "0.064"
    assert megabytes(Spread.of([1_350_000.0])) == "1.4"  # in a browser, too


def test_the_default_target_is_what_the_baseline_reaches_in_the_end(folder):
    assert default_target(read_groups([folder])) == 0.5
    assert default_target(read_groups([folder]), "fedavgm") == 0.59
    assert compare([folder]).table()[0]["rounds to 50 %"] == "5 (2 of 3)"
    with pytest.raises(UserError, match=r"target = 60 is not an accuracy; give a fraction"):
        compare([folder], target=60)


def test_runs_that_were_never_evaluated_have_dashes(tmp_path):
    run = fake.write_run(tmp_path / "a", rounds=3)
    fake.edit(run, accuracy=None)
    (row,) = compare([run]).table()
    assert [row["final 10 %"], row["best"], row["rounds"]] == ["–", "–", "3"]


def test_the_paired_test_is_students_on_the_shared_seeds(folder):
    fake.write_run(folder / "alone", algorithm="alt", seed=9, rounds=10)
    (pair,) = paired_tests(read_groups([folder]))
    assert (pair.first, pair.second, pair.seeds) == ("fedavg", "fedavgm", (0, 1, 2))
    assert pair.difference.mean == pytest.approx((0.10 + 0.08 + 0.09) / 3)
    assert pair.p == pytest.approx(
        stats.ttest_rel([0.60, 0.60, 0.57], [0.50, 0.52, 0.48]).pvalue, rel=1e-9
    )
    assert pair.adjusted == pair.p


@pytest.mark.parametrize("freedom", range(1, 13))
def test_the_tail_of_students_distribution(freedom):
    for t in (0.0, 0.3, -1.7, 4.5, 30.0):
        assert student_tail(t, freedom) == pytest.approx(2 * stats.t.sf(abs(t), freedom), abs=1e-12)


def test_a_test_needs_two_differences_and_survives_equal_ones():
    assert math.isnan(paired_t([0.1]))
    assert math.isnan(
        paired_t([0.5, 0.5])
    )  # a few test samples more in both seeds say nothing about chance
    assert math.isnan(paired_t([0.9 - 0.8, 0.7 - 0.6]))
    assert paired_t([0.5] * 8) == 2**-7  # of a sign test
    assert paired_t([0.0, 0.0]) == 1.0


def test_holm_multiplies_by_what_is_left_and_never_falls():
    adjusted = holm([0.01, 0.04, math.nan, 0.03])
    assert adjusted[0] == pytest.approx(0.03)
    assert adjusted[3] == pytest.approx(0.06)
    assert adjusted[1] == pytest.approx(0.06)
    assert math.isnan(adjusted[2])
    assert holm([0.6, 0.7]) == [1.0, 1.0]


def test_a_corrected_p_value_is_written_as_what_it_is(folder):
    """Before the correction it may be below 0.001 and after it not."""
    groups = read_groups([folder])
    pair = replace(paired_tests(groups)[0], p=0.0005, adjusted=0.0015)
    assert ">0.002<" in parts.versus([pair])["fedavgm"][1]


@pytest.mark.parametrize("freedom", [1, 2, 3, 9])
def test_the_interval_is_students(freedom):
    assert student_quantile(0.05, freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)
    values = [0.1 + i * i / 7 for i in range(freedom + 1)]
    spread = Spread.of(values)
    expected = stats.t.interval(0.95, freedom, loc=spread.mean, scale=stats.sem(values))
    assert interval(spread.mean, spread.deviation, spread.count) == pytest.approx(
        expected, rel=1e-9
    )


def test_the_difference_has_an_interval_on_the_shared_seeds(folder):
    (pair,) = paired_tests(read_groups([folder]))
    expected = stats.ttest_rel([0.60, 0.60, 0.57], [0.50, 0.52, 0.48]).confidence_interval()
    assert (pair.low, pair.high) == pytest.approx(tuple(expected), rel=1e-9)


def test_every_algorithm_is_compared_with_the_baseline_and_the_two_best_with_each_other(folder):
    for seed in range(3):
        run = fake.write_run(folder / f"alt{seed}", algorithm="alt", seed=seed, rounds=10)
        fake.edit(run, accuracy=[0.5, 0.53, 0.49][seed])
    groups = read_groups([folder])
    *pairs, between = paired_tests(groups)
    assert [(pair.first, pair.second) for pair in pairs] == [
        ("fedavg", "alt"),
        ("fedavg", "fedavgm"),
    ]
    assert (between.first, between.second, between.runner_up) == (
        "alt",
        "fedavgm",
        True,
    )  # the two best
    assert {pair.comparisons for pair in (*pairs, between)} == {3}
    named = paired_tests(groups, "alt")
    assert {pair.first for pair in named} == {"alt"}
    assert [row.label for row in results(groups, 0.5, "B") if row.baseline] == [groups[1].label]
    with pytest.raises(
        UserError, match="baseline = 'scaffold' is none of the groups; use a letter or one of these"
    ):
        paired_tests(groups, "scaffold")


def test_the_baseline_is_the_best_plain_averaging_or_else_the_first(tmp_path):
    for lr, value in ((0.1, 0.4), (0.3, 0.6), (1.0, 0.5)):
        fake.edit(fake.write_run(tmp_path / f"a{lr}", rounds=5, lr=lr), accuracy=value)
        fake.edit(
            fake.write_run(tmp_path / f"b{lr}", algorithm="alt", rounds=5, lr=lr), accuracy=0.9
        )
    groups = read_groups([tmp_path])
    assert groups[baselines(groups)[""]].label == "fedavg · lr=0.3"
    others = [group for group in groups if "alt" in group.label]
    assert baselines(others) == {"": 0}


def test_a_run_that_diverged_is_kept_out_of_numbers_and_comparisons(folder):
    """Its loss exploded, though every number is finite."""
    fake.edit(folder / "fedavgm-0", loss=[1.0] * 5 + [1e6] * 5)
    groups = read_groups([folder])
    (pair,) = paired_tests(groups)
    assert pair.seeds == (1, 2)
    row = results(groups, 0.5)[1]
    assert (row.finished, row.diverged, row.compared) == (3, 1, True)
    assert (row.last_tenth.mean, row.last_tenth.count) == (pytest.approx(0.585), 2)
    for seed in (1, 2):
        fake.edit(folder / f"fedavgm-{seed}", loss=[1.0] * 5 + [1e6] * 5)
    assert paired_tests(read_groups([folder])) == []
