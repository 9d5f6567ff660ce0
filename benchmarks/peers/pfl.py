"""FedAvg on Apple's pfl: one process, the clients' tensors in memory, no evaluation between rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from peers.common import Job, measure
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn


class Model(nn.Module):
    """What pfl asks of a model: the loss of a batch, and metrics."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def loss(self, inputs: Tensor, targets: Tensor, eval: bool = False) -> Tensor:
        return F.cross_entropy(self.inner(inputs), targets)

    @torch.no_grad()
    def metrics(self, inputs: Tensor, targets: Tensor) -> dict[str, Weighted]:
        return {"loss": Weighted(float(self.loss(inputs, targets)) * len(targets), len(targets))}


def train(job: Job, tick: Callable[[], None]) -> Iterable[Tensor]:
    class Tick(TrainingProcessCallback):
        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
            tick()
            return False, Metrics()

    inputs, targets = job.train_tensors
    parts = torch.from_numpy(job.parts)
    clients = [[inputs[part], targets[part]] for part in parts]
    order = iter(job.cohorts.flatten().tolist())
    data = FederatedDataset.from_slices(clients, lambda: next(order))
    inner = job.model()
    model = Model(inner)
    central = torch.optim.SGD(model.parameters(), lr=1.0)
    # Evaluation falls into the first round and never again.
    how = NNAlgorithmParams(
        central_num_iterations=job.rounds,
        evaluation_frequency=job.rounds + 1,
        train_cohort_size=job.work.cohort,
        val_cohort_size=None,
    )
    local = NNTrainHyperParams(
        local_num_epochs=1, local_learning_rate=job.work.lr, local_batch_size=job.work.batch
    )
    FederatedAveraging().run(
        algorithm_params=how,
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=PyTorchModel(
            model, local_optimizer_create=torch.optim.SGD, central_optimizer=central
        ),
        model_train_params=local,
        callbacks=[Tick()],
        send_metrics_to_platform=False,
    )
    return inner.parameters()


if __name__ == "__main__":
    measure(train)
