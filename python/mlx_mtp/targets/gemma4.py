"""Gemma 4: sliding and full attention, whose keys and values its assistants read."""

from __future__ import annotations

from mlx_lm.models.gemma4_text import logit_softcap

from ..heads.output import project
from .base import SharedKV, TargetOutput
from .generic import GenericTarget


class Gemma4Target(GenericTarget):
    """A Gemma 4 model, the text part of a multimodal one included.

    ``shared_kv`` has the last layer of each kind of attention that has keys and values
    of its own.
    """

    projects = True

    def __init__(self, model):
        super().__init__(model)
        self.text = getattr(model, "language_model", model)
        self.trunk = self.text.model
        self.hidden_size = self.trunk.config.hidden_size
        layers = [layer.self_attn for layer in self.trunk.layers]
        self.shared_kv = {
            layer.layer_type: SharedKV(i, layer.n_kv_heads, layer.head_dim)
            for i, layer in enumerate(layers)
            if layer.has_kv
        }

    def prefill(self, tokens, caches):
        hidden = self.trunk(tokens, cache=caches)
        return TargetOutput(self.logits(hidden), hidden)

    def embed(self, tokens):
        return self.trunk.embed_tokens(tokens) * self.trunk.embed_scale

    def logits(self, hidden):
        tied = self.text.tie_word_embeddings
        head = self.trunk.embed_tokens if tied else self.text.lm_head
        logits = project(head, hidden)
        if self.text.final_logit_softcapping is None:
            return logits
        return logit_softcap(self.text.final_logit_softcapping, logits)
