"""pfl-research's CIFAR-10 workloads on Kairos and, where it can be imported, on pfl, in one
process: time and accuracy.

    KAIROSFL_DATA=... make bench-gpu-peers
    KAIROSFL_DATA=... python benchmarks/speed/against_pfl.py --setting private --device cuda --pfl-rounds 3000

`benchmarks/image_classification/configs/baseline.yaml` of apple/pfl-research: its CNN, 1,000 users
of 50 samples, cohorts of 50 who count equally, one epoch, batch 10, lr 0.1. `iid` is 1,500 rounds;
`dirichlet` 3,000 with users by Dir(0.1), of 50 samples on average; `private` is that with epsilon
2, delta 1e-6, clip 0.4 and noise cohort 1,000. Its account is of a population of a million, which
nobody simulates, so epsilon is hypothetical. Both get the noise multiplier that Kairos calibrates;
pfl draws cohorts of 50, Kairos Poisson ones. pfl takes minutes for what Kairos does in seconds, so
by default it trains --pfl-rounds, enough for its clock. Milliseconds a round are from the first
evaluation to the last, without the start. For pfl, unzip its wheel and those of multiprocess, dill,
immutabledict and prv-accountant onto PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kairosfl import (
    DataSet,
    Population,
    Recipe,
    Run,
    Samples,
    Setup,
    Task,
    drive,
    parse,
    result,
    rounds,
)
from kairosfl.core.round import recorded
from kairosfl.data import load
from kairosfl.detectors import FGN
from kairosfl.engines.batched import Batched
from kairosfl.rules import accounting
from kairosfl.tasks.partitions import dirichlet, iid

EPSILON, DELTA, CLIP, POPULATION, NOISE_COHORT = 2.0, 1e-6, 0.4, 1_000_000, 1000
ROUNDS = {"iid": 1500, "dirichlet": 3000, "private": 3000}


def model() -> nn.Sequential:
    """pfl's simple_cnn, 1,626,442 parameters on CIFAR-10."""
    torch.manual_seed(0)
    made = nn.Sequential(
        *(
            nn.Conv2d(3, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
        ),
        *(nn.Flatten(), nn.Linear(12544, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)),
    )
    for layer in made:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    return made


def problem(options: argparse.Namespace) -> Task:
    """CIFAR-10, or noise of its shape where the data is not at hand, among equal clients."""
    if options.synthetic:
        rng = np.random.default_rng(0)
        parts = []
        for n in (options.clients * 10, 500):
            targets = torch.from_numpy(rng.integers(0, 10, n))
            inputs = torch.from_numpy(rng.standard_normal((n, 3, 32, 32), dtype=np.float32))
            inputs[:, 0, :3, :4] += targets[:, None, None]
            parts.append(Samples(inputs, targets))
        data = DataSet("synthetic", *parts, classes=10)
    else:
        data = load("cifar10")
    targets = data.train.targets.numpy()
    if options.setting == "iid":
        clients = iid(targets, options.clients, options.seed)
    else:
        clients = dirichlet(targets, options.clients, options.seed, alpha=0.1, balance=True)
    return Task(model(), data, Population.from_lists([clients[i] for i in range(options.clients)]))


def kairos(
    task: Task, z: float, options: argparse.Namespace, evaluate: Callable[[Tensor], float]
) -> dict[str, Any]:
    engine = Batched(task, options.device, precision=options.precision, cohorts=(options.cohort,))
    text = "fedavg"
    if options.setting == "private":
        text = f"privacy(epsilon={EPSILON}, delta={DELTA}, clip={CLIP}, noise={z}, population={POPULATION}, "
        text += f"noise_cohort={NOISE_COHORT})"
    recipe = Recipe(rounds=options.rounds, cohort=options.cohort, epochs=1, batch_size=10, lr=0.1)
    setup = Setup(parse(text), recipe, options.clients, task.layout, detectors=(FGN(),))
    start = Run.start(engine.start(), setup, seed=options.seed)
    began, curve = time.perf_counter(), []
    for run in drive(rounds(start, setup), engine):
        if run.round % options.every == 0 or run.round == options.rounds:
            curve.append((run.round, evaluate(result(run, setup)), time.perf_counter() - began))
    return {
        "curve": curve,
        "rounds": run.round,
        "device": str(run.x.device),
        **recorded(run, setup),
    }


def pfl(
    task: Task, z: float, options: argparse.Namespace, evaluate: Callable[[Tensor], float]
) -> dict[str, Any]:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByUser
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy.gaussian_mechanism import GaussianMechanism
    from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model().to(options.device)

        def loss(self, inputs: Tensor, targets: Tensor, eval: bool = False) -> Tensor:
            self.train(not eval)
            return nn.functional.cross_entropy(self.inner(inputs), targets)

        @torch.no_grad()
        def metrics(self, inputs: Tensor, targets: Tensor) -> dict[str, Weighted]:
            return {
                "loss": Weighted(
                    float(self.loss(inputs, targets, eval=True)) * len(targets), len(targets)
                )
            }

    made, curve, began = Model(), [], time.perf_counter()

    class Evaluate(TrainingProcessCallback):
        def after_central_iteration(
            self, *_: Any, central_iteration: int, **__: Any
        ) -> tuple[bool, Metrics]:
            done = central_iteration + 1
            if done % options.every == 0 or done == options.rounds:
                vector = nn.utils.parameters_to_vector(made.inner.parameters()).detach()
                curve.append((done, evaluate(vector), time.perf_counter() - began))
            return False, Metrics()

    inputs = task.prepared(task.dataset.train.inputs.to(options.device), torch.float32)
    targets = task.dataset.train.targets.to(options.device)
    own = [
        torch.from_numpy(np.asarray(task.clients[i])).to(options.device)
        for i in range(options.clients)
    ]
    users = [[inputs[rows], targets[rows]] for rows in own]
    draw = np.random.default_rng(options.seed)
    cohorts = iter(
        user
        for _ in range(options.rounds + 1)
        for user in draw.choice(options.clients, options.cohort, replace=False)
    )
    data = FederatedDataset.from_slices(users, lambda: int(next(cohorts)))
    private = [
        CentrallyAppliedPrivacyMechanism(GaussianMechanism(CLIP, z * options.cohort / NOISE_COHORT))
    ]
    how = NNAlgorithmParams(
        central_num_iterations=options.rounds,
        evaluation_frequency=options.rounds + 1,
        train_cohort_size=options.cohort,
        val_cohort_size=None,
    )
    FederatedAveraging().run(
        algorithm_params=how,
        backend=SimulatedBackend(
            training_data=data,
            val_data=data,
            postprocessors=[WeightByUser(), *(private if options.setting == "private" else [])],
        ),
        model=PyTorchModel(
            made,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(made.parameters(), lr=1.0),
        ),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=0.1, local_batch_size=10
        ),
        callbacks=[Evaluate()],
        send_metrics_to_platform=False,
    )
    return {"curve": curve, "rounds": options.rounds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--precision",
        default=None,
        help="of Kairos; tf32 on a GPU by default, which pfl gets as well",
    )
    parser.add_argument("--setting", choices=ROUNDS, default="iid")
    parser.add_argument(
        "--rounds", type=int, help="of Kairos; by default as in pfl's configuration"
    )
    parser.add_argument("--pfl-rounds", type=int, default=40, help="of pfl, if fewer")
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--every", type=int, default=10, help="rounds between evaluations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--synthetic", action="store_true", help="noise of CIFAR-10's shape, ten samples a client"
    )
    parser.add_argument("--who", nargs="+", choices=("kairos", "pfl"), default=["kairos", "pfl"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.rounds = options.rounds or ROUNDS[options.setting]
    if torch.device(options.device).type == "cuda" and options.precision in (None, "tf32"):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    z = 0.0
    if options.setting == "private":
        z = accounting.calibrated(NOISE_COHORT / POPULATION, options.rounds, EPSILON, DELTA)
    task = problem(options)
    judge = Batched(task, options.device)

    def evaluate(x: Tensor) -> float:
        return float(judge.evaluate(x).accuracy)

    found: dict[str, Any] = {"setting": options.setting, "rounds": options.rounds}
    if options.device.startswith("cuda"):
        found["gpu"] = torch.cuda.get_device_name(options.device)
    if options.setting == "private":
        found |= {"noise_multiplier": z, "epsilon": EPSILON, "hypothetical": True}
    pace: dict[str, float] = {}
    for who in options.who:
        if who == "pfl":
            options.rounds = min(options.rounds, options.pfl_rounds)
        try:
            found[who] = (kairos if who == "kairos" else pfl)(task, z, options, evaluate)
        except ImportError as error:
            found[who] = {"missing": str(error)}
            print(f"{who}: not run, {error}")
            continue
        curve = found[who]["curve"]
        (begun, _, before), (done, _, seconds) = curve[0], curve[-1]
        pace[who] = 1000 * (seconds - before) / max(done - begun, 1)
        tail = [100 * point[1] for point in curve][-max(1, len(curve) // 10) :]
        print(
            f"{who}: {pace[who]:.1f} ms a round, {done} rounds in {seconds:.1f} s, "
            f"accuracy {np.mean(tail):.2f} over the final 10 %",
            flush=True,
        )
    if len(pace) == 2:
        print(f"pfl takes {pace['pfl'] / pace['kairos']:.1f} times as long as Kairos")
    if options.out:
        options.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
