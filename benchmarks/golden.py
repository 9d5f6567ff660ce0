"""Golden numbers: do all rules, detectors and important compositions train the same model, to the
bit, at two commits?

    PYTHONPATH=OLD/src python benchmarks/golden.py --write golden.json
    PYTHONPATH=NEW/src python benchmarks/golden.py --against golden.json --changed fedams 'fedavg@conv'

Some 800 runs of a few rounds of tiny models on the CPU, on engines `loop` and `batched`. For each:
a checksum of `x` and of the result, how far they moved where they differ, and every column of the
metrics in every round. `--changed` names what is known to differ: a rule, with whatever it is
combined, or `rule@setting`, or `@setting`. What differs and is not named there fails; runs that one
checkout alone refuses count as different. `--only TEXT` is for one rule.

The bits hold for one machine and one version of torch, so the file is not for the repository.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["KAIROSFL_CACHE"] = "off"
os.environ["GOLDEN_KEY"] = "the same noise every time"  # the rule privacy reads it

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import kairosfl
from kairosfl import (
    DataSet,
    Loop,
    Population,
    Recipe,
    Run,
    Samples,
    Setup,
    Task,
    UserError,
    drive,
    parse,
    result,
)
from kairosfl import rounds as run_rounds
from kairosfl.detectors import FGN

RULES = [
    *(
        "fedavg",
        "fedprox",
        "fednova",
        "vrlsgd",
        "fedmut",
        "scaffold",
        "feddyn",
        "fedcm",
        "fedsam",
        "moon",
        "fedavgm",
    ),
    *(
        "fedadagrad",
        "fedadam",
        "fedyogi",
        "fedams",
        "fedcl",
        "alt(a=0.9, b=0.0995)",
        "pa3fed(always=true)",
        "fedaware",
    ),
    *(
        "average(share=0.6)",
        "budget(share=0.7)",
        "uniform",
        "privacy(epsilon=900.0, noise=0.8, key='GOLDEN_KEY')",
        "localprivacy",
    ),
    *(
        "bucketing",
        "nnm",
        "normclipping",
        "centeredclipping",
        "median",
        "trimmedmean",
        "geometricmedian",
        "krum",
    ),
    *("limits", "attack"),
    *("ditto", "apfl"),
    # These need a part of the model that clients keep, and are refused here.
    *("fedrep", "fedbabu"),
    # These need a clock, and are refused here.
    *("overcommit", "deadline", "buffered", "stale", "fedbuff", "fedasync"),
]
# Each option of a rule that changes what it computes, at another value than its default.
VARIANTS = [
    *("fedprox(mu=1.0)", "fednova(momentum=0.5)", "fednova(convex=true)", "vrlsgd(rate=0.5)"),
    *("fedmut(weights='samples')", "fedmut(alpha=1.0, rate=0.6, bound=3)"),
    *(
        "scaffold(lr=0.5)",
        "scaffold(weights='samples')",
        "scaffold(divisor='steps')",
        "scaffold(divisor='steps', correct='steps')",
    ),
    *("feddyn(alpha=0.1)", "feddyn(weights='samples')", "fedcm(lr=0.5)", "fedcm(decay=true)"),
    *("fedcm(weights='samples')", "fedsam(rho=0.5)", "moon(mu=5.0, temperature=0.2)"),
    *(
        "fedavgm(lr=0.5)",
        "fedavgm(nesterov=true)",
        "fedadagrad(beta1=0.9)",
        "fedadam(bias_correction=true)",
    ),
    *(
        "fedyogi(bias_correction=true)",
        "fedams(option=2)",
        "fedams(bias_correction=true)",
        "fedadam(tau=0.1)",
    ),
    *(
        "fedcl(once=true)",
        "fedcl(every=2)",
        "fedcl(budget=0.7)",
        "fedcl(increase=0.5, decrease=0.5)",
        "fedcl.random()",
    ),
    *(
        "fedcl.released()",
        "alt(a=0.9, b=0.0995, per='batch')",
        "alt(a=0.9, b=0.0995, reference='previous')",
    ),
    *("alt(a=0.9, b=0.0995, statistic='min')", "alt(a=0.9, b=0.0995, threshold='down')", "pa3fed"),
    *(
        "pa3fed(always=true, at='before')",
        "pa3fed(always=true, score='loss')",
        "pa3fed(always=true, change='small')",
    ),
    *(
        "fedaware(normalise=false)",
        "fedaware(adaptive=false)",
        "fedaware(explore=true)",
        "fedaware(layers=2)",
    ),
    *("fedaware(explore=true, clusters=4)", "fedaware(ridge=0.1)", "fedaware(dtype='bfloat16')"),
    *("fedaware(solver='frank_wolfe')", "fedaware(project=false)", "fedaware(alpha=0.9, lr=0.5)"),
    *(
        "average(share=0.9, decay=0.5)",
        "average(share=0.8, of='rounds')",
        "budget(share=0.7, by='detector')",
    ),
    *(
        "privacy(quantile=0.5, epsilon=900.0, noise=0.8, key='GOLDEN_KEY')",
        "localprivacy(epsilon=50.0, clip=0.3)",
        "bucketing(size=3)",
    ),
    *("nnm(share=0.4)", "normclipping(norm=0.1)", "centeredclipping(tau=0.1, iterations=3)"),
    *(
        "centeredclipping(weights='samples')",
        "trimmedmean(share=0.4)",
        "geometricmedian(weights='uniform')",
    ),
    *(
        "krum(keep=0)",
        "krum(share=0.3, keep=2)",
        "limits(weight=1.1, norm=1.1, numbers=2.0)",
        "limits(norm=0)",
    ),
    *(
        "attack(lie='random')",
        "attack(lie='swapped')",
        "attack(lie='little')",
        "attack(lie='inner')",
        "attack(share=0.5, strength=3.0)",
    ),
]
COMPOSITIONS = [
    "scaffold + fedcl",
    "scaffold + fedcl + pa3fed",
    "fedprox(mu=0.01) + fedcl + alt + pa3fed + fedaware",
    "fedavgm(beta=0.5) + fedaware",
    "fedavgm + fedcl",
    "fedadam + pa3fed",
    "fedyogi(lr=0.02) + fedcl",
    "fedams + fedaware",
    "fedadagrad + alt",
    "feddyn + fedcl",
    "feddyn + alt + pa3fed",
    "fedcm + fedcl",
    "fedcm + fedaware",
    "fedcm + fedsam",
    "fedmut + fedcl",
    "fedmut + fedaware",
    "fedmut + scaffold",
    "moon + fedcl + pa3fed",
    "moon + alt",
    "moon + fedaware",
    "vrlsgd + pa3fed",
    "vrlsgd + fedavgm",
    "fednova + fedprox",
    "fednova(momentum=0.9) + fedcl",
    "fednova + alt",
    "scaffold(weights='samples', lr=0.5) + fedavgm(nesterov=true)",
    "alt(reference='previous', statistic='min', per='batch') + fedcl",
    "fedaware(layers=2, normalise=false) + fedprox",
    "pa3fed(always=true, at='before', score='loss') + fedcl.released()",
    "fedcl.random() + scaffold + fedaware",
    "fedcl + pa3fed + average(share=0.6)",
    "scaffold + budget(share=0.7)",
    "scaffold + uniform",
    "fedavgm + average(share=0.8) + limits",
    "attack + trimmedmean",
    "attack + nnm + krum",
    "attack(lie='random') + bucketing + geometricmedian",
    "attack + fedcl + pa3fed + limits",
    "scaffold + centeredclipping",
    "fedprox + localprivacy",
    "fedavgm + privacy(epsilon=900.0, noise=0.8, key='GOLDEN_KEY')",
    "fedadam + normclipping",
    "fedcl + median",
]
# What the settings, models, engines and detectors below are crossed with.
FEW = [
    *(
        "fedavg",
        "fedprox",
        "fednova",
        "scaffold + fedcl + pa3fed",
        "feddyn",
        "fedcm",
        "moon",
        "fedyogi",
        "fedaware",
    ),
    *("alt(a=0.9, b=0.0995)", "attack + trimmedmean", "fedmut", "fedsam", "vrlsgd", "localprivacy"),
]
SERVERS = [
    "fedavg",
    "scaffold",
    "fedavgm + fedaware",
    "pa3fed(always=true)",
]  # for what concerns them least
ENGINES = ("loop", "batched")
PLAIN: dict[str, Any] = {
    "lr": 0.1, "momentum": 0.5, "weight_decay": 0.001, "clip": 2.0, "schedule": "exponential", "gamma": 0.97,
    "epochs": 2, "batch_size": 8,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "sgd": {"lr": 0.2, "epochs": 1, "batch_size": 16},
    "adamw": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "epochs": 2, "batch_size": 8},
    "drop_last": PLAIN | {"drop_last": True},
    "clip": PLAIN | {"clip": 0.1},
    "clip_after": PLAIN | {"clip": 0.1, "clip_after": True},
    "momentum": PLAIN | {"momentum": 0.9, "schedule": "steps", "milestones": [1, 3], "gamma": 0.5},
    "cosine": PLAIN | {"schedule": "cosine", "lr_min": 0.01, "epochs": 3},
    "one batch": PLAIN | {"batch_size": 64, "epochs": 1},
    "all clients": PLAIN | {"cohort": 12},
    "seed 1": PLAIN | {"seed": 1},
    "seed 7": PLAIN | {"seed": 7},
    "sparse": PLAIN | {"eval_every": 3, "checkpoint_every": 2, "cosines": [2]},
}
DETECTORS = [
    *(
        "fgn(compare='visits')",
        "fgn(include_lr=false, weighted=false)",
        "fgn(window=2)",
        "fgn(window=2, every=2)",
        "fgn(window=3, forced=2)",
    ),
    *(
        "fedfim",
        "fedfim(exact=false)",
        "noisedfgn(noise=4.0)",
        "fgn + fedfim",
        "fgn(compare='levels')",
        "fgn(fall=0.5)",
    ),
]
PRIVATE = "fedcl + privacy(epsilon=900.0, noise=0.8, key='GOLDEN_KEY')"
SIZES = (3, 40, 9, 25, 12, 31, 7, 18, 2, 22, 16, 15)
COHORT, ROUNDS, CLASSES, VOCABULARY, LENGTH = 4, 5, 4, 11, 6
TIMES = ("seconds", "fisher_seconds")  # columns that are another in every run


class Adapted(nn.Module):
    """A frozen layer, and beside it one of rank two that is trained, as LoRA has them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Reader(nn.Module):
    """An LSTM that answers at the last position, or, a language model, at each."""

    def __init__(self, outputs: int, each: bool) -> None:
        super().__init__()
        self.each = each
        self.embed, self.lstm = nn.Embedding(VOCABULARY, 5), nn.LSTM(5, 6, batch_first=True)
        self.head = nn.Linear(6, outputs)

    def forward(self, x: Tensor) -> Tensor:
        states = self.lstm(self.embed(x))[0]
        return self.head(states if self.each else states[:, -1])


