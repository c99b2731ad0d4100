"""Thoughts, answers and tool calls of thinking models.

Pure Python over token ids and text: nothing here imports mlx, mlx_lm or the extension.
"""

from .budget import (
    BudgetError,
    InsufficientTokens,
    InvalidTokenId,
    LoopGuard,
    SoftClose,
    ThinkingBudget,
    UnencodableText,
    UnsupportedTransition,
)
from .config import (
    ALWAYS,
    CannotDisableReasoning,
    Frame,
    PromptStrategy,
    ReasoningConfig,
    Transition,
    UnknownEffort,
)
from .emitter import (
    End,
    Event,
    Framing,
    ReasoningDelta,
    ReasoningEmitter,
    ReasoningEnd,
    ReasoningStart,
    RejectedToolCall,
    ResponseDelta,
    Split,
    ToolCall,
    collect,
    split,
)
from .errors import ReasoningError
from .families import FAMILIES, QWEN_TRANSITION, Family, UnknownFamily, family
from .resolve import REGISTRY, ChatTemplate, Model, Registry, TemplateError, resolve
from .scan import Scanner
from .tools import PROTOCOLS, Call, ToolCallError, infer_protocol, parse_tool_calls
from .vocabulary import Vocabulary

__all__ = [
    "ALWAYS",
    "FAMILIES",
    "PROTOCOLS",
    "QWEN_TRANSITION",
    "REGISTRY",
    "BudgetError",
    "Call",
    "CannotDisableReasoning",
    "ChatTemplate",
    "End",
    "Event",
    "Family",
    "Frame",
    "Framing",
    "InsufficientTokens",
    "InvalidTokenId",
    "LoopGuard",
    "Model",
    "PromptStrategy",
    "ReasoningConfig",
    "ReasoningDelta",
    "ReasoningEmitter",
    "ReasoningEnd",
    "ReasoningError",
    "ReasoningStart",
    "Registry",
    "RejectedToolCall",
    "ResponseDelta",
    "Scanner",
    "SoftClose",
    "Split",
    "TemplateError",
    "ThinkingBudget",
    "ToolCall",
    "ToolCallError",
    "Transition",
    "UnencodableText",
    "UnknownEffort",
    "UnknownFamily",
    "UnsupportedTransition",
    "Vocabulary",
    "collect",
    "family",
    "infer_protocol",
    "parse_tool_calls",
    "resolve",
    "split",
]
