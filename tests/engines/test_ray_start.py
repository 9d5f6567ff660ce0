"""Engine `ray` before its cluster is up: shards, and what is said if it does not start."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from kairosfl.client.trainer import batches
from kairosfl.core.fields import Briefs
from kairosfl.engines.cluster import LAST_WORD, check_reachable
from kairosfl.errors import UserError

ray = pytest.importorskip("ray")
engine = pytest.importorskip("kairosfl.engines.ray")


@pytest.mark.parametrize("drop_last", [False, True])
def test_expected_steps_are_those_that_clients_do(drop_last: bool) -> None:
    sizes = np.array([3, 9, 24, 4, 5])
    ids = torch.tensor([0, 1, 2, 4])
    shared: dict[str, Any] = {
        "seed": 1,
        "round": 0,
        "start": torch.zeros(2),
        "lr": 0.1,
        "drop_last": drop_last,
    }
    briefs = Briefs(
        ids=ids, batch_size=torch.tensor([4, 4, 4, 2]), epochs=torch.tensor([2, 2, 2, 1]), **shared
    )
    done = [sum(map(len, batches(brief, int(sizes[brief.client])))) for brief in briefs.each()]
    assert engine.expected_steps(briefs, sizes).tolist() == done
    assert done == ([2, 4, 12, 2] if drop_last else [2, 6, 12, 3])


def test_an_address_at_which_nobody_answers_is_refused_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for form in (address, f"ray://{address}"):
            with pytest.raises(
                UserError,
                match=rf"run\.ray_address = '{form}' cannot be reached: Connection refused",
            ):
                engine._connect(form)
        taken.listen()
        check_reachable(address)
    for form in ("auto", "local"):
        check_reachable(form)
    with pytest.raises(UserError, match="cannot be reached"):
        check_reachable("127.0.0.1:999999")


@pytest.mark.parametrize(
    ("address", "sentence"), [(None, "Ray does not start"), ("auto", "cannot be reached")]
)
def test_a_ray_that_does_not_start_is_one_sentence(
    address: str | None, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: Any) -> None:
        raise Exception("The current node timed out during startup.\nThis could happen because ...")

    stand_in = SimpleNamespace(init=init, is_initialized=lambda: False)
    monkeypatch.setattr(engine, "ray", cast(Any, stand_in))
    with pytest.raises(
        UserError, match=rf"{sentence}: The current node timed out during startup\.;"
    ):
        engine._connect(address)


ENDS = {"os._exit(1)": True, "sys.exit(1)": False, "1 / 0": False, "os.kill(os.getpid(), 9)": True}
ENDS |= {
    "witness.dismiss(); os._exit(1)": False,
    "os.fork() or witness.dismiss(); os._exit(1)": True,
}


@pytest.mark.parametrize(("end", "heard"), ENDS.items())
def test_a_process_that_ray_ends_has_a_last_word(end: str, heard: bool) -> None:
    code = (
        f"import os, sys; from kairosfl.engines.cluster import Witness; witness = Witness(); {end}"
    )
    # The witness holds this pipe, so that reading it to its end waits for the witness.
    ended = subprocess.run(
        [sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, check=False
    )
    assert ended.returncode != 0
    assert (f"kairosfl: {LAST_WORD}\n" in ended.stderr) == heard
