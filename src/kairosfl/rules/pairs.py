"""What a run says at its end about pairs of rules that train, but make little sense together.

docs/rules/compositions.md shows them. The rule that looks a pair up decides at which settings.
Names stand in the order of `RULES`.
"""

from __future__ import annotations

SAID = {
    ("vrlsgd", "feddyn"): (
        "vrlsgd and feddyn both correct the clients' drift, each as if it were alone; compare the "
        "sum with each of them"
    ),
    ("scaffold", "feddyn"): (
        "scaffold and feddyn both correct the clients' drift, each as if it were alone; compare "
        "the sum with each of them"
    ),
    ("moon", "alt"): (
        "moon moves a client's features away from those of its previous model, and "
        "alt(reference='previous') stops the client as soon as they are: on CIFAR-10 the pair lost "
        "8.2 points; use reference = 'global'"
    ),
}
