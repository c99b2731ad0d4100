"""Loading a model together with its MTP head.

A head comes with the trunk's own weights (raw or converted folder) or in a sidecar
file next to them. It is checked before it is used: every tensor by name and shape,
its values, and how often it agrees with the model.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub.errors import HfHubHTTPError
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm import utils as lm_utils
from mlx_lm.models.base import create_causal_mask
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .context import bucket
from .drafters import (
    AssistantConfig,
    DrafterMismatch,
    DraftModelDrafter,
    Gemma4Assistant,
    Gemma4AssistantDrafter,
    MTPHead,
    head_drafter,
)
from .heads import HeadSpec, UnsupportedHead
from .heads.checkpoint import build_head, convert, find_spec, select, text_config
from .memory import Footprint, MemoryPolicy
from .targets import as_target, check_vision

DEMO = Path(__file__).parent / "demo"
SIDECARS = ("mtp*.safetensors", "mtp/weights.safetensors")
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "*.tiktoken", "vocab.*")
HEAD_LIKE = re.compile(r"(?:^|[._])mtp[._]")
ENCODER_FILES = ("modules.json", "config_sentence_transformers.json")
ENCODER = re.compile(r"((?<!LMHead)(?<!ChatGLM)Model|Classification|Embedding)$")
PLANNED_DEPTH = 3
GAIN = re.compile(r"norm[^.]*\.weight$")
ROUTER_BIAS = re.compile(r"(e_score_correction|expert|router)_bias$")

# Agreement of a head with its model below which it is reported. A head that works
# is above 0.5 on its model's own text, one with a wiring fault near 0.
PROBE_BAR = 0.25
PROBE_TOKENS = 32
PROBE_PROMPT = "Count from one to ten, then say what you have done."


@dataclass(frozen=True)
class LoadedHead:
    """What ``load`` leaves on a model as ``model.mtp_head``.

    Args:
        head (MTPHead): The weights.
        source (str): The file they came from.
        agreement (float, optional): What ``probe_head`` measured.
    """

    head: MTPHead
    source: str
    agreement: float | None = None


@dataclass(frozen=True)
class _Shard:
    """A safetensors file, its tensors still unread."""

    path: Path
    tensors: dict[str, mx.array]
    metadata: dict[str, str]


@dataclass(frozen=True)
class _Found:
    """Head tensors under the names of ``MTPHead``, before any change to them.

    ``zero_centred`` says that norm gains are stored as their difference from 1, and
    ``stored`` that the layers are as ``save_head`` writes them.
    """

    tensors: dict[str, mx.array]
    source: str
    zero_centred: bool
    stored: bool
    spec: HeadSpec


def load(
    path_or_hf_repo: str | Path = "demo",
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    mtp: bool | str | Path = True,
    probe: bool = True,
    dtype: mx.Dtype | None = None,
    memory: MemoryPolicy | None = None,
):
    """Loads a model, its tokenizer and, where there is one, its MTP head.

    The first eight arguments are those of ``mlx_lm.load``. The head is left on the
    model as ``model.mtp_head`` (a ``LoadedHead``, or ``None``); it is no parameter of
    the model. Why one was left out, ``response.mtp.fallback`` says. Embedding and
    reranking models are never decoded with drafts.

    Args:
        path_or_hf_repo: A folder, a Hugging Face Hub id, or ``"demo"``, the small
            model inside this package.
        tokenizer_config (dict, optional): Options of the tokenizer.
        model_config (dict, optional): Replaces entries of ``config.json``.
        adapter_path (str, optional): LoRA adapters to apply.
        lazy (bool): Leave the weights unread until they are needed. Then the head
            is not probed either.
        return_config (bool): Also return the config.
        revision (str, optional): Branch, tag or commit on the Hub.
        trust_remote_code (bool): Allow Python code that comes with the checkpoint.
        mtp: ``True`` looks for a head in the folder, ``False`` does not, a path
            names the sidecar file or folder to take it from. A head in the folder
            that is not supported is left out with a warning.
        probe (bool): Measure the head's agreement with the model (one forward of the
            prompt and 32 decoding steps) and warn when it is too low.
        dtype (Dtype, optional): Floating weights, scales of quantised ones included,
            are cast to this. Default: float32 on a CPU device, where half precision
            is 10 to 45 times slower, else the dtypes of the files.
        memory (MemoryPolicy, optional): Checked before the weights are read: a head
            that does not fit is left out, or with ``"fail"`` nothing is loaded. Streams
            of the model keep to it too.

    Returns:
        ``(model, tokenizer)`` or ``(model, tokenizer, config)``.

    Raises:
        FileNotFoundError: No such folder or Hub id, or a file is missing in it.
        ValueError: A file is damaged, the head does not fit the model, or the
            checkpoint asks for code of its own and ``trust_remote_code`` is off.
        UnsupportedHead: ``mtp`` names a head for a model that cannot take one.
        MemoryBudgetExceeded: ``memory`` forbids to load the model.

    Example:
        >>> model, tokenizer = load()
        >>> model.mtp_head.source
        'model.safetensors'
    """
    folder = find_model(path_or_hf_repo, revision)
    _refuse_code(folder, trust_remote_code)
    trunk = _read_trunk(folder)
    model, config = _load_trunk(
        folder, trunk, model_config, adapter_path, trust_remote_code
    )
    tokenizer = _load_tokenizer(
        folder,
        {"trust_remote_code": trust_remote_code, **(tokenizer_config or {})},
        config,
    )
    found = _Checkpoint(model, tokenizer, folder, trunk, config)
    _attach(found, lazy, mtp, probe, dtype, memory)
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def load_vision(
    path_or_hf_repo: str | Path,
    *,
    adapter_path: str | None = None,
    lazy: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    mtp: bool | str | Path = True,
    probe: bool = True,
    dtype: mx.Dtype | None = None,
    memory: MemoryPolicy | None = None,
):
    """Loads a model that reads images, by ``mlx_vlm``, and its MTP head.

    Args:
        path_or_hf_repo, adapter_path, lazy, revision, trust_remote_code, mtp, probe,
            dtype, memory: As in ``load``.

    Returns:
        ``(model, processor)``, as ``mlx_vlm.load`` gives them, with ``model.mtp_head``.

    Raises:
        ImportError: ``mlx_vlm`` is missing.
        UnsupportedHead: There is no target for images of this model type.
        FileNotFoundError, ValueError, MemoryBudgetExceeded: As in ``load``.

    Example:
        >>> model, processor = load_vision("Qwen3.5-4B")
        >>> inputs = mlx_vlm.prepare_inputs(processor, ["cat.png"], prompts=text)
        >>> prompt = VisionPrompt.of(model, **inputs)
        >>> for response in stream_generate(model, processor, prompt):
        ...     print(response.text, end="")
    """
    try:
        import mlx_vlm
    except ImportError as error:
        raise ImportError(
            f"load_vision needs mlx-vlm ({error}): pip install 'mlx-mtp[vision]'"
        ) from error
    folder = find_model(path_or_hf_repo, revision)
    _refuse_code(folder, trust_remote_code)
    config = _read_json(folder / "config.json")
    check_vision(config)
    if not config.get("vision_config"):
        raise ValueError(
            f"[load] {folder} reads no images: its config.json has no vision_config. "
            "Use load."
        )
    trunk = _read_trunk(folder)
    model, processor = mlx_vlm.load(
        str(folder), adapter_path, lazy=True, trust_remote_code=trust_remote_code
    )
    tokenizer = TokenizerWrapper(getattr(processor, "tokenizer", processor))
    found = _Checkpoint(model, tokenizer, folder, trunk, config)
    _attach(found, lazy, mtp, probe, dtype, memory)
    return model, processor


@dataclass(frozen=True)
class _Checkpoint:
    """A model whose weights are still unread, and the folder it comes from."""

    model: Any
    tokenizer: Any
    folder: Path
    trunk: list[_Shard]
    config: dict[str, Any]


def _attach(found: _Checkpoint, lazy, mtp, probe, dtype, memory) -> None:
    """Reads the weights, and leaves the head and what belongs to it on the model."""
    model, folder = found.model, found.folder
    if dtype is None and mx.default_device() == mx.cpu:
        dtype = mx.float32
    if dtype is not None:
        model.set_dtype(dtype)
    attach = partial(
        _load_attached, model, folder, found.trunk, found.config, mtp, dtype
    )
    head = reason = None
    if memory is not None:
        reason = _over_budget(memory, model, attach(True)[0] if mtp else None)
    if not lazy:
        mx.eval(model.parameters())
    if mtp and reason is None:
        head, reason = attach(lazy)
    if mtp and reason is not None:
        reason = reason.rstrip(".")
        warnings.warn(f"[load] The MTP head is left out: {reason}.", stacklevel=3)
    if head is not None and probe and not lazy:
        head = _probed(model, head, found.tokenizer)
    model.mtp_head, model.mtp_reason, model.mtp_memory = head, reason, memory
    model.mtp_never = _encoder(folder, found.config)


def load_drafter(
    path_or_hf_repo: str | Path,
    model,
    tokenizer,
    *,
    vocabulary: Iterable[int] | None = None,
    **options,
) -> DraftModelDrafter | Gemma4AssistantDrafter:
    """Loads what drafts for ``model`` from a folder of its own, for ``mtp``.

    That is a Gemma 4 assistant, which its config tells, or else a smaller model.

    Args:
        path_or_hf_repo: Its folder or Hugging Face Hub id.
        model: The model to draft for, from ``load``.
        tokenizer: The tokenizer of that model.
        vocabulary (optional): Ids of the tokens that an assistant may propose, see
            ``draft_vocabulary``.
        options: As in ``load``; for an assistant ``revision``, ``lazy`` and ``dtype``.

    Raises:
        DrafterMismatch: The tokenizers do not mean the same tokens by the same ids, or
            the assistant is for another model.
        UnsupportedHead: It is an embedding or reranking model.
        FileNotFoundError, ValueError: As in ``load``.
        TypeError: ``mtp`` or ``return_config`` is given.

    Example:
        >>> drafter = load_drafter("gemma-4-E2B-it-assistant", model, tokenizer)
        >>> stream_generate(model, tokenizer, prompt, mtp=drafter)
    """
    for name in ("mtp", "return_config"):
        if name in options:
            raise TypeError(f"[load_drafter] {name} is an argument of load alone.")
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    folder = find_model(path_or_hf_repo, options.pop("revision", None), tokenizer=False)
    config = _read_json(folder / "config.json")
    _refuse_encoder(folder, config)
    if config.get("model_type") in ASSISTANTS:
        if (folder / "tokenizer.json").exists():
            theirs = _vocabulary(_read_json(folder / "tokenizer.json"))
            _check_same_tokens(tokenizer.get_vocab(), theirs, folder)
        return _load_assistant(folder, config, as_target(model), vocabulary, **options)
    if vocabulary is not None:
        raise ValueError(f"[load] {folder} is a model: it takes no draft vocabulary.")
    draft, theirs = load(folder, mtp=False, **options)
    ours = tokenizer.get_vocab()
    _check_same_tokens(ours, theirs.get_vocab(), folder)
    size = max(ours.values()) + 1
    return DraftModelDrafter(as_target(draft), as_target(model), size)


def _check_same_tokens(ours, theirs, folder: Path) -> None:
    if difference := _first_difference(ours, theirs):
        raise DrafterMismatch(
            f"[load] The tokenizer of {folder} is another one: they differ "
            f"{difference}."
        )


def _load_assistant(
    folder: Path,
    config,
    target,
    vocabulary: Iterable[int] | None,
    lazy: bool = False,
    dtype: mx.Dtype | None = None,
) -> Gemma4AssistantDrafter:
    """The assistant in a folder, raw or converted, for a target that it fits."""
    assistant = Gemma4Assistant(AssistantConfig.from_dict(config))
    Gemma4AssistantDrafter(assistant, target).check(target)
    tensors = {name: x for s in _read_trunk(folder) for name, x in s.tensors.items()}
    if assistant.config.tie_word_embeddings:
        tensors = {k: x for k, x in tensors.items() if not k.startswith("lm_head.")}
    ordering = "masked_embedding.token_ordering"
    if ordering in tensors:
        tensors[ordering] = tensors[ordering].astype(mx.int32)

    def quantisation(path, module):
        if f"{path}.scales" not in tensors:
            return False
        return lm_utils.infer_quant_config(path, module, tensors)

    try:
        nn.quantize(assistant, class_predicate=quantisation)
        assistant.load_weights(list(tensors.items()))
    except ValueError as error:
        fault = " ".join(str(error).split())
        raise ValueError(
            f"[load] The Gemma 4 assistant in {folder} does not fit its config: {fault}"
        ) from error
    assistant.set_dtype(dtype or _head_dtype(tensors, target))
    if not lazy:
        _check_values(assistant, str(folder), "Gemma 4 assistant", "")
    return Gemma4AssistantDrafter(assistant, target, vocabulary)


def load_head(
    path: str | Path, config: dict[str, Any], dtype: mx.Dtype | None = None
) -> MTPHead:
    """Loads an MTP head without its model.

    Args:
        path: A safetensors file, or a folder with a sidecar (``mtp*.safetensors``,
            ``mtp/weights.safetensors``) or with a whole checkpoint.
        config (dict): The model's config, or its ``text_config``.
        dtype (Dtype, optional): Cast floating tensors to this.

    Raises:
        FileNotFoundError: No such file or folder.
        ValueError: There is no head, or it is damaged, incomplete or of other sizes.
        UnsupportedHead: The model type of the config has no head that is known.
    """
    path = Path(path)
    trunk = _read_trunk(path) if path.is_dir() else []
    found = _find_head(path, trunk, find_spec(config), config)
    if found is None:
        raise ValueError(f"[load] {path} has no MTP head.")
    return _build(found, config, dtype)


def save_head(head: MTPHead, path: str | Path) -> None:
    """Writes a head to a sidecar that ``load`` and ``load_head`` read back equal.

    Args:
        head (MTPHead): The head, quantised or not.
        path: The file, or a model folder, which gets an ``mtp.safetensors``.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "mtp.safetensors"
    tensors = {f"mtp.{name}": x for name, x in tree_flatten(head.parameters())}
    family = {"mtp_family": head.spec.family}
    mx.save_safetensors(
        str(path), tensors, {"format": "mlx", "norm_offset": "0", **family}
    )


