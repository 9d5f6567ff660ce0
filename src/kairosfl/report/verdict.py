"""The result in a sentence or two: the best algorithm against the baseline, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from kairosfl.report.pictures import counted
from kairosfl.report.tables import Pair, Row, bounds, by_problem, megabytes, said
from kairosfl.runs.score import Score

SUMMARISED = 3


def verdict(rows: Sequence[Row], pairs: Sequence[Pair]) -> str:
    """The result on each problem, as HTML."""
    scored = [row for row in rows if row.last_tenth.count]
    if not scored:
        return "No round has been evaluated yet."
    problems = list(by_problem(rows).values())
    if len(problems) == 1:
        return _summary(rows, pairs)
    summaries = ""
    for members in problems[:SUMMARISED]:
        summaries += f"<span>{_summary([rows[i] for i in members], pairs)}</span>"
    if len(problems) > SUMMARISED:
        summaries += " The table has the results on other data."
    return summaries


def _summary(rows: Sequence[Row], pairs: Sequence[Pair]) -> str:
    """The result on one problem."""
    if len(rows) == 1:
        return _alone(rows[0])
    compared = [row for row in rows if row.compared]
    if not compared:
        any_finished = any(row.finished for row in rows)
        what = "finished without diverging" if any_finished else "finished"
        return (
            f"None of {len(rows)} algorithms has {what}, so they are not compared; the table shows "
            "their progress."
        )
    text = _alone(compared[0]) if len(compared) == 1 else _compared(compared, rows, pairs)

    diverged = sum(row.finished > 0 and not row.compared for row in rows)
    unfinished = len(rows) - len(compared) - diverged
    others = []
    if unfinished:
        others.append(counted(unfinished, "unfinished algorithm"))
    if diverged:
        others.append(f"{diverged} diverged")
    if others:
        text += f" Not compared: {' and '.join(others)}."
    return text


def _alone(row: Row) -> str:
    """One result, of an algorithm that is not compared with any other."""
    score = row.score
    note = " It diverged." if row.diverged and not row.compared else ""
    if not row.last_tenth.count:
        return f"<b>{escape(row.label)}</b> has no final result.{note}"
    peak = f"its best round has {row.best.of_score(score)}{score.unit}"
    epochs = row.epochs.text(0)
    epochs += " client epoch" if epochs == "1" else " client epochs"
    return f"{_reached(row, [row])}; {peak}, for {megabytes(row.bytes)} MB and {epochs}.{note}"


def _reached(row: Row, rows: Sequence[Row], name: str = "") -> str:
    """What a row reaches; `so far` if any of these rows is still going."""
    score = row.score
    so_far = "So far " if any(other.going for other in rows) else ""
    metric = f"{escape(score.with_article)} of " if score.stated else ""
    value = f"{metric}<b>{escape(row.last_tenth.of_score(score))}{score.unit}</b>"
    return f"{so_far}<b>{escape(row.label)}</b>{name} reaches {value} {row.when}"


def _compared(rows: Sequence[Row], every: Sequence[Row], pairs: Sequence[Pair]) -> str:
    """The best of these against the baseline; if that is the baseline itself, the second best."""
    score = rows[0].score
    order = sorted(rows, key=lambda row: -score.sign * row.last_tenth.mean)
    best, second = order[:2]
    baseline = next((row for row in every if row.baseline), None)
    if baseline is None or baseline not in rows:
        why = _without_baseline(baseline)
        return f"{_reached(best, rows)}. {why}, so nothing is compared with it."

    other = second if baseline is best else best
    pair = _pair_of(pairs, baseline, other)
    better = score.sign * (other.last_tenth.mean - baseline.last_tenth.mean)
    if pair is not None:
        better = pair.difference.mean  # on the shared seeds
    apart = _apart(better, score, score.digits(best.last_tenth.mean))
    if baseline is best:
        text = (
            f"{_reached(best, rows, ', the baseline,')}; the closest, <b>{escape(other.label)}</b>, "
            f"is {apart} it"
        )
    else:
        text = f"{_reached(best, rows)}, {apart} <b>{escape(baseline.label)}</b>, the baseline"
    return text + _trust(pair) + _runner_up(best, second, pairs)


def _without_baseline(baseline: Row | None) -> str:
    """Why the baseline cannot be compared with."""
    if baseline is None:
        return "The baseline is not on these data"
    why = "diverged" if baseline.finished else "has not finished"
    return f"The baseline, <b>{escape(baseline.label)}</b>, {why}"


def _apart(better: float, score: Score, digits: int) -> str:
    """How far one is from the other, such as `1.2 points above`, at this many digits."""
    gap = score.scale * abs(better)
    if gap < 0.5 * 10**-digits:
        return "level with"
    side = "above" if (better > 0) == score.higher else "below"
    points = " points" if score.percent else ""
    return f"{gap:.{digits}f}{points} {side}"


def _pair_of(
    pairs: Sequence[Pair], first: Row, second: Row, *, runner_up: bool = False
) -> Pair | None:
    """The test of these two; with `runner_up`, only if it is that of the two best."""
    for pair in pairs:
        is_of_these = (pair.first, pair.second) == (first.label, second.label)
        if is_of_these and (pair.runner_up or not runner_up):
            return pair
    return None


def _runner_up(best: Row, second: Row, pairs: Sequence[Pair]) -> str:
    """The second best, if the seeds do not tell it from the best and it is not the baseline."""
    pair = _pair_of(pairs, second, best, runner_up=True)
    if pair is None or pair.adjusted < 0.05:
        return ""
    score = second.score
    value = f"{escape(second.last_tenth.of_score(score))}{score.unit} {second.when}"
    why = said(pair.adjusted)
    if math.isnan(pair.p):
        why = "they share only one seed"
    if pair.alike:
        why = "all shared seeds differ by the same amount"
    return (
        f" The second best, <b>{escape(second.label)}</b> ({value}), cannot be told from it "
        f"({escape(why)})."
    )


def _trust(pair: Pair | None) -> str:
    """How far a difference can be trusted, as the rest of the sentence that states it."""
    if pair is None:
        return ". The two have no finished seed in common, so they cannot be compared seed by seed."
    if pair.alike:
        return (
            f"; the difference is the same in all {len(pair.seeds)} shared seeds, which does not "
            "tell it from chance: more seeds would."
        )
    if math.isnan(pair.p):
        return ". They share only one seed: the difference may be due to chance."
    test = f"95 % interval {bounds(pair)} over {len(pair.seeds)} shared seeds"
    test += f"; {said(pair.adjusted)} in a paired t-test"
    if pair.comparisons > 1:
        test += f", Holm-corrected for {pair.comparisons} comparisons"
    if pair.adjusted < 0.05:
        return f" ({escape(test)})."
    return f"; the difference is not statistically significant ({escape(test)})."


def target_words(rows: Sequence[Row], target: float, given: bool) -> str:
    """Where the target comes from."""
    if given:
        return "as given"
    if len(rows) == 1:
        return reached("it", rows[0].when) if math.isfinite(target) else "none yet"
    baselines = [row for row in rows if row.baseline]
    if not math.isfinite(target):
        return f"none yet: {baselines[0].label}, the baseline, has no final result"
    if len(baselines) == 1:
        return reached(f"{baselines[0].label}, the baseline,", baselines[0].when)
    return reached("the worst of the baselines", "in the final 10 % of its rounds")


def reached(whose: str, when: str) -> str:
    """Of the target that a group sets."""
    return f"what {whose} reaches {when}, rounded"
