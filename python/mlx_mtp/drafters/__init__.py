"""Drafters: what proposes the next tokens."""

from .base import DraftContext, Drafter, DrafterMismatch, Drafts
from .mtp_head import HeadConfig, MTPHead, MTPHeadDrafter
from .ngram import NGramDrafter

__all__ = [
    "DraftContext",
    "Drafter",
    "DrafterMismatch",
    "Drafts",
    "HeadConfig",
    "MTPHead",
    "MTPHeadDrafter",
    "NGramDrafter",
]