def probe_head(model, head: MTPHead, tokenizer) -> float:
    """How often a head's first draft is what the model says next.

    The model continues a fixed prompt greedily for 32 tokens. The head then reads
    the prompt and these tokens in one forward, and its greedy choices are compared
    with the model's.

    Args:
        model: An ``mlx_lm`` model of a supported family.
        head (MTPHead): The head to measure.
        tokenizer: The model's tokenizer.

    Returns:
        float: The fraction of equal tokens, in [0, 1].
    """
    target = as_target(model)
    prompt = mx.array([_probe_prompt(tokenizer)])
    tokens, hidden = _continue_greedily(target, prompt, PROBE_TOKENS)
    # Row i joins hidden row i with token i + 1 and predicts token i + 2.
    embedded = head.embed(tokens[0, 1:-1], target)
    views = [_FirstForward()] * len(head.layers)
    out = head(embedded, hidden[0, :-1], views)
    first = prompt.shape[1] - 1
    drafts = mx.argmax(head.logits(out[first:], target), axis=-1)
    return mx.mean(drafts == tokens[0, first + 2 :]).item()


def inspect_model(
    path_or_hf_repo: str | Path, revision: str | None = None
) -> dict[str, Any]:
    """What a model folder offers, read from names and shapes alone.

    Returns:
        dict: ``folder``, ``model_type``, ``parameters`` (of trunk and head),
        ``gigabytes`` on disk, ``quantization`` or ``None``, and ``mtp_head``:
        ``family``, ``source`` and the number of ``tensors`` and ``parameters``, or
        ``None``.

    Raises:
        FileNotFoundError, ValueError: As ``load``.
    """
    folder = find_model(path_or_hf_repo, revision)
    config, trunk = _read_json(folder / "config.json"), _read_trunk(folder)
    try:
        found = _find_head(folder, trunk, find_spec(config), config)
    except UnsupportedHead:
        found = None
    tensors = [x for shard in trunk for x in shard.tensors.values()]
    head = None
    if found is not None:
        head = {
            "family": found.spec.family,
            "source": found.source,
            "tensors": len(found.tensors),
            "parameters": sum(x.size for x in found.tensors.values()),
        }
    return {
        "folder": str(folder),
        "model_type": config.get("model_type"),
        "parameters": sum(x.size for x in tensors),
        "gigabytes": round(sum(x.nbytes for x in tensors) / 1e9, 3),
        "quantization": config.get("quantization"),
        "mtp_head": head,
    }


