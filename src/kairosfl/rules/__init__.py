"""The rules: one file per paper, its citation and equations first."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kairosfl.core.rule import Algorithm, Rule
from kairosfl.core.spec import Spec, build
from kairosfl.core.spec import parse as parse_spec
from kairosfl.errors import UserError
from kairosfl.names import without_fedavg
from kairosfl.plugins import Registry
from kairosfl.rules.alt import ALT
from kairosfl.rules.apfl import APFL
from kairosfl.rules.attack import Attack
from kairosfl.rules.average import Average
from kairosfl.rules.budget import Budget
from kairosfl.rules.buffered import Buffered
from kairosfl.rules.clipping import CenteredClipping, NormClipping
from kairosfl.rules.deadline import Deadline
from kairosfl.rules.ditto import Ditto
from kairosfl.rules.fedams import FedAMS
from kairosfl.rules.fedasync import FedAsync
from kairosfl.rules.fedavgm import FedAvgM
from kairosfl.rules.fedaware import FedAWARE
from kairosfl.rules.fedbabu import FedBABU
from kairosfl.rules.fedbuff import FedBuff
from kairosfl.rules.fedcl import FedCL
from kairosfl.rules.fedcm import FedCM
from kairosfl.rules.feddyn import FedDyn
from kairosfl.rules.fedmut import FedMut
from kairosfl.rules.fednova import FedNova
from kairosfl.rules.fedopt import FedAdagrad, FedAdam, FedYogi
from kairosfl.rules.fedprox import FedProx
from kairosfl.rules.fedrep import FedRep
from kairosfl.rules.fedsam import FedSAM
from kairosfl.rules.geometricmedian import GeometricMedian
from kairosfl.rules.krum import Krum
from kairosfl.rules.limits import Limits
from kairosfl.rules.localprivacy import LocalPrivacy
from kairosfl.rules.median import Median, TrimmedMean
from kairosfl.rules.mixing import NNM, Bucketing
from kairosfl.rules.moon import MOON
from kairosfl.rules.overcommit import OverCommit
from kairosfl.rules.pa3fed import PA3Fed
from kairosfl.rules.privacy import Privacy
from kairosfl.rules.scaffold import SCAFFOLD
from kairosfl.rules.stale import Stale
from kairosfl.rules.uniform import Uniform
from kairosfl.rules.vrlsgd import VRLSGD

RULES: Registry[type[Spec]] = Registry(
    "kairosfl.rules",
    {
        rule.name(): rule
        for rule in (
            FedProx,
            FedNova,
            VRLSGD,
            FedMut,
            SCAFFOLD,
            FedDyn,
            FedCM,
            FedSAM,
            MOON,
            FedAvgM,
            FedAdagrad,
            FedAdam,
            FedYogi,
            FedAMS,
            FedCL,
            ALT,
            PA3Fed,
            FedAWARE,
            Average,
            Budget,
            Uniform,
            Privacy,
            LocalPrivacy,
            Bucketing,
            NNM,
            NormClipping,
            CenteredClipping,
            Median,
            TrimmedMean,
            GeometricMedian,
            Krum,
            Limits,
            Attack,
            OverCommit,
            Deadline,
            Buffered,
            Stale,
            FedBuff,
            FedAsync,
            FedRep,
            FedBABU,
            Ditto,
            APFL,
        )
    },
)


def FedAvg() -> Algorithm:
    """No rule at all: McMahan et al., "Communication-Efficient Learning", AISTATS 2017."""
    return Algorithm()


def parse(
    text: str | Sequence[str | Mapping[str, Any]], *, allow: Collection[str] = ()
) -> Algorithm:
    """An algorithm from text, `"fedprox(mu=0.01) + fedavgm"`, or from a list as TOML has it.

    Args:
        text: The sum of rules; `"fedavg"` is the empty one. An entry of a list is text, or a table
            such as `{rule = "fedprox", mu = 0.01}`.
        allow: Modules that a dotted name such as `"mine.Rule"` may import; those already imported
            need no permission.
    """
    if isinstance(text, str):
        return _from_text(text, allow)
    algorithm = Algorithm()
    for entry in text:
        if isinstance(entry, str):
            algorithm += _from_text(entry, allow)
        else:
            algorithm += _from_table(entry, allow)
    return algorithm


def _from_text(text: str, allow: Collection[str]) -> Algorithm:
    """The sum of rules that a text such as `"fedprox(mu=0.01) + fedavgm"` writes."""
    text = without_fedavg(text)
    if not text:
        return Algorithm()
    rules = []
    for spec in parse_spec("rule", text, RULES, _allowed(allow)):
        rules.append(_rule(spec, spec.name()))
    return Algorithm(tuple(rules))


def _from_table(entry: Mapping[str, Any], allow: Collection[str]) -> Algorithm:
    """The rule of a table such as `{rule = "fedprox", mu = 0.01}`."""
    options: dict[str, Any] = {}
    if isinstance(entry, Mapping):  # whatever else a file may hold has no rule
        options.update(entry)
    name = options.pop("rule", None)
    if not isinstance(name, str):
        raise UserError(
            f"algorithm: the entry {entry!r} has no rule; write {{rule = 'fedprox', ...}}."
        )
    if name != "fedavg":
        spec = build("rule", name, options, RULES, _allowed(allow))
        return Algorithm((_rule(spec, name),))
    if options:
        raise UserError(f"fedavg has no option {next(iter(options))!r}; it has none.")
    return Algorithm()


def _rule(spec: Spec, name: str) -> Rule:
    """The spec, if it is a rule."""
    if not isinstance(spec, Rule):
        raise UserError(f"{name} is not a rule; give the name of one.")
    return spec


def _allowed(allow: Collection[str]) -> Collection[str]:
    """Also the modules of packages that register rules, since run folders hold dotted names."""
    return (*allow, *(point.module for point in RULES.others().values()))


__all__ = [
    "ALT",
    "APFL",
    "MOON",
    "NNM",
    "RULES",
    "SCAFFOLD",
    "VRLSGD",
    "Attack",
    "Average",
    "Bucketing",
    "Budget",
    "CenteredClipping",
    "Ditto",
    "FedAMS",
    "FedAWARE",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBABU",
    "FedCL",
    "FedCM",
    "FedDyn",
    "FedMut",
    "FedNova",
    "FedProx",
    "FedRep",
    "FedSAM",
    "FedYogi",
    "GeometricMedian",
    "Krum",
    "Limits",
    "LocalPrivacy",
    "Median",
    "NormClipping",
    "PA3Fed",
    "Privacy",
    "TrimmedMean",
    "Uniform",
    "parse",
]