def mlp(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), *between, nn.Linear(8, CLASSES))


def conv() -> nn.Module:
    first = [nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(4, 6, 3, stride=2), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Linear(6, CLASSES))


def frozen() -> nn.Module:
    model = mlp(nn.Linear(8, 8), nn.ReLU())
    model[1].requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "dropout": lambda: mlp(nn.Dropout(0.3)),
    "conv": conv,
    "lstm": lambda: Reader(CLASSES, each=False),
    "language": lambda: Reader(VOCABULARY, each=True),
    "frozen": frozen,
    "lora": lambda: nn.Sequential(nn.Flatten(), Adapted(64, 8), nn.Tanh(), Adapted(8, CLASSES)),
    "regression": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.SiLU(), nn.Linear(6, 1)),
}


@dataclass(frozen=True)
class Case:
    """A run: its algorithm, and `setting`, the key of `SETTINGS`, `MODELS`, or a detector, or
    "failures".
    """

    algorithm: str
    engine: str = "loop"
    setting: str = "plain"

    def __str__(self) -> str:
        return f"{self.algorithm} | {self.engine} | {self.setting}"


def cases() -> list[Case]:
    listed: list[Case] = []
    for engine in ENGINES:
        listed += [Case(algorithm, engine) for algorithm in (*RULES, *COMPOSITIONS)]
        listed += [Case(algorithm, engine, "adamw") for algorithm in RULES]
        others = [
            setting for setting in (*SETTINGS, *MODELS) if setting not in ("plain", "adamw", "mlp")
        ]
        listed += [Case(algorithm, engine, setting) for setting in others for algorithm in FEW]
    listed += [Case(algorithm) for algorithm in VARIANTS]
    listed += [
        Case(algorithm, "loop", "failures") for algorithm in (*RULES, "scaffold + fedcl + pa3fed")
    ]
    engines = [(engine, name) for engine in ENGINES for name in DETECTORS]
    return listed + [
        Case(PRIVATE if "noised" in name else "fedcl", engine, name) for engine, name in engines
    ]


