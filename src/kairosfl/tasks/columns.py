"""The columns of `metrics.jsonl`, each declared once: its name is taken, and its range is what a
report believes.

The metrics of a task and what rules record are columns, too, under names of their own.
"""

from __future__ import annotations

from math import inf

Range = tuple[float, float]
ANY: Range = (-inf, inf)
SHARE: Range = (0.0, 1.0)
AMOUNT: Range = (0.0, 1e18)

# None: not a number that is drawn.
COLUMNS: dict[str, Range | None] = {
    "round": None,
    "metric": None,
    "evaluated": None,
    "loss": ANY,
    "train_loss": ANY,
    # --- who took part, and what they did ---
    "cohort": AMOUNT,
    "reported": AMOUNT,
    "rejected": AMOUNT,
    "epochs": AMOUNT,
    "epochs_total": AMOUNT,
    "steps": AMOUNT,
    "samples": AMOUNT,
    "passes": AMOUNT,
    # --- signals ---
    "critical": SHARE,
    "fgn": ANY,
    "fedfim": ANY,
    "noisedfgn": ANY,
    "fisher": ANY,
    "fisher_seconds": AMOUNT,
    "fisher_bytes": AMOUNT,
    "elud": ANY,
    "coherence": ANY,
    "consensus": ANY,
    # --- cost ---
    "lr": AMOUNT,
    "bytes_down": AMOUNT,
    "bytes_up": AMOUNT,
    "seconds": AMOUNT,
    # --- by the clock, where there is one ---
    "time": AMOUNT,
    "device_seconds": AMOUNT,
    "wasted_seconds": AMOUNT,
    "age": AMOUNT,
    "together": AMOUNT,
}
RANGES: dict[str, Range] = {name: span for name, span in COLUMNS.items() if span is not None}
# Names that a metric of one's own cannot have: the columns, and what the library's rules record.
RECORDED = ("epsilon", "hypothetical_epsilon", "local_epsilon", "update_clip", "lud", "chi_square")
TAKEN = frozenset((*COLUMNS, *RECORDED, "score"))
