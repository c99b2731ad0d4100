"""Speed of speculative decoding against plain decoding and against others."""

from . import arms, peers, prompts, report
from .arms import Arm, Run
from .energy import Joules
from .measure import PLAIN, Case, measure, spread

__all__ = [
    "PLAIN",
    "Arm",
    "Case",
    "Joules",
    "Run",
    "arms",
    "measure",
    "peers",
    "prompts",
    "report",
    "spread",
]
