"""FedAvg on FLGo: one process, nothing held out, no evaluation between rounds."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from types import ModuleType

import torch
from peers.common import Job, measure, without_torchvision
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

without_torchvision()

import flgo
import flgo.benchmark.partition
from flgo.algorithm import fedavg
from flgo.benchmark.toolkits.cv.classification import (
    FromDatasetGenerator,
    FromDatasetPipe,
    GeneralCalculator,
)
from flgo.experiment.logger import BasicLogger


class Quiet(BasicLogger):
    def log_once(self, *_: object, **__: object) -> None:
        """Nothing to measure."""


def benchmark(job: Job) -> ModuleType:
    """What FLGo calls a benchmark: a package with a `core`, which it imports by name."""
    data = TensorDataset(*job.train_tensors)

    class TaskGenerator(FromDatasetGenerator):
        scene = "horizontal"

        def __init__(self) -> None:
            super().__init__(benchmark="peers_task", train_data=data)

    class TaskPipe(FromDatasetPipe):
        class TaskDataset(Subset):  # FLGo's own is refused by current PyTorch
            def __init__(
                self, dataset: TensorDataset, indices: list[int], perturbation: None = None
            ) -> None:
                super().__init__(dataset, indices)

        def __init__(self, task_path: str) -> None:
            super().__init__(task_path, train_data=data)

    package, core = ModuleType("peers_task"), ModuleType("peers_task.core")
    core.TaskGenerator, core.TaskPipe, core.TaskCalculator = (
        TaskGenerator,
        TaskPipe,
        GeneralCalculator,
    )
    TaskGenerator.__module__ = "peers_task.core"
    package.__path__ = []
    sys.modules.update({"peers_task": package, "peers_task.core": core})
    return package


def train(job: Job, tick: Callable[[], None]) -> Iterable[Tensor]:
    class Partition(flgo.benchmark.partition.BasicPartitioner):
        num_clients = job.work.clients

        def __call__(self, data: object) -> list[list[int]]:
            return job.parts.tolist()

    class Server(fedavg.Server):
        def sample(self) -> list[int]:
            return job.cohorts[self.current_round - 1].tolist()

        def iterate(self) -> bool:
            updated = super().iterate()
            tick()
            return updated

    class Algorithm:
        pass

    Algorithm.Server, Algorithm.Client = Server, fedavg.Client
    with tempfile.TemporaryDirectory() as folder:
        task = os.path.join(folder, "task")
        flgo.gen_task_by_(benchmark(job), Partition(), task)
        option = {
            "num_rounds": job.rounds,
            "num_epochs": 1,
            "proportion": job.work.cohort / job.work.clients,
            "learning_rate": job.work.lr,
            "lr_scheduler": "-1",
            "batch_size": float(job.work.batch),
            "train_holdout": 0.0,
            "eval_interval": -1,
            "no_tqdm": True,
            "no_log_console": True,
            "torch_num_threads": torch.get_num_threads(),
        }
        runner = flgo.init(
            task, Algorithm, option, model=flgo.convert_model(lambda: job.model()), Logger=Quiet
        )
        runner.run()
    return runner.model.parameters()


if __name__ == "__main__":
    measure(train)
