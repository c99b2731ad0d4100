"""Token ids as bytes, and which ids are control tokens.

The one thing the rest of this package asks of a tokenizer. Control tokens (added
tokens such as `<think>`) are told apart from ordinary tokens that happen to spell the
same text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence


class Vocabulary:
    """What a router of token ids needs to know about a tokenizer.

    Args:
        encode: Text to token ids, without added special tokens.
        piece: Token id to the bytes it stands for; `b""` for an unknown id.
        controls: Text of each control token to its id.
        special: Ids of control tokens that are never part of an answer (`<|im_end|>`).
        size: Number of ids, for range checks.
        strip_space: The first ordinary token of a text carries a space that is not
            part of it (SentencePiece).

    Example:
        >>> pieces = [b"<think>", b"</think>", b"a", b"b"]
        >>> vocabulary = Vocabulary(
        ...     lambda text: [pieces.index(char.encode()) for char in text],
        ...     lambda id: pieces[id],
        ...     {"<think>": 0, "</think>": 1},
        ... )
        >>> vocabulary.encode("ab")
        [2, 3]

    `from_tokenizer` makes one of a tokenizer.
    """

    def __init__(
        self,
        encode: Callable[[str], Sequence[int]],
        piece: Callable[[int], bytes],
        controls: Mapping[str, int],
        *,
        special: Iterable[int] = (),
        size: int | None = None,
        strip_space: bool = False,
    ):
        self.encode = encode
        self.piece = piece
        self.controls = dict(controls)
        self.control_text = {id: text for text, id in self.controls.items()}
        self.special = frozenset(special)
        self.size = size
        self.strip_space = strip_space

    @classmethod
    def from_tokenizer(cls, tokenizer) -> Vocabulary:
        """The vocabulary of a transformers tokenizer, or of mlx_lm's wrapper of one."""
        added = tokenizer.added_tokens_decoder
        controls = {token.content: id for id, token in added.items()}
        special = {id for id, token in added.items() if token.special}
        special.update(tokenizer.all_special_ids)
        texts = {id: text.encode() for text, id in controls.items()}

        def encode(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False))

        sample = "".join(tokenizer.convert_ids_to_tokens(encode("a b é")))
        if "Ġ" in sample:
            to_bytes = _byte_level
        elif "▁" in sample:
            to_bytes = _sentencepiece
        else:
            to_bytes = None

        def piece(id: int) -> bytes:
            if id in texts:
                return texts[id]
            token = tokenizer.convert_ids_to_tokens(id)
            if token is None:
                return b""
            if to_bytes is None:
                return tokenizer.decode([id]).encode()
            return to_bytes(token)

        return cls(
            encode,
            piece,
            controls,
            special=special,
            size=len(tokenizer),
            strip_space=to_bytes is _sentencepiece,
        )


def _byte_table() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, inverted."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update((chr(256 + i), byte) for i, byte in enumerate(others))
    return table


_BYTES = _byte_table()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTES[char] for char in token)
    except KeyError:
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace("▁", " ").encode()
