"""The table of client rows: growth by blocks, defaults, and rows whose length is known at the first
write.
"""

from __future__ import annotations

import pytest
import torch

from kairosfl.core import table as module
from kairosfl.core.table import Table
from kairosfl.engines import memory


def test_rows_come_back_and_unknown_clients_have_the_default() -> None:
    table = Table({"a": torch.tensor([7.0, 8.0]), "b": torch.tensor(-1)})
    assert table.rows(torch.tensor([3]))["a"].tolist() == [[7, 8]]
    table.write(
        torch.tensor([5, 2]),
        {"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b": torch.tensor([10, 20])},
    )
    rows = table.rows(torch.tensor([2, 9, 5]))
    assert rows["a"].tolist() == [[3, 4], [7, 8], [1, 2]]
    assert rows["b"].tolist() == [20, -1, 10]
    assert table.ids == [5, 2]
    assert table.slots(torch.tensor([2, 5])).tolist() == [1, 0]
    assert table.written == {2, 5}


def test_names_left_out_are_the_default_for_new_clients_and_stay_for_old_ones() -> None:
    table = Table({"a": torch.zeros(2), "b": torch.tensor(-1)})
    table.write(torch.tensor([1]), {"a": torch.ones(1, 2), "b": torch.tensor([5])})
    table.write(torch.tensor([1, 2]), {"a": torch.full((2, 2), 3.0)})
    rows = table.rows(torch.tensor([1, 2]))
    assert rows["a"].tolist() == [[3, 3], [3, 3]]
    assert rows["b"].tolist() == [5, -1]


def test_blocks_grow_and_are_never_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 3 * 1200)
    table = Table({"a": torch.zeros(300)})
    for client in range(8):
        table.write(torch.tensor([client]), {"a": torch.full((1, 300), float(client))})
        if client == 0:
            first = next(table.column("a")).data_ptr()
    blocks = list(table.column("a"))
    assert [len(block) for block in blocks] == [3, 3, 2]
    assert blocks[0].data_ptr() == first
    assert torch.cat(blocks)[:, 0].tolist() == list(range(8))


def test_a_single_number_stands_for_a_vector_of_a_length_not_known_yet() -> None:
    table = Table({"a": torch.zeros((), dtype=torch.bfloat16)})
    assert table.rows(torch.tensor([0, 1]))["a"].shape == (2,)
    table.write(torch.tensor([4]), {"a": torch.full((1, 500), 1.5)})
    rows = table.rows(torch.tensor([4, 0]))["a"]
    assert rows.dtype == torch.bfloat16
    assert rows[0].tolist() == [1.5] * 500
    assert rows[1].tolist() == [0.0] * 500


def test_reserved_slots_keep_their_order() -> None:
    table = Table({"a": torch.zeros(2)})
    table.reserve(torch.tensor([9, 3, 6]))
    table.write(torch.tensor([3]), {"a": torch.ones(1, 2)})
    table.write(torch.tensor([6, 9]), {"a": torch.tensor([[2.0, 2.0], [3.0, 3.0]])})
    assert torch.cat(list(table.column("a")))[:, 0].tolist() == [3, 1, 2]


def test_blocks_that_find_no_room_are_asked_for_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def empty(*shape: int, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        asked.append((shape, dtype, pin_memory))
        return torch.zeros(shape, dtype=dtype)

    monkeypatch.setattr(memory, "fits", lambda device, size: False)
    monkeypatch.setattr(memory.torch, "empty", empty)
    table = Table({"a": torch.full((300,), 2.0)}, memory.spilling)
    table.write(torch.tensor([3]), {"a": torch.ones(1, 300)})
    assert asked == [((module.BLOCK_BYTES // 1200, 300), torch.float32, True)]
    assert table.rows(torch.tensor([3, 4]))["a"].mean(1).tolist() == [1, 2]