def find_model(
    path_or_hf_repo: str | Path, revision: str | None = None, tokenizer: bool = True
) -> Path:
    """The local folder of a model, fetched from the Hub if need be.

    ``tokenizer`` says that it must have one.

    Raises:
        FileNotFoundError: There is no such model, or files are missing.
        ValueError: The name is empty.
    """
    if str(path_or_hf_repo) == "demo":
        return DEMO
    if path_or_hf_repo == "":
        raise ValueError('[load] The model has no name. "." is the current folder.')
    folder = Path(path_or_hf_repo).expanduser()
    if not folder.exists():
        folder = _download(str(path_or_hf_repo), revision)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"[load] {folder} is a file. Give the folder of the model."
        )
    needed = (("config.json",), ("model*.safetensors",), TOKENIZERS)
    for patterns in needed if tokenizer else needed[:2]:
        if not any(any(folder.glob(pattern)) for pattern in patterns):
            raise FileNotFoundError(
                f"[load] {folder} has no {' or '.join(patterns)}. A model folder holds "
                "config.json, model*.safetensors and the tokenizer."
            )
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = set(_read_json(index).get("weight_map", {}).values())
        if missing := sorted(f for f in files if not (folder / f).exists()):
            raise FileNotFoundError(
                f"[load] {folder} lacks {', '.join(missing)}, named in {index.name}. "
                "Download it again."
            )
    return folder