@cache
def samples(kind: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets for a model; the classes can be told apart, and each client has more of
    some.
    """
    rng = np.random.Generator(np.random.Philox(key=5))
    n = sum(SIZES)
    labels = (rng.integers(0, 2, n) + np.repeat(np.arange(len(SIZES)), SIZES)) % CLASSES
    if kind in ("lstm", "language"):
        tokens = (rng.integers(0, 4, (n, LENGTH + 1)) + 2 * labels[:, None]) % VOCABULARY
        inputs = torch.from_numpy(tokens[:, :-1])
        return inputs, torch.from_numpy(tokens[:, 1:] if kind == "language" else labels)
    images = rng.standard_normal((n, 1, 8, 8), dtype=np.float32)
    images[np.arange(n), 0, labels] += 1
    if kind == "regression":
        return torch.from_numpy(images), torch.from_numpy(
            images.mean((1, 2, 3), keepdims=False)[:, None] * 8
        )
    return torch.from_numpy(images), torch.from_numpy(labels)


def clients() -> list[np.ndarray]:
    return np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])


def trained(case: Case) -> dict[str, Any]:
    """What a run gives, or why there is none."""
    torch.manual_seed(3)
    torch.set_num_threads(1)
    kind = case.setting if case.setting in MODELS else "mlp"
    model = MODELS[kind]()
    try:
        return failing(case, model) if case.setting == "failures" else simulated(case, model, kind)
    except UserError as error:
        return {"refused": str(error)}
    except Exception as error:  # the other runs are worth their numbers nevertheless
        return {"fails": f"{type(error).__name__}: {error}"}


def simulated(case: Case, model: nn.Module, kind: str) -> dict[str, Any]:
    x, y = samples(kind)
    arguments: dict[str, Any] = {"cohort": COHORT, "seed": 3, **SETTINGS.get(case.setting, PLAIN)}
    if case.setting in DETECTORS:
        arguments["detector"] = case.setting
    if kind in ("language", "regression"):
        arguments["kind"] = kind
    history = kairosfl.simulate(
        model,
        (x, y),
        (x[::3], y[::3]),
        algorithm=case.algorithm,
        rounds=ROUNDS,
        clients=clients(),
        engine=case.engine,
        device="cpu",
        deterministic=True,
        progress=False,
        **arguments,
    )
    newest = max(history.folder.glob("checkpoint/state-*.safetensors"))
    names = [name for name in history.metrics[-1] if name not in TIMES]
    columns = {name: [row.get(name) for row in history.metrics] for name in names}
    return numbers(load_file(newest)["x"], history.x) | {"columns": columns}


@dataclass
class Losing:
    """An engine whose first client is lost in every other round, and in one round all of them."""

    engine: Loop

    def train(self, briefs: Any) -> Any:
        reports = self.engine.train(briefs)
        ids = reports.ids.tolist()
        if not len(briefs):  # with the rule privacy, chance may draw nobody
            return reports
        number = int(torch.as_tensor(briefs.round).max())  # a number in 0.2, a tensor since
        lost = ids if number == 2 else ids[: number % 2]
        stay = torch.tensor(
            [row for row, client in enumerate(ids) if client not in lost], dtype=torch.int64
        )
        return replace(reports.take(stay), failed=tuple((client, "it was lost") for client in lost))


def failing(case: Case, model: nn.Module) -> dict[str, Any]:
    """A run on the library's level, in which clients fail."""
    x, y = samples("mlp")
    data = DataSet("golden", Samples(x, y), Samples(x[::3], y[::3]), classes=CLASSES)
    task = Task(model, data, Population.from_lists(clients()))
    recipe = Recipe(rounds=ROUNDS + 1, cohort=COHORT, **PLAIN)
    setup = Setup(parse(case.algorithm), recipe, len(SIZES), task.layout, (FGN(),))
    *_, run = drive(run_rounds(Run.start(task.start(), setup, seed=3), setup), Losing(Loop(task)))
    return numbers(run.x, result(run, setup))


def numbers(x: Tensor, end: Tensor) -> dict[str, Any]:
    """The checksums of two vectors, and eight projections of each, by which the distance to others
    is estimated.
    """
    found: dict[str, Any] = {}
    for name, vector in (("x", x), ("result", end)):
        values = vector.detach().cpu().contiguous().numpy()
        signs = np.random.Generator(np.random.Philox(key=1)).standard_normal((8, len(values)))
        found[name] = hashlib.sha256(values.tobytes()).hexdigest()[:16]
        found[f"{name} sketch"] = [float(value) for value in signs @ values.astype(np.float64)]
        found[f"{name} length"] = float(np.linalg.norm(values.astype(np.float64)))
    return found


def all_numbers(chosen: list[Case], processes: int) -> dict[str, Any]:
    names = [str(case) for case in chosen]
    if processes == 1:
        return dict(zip(names, map(trained, chosen), strict=True))
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return dict(zip(names, pool.map(trained, chosen, chunksize=8), strict=True))


def machine() -> dict[str, str]:
    """What the bits depend on apart from Kairos."""
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "processor": processor(),
        "python": sys.version[:4],
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What differs between two runs, in words. Columns that one of them alone has are not compared."""
    for state in ("refused", "fails"):
        if state in before or state in after:
            return [] if state in before and state in after else [_state(before, after)]
    listed = [
        f"{name} by {_apart(name, before, after)}"
        for name in ("x", "result")
        if before[name] != after[name]
    ]
    old, new = before.get("columns", {}), after.get("columns", {})
    return listed + [
        _column(name, old[name], new[name])
        for name in old
        if name in new and not _same(old[name], new[name])
    ]


def _state(before: dict[str, Any], after: dict[str, Any]) -> str:
    texts = [_one_state(each) for each in (before, after)]
    return f"{texts[0]} before, {texts[1]} now"


def _one_state(numbers: dict[str, Any]) -> str:
    for state in ("refused", "fails"):
        if state in numbers:
            return f"{state} ({numbers[state]})"
    return "trains"


def _apart(name: str, before: dict[str, Any], after: dict[str, Any]) -> str:
    """How far two vectors are apart, relative to the length of the first."""
    one, two = (np.array(each[f"{name} sketch"]) for each in (before, after))
    distance = float(np.sqrt(np.mean((one - two) ** 2))) / max(before[f"{name} length"], 1e-30)
    return f"{distance:.0e} of its length"


def _same(old: list[Any], new: list[Any]) -> bool:
    return json.dumps(old) == json.dumps(new)


def _column(name: str, old: list[Any], new: list[Any]) -> str:
    pairs = list(enumerate(zip(old, new, strict=False), 1))
    first = next(
        ((round, one, two) for round, (one, two) in pairs if not _same([one], [two])), None
    )
    if first is None:
        return f"{name}: {len(old)} rounds before, {len(new)} now"
    return f"{name} from round {first[0]} ({_short(first[1])} before, {_short(first[2])} now)"


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def expected(name: str, changed: list[str]) -> bool:
    """Whether a case is named among those that are known to change."""
    algorithm, _, setting = name.split(" | ")
    parts = [part.split("(")[0].split(".")[0].strip() for part in algorithm.split(" + ")]
    for each in changed:
        rule, at, where = each.partition("@")
        if rule in ("", *parts) and (not at or where == setting):
            return True
    return False


def compare(old: dict[str, Any], new: dict[str, Any], changed: list[str]) -> Iterator[str]:
    """The differences that were not expected, each printed, after those that were."""
    counted = {"same": 0, "expected": 0}
    unexpected: dict[str, list[str]] = {}
    for name in (name for name in new if name in old):
        listed = differences(old[name], new[name])
        if not listed:
            counted["same"] += 1
        elif expected(name, changed):
            counted["expected"] += 1
            print(f"expected: {name}: {'; '.join(listed)}")
        else:
            unexpected[name] = listed
    for name, listed in unexpected.items():
        print(f"DIFFERS: {name}: {'; '.join(listed)}")
    for side, names in (
        ("the file alone has", old.keys() - new.keys()),
        ("the file lacks", new.keys() - old.keys()),
    ):
        if names:
            print(f"{side} {len(names)} runs, such as {min(names)}")
    algorithms = ", ".join(sorted({name.split(" | ")[0] for name in unexpected})) or "none"
    print(
        f"{counted['same']} the same to the bit, {counted['expected']} differ as expected, {len(unexpected)} differ"
    )
    print(f"algorithms that differ: {algorithms}")
    yield from unexpected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--write", type=Path, help="the file to store the numbers of this checkout in"
    )
    parser.add_argument("--against", type=Path, help="the file to compare with")
    parser.add_argument(
        "--changed",
        nargs="*",
        default=[],
        help="what is known to differ: rule, rule@setting, @setting",
    )
    parser.add_argument(
        "--only",
        default="",
        help="runs whose name 'algorithm | engine | setting' contains this text",
    )
    parser.add_argument("--processes", type=int, default=1)
    chosen = parser.parse_args()
    if not chosen.write and not chosen.against:
        parser.error("give --write FILE, --against FILE, or both")

    begun = time.perf_counter()
    selected = [case for case in cases() if chosen.only in str(case)]
    new = all_numbers(selected, chosen.processes)
    refused = sum("refused" in each for each in new.values())
    fails = [f"{name}: {each['fails']}" for name, each in new.items() if "fails" in each]
    print(
        f"{len(new)} runs of {Path(kairosfl.__file__).parent} in {time.perf_counter() - begun:.0f} s, {refused} refused"
    )
    print("\n".join(f"fails: {line}" for line in fails), end="\n" if fails else "")
    if chosen.write:
        chosen.write.write_text(json.dumps({"machine": machine(), "runs": new}))
    if not chosen.against:
        return

    stored = json.loads(chosen.against.read_text())
    if stored["machine"] != machine():
        print(
            f"the file is of {stored['machine']}, this is {machine()}: bits may differ for that reason alone"
        )
    old = {name: each for name, each in stored["runs"].items() if chosen.only in name}
    sys.exit(bool(list(compare(old, json.loads(json.dumps(new)), chosen.changed))))


if __name__ == "__main__":
    main()
