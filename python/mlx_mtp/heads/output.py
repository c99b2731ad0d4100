"""Output projections, and parts of them."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn


def project(head: nn.Module, hidden: mx.array) -> mx.array:
    """Logits of hidden rows by a linear layer, or by an embedding that is shared."""
    return head.as_linear(hidden) if hasattr(head, "as_linear") else head(hidden)


class HeadRows(nn.Module):
    """Some rows of a linear layer or an embedding, quantised or not, as a projection.

    Args:
        head (Module): The layer.
        ids (array): ``(..., S)``, the rows; they are copied.
    """

    def __init__(self, head: nn.Module, ids: mx.array):
        super().__init__()
        self.weight = head.weight[ids]
        self._how = None
        if "bias" in head:
            self.bias = head.bias[ids][..., None, :]
        if "scales" in head:
            self.scales = head.scales[ids]
            if "biases" in head:
                self.biases = head.biases[ids]
            names = ("group_size", "bits", "mode")
            self._how = {name: getattr(head, name) for name in names}

    def __call__(self, hidden: mx.array) -> mx.array:
        """Logits ``(..., S)`` of rows ``(..., H)``."""
        if self._how is None:
            logits = hidden @ self.weight.swapaxes(-1, -2)
        else:
            logits = mx.quantized_matmul(
                hidden,
                self.weight,
                self.scales,
                self.get("biases"),
                transpose=True,
                **self._how,
            )
        return logits + self.bias if "bias" in self else logits