def _download(repo: str, revision: str | None) -> Path:
    if repo.startswith((".", "/", "~")) or repo.count("/") > 1:
        raise FileNotFoundError(f"[load] There is no folder {repo}.")
    patterns = [*lm_utils.DEFAULT_ALLOW_PATTERNS, *SIDECARS]
    try:
        return lm_utils._download(repo, revision=revision, allow_patterns=patterns)
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0]
        raise FileNotFoundError(
            f"[load] {repo} is not a folder here and could not be fetched from the "
            f"Hugging Face Hub ({reason}). Check the name, give the path of a folder, "
            'or use "demo", the model inside this package.'
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"[load] {path} is not valid JSON: {error}.") from error


def _refuse_code(folder: Path, trust_remote_code: bool) -> None:
    """Code that comes with a checkpoint runs only when that is asked for."""
    for name in ("config.json", "tokenizer_config.json"):
        if trust_remote_code or not (folder / name).exists():
            continue
        config = _read_json(folder / name)
        for key in ("model_file", "auto_map"):
            if config.get(key):
                raise ValueError(
                    f"[load] {folder / name} asks to run Python code of the checkpoint "
                    f"({key}: {config[key]}). Pass trust_remote_code=True if you trust "
                    "it; if this software knows the model without that code, removing "
                    f"the key {key} is the safer way."
                )


