"""Prompt caches in files and copies of them, with the drafter's state."""

from __future__ import annotations

from copy import deepcopy
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as lm_cache

from .context import refuse_taken
from .generation import DEFAULT_DEPTH, MTP, find_decoder
from .speculative import SpeculativeDecoder


def save_prompt_cache(
    file_name: str | PathLike,
    cache: list[Any],
    metadata: dict[str, str] | None = None,
    *,
    model,
    mtp: MTP = "auto",
) -> None:
    """As ``mlx_lm``'s, which can read the file, with the drafter's state beside it.

    That goes to a second file, ``name.mtp.safetensors`` beside ``name.safetensors``.

    Args:
        file_name: The ``.safetensors`` file.
        cache (list): A prompt cache that no open stream has.
        metadata (dict, optional): Strings to keep in the file.
        model: The model that the cache is of.
        mtp: As given to ``stream_generate``; the drafter it stands for.

    Raises:
        ValueError: An open stream has the cache.

    Example:
        >>> save_prompt_cache("chat.safetensors", cache, model=model)
        >>> cache = load_prompt_cache("chat.safetensors", model=model)
    """
    refuse_taken(cache)
    lm_cache.save_prompt_cache(fspath(file_name), cache, metadata)
    if decoder := _decoder(model, mtp):
        decoder.save_prefix(_beside(file_name), cache)
    else:
        Path(_beside(file_name)).unlink(missing_ok=True)


def load_prompt_cache(
    file_name: str | PathLike,
    return_metadata: bool = False,
    *,
    model,
    mtp: MTP = "auto",
):
    """As ``mlx_lm``'s, for files of either, with the drafter's state if it is there.

    Without its state a drafter knows nothing of what the cache holds: the first drafts
    are worse, the tokens are the same. A state of another kind of
    drafter is left out.

    Args:
        file_name, model, mtp: As in ``save_prompt_cache``.
        return_metadata (bool): Also return the strings of the file.

    Returns:
        The prompt cache, or ``(cache, metadata)``.
    """
    cache, metadata = lm_cache.load_prompt_cache(fspath(file_name), True)
    mx.eval([entry.state for entry in cache])  # another thread may go on
    if decoder := _decoder(model, mtp):
        decoder.load_prefix(_beside(file_name), cache)
    return (cache, metadata) if return_metadata else cache


def copy_prompt_cache(cache: list[Any], *, model, mtp: MTP = "auto") -> list[Any]:
    """A copy that goes on by itself, for prompts that share a beginning.

    Args:
        cache, model, mtp: As in ``save_prompt_cache``, with its errors.
    """
    refuse_taken(cache)
    decoder = _decoder(model, mtp)
    return decoder.fork(cache) if decoder else deepcopy(cache)


def _decoder(model, mtp: MTP) -> SpeculativeDecoder | None:
    return None if mtp is None else find_decoder(model, mtp, DEFAULT_DEPTH)


def _beside(file_name) -> str:
    return fspath(file_name).removesuffix(".safetensors") + ".mtp.safetensors"
