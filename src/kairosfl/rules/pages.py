"""The tables of the rules' pages, from what the rules say about themselves."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator
from itertools import combinations

from kairosfl.core.refusals import TABLE, Member, Refusal, facts, match, suggested
from kairosfl.core.rule import about, acts
from kairosfl.rules import RULES, parse

# Settings at which a rule is another one than by default.
SETTINGS = (
    "fedaware(explore=True)",
    "fedcl(budget=0.5)",
    "budget(by='detector')",
    "scaffold(divisor='steps', correct='steps')",
    "alt(reference='previous')",
    "fedadagrad(beta1=0.9)",
    "normclipping(norm=1.0)",
    "deadline(keep=True)",
)


def refusals() -> str:
    """Which rules are refused side by side and why, as a table in Markdown."""
    pairs: dict[Refusal, list[tuple[str, str]]] = {row: [] for row in TABLE}
    fixes: dict[Refusal, list[str]] = {row: [] for row in TABLE}
    members = {text: _member(text) for text in (*RULES.own, *SETTINGS)}
    for first, second in combinations(members, 2):
        if type(members[first].rule) is type(members[second].rule):
            continue
        matched = match(members[first], members[second])
        if matched is None:
            continue
        row, one, other = matched
        if one is members[first]:
            pairs[row].append((first, second))
        else:
            pairs[row].append((second, first))
        fixes[row] += [*suggested(one, row.other), *suggested(other, row.one)]

    lines = ["| one | beside | why |", "|---|---|---|"]
    lines += [_line(row, pairs[row], fixes[row]) for row in TABLE]
    return "\n".join(lines) + "\n"


def sums() -> str:
    """Which rules need only sums of updates, as a table in Markdown."""
    only: list[str] = []
    single: list[str] = []
    for name in RULES.own:
        texts = only if _member(name).traits.sums else single
        texts.append(name)
    for text in SETTINGS:  # where they change the answer
        by_default = _name(text) in only
        with_settings = _member(text).traits.sums
        if with_settings and not by_default:
            only.append(text)
        elif by_default and not with_settings:
            single.append(text)
    return (
        "| what the server needs | rules |\n|---|---|\n"
        f"| weighted sums of the updates, and their norms | {_listed(only)} |\n"
        f"| single updates | {_listed(single)} |\n"
    )


def options(name: str) -> str:
    """The options of a rule with their defaults and what its docstring says about them."""
    documented = inspect.getdoc(RULES[name]) or ""
    section = documented.partition("\nArgs:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", section, re.MULTILINE)
    meanings = {option: " ".join(text.split()) for option, text in entries}

    lines = ["| option | default | what it does |", "|---|---|---|"]
    for field in dataclasses.fields(RULES[name]):  # type: ignore[arg-type]
        default = repr(field.default).replace("'", '"')
        meaning = re.sub(r'"\w+"', r"`\g<0>`", meanings[field.name]).removesuffix(".")
        lines.append(f"| `{field.name}` | `{default}` | {meaning} |")
    return "\n".join(lines) + "\n"


def _member(text: str) -> Member:
    (rule,) = parse(text).rules
    traits = about(rule)
    return Member(rule, traits, facts(rule, traits, acts))


def _name(text: str) -> str:
    return text.partition("(")[0]


def _line(row: Refusal, pairs: list[tuple[str, str]], suggestions: list[str]) -> str:
    ones = list(_general(one for one, _ in pairs))
    others = list(_general(other for _, other in pairs))
    beside = _listed(others)
    if row.one == row.other:
        ones = list(_general(text for pair in pairs for text in pair))
        beside = "one another"
    names = {"one": _called(ones, "the first"), "other": _called(others, "the second")}
    fixes = dict.fromkeys(suggestions)
    if row.fix:
        fixes[row.fix] = None
    why = row.why
    if fixes:
        why += "; " + ", or ".join(fixes)
    return f"| {_listed(ones)} | {beside} | {why.format(**names)} |"


def _general(texts: Iterable[str]) -> Iterator[str]:
    """Each text once; one with settings only where the rule is not there without them."""
    distinct = dict.fromkeys(texts)
    for text in distinct:
        if text in RULES.own or _name(text) not in distinct:
            yield text


def _called(texts: list[str], otherwise: str) -> str:
    if len(texts) == 1:
        return _name(texts[0])
    return otherwise


def _listed(texts: list[str]) -> str:
    """The texts with commas between them; those with settings as code."""
    words = []
    for text in texts:
        words.append(text if text in RULES.own else f"`{text}`")
    return ", ".join(words)
