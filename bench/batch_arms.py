"""The arms of ``batch.py``: the same requests, decoded in three ways."""

from __future__ import annotations

from collections import Counter

from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler
from streams import Subject

from mlx_mtp.batch import BatchIterator
from mlx_mtp.sampling import SamplingParams
from mlx_mtp.speculative import SpeculativeDecoder


class Arms:
    """Each arm decodes all prompts to ``tokens`` tokens, past their ends."""

    def __init__(self, questions, temperature: float, tokens: int):
        self.subject = Subject("demo")
        self.prompts = [self.subject.encode(q) for q in questions]
        self.temperature, self.tokens = temperature, tokens
        self.decoders: dict = {}
        self.clear()

    def clear(self) -> None:
        self.telemetry: dict[str, list] = {}
        self.widths: dict[str, list] = {}

    def decoder(self, depth) -> SpeculativeDecoder:
        if depth not in self.decoders:
            subject = self.subject
            self.decoders[depth] = SpeculativeDecoder(
                subject.target, subject.drafter, depth
            )
        return self.decoders[depth]

    def options(self, seed: int) -> dict:
        params = SamplingParams(self.temperature)
        return {"max_tokens": self.tokens, "params": params, "seed": seed}

    def mlx_lm(self) -> list[list[int]]:
        batch = BatchGenerator(
            self.subject.model,
            sampler=make_sampler(self.temperature),
            completion_batch_size=len(self.prompts),
        )
        ids = batch.insert(self.prompts, [self.tokens] * len(self.prompts))
        found = {id_: [] for id_ in ids}
        while responses := batch.next_generated():
            for response in responses:
                found[response.uid].append(int(response.token))
        batch.close()
        assert all(len(x) == self.tokens for x in found.values())
        return [found[id_] for id_ in ids]

    def one_by_one(self, depth: int) -> list[list[int]]:
        decoder = self.decoder(depth)
        return [
            [step.token for step in decoder.stream(prompt, **self.options(i))]
            for i, prompt in enumerate(self.prompts)
        ]

    def ours(self, depth) -> list[list[int]]:
        batch = BatchIterator(self.decoder(depth), max_rows=len(self.prompts))
        ids = [batch.add(p, **self.options(i)) for i, p in enumerate(self.prompts)]
        name, found = f"batch, depth {depth}", {id_: [] for id_ in ids}
        telemetry = [batch.telemetry(id_) for id_ in ids]
        for outputs in batch:
            for out in outputs:
                if out.error is not None:
                    raise out.error
                found[out.id] += [step.token for step in out.steps]
        self.telemetry.setdefault(name, []).extend(telemetry)
        self.widths.setdefault(name, []).append(batch.row_rounds / batch.rounds)
        return [found[id_] for id_ in ids]

    def counters(self, name: str) -> dict:
        """Acceptance, rows a round, and row rounds by depth of an arm of ours."""
        if name not in self.telemetry:
            return {}
        some, widths = self.telemetry[name], self.widths[name]
        drafted = sum(t.drafted for t in some)
        depths = sum((Counter(t.depths) for t in some), Counter())
        return {
            "acceptance": sum(t.accepted for t in some) / max(drafted, 1),
            "width": sum(widths) / len(widths),
            "depths": dict(sorted(depths.items())),
        }

    def check(self, depths) -> dict[str, int]:
        """Rows of each arm that part from their single run at a near-tie; another
        difference is an error."""
        alone, ties = self.one_by_one(3), {}
        for depth in depths:
            name = f"batch, depth {depth}"
            ties[name] = 0
            for prompt, expected, got in zip(
                self.prompts, alone, self.ours(depth), strict=True
            ):
                difference = self.subject.difference(prompt, expected, got)
                if difference is not None and not difference["near_tie"]:
                    raise SystemExit(f"{name}: other tokens, {difference}")
                ties[name] += difference is not None
        return ties
