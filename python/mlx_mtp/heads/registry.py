"""Families by model type and config: what is built in and what others add."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class UnsupportedHead(ValueError):
    """A model and an MTP head that this package cannot run together."""


class AmbiguousFamily(ValueError):
    """Two entries of a registry fit a config equally well."""


@dataclass(frozen=True)
class Entry(Generic[T]):
    """One family in a registry.

    Args:
        model_type (str): As in ``config.json``.
        value: What is found.
        name (str): For messages.
        when (callable, optional): ``when(config) -> bool``. An entry with a predicate
            that holds goes before those without.
        kind (str): ``"text"`` for models of ``mlx_lm``, ``"vision"`` for those of
            ``mlx_vlm``.
    """

    model_type: str
    value: T
    name: str
    when: Callable[[dict[str, Any]], bool] | None = None
    kind: str = "text"


class Registry(Generic[T]):
    """Finds the entry of a config. The order of registration does not matter."""

    def __init__(self, what: str):
        self.what = what
        self._entries: list[Entry[T]] = []

    def register(self, entry: Entry[T]) -> None:
        """Adds an entry.

        Raises:
            ValueError: The kind is unknown, or the model type has an entry without
                a predicate already and so has this.
        """
        if entry.kind not in ("text", "vision"):
            raise ValueError(f'kind must be "text" or "vision" but is {entry.kind!r}.')
        same = [
            other
            for other in self._entries
            if (other.kind, other.model_type) == (entry.kind, entry.model_type)
        ]
        if entry.when is None and any(other.when is None for other in same):
            raise ValueError(
                f"The {self.what} of model type {entry.model_type} ({entry.kind}) is "
                "there already. Give a predicate to be more specific."
            )
        self._entries.append(entry)

    def find(self, config: dict[str, Any], kind: str = "text") -> T | None:
        """The value for a config, ``None`` if there is none.

        Raises:
            AmbiguousFamily: Two entries fit equally well.
        """
        fitting = [
            entry
            for entry in self._entries
            if (entry.kind, entry.model_type) == (kind, config.get("model_type"))
            and (entry.when is None or entry.when(config))
        ]
        best = [e for e in fitting if e.when is not None] or fitting
        if len(best) > 1:
            raise AmbiguousFamily(
                f"Model type {config['model_type']} has {len(best)} entries for its "
                f"{self.what} that fit: {', '.join(sorted(e.name for e in best))}. "
                "Make their predicates exclude each other."
            )
        return best[0].value if best else None

    def entries(self) -> tuple[Entry[T], ...]:
        """All entries, sorted by kind, model type and name."""
        key = lambda e: (e.kind, e.model_type, e.name)  # noqa: E731
        return tuple(sorted(self._entries, key=key))
