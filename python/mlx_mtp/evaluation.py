"""lm-evaluation-harness through MTP; needs ``pip install 'mlx-mtp[lm-eval]'``.

    python -m mlx_mtp.evaluation --model mlx_mtp --model_args path=PATH --tasks gsm8k

takes every option of the harness's own command.
"""

from __future__ import annotations

import mlx.core as mx
from lm_eval.api.registry import register_model
from mlx_lm.evaluate import MLXLM, chat_template_fn
from tqdm import tqdm

from .drafters import NGramDrafter
from .generation import Depth, find_decoder, make_sampler, stream_generate
from .loading import load

MAX_TOKENS = 256  # where a task says nothing


@register_model("mlx_mtp")
class MTPLM(MLXLM):
    """A model of the harness: it generates with MTP, and scores with the target.

    Greedy answers are those of ``mlx_lm``. A task that samples (``do_sample``) draws
    with its ``temperature``, ``top_p`` and ``top_k``.

    Args:
        path (str): As in ``mlx_mtp.load``.
        depth (int or str): Drafts a round, or ``"adaptive"``.
        drafter (str): ``"mtp"``, or ``"ngram"`` where the model has no head.
        max_tokens (int, optional): Of every answer, in place of what its task says.
        batch_size (int): Of ``loglikelihood_rolling``.
        use_chat_template (bool, optional): Whether prompts come from the template, with
            its special tokens in them. Default: if the model has one.
        enable_thinking (bool, optional): For that template. A thought is no part of the
            answer, and stop strings within it do not count.
        seed (int): Of the first answer; every other one has the next.

    ``rounds`` and ``round_tokens`` count what speculation did.

    Raises:
        ValueError: The model has no head.

    Example:
        >>> lm_eval.simple_evaluate(MTPLM("demo", depth=4), tasks=["gsm8k"], limit=20)
    """

    def __init__(
        self,
        path: str,
        depth: Depth = 3,
        drafter: str = "mtp",
        max_tokens: int | None = None,
        batch_size: int = 8,
        use_chat_template: bool | None = None,
        enable_thinking: bool | None = None,
        seed: int = 0,
        **_,  # what the harness gives every model, such as a device
    ):
        super(MLXLM, self).__init__()
        self._model, self.tokenizer = load(path)
        chosen = NGramDrafter() if drafter == "ngram" else "auto"
        self._decoder = find_decoder(self._model, chosen, depth)
        if self._decoder is None:
            raise ValueError('The model has no MTP head. Try drafter="ngram".')
        self._max_tokens, self._batch_size = max_tokens, int(batch_size)
        if use_chat_template is None:
            use_chat_template = self.tokenizer.chat_template is not None
        self.use_chat_template = use_chat_template
        self._thinks = self.tokenizer.has_thinking and enable_thinking is not False
        self._template = {}
        if enable_thinking is not None:
            self._template["enable_thinking"] = enable_thinking
        self._seed = seed
        self.rounds = self.round_tokens = 0

    def apply_chat_template(self, chat_history, add_generation_prompt=True) -> str:
        make = chat_template_fn(**self._template)
        return make(self, chat_history, add_generation_prompt)

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """The answers, each up to the first of its task's stop strings."""
        return [
            self._answer(*request.args, seed=self._seed + i)
            for i, request in enumerate(tqdm(requests, disable=disable_tqdm))
        ]

    def _answer(self, context: str, options: dict, seed: int) -> str:
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else list(filter(None, until))
        prompt = self.tokenizer.encode(
            context, add_special_tokens=not self.use_chat_template
        )
        text = ""
        for response in stream_generate(
            self._model,
            self.tokenizer,
            prompt,
            self._max_tokens or options.get("max_gen_toks", MAX_TOKENS),
            mtp=self._decoder,
            sampler=_sampler(options),
            seed=seed,
            stop=until if until and not self._thinks else None,
        ):
            text += response.text
        self.rounds += response.mtp.rounds
        self.round_tokens += response.mtp.round_tokens
        return self._behind_thought(context, text, until) if self._thinks else text

    def _behind_thought(self, context: str, text: str, until: list[str]) -> str:
        """The answer, up to a stop string; empty if its thought did not end."""
        begin, end = self.tokenizer.think_start, self.tokenizer.think_end
        opened = begin in text or context.rstrip().endswith(begin)
        if end not in text and opened:
            return ""
        # The line breaks behind a thought are often a stop string.
        text = text.rpartition(end)[2].lstrip("\n")
        ends = [at for stop in until if (at := text.find(stop)) >= 0]
        return text[: min(ends, default=None)]


def _sampler(options: dict):
    if not options.get("do_sample"):
        return None
    return make_sampler(
        options.get("temperature", 1.0),
        top_p=options.get("top_p", 0.0),
        top_k=options.get("top_k", 0),
    )


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    mx.random.seed(0)
    cli_evaluate()
