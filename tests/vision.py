"""A small random model of ``mlx_vlm`` with images, and what it decodes by itself."""

import json

import mlx.core as mx
import numpy as np
from head_families import raw
from mlx.utils import tree_flatten
from mlx_vlm.generate import generate_step
from mlx_vlm.models import qwen3_5, qwen3_5_moe
from tiny import qwen_config, random_prompt

from mlx_mtp.heads.checkpoint import build_head, find_spec
from mlx_mtp.loading import DEMO, save_head
from mlx_mtp.targets import VisionPrompt

IMAGE, VIDEO, START, END = 120, 121, 122, 123
PATCH = 96  # values of a patch
WIDE, TALL = (1, 4, 10), (1, 8, 4)  # patches along time, height and width

_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "in_channels": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [],
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
}


def vision_config(moe=False, **more):
    """Positions turn half of each head, by three axes, and turn it fast."""
    text = {
        **qwen_config(),
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "full_attention_interval": 2,
        "rope_parameters": {
            "type": "default",
            "rope_theta": 100.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [4, 2, 2],
        },
        **(_EXPERTS if moe else {}),
        **more,
    }
    return {
        "model_type": "qwen3_5_moe" if moe else "qwen3_5",
        "text_config": text,
        "vision_config": {**_VISION, "model_type": "qwen3_5"},
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
        "vocab_size": text["vocab_size"],
    }


def tiny_vision(seed=2, moe=False, **more):
    mx.random.seed(seed)
    module = qwen3_5_moe if moe else qwen3_5
    model = module.Model(module.ModelConfig.from_dict(vision_config(moe, **more)))
    for layer in model.language_model.layers:
        if not layer.is_linear:  # what it attends to shall matter
            for name in ("q_norm", "k_norm"):
                layer.self_attn[name].weight = 3 * layer.self_attn[name].weight
            layer.self_attn.o_proj.weight = 4 * layer.self_attn.o_proj.weight
    # What it emits is text.
    rows = model.language_model.lm_head.weight
    rows[IMAGE : END + 1] = 0
    model.eval()
    mx.eval(model.parameters())
    return model


def image_inputs(*parts, seed=1):
    """What a processor makes of a prompt: numbers are text, tuples are images, or
    videos if they have several steps of time, and None drops a token."""
    ids, grids, kind, token = [], [], "image", IMAGE
    for i, part in enumerate(parts):
        if part is None:
            ids.pop()
            continue
        if isinstance(part, int):
            ids += random_prompt(part, 100, seed + i)
            continue
        if part[0] > 1:
            kind, token = "video", VIDEO
        for _ in range(part[0]):
            ids += [START, *[token] * (part[1] * part[2] // 4), END]
        grids.append(part)
    inputs = {"input_ids": mx.array([ids])}
    if grids:
        patches = sum(int(np.prod(grid)) for grid in grids)
        key = mx.random.key(seed)
        pixels = "pixel_values_videos" if kind == "video" else "pixel_values"
        inputs[pixels] = mx.random.normal((patches, PATCH), key=key)
        inputs[f"{kind}_grid_thw"] = mx.array(grids)
    return inputs


def vision_prompt(model, *parts, seed=1):
    return VisionPrompt.of(model, **image_inputs(*parts, seed=seed))


def their_tokens(model, inputs, count):
    """The greedy tokens of ``mlx_vlm``'s own loop."""
    inputs = dict(inputs)
    ids, pixels = inputs.pop("input_ids"), inputs.pop("pixel_values", None)
    steps = generate_step(
        ids, model, pixels, None, max_tokens=count, temperature=0.0, **inputs
    )
    return [int(token) for token, _ in steps]


def write_folder(path, moe=False, published=False):
    """A checkpoint with processor and head, its tokenizer that of the demo model.

    Args:
        published (bool): Under the names and in the shapes of the original, the head
            among the other weights; else as converted, the head beside them.
    """
    tokenizer, options = (
        json.loads((DEMO / name).read_text())
        for name in ("tokenizer.json", "tokenizer_config.json")
    )
    first = 1 + max(token["id"] for token in tokenizer["added_tokens"])
    for i, name in enumerate(("vision_start", "vision_end", "image_pad", "video_pad")):
        token = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        token |= {"content": f"<|{name}|>", "special": True}
        tokenizer["added_tokens"].append({"id": first + i, **token})
        options["added_tokens_decoder"][str(first + i)] = token
    config = {
        **vision_config(moe, vocab_size=first + 4),
        "vision_start_token_id": first,
        "vision_end_token_id": first + 1,
        "image_token_id": first + 2,
        "video_token_id": first + 3,
        "eos_token_id": 0,
    }
    images = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "patch_size": 4,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 256, "longest_edge": 4096},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    for name, value in {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": options,
        "config.json": config,
        "preprocessor_config.json": images,
    }.items():
        (path / name).write_text(json.dumps(value))
    mx.random.seed(1)
    module = qwen3_5_moe if moe else qwen3_5
    model = module.Model(module.ModelConfig.from_dict(config))
    head, file = build_head(config, find_spec(config)), str(path / "model.safetensors")
    if published:
        weights = original(model, config, "") | original(head, config, "mtp.")
        mx.save_safetensors(file, weights, {"format": "pt"})
        return
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(file, weights, {"format": "mlx"})
    save_head(head, path)


def original(module, config, start):
    """Parameters under the names and in the shapes in which Qwen publishes them."""
    weights = {}
    for name, x in raw(module, config, start).items():
        if name.startswith("vision_tower."):
            name = name.replace("vision_tower", "model.visual", 1)
        elif name.startswith("model."):
            name = name.replace("model", "model.language_model", 1)
        if x.ndim == 1 and "norm" in name and "linear_attn" not in name:
            x = x - (0 if "visual" in name else 1)
        weights[name] = x.transpose(0, 4, 1, 2, 3) if x.ndim == 5 else x
    return weights
