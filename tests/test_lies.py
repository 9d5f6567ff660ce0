"""One client of ten lies, 25 rounds on digits: what the deployment's template withstands, and
FedAvg does not.

The lies, and the tables of docs/trust.md, are in benchmarks/studies/lies.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from lies import BARE, CLIENTS, LIES, LIMITS, LONG, PA3FED, TEMPLATE, Case, accuracy

from kairosfl.rules.attack import liars

HARM = 0.03


@pytest.mark.parametrize("lie", ["noise", "samples, turned"])
def test_no_client_of_ten_moves_the_template_by_more_than_three_points(lie: str) -> None:
    honest = accuracy(Case(TEMPLATE))
    assert honest > 0.93
    assert accuracy(Case(TEMPLATE, lie)) > honest - HARM


def test_without_limits_the_same_lie_ruins_the_run() -> None:
    assert LIMITS.startswith("limits(")
    assert accuracy(Case(BARE, "samples, turned")) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize(
    "seed", [0, 1, 3, 8]
)  # the last two cost most: of those chosen on, and of the others
def test_every_lie(lie: str, seed: int) -> None:
    for text in (TEMPLATE, f"{PA3FED} + {LIMITS}"):
        assert accuracy(Case(text, lie, seed)) > accuracy(Case(TEMPLATE, seed=seed)) - HARM


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["median", "centeredclipping"])
@pytest.mark.parametrize("lie", ["sign", "scaled", "random", "little", "inner", "labels"])
def test_three_of_ten_on_iid_digits(rule: str, lie: str) -> None:
    lying = liars(0, CLIENTS, 0.3)
    assert len(lying) == 3
    honest = accuracy(Case("fedavg"))
    if lie == "labels":
        assert accuracy(Case("fedavg", flipped=tuple(map(int, lying)))) < honest - HARM
        case = Case(rule, flipped=tuple(map(int, lying)))
    else:
        case = Case(f"attack(lie='{lie}', share=0.3) + {rule}")
    assert accuracy(case) > honest - HARM


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lie", ["sign", "inner"])  # which cost most
def test_three_of_ten_with_mixing_on_other_seeds_as_well(seed: int, lie: str) -> None:
    case = Case(f"attack(lie='{lie}', share=0.3) + nnm(share=0.3) + median", seed=seed)
    assert accuracy(case) > accuracy(Case("fedavg", seed=seed)) - HARM


@pytest.mark.slow
@pytest.mark.parametrize("unequal", [False, True])
def test_honest_clients_with_different_data_lose_less_than_a_point(unequal: bool) -> None:
    lost = [
        np.subtract(
            *(
                accuracy(Case(text, "none", seed, "dirichlet", LONG, unequal))
                for text in (BARE, TEMPLATE)
            )
        )
        for seed in range(2)
    ]
    assert np.mean(lost) < 0.01
