"""MTP heads: one module, and for each family a row that says how it is wired."""

from .module import HeadConfig, MTPHead
from .registry import AmbiguousFamily, Entry, Registry, UnsupportedHead
from .spec import HeadSpec

__all__ = [
    "AmbiguousFamily",
    "Entry",
    "HeadConfig",
    "HeadSpec",
    "MTPHead",
    "Registry",
    "UnsupportedHead",
]
