"""Drafters: what proposes the next tokens."""

from ..heads import HeadConfig, MTPHead
from .base import DraftContext, Drafter, DrafterMismatch, Drafts
from .draft_model import DraftModelDrafter
from .gemma4_assistant import (
    AssistantConfig,
    Gemma4Assistant,
    Gemma4AssistantDrafter,
)
from .mtp_head import MTPHeadDrafter
from .ngram import NGramDrafter
from .vision_head import VisionHeadDrafter, head_drafter
from .vocabulary import draft_vocabulary

__all__ = [
    "AssistantConfig",
    "DraftContext",
    "DraftModelDrafter",
    "Drafter",
    "DrafterMismatch",
    "Drafts",
    "Gemma4Assistant",
    "Gemma4AssistantDrafter",
    "HeadConfig",
    "MTPHead",
    "MTPHeadDrafter",
    "NGramDrafter",
    "VisionHeadDrafter",
    "draft_vocabulary",
    "head_drafter",
]