def _read_shard(path: Path) -> _Shard:
    if path.stat().st_size < 1024 and path.read_bytes().startswith(b"version https"):
        raise ValueError(
            f"[load] {path} is a Git LFS pointer, not the file. Run: git lfs pull"
        )
    try:
        tensors, metadata = mx.load(str(path), return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"[load] {path} is damaged or incomplete: {error} Download it again."
        ) from error
    return _Shard(path, tensors, metadata)


def _read_trunk(folder: Path) -> list[_Shard]:
    return [_read_shard(path) for path in sorted(folder.glob("model*.safetensors"))]


def _load_trunk(folder, trunk, model_config, adapter_path, trust_remote_code):
    config = _read_json(folder / "config.json") | (model_config or {})
    if "model_type" not in config:
        raise ValueError(f"[load] {folder / 'config.json'} has no model_type.")
    try:
        model, config = lm_utils.load_model(
            folder,
            lazy=True,
            model_config=model_config,
            get_model_classes=partial(_classes, _appended(trunk, config)),
            trust_remote_code=trust_remote_code,
        )
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"[load] {folder / 'config.json'} is not a complete config of model type "
            f"{config['model_type']}: {error}."
        ) from error
    if isinstance(model, _Headless):
        model.__class__ = type(model).__mro__[2]
    if adapter_path is not None:
        model = lm_utils.load_adapters(model, adapter_path)
        model.eval()
    return model, config


def _refuse_encoder(folder: Path, config) -> None:
    if reason := _encoder(folder, config):
        raise UnsupportedHead(reason)


def _encoder(folder: Path, config) -> str | None:
    """Why a model does not decode, whatever its type: it gives vectors or scores."""
    signs = [name for name in ENCODER_FILES if (folder / name).exists()]
    architectures = config.get("architectures") or ()
    signs += [name for name in architectures if ENCODER.search(name)]
    if not signs:
        return None
    return (
        f"{folder} is an embedding or reranking model of type "
        f"{config.get('model_type')} ({', '.join(signs)})"
    )


class _Headless:
    """A model class while its weights are read, see ``_classes``."""


