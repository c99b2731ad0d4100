"""Any mlx_lm model with hidden rows: those around the final norm of its trunk."""

from __future__ import annotations

from ..heads.output import project
from .generic import GenericTarget
from .stepping import calls_of

TRUNKS = ("model", "backbone")
EMBEDDINGS = ("embed_tokens", "word_embeddings", "embeddings")
NORMS = ("norm", "norm_f")


class FamilyTarget(GenericTarget):
    """A model of a family with MTP heads.

    Its logits are those of its own call, in which the final norm is watched.

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
        with calls_of(self._norm) as calls:
            out = super().prefill(tokens, caches)
        before, behind = calls[-1]
        return out._replace(hidden=before if self.head_spec.hidden == "pre" else behind)

    def embed(self, tokens):
        return self._embedding(tokens)

    @property
    def output(self):
        return self.model.lm_head if "lm_head" in self.model else self._embedding

    def logits(self, hidden):
        return project(self.output, hidden)


def _first(module, names):
    return next(getattr(module, name) for name in names if name in module)
