"""FedAvg on Flower's simulation: Ray with one actor of one core for each of two cores."""

from __future__ import annotations

import os

os.environ.update(
    FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1", RAY_USAGE_STATS_ENABLED="0"
)

import logging
import time
from collections.abc import Callable, Iterable
from functools import lru_cache

import torch
import torch.nn.functional as F
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from peers.common import WORKLOADS, Job, measure
from torch import Tensor

logging.getLogger("flwr").setLevel(logging.ERROR)


@lru_cache(maxsize=1)
def loaded(name: str, rounds: int) -> Job:
    """The data, once in every actor."""
    torch.set_num_threads(1)
    return Job.make(WORKLOADS[name], rounds)


def client(message: Message, context: Context) -> Message:
    config = message.content["config"]
    job = loaded(config["workload"], config["rounds"])
    inputs, targets = job.train_tensors
    model = job.model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=job.work.lr)
    mine = torch.from_numpy(job.parts[config["client"]])
    for batch in mine[torch.randperm(len(mine))].split(job.work.batch):
        optimiser.zero_grad()
        F.cross_entropy(model(inputs[batch]), targets[batch]).backward()
        optimiser.step()
    counted = MetricRecord({"num-examples": len(mine)})
    return Message(
        content=RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": counted}),
        reply_to=message,
    )


def train(job: Job, tick: Callable[[], None]) -> Iterable[Tensor]:
    name = next(key for key, work in WORKLOADS.items() if work is job.work)

    class Strategy(FedAvg):
        """The cohorts of the comparison; a node is told which client it is."""

        def configure_train(
            self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
        ) -> Iterable[Message]:
            while len(nodes := sorted(grid.get_node_ids())) < job.work.clients:
                time.sleep(0.1)  # they register while the server starts
            for who in job.cohorts[server_round - 1].tolist():
                told = ConfigRecord({"workload": name, "rounds": job.rounds, "client": who})
                content = RecordDict({"arrays": arrays, "config": told})
                yield Message(
                    content=content, message_type=MessageType.TRAIN, dst_node_id=nodes[who]
                )

        def aggregate_train(
            self, server_round: int, replies: Iterable[Message]
        ) -> tuple[ArrayRecord | None, MetricRecord | None]:
            result = super().aggregate_train(server_round, replies)
            tick()
            return result

    server = ServerApp()
    final: dict[str, Tensor] = {}

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        start = ArrayRecord(job.model().state_dict())
        result = Strategy(fraction_evaluate=0.0).start(grid, start, num_rounds=job.rounds)
        final.update(result.arrays.to_torch_state_dict())

    app = ClientApp()
    app.train()(client)
    run_simulation(
        server_app=server,
        client_app=app,
        num_supernodes=job.work.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": 2},
        },
    )
    return list(final.values())


if __name__ == "__main__":
    from peers import (
        flower,
    )  # by its name, so that the actors find `client` there and keep the data

    measure(flower.train)
