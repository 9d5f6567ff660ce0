"""What is measured during a run, and the detectors of critical learning periods."""

from kairosfl.core.measures import (
    Measures,
    coherence,
    cosine_matrix,
    elud,
    measured,
    readings,
    squared_norms,
)
from kairosfl.core.rule import Detector, Signals
from kairosfl.detectors.detectors import DETECTORS, FGN, FedFIM, parse_detectors
from kairosfl.detectors.noised import NoisedFGN

DETECTORS[NoisedFGN.name()] = NoisedFGN

__all__ = [
    "DETECTORS",
    "FGN",
    "Detector",
    "FedFIM",
    "Measures",
    "NoisedFGN",
    "Signals",
    "coherence",
    "cosine_matrix",
    "elud",
    "measured",
    "parse_detectors",
    "readings",
    "squared_norms",
]
