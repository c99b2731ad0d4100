"""Checks of what a processor of ``mlx_vlm`` made of a prompt with images."""

from __future__ import annotations

from itertools import groupby, zip_longest

import mlx.core as mx
import numpy as np

from .vision_prompt import PlaceholderMismatch

PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


def check_ids(input_ids, attention_mask, vocab_size: int) -> mx.array:
    """The token ids ``(1, P)`` of one prompt without padding."""
    ids = as_array("input_ids", input_ids, mx.integer)
    if ids.ndim != 2 or ids.shape[0] != 1 or not ids.size:
        raise ValueError(
            "[VisionPrompt] input_ids must be those of one prompt, with shape (1, P), "
            f"but has shape {ids.shape}."
        )
    low, high = mx.min(ids).item(), mx.max(ids).item()
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"[VisionPrompt] input_ids has {low if low < 0 else high}, outside of the "
            f"vocabulary of {vocab_size}."
        )
    if attention_mask is not None:
        mask = as_array("attention_mask", attention_mask, mx.generic)
        if mask.shape != ids.shape:
            raise ValueError(
                f"[VisionPrompt] attention_mask must have shape {ids.shape} but has "
                f"shape {mask.shape}."
            )
        if not mx.all(mask == 1).item():
            raise ValueError("[VisionPrompt] The prompt is padded.")
    return ids


def check_images(ids: mx.array, inputs: dict, config) -> dict:
    """The inputs, as arrays, once pixels, grids and placeholders fit each other.

    Args:
        ids (array): ``(1, P)``.
        inputs (dict): What the processor gave beside them.
        config: Of a Qwen model of ``mlx_vlm``.
    """
    given = [name for name in PIXELS.values() if inputs.get(name) is not None]
    if len(given) > 1:
        raise ValueError(
            "[VisionPrompt] pixel_values and pixel_values_videos are both given, but "
            "mlx_vlm reads either images or videos in one prompt. Use two turns."
        )
    inputs, vision = dict(inputs), config.vision_config
    for kind, pixels in PIXELS.items():
        name, rows = f"{kind}_grid_thw", []
        if (inputs.get(name) is None) != (pixels not in given):
            there, missing = (name, pixels) if pixels not in given else (pixels, name)
            raise PlaceholderMismatch(
                f"[VisionPrompt] {there} is given but {missing} is missing."
            )
        if pixels in given:
            inputs[name] = as_array(name, inputs[name], mx.integer)
            inputs[pixels] = as_array(pixels, inputs[pixels], mx.floating)
            rows = _grid_rows(name, inputs[name], vision)
            _check_pixels(pixels, inputs[pixels], rows, vision)
        own = ids == getattr(config, f"{kind}_token_id")
        _check_blocks(kind, own, rows, vision)
    return inputs


def as_array(name: str, x, kind) -> mx.array:
    """``x`` as an array whose dtype is of a kind, such as ``mx.integer``."""
    try:
        x = mx.array(x)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"[VisionPrompt] {name} must be an array but is a {type(x).__name__}."
        ) from error
    if not mx.issubdtype(x.dtype, kind):
        raise TypeError(f"[VisionPrompt] {name} must not have dtype {x.dtype}.")
    return x


def _grid_rows(name: str, grid: mx.array, vision) -> list[list[int]]:
    if grid.ndim != 2 or grid.shape[1] != 3:
        raise ValueError(
            f"[VisionPrompt] {name} must have shape (N, 3), patches along time, height "
            f"and width, but has shape {grid.shape}."
        )
    rows, merge = grid.tolist(), vision.spatial_merge_size
    for row in rows:
        if min(row) < 1 or row[1] % merge or row[2] % merge:
            raise ValueError(
                f"[VisionPrompt] {name} must hold positive numbers, height and width "
                f"multiples of {merge}, but has {row}."
            )
    return rows


def _check_pixels(name: str, pixels: mx.array, rows, vision) -> None:
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    wanted = (int(sum(map(np.prod, rows))), values)
    if pixels.shape != wanted:
        raise ValueError(
            f"[VisionPrompt] {name} must have shape {wanted}, a row for each patch of "
            f"the grid, but has shape {pixels.shape}."
        )


def _check_blocks(kind: str, own: mx.array, rows, vision) -> None:
    """An image has one block of placeholders, a video one for each step of time."""
    wanted = []
    for time, height, width in rows:
        size = height * width // vision.spatial_merge_size**2
        wanted += [size * time] if kind == "image" else [size] * time
    found = [len(list(run)) for here, run in groupby(own[0].tolist()) if here]
    for i, (has, needs) in enumerate(zip_longest(found, wanted, fillvalue=0), 1):
        if has != needs:
            raise PlaceholderMismatch(
                f"[VisionPrompt] Block {i} of {kind} placeholders has {has} tokens but "
                f"must have {needs}, by {kind}_grid_thw."
            )
