"""What is measured during a run, and the detectors of critical learning periods."""

from kairosfl.detectors.detectors import DETECTORS, FGN, Detector, FedFIM, parse_detectors
from kairosfl.detectors.measures import Signals, coherence, cosine_matrix, elud, squared_norms
from kairosfl.detectors.noised import NoisedFGN

DETECTORS[NoisedFGN.name()] = NoisedFGN

__all__ = [
    "DETECTORS",
    "FGN",
    "Detector",
    "FedFIM",
    "NoisedFGN",
    "Signals",
    "coherence",
    "cosine_matrix",
    "elud",
    "parse_detectors",
    "squared_norms",
]