def _appended(trunk: list[_Shard], config) -> set[str]:
    """The tensors of a head that is stored as one more layer of the trunk."""
    try:
        spec = find_spec(config)
    except UnsupportedHead:
        return set()
    names = [name for shard in trunk for name in shard.tensors]
    return {n for n in select(names, spec, config) if n.startswith("model.layers.")}


def _classes(head: set[str], config):
    """``mlx_lm``'s classes of a model, whose weights do not have the head's.

    Some of its models know the number of the head's layer for one size only.
    """
    model_class, arguments = lm_utils._get_classes(config)
    if not head:
        return model_class, arguments

    def sanitize(self, weights):
        kept = {name: x for name, x in weights.items() if name not in head}
        return model_class.sanitize(self, kept)

    made = type("Headless", (_Headless, model_class), {"sanitize": sanitize})
    return made, arguments


def _load_tokenizer(folder, tokenizer_config, config):
    try:
        return lm_utils.load_tokenizer(
            folder, tokenizer_config, eos_token_ids=config.get("eos_token_id")
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"[load] The tokenizer in {folder} cannot be loaded: {error}"
        ) from error


def _over_budget(memory: MemoryPolicy, model, loaded: LoadedHead | None) -> str | None:
    """Why there is no room for the head, if there is none."""
    target = as_target(model)
    drafter = loaded and head_drafter(loaded.head, target)
    plan = partial(
        Footprint(target, drafter).plan,
        bucket(memory.context),
        prompt=memory.context,
        others=mx.get_active_memory(),
    )
    depth, reason = memory.choose(
        plan, PLANNED_DEPTH if drafter else 0, f"{memory.context} tokens"
    )
    return reason if drafter and not depth else None


def _load_attached(
    model, folder, trunk, config, mtp, dtype, lazy
) -> tuple[LoadedHead | None, str | None]:
    """The head that goes with a model, and why it is left out, if it is."""
    try:
        _refuse_encoder(folder, config)
        spec = find_spec(config)
    except UnsupportedHead as error:
        if mtp is not True:
            raise UnsupportedHead(f"[load] No head of {mtp} fits: {error}.") from None
        if _looks_headed(trunk, config) or _sidecars(folder):
            return None, str(error)
        return None, None
    path = folder if mtp is True else Path(mtp).expanduser()
    if path != folder and path.is_dir():
        _check_same_vocabulary(folder, path)
        trunk = _read_trunk(path)
    found = _find_head(path, trunk, spec, config)
    if found is None:
        if mtp is not True:
            raise ValueError(f"[load] {path} has no MTP head.")
        return None, None
    try:
        dtype = dtype or _head_dtype(found.tensors, as_target(model))
        return LoadedHead(_build(found, config, dtype, lazy), found.source), None
    except RuntimeError as error:  # no memory, or a file that cannot be read
        return None, f"{found.source} could not be read ({error})"


def _looks_headed(trunk: list[_Shard], config) -> bool:
    """Whether tensors are named as those of a head, or stand behind the trunk's."""
    layers = text_config(config).get("num_hidden_layers")
    for name in (name for shard in trunk for name in shard.tensors):
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if HEAD_LIKE.search(name) or (layer and layers and int(layer[1]) >= layers):
            return True
    return False


def _check_same_vocabulary(ours: Path, theirs: Path) -> None:
    """A head of another folder must mean the same tokens by the same ids."""
    files = [folder / "tokenizer.json" for folder in (ours, theirs)]
    if not all(f.exists() for f in files) or files[0].samefile(files[1]):
        return
    left, right = (_vocabulary(_read_json(file)) for file in files)
    if difference := _first_difference(left, right):
        raise ValueError(
            f"[load] The vocabularies of {ours} and {theirs} differ, {difference}."
        )


def _first_difference(left: dict[str, int], right: dict[str, int]) -> str | None:
    """Where two vocabularies differ, in words; None if they do not."""
    if different := left.items() ^ right.items():
        token, index = min(different, key=lambda item: item[1])
        return f"first in token {token!r} with id {index}"
    return None


def _vocabulary(tokenizer: dict[str, Any]) -> dict[str, int]:
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram: pairs of token and score
        vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
    added = {t["content"]: t["id"] for t in tokenizer.get("added_tokens", ())}
    return vocabulary | added


