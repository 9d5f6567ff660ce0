"""What there is to say about pairs of rules that make little sense together, all in one place.

`WITHOUT_EFFECT`: refused, because the model would be that of the other rule alone. `SAID`: they
train, and the run says so at its end; docs/rules/compositions.md shows them. The rule that looks a
pair up decides at which settings. Names stand in the order of `RULES`.
"""

from __future__ import annotations

WITHOUT_EFFECT = {
    ("fednova", "krum"): (
        "with keep = 1, Krum takes a single report, and FedNova compares how far several clients went; "
        "use keep = 0, or 2 and more"
    ),
    ("pa3fed", "krum"): (
        "with keep = 1, Krum takes a single report, whatever its weight; use keep = 0, or 2 and more"
    ),
}

SAID = {
    ("vrlsgd", "feddyn"): (
        "vrlsgd and feddyn both correct the clients' drift, each as if it were alone; compare the sum with each of them"
    ),
    ("scaffold", "feddyn"): (
        "scaffold and feddyn both correct the clients' drift, each as if it were alone; compare the sum "
        "with each of them"
    ),
    ("moon", "alt"): (
        "moon moves a client's features away from those of its previous model, and "
        "alt(reference='previous') stops the client as soon as they are: on CIFAR-10 the pair lost "
        "8.2 points; use reference = 'global'"
    ),
}
