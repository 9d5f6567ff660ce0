"""The result in a sentence or two: the best algorithm against the baseline, and how far that can be
trusted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from kairosfl.report.pictures import counted
from kairosfl.report.tables import Pair, Row, by_problem, megabytes, said, signed

SUMMARISED = 3


def verdict(rows: Sequence[Row], pairs: Sequence[Pair]) -> str:
    """The result on each problem, as HTML."""
    scored = [row for row in rows if row.last_tenth.count]
    if not scored:
        return "No round has been evaluated yet."
    problems = [[rows[i] for i in mine] for mine in by_problem(rows).values()]
    more = " The table has the results on other data." if len(problems) > SUMMARISED else ""
    said = [_summary(each, pairs) for each in problems[:SUMMARISED]]
    return (said[0] if len(said) == 1 else "".join(f"<span>{each}</span>" for each in said)) + more


def _summary(rows: Sequence[Row], pairs: Sequence[Pair]) -> str:
    """The result on one problem."""
    compared = [row for row in rows if row.compared]
    if len(rows) == 1:
        return _alone(rows[0])
    if not compared:
        what = "finished" if not any(row.finished for row in rows) else "finished without diverging"
        return f"None of {len(rows)} algorithms has {what}, so they are not compared; the table shows their progress."
    diverged = sum(row.finished > 0 and not row.compared for row in rows)
    unfinished = len(rows) - len(compared) - diverged
    left = [counted(unfinished, "unfinished algorithm")] * (unfinished > 0)
    left += [f"{diverged} diverged"] * (diverged > 0)
    text = _alone(compared[0]) if len(compared) == 1 else _compared(compared, rows, pairs)
    return f"{text} Not compared: {' and '.join(left)}." if left else text


def _alone(row: Row) -> str:
    score = row.score
    peak = f"its best round has {row.best.of_score(score)}{score.unit}"
    epochs = (
        "1 client epoch" if row.epochs.text(0) == "1" else f"{row.epochs.text(0)} client epochs"
    )
    note = " It diverged." if row.diverged and not row.compared else ""
    if not row.last_tenth.count:
        return f"<b>{escape(row.label)}</b> has no final result.{note}"
    return f"{_reached(row, [row])}; {peak}, for {megabytes(row.bytes)} MB and {epochs}.{note}"


def _reached(row: Row, rows: Sequence[Row], name: str = "") -> str:
    score = row.score
    so_far = "So far " if any(each.going for each in rows) else ""
    named = f"{escape(score.with_article)} of " if score.stated else ""
    value = f"{named}<b>{escape(row.last_tenth.of_score(score))}{score.unit}</b>"
    return f"{so_far}<b>{escape(row.label)}</b>{name} reaches {value} {row.when}"


def _compared(rows: Sequence[Row], every: Sequence[Row], pairs: Sequence[Pair]) -> str:
    """The best of these against the baseline; if that is the baseline itself, the second best."""
    score = rows[0].score
    order = sorted(rows, key=lambda row: -score.sign * row.last_tenth.mean)
    best = order[0]
    base = next((row for row in every if row.baseline), None)
    if base is None or base not in rows:
        why = "" if base is None else " diverged" if base.finished else " has not finished"
        reason = (
            f"The baseline, <b>{escape(base.label)}</b>,{why}"
            if base
            else "The baseline is not on these data"
        )
        return f"{_reached(best, rows)}. {reason}, so nothing is compared with it."
    shown = order[1] if base is best else best
    pair = next(
        (pair for pair in pairs if (pair.first, pair.second) == (base.label, shown.label)), None
    )
    better = (
        score.sign * (shown.last_tenth.mean - base.last_tenth.mean)
        if pair is None
        else pair.difference.mean
    )
    gap = score.scale * abs(better)  # on the shared seeds, where there are any
    digits = score.digits(best.last_tenth.mean)
    level = gap < 0.5 * 10**-digits
    side = "above" if (better > 0) == score.higher else "below"
    apart = "level with" if level else f"{gap:.{digits}f}{' points' * score.percent} {side}"
    if base is best:
        text = f"{_reached(best, rows, ', the baseline,')}; the closest, <b>{escape(shown.label)}</b>, is {apart} it"
    else:
        text = f"{_reached(best, rows)}, {apart} <b>{escape(base.label)}</b>, the baseline"
    return text + _trust(pair) + _runner_up(best, order[1], pairs)


def _runner_up(best: Row, second: Row, pairs: Sequence[Pair]) -> str:
    """The second best, if the seeds do not tell it from the best and it has not been named as the
    baseline.
    """
    names = (second.label, best.label)
    pair = next(
        (pair for pair in pairs if pair.runner_up and (pair.first, pair.second) == names), None
    )
    if pair is None or pair.adjusted < 0.05:
        return ""
    score = second.score
    value = f"{escape(second.last_tenth.of_score(score))}{score.unit} {second.when}"
    why = said(pair.adjusted)
    if math.isnan(pair.p):
        why = "they share only one seed"
    if pair.alike:
        why = "all shared seeds differ by the same amount"
    return f" The second best, <b>{escape(second.label)}</b> ({value}), cannot be told from it ({escape(why)})."


def _trust(pair: Pair | None) -> str:
    if pair is None:
        return ". The two have no finished seed in common, so they cannot be compared seed by seed."
    if pair.alike:
        same = f"in all {len(pair.seeds)} shared seeds"
        return f"; the difference is the same {same}, which does not tell it from chance: more seeds would."
    if math.isnan(pair.p):
        return ". They share only one seed: the difference may be due to chance."
    ends = [pair.score.scale * end for end in (pair.low, pair.high)]
    digits = pair.score.digits(max(map(abs, ends)))
    tests = f", Holm-corrected for {pair.comparisons} comparisons" if pair.comparisons > 1 else ""
    test = f"95 % interval {' to '.join(signed(end, digits) for end in ends)} over {len(pair.seeds)} shared seeds"
    test += f"; {said(pair.adjusted)} in a paired t-test{tests}"
    if pair.adjusted < 0.05:
        return f" ({escape(test)})."
    return f"; the difference is not statistically significant ({escape(test)})."


def target_words(rows: Sequence[Row], target: float, given: bool) -> str:
    """Where the target comes from."""
    if given:
        return "as given"
    if len(rows) == 1:
        return reached("it", rows[0].when) if math.isfinite(target) else "none yet"
    base = [row for row in rows if row.baseline]
    if not math.isfinite(target):
        return f"none yet: {base[0].label}, the baseline, has no final result"
    if len(base) == 1:
        return reached(f"{base[0].label}, the baseline,", base[0].when)
    return reached("the worst of the baselines", "in the final 10 % of its rounds")


def reached(whose: str, when: str) -> str:
    """Of the target that a group sets."""
    return f"what {whose} reaches {when}, rounded"