def _find_head(path: Path, trunk: list[_Shard], spec, config) -> _Found | None:
    """The head in a file, in a folder's sidecars, or else among the trunk's tensors."""
    if not path.exists():
        raise FileNotFoundError(f"[load] There is no MTP head at {path}.")
    files = _sidecars(path) if path.is_dir() else [path]
    sidecars = [_read_shard(file) for file in files]
    shards = sidecars or trunk
    names = [name for shard in shards for name in shard.tensors]
    stored = any("mtp_family" in shard.metadata for shard in sidecars)
    _check_family(sidecars, spec, config)
    belongs = select(names, spec, config, stored)
    shards = [s for s in shards if any(_is_part(name, belongs) for name in s.tensors)]
    if not shards:
        if sidecars:
            raise ValueError(
                f"[load] {files[0]} has no tensors named {spec.place}, as an MTP head "
                f"of {spec.family} has."
            )
        return None
    source = ", ".join(shard.path.name for shard in shards)
    zero_centred = spec.norm_offset and _zero_centred(
        shards, trunk, is_sidecar=bool(sidecars)
    )
    tensors = _select(shards, belongs, spec.place)
    return _Found(tensors, source, zero_centred, stored, spec)


def _check_family(sidecars: list[_Shard], spec: HeadSpec, config) -> None:
    for shard in sidecars:
        family = shard.metadata.get("mtp_family", spec.family)
        if family != spec.family:
            raise UnsupportedHead(
                f"[load] {shard.path} has an MTP head of {family} but model type "
                f"{config.get('model_type')} takes one of {spec.family}."
            )


def _is_part(name: str, belongs: dict[str, str | None]) -> bool:
    return belongs.get(name) is not None or (
        name not in belongs and HEAD_LIKE.search(name) is not None
    )


def _sidecars(folder: Path) -> list[Path]:
    return [file for pattern in SIDECARS for file in sorted(folder.glob(pattern))]


def _select(shards: list[_Shard], belongs: dict[str, str | None], place: str):
    """The head's tensors under their names in ``MTPHead``."""
    tensors: dict[str, mx.array] = {}
    for shard in shards:
        for name, x in shard.tensors.items():
            if name not in belongs and HEAD_LIKE.search(name):
                raise ValueError(
                    f"[load] {shard.path} has the tensor {name}, which looks like a "
                    f"part of an MTP head under an unknown prefix. Known is {place}, "
                    "with model. and language_model. in front or not."
                )
            ours = belongs.get(name)
            if ours in tensors:
                raise ValueError(f"[load] {shard.path} has {name} a second time.")
            if ours is not None:
                tensors[ours] = x
    return tensors


def _zero_centred(shards: list[_Shard], trunk: list[_Shard], is_sidecar: bool) -> bool:
    """Whether norm gains are stored as their difference from 1, as in raw checkpoints.

    Conversion to MLX adds 1 and moves the axes of the trunk's convolutions, so their
    layout tells for the same folder. The presence of a head tells nothing: converted
    folders may have one.
    """
    metadata = {k: v for shard in shards for k, v in shard.metadata.items()}
    if "norm_offset" in metadata:
        return metadata["norm_offset"] == "1"
    convolutions = [
        x for s in trunk for name, x in s.tensors.items() if "conv1d.weight" in name
    ]
    if convolutions and not (is_sidecar and "format" in metadata):
        return any(x.shape[-1] != 1 for x in convolutions)
    if "format" in metadata:
        return metadata["format"] != "mlx"
    raise ValueError(
        f"[load] {shards[0].path} does not say whether its norm gains are stored as "
        'such or less 1. Save it with the metadata {"norm_offset": "0"} or '
        '{"norm_offset": "1"}, which is what a loader has to add.'
    )


def _head_dtype(tensors: dict[str, mx.array], target) -> mx.Dtype:
    """The trunk's dtype if it has the range for the tensors' values, else float32."""
    ours = {x.dtype for x in tensors.values() if mx.issubdtype(x.dtype, mx.floating)}
    theirs = target.embed(mx.array([[0]])).dtype
    return mx.float32 if theirs == mx.float16 and ours - {theirs} else theirs


