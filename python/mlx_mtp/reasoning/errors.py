"""The base class of this package's errors."""


class ReasoningError(ValueError):
    """Base class of every error of this package."""
