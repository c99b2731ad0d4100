"""The same prompt decoded by ``mlx_lm`` and by us; and are they equal."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import mlx.core as mx
import mlx_lm
import smollm2
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_sampler as mlx_lm_sampler

import mlx_mtp
from mlx_mtp.drafters import MTPHeadDrafter, NGramDrafter
from mlx_mtp.proof.checks import difference
from mlx_mtp.speculative import SpeculativeDecoder
from mlx_mtp.targets import as_target


@dataclass
class Run:
    """One decoded stream, the end token included."""

    tokens: list[int]
    seconds: float  # from the request to the last token
    first: float  # of these, to the first token
    from_draft: list[bool]
    mtp: mlx_mtp.Telemetry | None = None

    @property
    def tps(self) -> float:
        return len(self.tokens) / self.seconds


class Subject:
    """A model with the drafter that goes with it."""

    def __init__(self, name: str):
        self.name = name
        path = smollm2.folder() if name == "smollm2" else name
        self.model, self.tokenizer = mlx_mtp.load(path)
        self.target = as_target(self.model)
        if self.model.mtp_head is None:
            self.drafter = NGramDrafter()
        else:
            self.drafter = MTPHeadDrafter(self.model.mtp_head.head, self.target)
        self._decoders: dict[int, SpeculativeDecoder] = {}

    def decoder(self, depth: int) -> SpeculativeDecoder:
        if depth not in self._decoders:
            self._decoders[depth] = SpeculativeDecoder(self.target, self.drafter, depth)
        return self._decoders[depth]

    def encode(self, question: str, tools=None, thinking: bool = True) -> list[int]:
        return self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            tools=tools,
            add_generation_prompt=True,
            enable_thinking=thinking,
            return_dict=False,
        )

    def plain(self, prompt, max_tokens: int, temperature: float, seed: int = 0) -> Run:
        mx.random.seed(seed)
        return _run(
            lambda: mlx_lm.stream_generate(
                self.model,
                self.tokenizer,
                prompt,
                max_tokens,
                sampler=mlx_lm_sampler(temperature),
            )
        )

    def ours(
        self, prompt, max_tokens: int, temperature: float, depth: int, seed: int = 0
    ) -> Run:
        return _run(
            lambda: mlx_mtp.stream_generate(
                self.model,
                self.tokenizer,
                prompt,
                max_tokens,
                mtp=self.decoder(depth),
                sampler=mlx_mtp.make_sampler(temperature),
                seed=seed,
            )
        )

    def plain_tokens(self, prompt, count: int) -> list[int]:
        """``count`` greedy tokens of ``mlx_lm``, past the end of the answer too."""
        steps = generate_step(mx.array(prompt), self.model, max_tokens=count)
        return [int(token) for token, _ in steps]

    def our_tokens(self, prompt, count: int, depth: int) -> list[int]:
        """The same of ours."""
        steps = self.decoder(depth).stream(prompt, max_tokens=count)
        return [step.token for step in steps]

    def difference(self, prompt, expected: list[int], got: list[int]) -> dict | None:
        """Where two greedy outputs part, and whether it is at a near-tie."""
        return difference(self.target, prompt, expected, got)


def _run(decode) -> Run:
    tokens, from_draft, times = [], [], [perf_counter()]
    for response in decode():
        times.append(perf_counter())
        tokens.append(response.token)
        from_draft.append(response.from_draft)
    seconds, first = times[-1] - times[0], times[1] - times[0]
    return Run(tokens, seconds, first, from_draft, getattr(response, "mtp", None))