def _build(found: _Found, config, dtype=None, lazy=False) -> MTPHead:
    head, tensors = build_head(config, found.spec), dict(found.tensors)
    if not found.stored:
        tensors = convert(tensors, found.spec, config)

    def quantisation(path, module):
        if f"{path}.scales" not in tensors or f"{path}.weight" not in tensors:
            return False
        return lm_utils.infer_quant_config(path, module, tensors)

    try:
        nn.quantize(head, class_predicate=quantisation)
    except ValueError as error:
        raise ValueError(
            f"[load] The quantised MTP head in {found.source} has weights and scales "
            f"that do not fit together: {error}"
        ) from error
    _check_fit(head, tensors, found.source)
    if found.zero_centred:
        for name in filter(GAIN.search, tensors):
            shifted = 1 + tensors[name].astype(mx.float32)
            tensors[name] = shifted.astype(dtype or tensors[name].dtype)
    head.load_weights(list(tensors.items()))
    if dtype is not None:
        _set_dtype(head, dtype)
    head.eval()
    if not lazy:
        _check_values(head, found.source)
    return head


def _set_dtype(head: MTPHead, dtype: mx.Dtype) -> None:
    """Casts floating tensors but the biases that choose experts."""

    def cast(name, x):
        keep = ROUTER_BIAS.search(name) or not mx.issubdtype(x.dtype, mx.floating)
        return x if keep else x.astype(dtype)

    head.update(tree_map_with_path(cast, head.parameters()))


def _check_fit(head: MTPHead, tensors: dict[str, mx.array], source: str) -> None:
    expected = dict(tree_flatten(head.parameters()))
    faults = [f"{name} is missing" for name in sorted(expected.keys() - tensors)]
    faults += [f"{name} is unknown" for name in sorted(tensors.keys() - expected)]
    for name in sorted(expected.keys() & tensors):
        shape, wanted = tensors[name].shape, expected[name].shape
        if shape != wanted:
            faults.append(f"{name} has shape {shape} in place of {wanted}")
    if faults:
        raise ValueError(
            f"[load] The MTP head in {source} does not fit the config: "
            f"{'; '.join(faults)}. Pass mtp=False to do without it."
        )


def _check_values(
    head: nn.Module,
    source: str,
    what: str = "MTP head",
    advice: str = " Pass mtp=False to do without it.",
) -> None:
    """Reads the tensors. A head of zeros or NaN would only show as never accepted."""
    flat = dict(tree_flatten(head.parameters()))
    finite = {name: mx.isfinite(x).all() for name, x in flat.items()}
    filled = {
        name: (x != 0).any()
        for name, x in flat.items()
        if name.endswith((".weight", ".scales"))
    }
    mx.eval(flat, finite, filled)
    faults = [f"{name} is not finite" for name, ok in finite.items() if not ok]
    faults += [f"{name} is all zeros" for name, ok in filled.items() if not ok]
    if faults:
        raise ValueError(
            f"[load] The {what} in {source} is damaged: {'; '.join(faults)}.{advice}"
        )


def _probed(model, loaded: LoadedHead, tokenizer) -> LoadedHead:
    agreement = probe_head(model, loaded.head, tokenizer)
    if agreement < PROBE_BAR:
        warnings.warn(
            f"[load] The MTP head in {loaded.source} agrees with the model on "
            f"{agreement:.0%} of {PROBE_TOKENS} tokens (a working head: above "
            f"{PROBE_BAR:.0%}), so drafting with it will only cost time. Check that it "
            "was made for this model and that its norm gains are stored as its "
            "metadata or the trunk's layout says (norm_offset).",
            stacklevel=4,
        )
    return replace(loaded, agreement=agreement)


def _probe_prompt(tokenizer) -> list[int]:
    if getattr(tokenizer, "has_chat_template", False):
        messages = [{"role": "user", "content": PROBE_PROMPT}]
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
    return tokenizer.encode(PROBE_PROMPT)


def _continue_greedily(target, tokens: mx.array, count: int):
    """The tokens with ``count`` more, and the hidden rows of all but the last."""
    caches, rows, fed = target.make_cache(), [], tokens
    for _ in range(count):
        out = target.prefill(fed, caches)
        fed = mx.argmax(out.logits[:, -1:], axis=-1).astype(tokens.dtype)
        mx.eval(fed, out.hidden)
        rows.append(out.hidden)
        tokens = mx.concatenate([tokens, fed], axis=1)
    return tokens, mx.concatenate(rows, axis=1)


class _FirstForward:
    """The memory of a forward that has nothing before it and nothing after it."""

    batch, offset = 1, 0

    def __getitem__(self, i):
        return self  # layers with several caches

    def make_mask(self, width, return_array=False, window_size=None):
        return create_causal_mask(width, window_size=window_size)

    def update_and_fetch(self, keys, values):
        self.keys, self.values = keys, values
        return keys, values

    def attend(self, q, k, v, scale: float) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal")
