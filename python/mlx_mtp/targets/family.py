"""Any mlx_lm model with hidden rows: a trunk with a final norm and a projection."""

from __future__ import annotations

from ..heads.output import project
from .base import TargetOutput
from .generic import GenericTarget
from .stepping import inputs_of

TRUNKS = ("model", "backbone")
EMBEDDINGS = ("embed_tokens", "word_embeddings", "embeddings")
NORMS = ("norm", "norm_f")


class FamilyTarget(GenericTarget):
    """A model of a family with MTP heads, through its own forward.

    Args:
        model: The model.
        head_spec (HeadSpec): Says which hidden row the family's heads read.
    """

    def __init__(self, model, head_spec):
        self.head_spec = head_spec
        self.trunk = _first(model, TRUNKS)
        self._embedding = _first(self.trunk, EMBEDDINGS)
        self._norm = _first(self.trunk, NORMS)
        self.hidden_size = model.args.hidden_size
        super().__init__(model)

    def prefill(self, tokens, caches):
        if self.head_spec.hidden == "post":
            hidden = self.trunk(tokens, cache=caches)
            return TargetOutput(self.logits(hidden), hidden)
        with inputs_of(self._norm) as rows:
            logits = self.logits(self.trunk(tokens, cache=caches))
        return TargetOutput(logits, rows[-1])

    def embed(self, tokens):
        return self._embedding(tokens)

    @property
    def output(self):
        return self.model.lm_head if "lm_head" in self.model else self._embedding

    def logits(self, hidden):
        return project(self.output, hidden)


def _first(module, names):
    return next(getattr(module, name) for name in names if name in module)
