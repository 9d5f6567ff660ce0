"""FedAvg on FedLab's standalone pipeline: one process, the clients' tensors in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from peers.common import Job, measure, without_torchvision
from torch import Tensor
from torch.utils.data import DataLoader

without_torchvision()

from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler
from fedlab.contrib.dataset.basic_dataset import BaseDataset, FedDataset
from fedlab.core.standalone import StandalonePipeline


class Clients(FedDataset):
    def __init__(self, job: Job) -> None:
        inputs, targets = job.train_tensors
        self.sets = [
            BaseDataset(inputs[part], targets[part]) for part in torch.from_numpy(job.parts)
        ]

    def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> DataLoader:
        return DataLoader(self.sets[id], batch_size=batch_size, shuffle=True)


def train(job: Job, tick: Callable[[], None]) -> Iterable[Tensor]:
    class Server(FedAvgServerHandler):
        def sample_clients(self) -> list[int]:
            return job.cohorts[self.round].tolist()

    class Pipeline(StandalonePipeline):
        def evaluate(self) -> None:
            tick()

    server = Server(
        job.model(), global_round=job.rounds, sample_ratio=job.work.cohort / job.work.clients
    )
    trainer = FedAvgSerialClientTrainer(job.model(), num_clients=job.work.clients)
    trainer.setup_dataset(Clients(job))
    trainer.setup_optim(epochs=1, batch_size=job.work.batch, lr=job.work.lr)
    Pipeline(server, trainer).main()
    return server.model.parameters()


if __name__ == "__main__":
    measure(train)
