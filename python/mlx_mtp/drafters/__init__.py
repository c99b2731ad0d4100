"""Drafters: what proposes the next tokens."""

from ..heads import HeadConfig, MTPHead
from .base import DraftContext, Drafter, DrafterMismatch, Drafts
from .draft_model import DraftModelDrafter
from .mtp_head import MTPHeadDrafter
from .ngram import NGramDrafter

__all__ = [
    "DraftContext",
    "DraftModelDrafter",
    "Drafter",
    "DrafterMismatch",
    "Drafts",
    "HeadConfig",
    "MTPHead",
    "MTPHeadDrafter",
    "NGramDrafter",
]
