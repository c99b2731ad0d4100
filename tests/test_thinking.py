"""Thinking budgets in the decoding loops: one stream, whatever drafts it."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache
from reasoning_support import qwen3_5_vocabulary, qwen3_vocabulary
from tiny import ScriptedDrafter, tiny_qwen

import mlx_mtp
from mlx_mtp import NGramDrafter, make_sampler
from mlx_mtp.cli import main
from mlx_mtp.reasoning import (
    CannotDisableReasoning,
    InsufficientTokens,
    InvalidTokenId,
    LoopGuard,
    ReasoningConfig,
    SoftClose,
    ThinkingBudget,
    Transition,
    Vocabulary,
    family,
    split,
)
from mlx_mtp.speculative import SpeculativeDecoder
from mlx_mtp.state import KVAdapter
from mlx_mtp.targets import TargetOutput
from mlx_mtp.thinking import (
    ControllerProcessor,
    MissingCapability,
    make_budget,
    reasoning_config,
    template_kwargs,
)

QUESTION = "What is 3757 + 4868?"
CLOSE = 4091  # </think> of the demo
SENTENCE = Transition("\nTime is up, I have to answer now.\n", "\n\n")


def render(demo, question=QUESTION, **kwargs):
    message = {"role": "user", "content": question}
    return demo[1].apply_chat_template([message], add_generation_prompt=True, **kwargs)


@pytest.fixture(scope="module")
def prompt(demo):
    return render(demo)


@pytest.fixture(scope="module")
def plain(demo, prompt):
    """mlx_lm's own loop, by budget."""
    streams = {}

    def tokens(budget):
        if budget not in streams:
            streams[budget] = run(demo, prompt, budget, budget + 8, mtp=None)[0]
        return streams[budget]

    return tokens


def run(demo, prompt, budget, max_tokens=32, **kwargs):
    """Tokens and the last response."""
    responses = list(
        mlx_mtp.stream_generate(
            *demo, prompt, max_tokens=max_tokens, thinking_budget=budget, **kwargs
        )
    )
    return [r.token for r in responses], responses[-1]


def budget_with(demo, prompt, tokens, **options):
    model, tokenizer = demo
    config = reasoning_config(model, tokenizer)
    return make_budget(config, tokenizer, prompt, tokens, **options)


# One stream


@pytest.mark.parametrize("mtp", [1, 2, 3, 4, 5, 6, 7, 8, "ngram"])
def test_the_boundary_at_every_offset_of_a_block(demo, prompt, plain, mtp):
    depth = 4 if mtp == "ngram" else mtp
    drafter = NGramDrafter() if mtp == "ngram" else mtp
    for budget in range(depth + 1, 2 * depth + 3):
        kwargs = {"mtp": drafter, "num_draft_tokens": depth}
        tokens, _ = run(demo, prompt, budget, budget + 8, **kwargs)
        assert tokens == plain(budget)
        assert tokens.index(CLOSE) == budget


def test_zero_closes_at_once_and_a_large_budget_changes_nothing(demo, prompt, plain):
    for mtp in (None, 3):
        tokens, _ = run(demo, prompt, 0, mtp=mtp)
        assert tokens[0] == CLOSE
        free, _ = run(demo, prompt, None, 200, mtp=mtp)
        assert run(demo, prompt, 150, 200, mtp=mtp)[0] == free


def test_no_budget_slows_a_round_that_cannot_reach_it(demo, prompt):
    _, free = run(demo, prompt, None, 200)
    _, limited = run(demo, prompt, 150, 200)
    assert limited.mtp.fallback is None
    assert limited.mtp.target_calls == free.mtp.target_calls


def test_a_prompt_without_a_thought_is_not_limited(demo):
    prompt = render(demo, enable_thinking=False)
    for mtp in (None, 3):
        free, _ = run(demo, prompt, None, mtp=mtp)
        assert run(demo, prompt, 0, mtp=mtp)[0] == free


def test_text_and_token_prompts_are_primed_alike(demo, prompt, plain):
    text = render(demo, tokenize=False)
    assert run(demo, text, 5, 13)[0] == plain(5)


@pytest.mark.parametrize("strength", [2.0, 30.0])
def test_a_soft_close_is_the_same_in_both_loops(demo, prompt, strength):
    streams = []
    for mtp in (None, 1, 3, 6):
        budget = budget_with(demo, prompt, 30, soft=SoftClose(20, strength))
        streams.append(run(demo, prompt, budget, 40, mtp=mtp)[0])
    assert streams.count(streams[0]) == 4
    assert (streams[0].index(CLOSE) < 30) == (strength > 20)


def test_a_loop_guard_is_the_same_in_both_loops(demo):
    """Two equal digits in a row are a loop here."""
    prompt = render(demo, "What is 3377 + 4868?")
    streams = []
    for mtp in (None, 2, 5):
        guard = LoopGuard(longest=1, repeats=2, every=1)
        budget = budget_with(demo, prompt, 60, loops=guard)
        streams.append(run(demo, prompt, budget, mtp=mtp)[0])
    assert streams.count(streams[0]) == 3
    assert CLOSE in streams[0][:10]


def test_sampled_streams_keep_the_limit(demo, prompt):
    for seed in range(3):
        for mtp in (None, 3, NGramDrafter()):
            budget = budget_with(demo, prompt, 9)
            kwargs = {"mtp": mtp, "sampler": make_sampler(1.5), "seed": seed}
            tokens, _ = run(demo, prompt, budget, 20, **kwargs)
            assert CLOSE in tokens[: 9 + 3 + 1]
            assert budget.spent <= 9 + 3


def test_processors_and_a_cache_that_cannot_speculate_change_nothing(
    demo, prompt, plain
):
    def nothing(tokens, logits):
        return logits

    for kwargs in ({"logits_processors": [nothing]}, {"max_kv_size": 512}):
        for mtp in (None, "auto"):
            assert run(demo, prompt, 11, 19, mtp=mtp, **kwargs)[0] == plain(11)


class Shift:
    """Forbids a token in every second place, and keeps what it has seen."""

    def __init__(self, banned):
        self.banned, self.seen = banned, []

    def __call__(self, tokens, logits):
        self.seen.append(tokens.tolist())
        if len(tokens) % 2:
            logits[:, self.banned] = -mx.inf
        return logits


def test_a_budget_works_behind_a_processor_that_changes_the_stream(demo, prompt, plain):
    """Forced tokens are forced whatever it does, and it sees them in its history."""
    for budget in (6, 7, 11):
        banned = plain(budget)[3 - len(prompt) % 2]
        streams, histories = [], []
        for mtp in (None, 1, 3, NGramDrafter()):
            shift = Shift(banned)
            kwargs = {"mtp": mtp, "logits_processors": [shift]}
            streams.append(run(demo, prompt, budget, budget + 8, **kwargs)[0])
            histories.append({tuple(seen) for seen in shift.seen})
        assert streams.count(streams[0]) == 4
        assert streams[0] != plain(budget) and streams[0][budget] == CLOSE
        # Behind the transition every loop shows the processor the same histories.
        ends = [
            {h for h in history if len(h) > len(prompt) + budget + 1}
            for history in histories
        ]
        assert ends[0] and all(end <= ends[0] for end in ends[1:])


def test_the_answer_reserve_is_kept_in_both_loops(demo, prompt):
    for reserve in (5, 20):
        streams = []
        for mtp in (None, 3):
            budget = budget_with(
                demo, prompt, None, max_tokens=40, answer_reserve=reserve
            )
            streams.append(run(demo, prompt, budget, 40, mtp=mtp)[0])
        assert streams[0] == streams[1]
        assert 40 - streams[0].index(CLOSE) - 1 >= reserve


# Real vocabularies, with a scripted target


class ScriptTarget:
    """Says ``script[i]`` at position i, and counts its forwards outside of rounds."""

    hidden_size = 1

    def __init__(self, script, vocab_size):
        self.script, self.vocab_size = mx.array(script), vocab_size
        self.adapters = [KVAdapter()]
        self.fed = []

    def weights(self):
        return self.script

    def make_cache(self):
        return [KVCache()]

    def forward(self, tokens, views):
        places = mx.arange(tokens.shape[1]) + 1
        offset = views[0].offset
        rows = mx.zeros((tokens.shape[0], 1, tokens.shape[1], 1))
        views[0].update_and_fetch(rows, rows)
        if not isinstance(offset, int):
            offset = offset[:, None]
        says = mx.broadcast_to(self.script[places + offset], tokens.shape)
        return TargetOutput(
            mx.where(mx.arange(self.vocab_size) == says[..., None], 9.0, 0.0)
        )

    def prefill(self, tokens, caches):
        self.fed.append(tokens.shape[1])
        return self.forward(tokens, caches)


def by_hand(budget, script, start, size):
    """The stream by the controller's contract alone."""
    out = []
    while len(out) < size:
        for token in budget.forced() or [script[start + len(out)]]:
            budget.accept(token)
            out.append(token)
    return out[:size]


def scripted(vocabulary, thought, depth, plan=(99,)):
    prompt = vocabulary.encode("Hi")
    script = (prompt + thought * 20)[:400]
    target = ScriptTarget(script, vocabulary.size)
    drafter = ScriptedDrafter(script[len(prompt) :], vocabulary.size, plan)
    return prompt, script, target, SpeculativeDecoder(target, drafter, depth)


@pytest.mark.parametrize("depth", range(1, 9))
def test_the_boundary_at_every_offset_on_the_vocabulary_of_qwen3_5(depth):
    vocabulary = qwen3_5_vocabulary()
    thought = vocabulary.encode("Also 7 + 8 = 15, 写 🙂 naïve: 12 und 👩‍🚀. ")
    prompt, script, _, decoder = scripted(vocabulary, thought, depth, (99, 0, 1))

    def budget(tokens):
        return ThinkingBudget(
            family("qwen3_5"), vocabulary, tokens, primed=True, transition=SENTENCE
        )

    for tokens in range(depth + 1, 2 * depth + 3):
        limit = budget(tokens)
        steps = decoder.stream(prompt, max_tokens=45, controller=limit)
        expected = by_hand(budget(tokens), script, len(prompt), 45)
        assert [step.token for step in steps] == expected
        assert tokens <= limit.spent <= tokens + 3
        close = expected.index(vocabulary.controls["</think>"])
        text = b"".join(vocabulary.piece(token) for token in expected[:close])
        assert text.decode().endswith(SENTENCE.before)


def test_a_transition_of_24_tokens_costs_one_forward():
    """Qwen3's own text. Every draft is right, so the other forwards are known too."""
    vocabulary, depth = qwen3_vocabulary(), 3
    thought = vocabulary.encode("Also 7 + 8 = 15, so 12. ")
    prompt, _, target, decoder = scripted(vocabulary, thought, depth)
    budget = ThinkingBudget(family("qwen3"), vocabulary, 13, primed=True)
    steps = decoder.stream(prompt, max_tokens=13 + 24 + 1, controller=budget)
    tokens = [step.token for step in steps]
    closed = vocabulary.controls["</think>"]
    assert tokens.index(closed) == 13 + 24 - 2
    # 1 token of the prompt's row and 12 in three rounds; then the transition.
    telemetry = steps.telemetry
    assert telemetry.rounds == 3
    assert target.fed[-1] == 1 + 24  # with the token that no round had fed
    assert telemetry.target_calls == 3 + 1


@pytest.mark.parametrize("mtp", [None, NGramDrafter()])
def test_a_forced_token_that_the_model_does_not_have_is_an_error(demo, prompt, mtp):
    """Behind the last token in front of it, if the stream comes so far."""

    def stream(max_tokens):
        budget = budget_with(demo, prompt, 5)
        budget.forced = lambda: [9999] if budget.spent == 5 else []
        return mlx_mtp.stream_generate(
            *demo, prompt, max_tokens, mtp=mtp, thinking_budget=budget
        )

    expected = [r.token for r in stream(5)]
    steps = stream(6)
    assert [next(steps).token for _ in range(5)] == expected
    with pytest.raises(ValueError, match="forced token 9999"):
        next(steps)


@pytest.mark.parametrize("mtp", [None, NGramDrafter()])
def test_a_budget_is_checked_against_the_model(demo, mtp):
    model = tiny_qwen()  # with fewer tokens than the tokenizer
    with pytest.raises(InvalidTokenId, match="128"):
        run((model, demo[1]), [1, 2, 3], 4, mtp=mtp)
    session = mlx_mtp.Session(model, demo[1], mtp=mtp)
    with pytest.raises(InvalidTokenId, match="128"):
        session.respond("Hi", thinking_budget=4)


# mlx_lm's loop


class Spy:
    """A controller that forces [7, 8] behind five tokens and favours 3 after that."""

    def __init__(self):
        self.read = []

    def accept(self, token):
        self.read.append(token)

    def forced(self):
        return [7, 8][len(self.read) - 5 :] if 5 <= len(self.read) < 7 else []

    def horizon(self):
        return max(5 - len(self.read), 0)

    def bias(self):
        return {3: 2.0} if len(self.read) == 7 else None


def test_the_adapter_forces_by_mask_and_reads_no_token_too_early():
    spy, row, no = Spy(), mx.zeros((1, 10)), -mx.inf
    adapter = ControllerProcessor(spy)
    stream = [4, 4, 4, 4, 4, 7, 8, 1]
    shaped = [adapter(mx.array([9, 9, *stream[:n]]), row)[0].tolist() for n in range(5)]
    assert shaped == [[0.0] * 10] * 5 and spy.read == []
    shaped = [
        adapter(mx.array([9, 9, *stream[:n]]), row)[0].tolist() for n in (5, 6, 7)
    ]
    assert shaped == [
        [no, no, no, no, no, no, no, 0.0, no, no],
        [no, no, no, no, no, no, no, no, 0.0, no],
        [0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    ]
    assert spy.read == stream[:7]


def test_what_the_adapter_keeps_comes_with_the_next_call():
    """For a loop that does not ask, behind the token that it still held."""

    class Fails(Spy):
        def forced(self):
            return [10] if len(self.read) == 5 else []

    class Closed(Spy):
        masks = True

        def forced(self):
            return []

        def mask(self):
            return np.full(1, len(self.read) < 5, np.uint32)

    row, stream = mx.zeros((1, 10)), [9, 9, 4, 4, 4, 4, 4]
    for controller, error in ((Fails(), "vocabulary"), (Closed(), "no token")):
        adapter = ControllerProcessor(controller)
        adapter(mx.array(stream[:2]), row)
        adapter(mx.array(stream), row)
        with pytest.raises((ValueError, RuntimeError), match=error):
            adapter(mx.array([*stream, 4]), row)


# Setup


def silent(done, total):
    raise AssertionError("the prompt was fed")


@pytest.mark.parametrize("mtp", [None, "auto"])
@pytest.mark.parametrize(
    ("budget", "max_tokens", "error"),
    [
        (-1, 60, ValueError),
        (60, 60, InsufficientTokens),
        ("12", 60, TypeError),
        (True, 60, TypeError),
    ],
)
def test_impossible_budgets_are_refused_before_the_prompt(
    demo, prompt, mtp, budget, max_tokens, error
):
    with pytest.raises(error):
        run(demo, prompt, budget, max_tokens, mtp=mtp, prompt_progress_callback=silent)


def test_a_model_without_thoughts_has_no_budget(demo, prompt):
    model, tokenizer = mlx_mtp.load("demo")
    tokenizer._tokenizer.chat_template = "{{ messages[0].content }}"
    assert reasoning_config(model, tokenizer) is None
    with pytest.raises(MissingCapability, match="thoughts") as raised:
        run((model, tokenizer), prompt, 5)
    assert raised.value.capability == "reasoning"


def test_a_budget_and_a_draft_model_exclude_each_other(demo, prompt):
    with pytest.raises(ValueError, match="draft_model"):
        run(demo, prompt, 5, draft_model=demo[0])


def test_template_arguments_for_models_with_and_without_thoughts():
    config = family("qwen3")
    assert template_kwargs(config, False) == {"enable_thinking": False}
    assert template_kwargs(None) == template_kwargs(None, False) == {}
    for asked in ({"thinking": True}, {"effort": "high"}):
        with pytest.raises(MissingCapability):
            template_kwargs(None, **asked)
    with pytest.raises(CannotDisableReasoning):
        template_kwargs(family("deepseek_r1"), False)


def test_a_family_without_a_transition_gets_the_bare_delimiter(demo):
    _, tokenizer = demo
    config = ReasoningConfig("<think>", "</think>")
    budget = make_budget(config, tokenizer, "<think>", 0)
    assert list(budget.forced()) == [CLOSE]
    budget = make_budget(family("qwen3"), tokenizer, "<think>", 0)
    text = Vocabulary.from_tokenizer(tokenizer).encode(
        f"{family('qwen3').transition.before}</think>\n\n"
    )
    assert list(budget.forced()) == text


# Command line


def generate(capsys, *args):
    assert main(["generate", "-p", "What is 57 + 68?", "--json", *args]) == 0
    report = json.loads(capsys.readouterr().out)
    return split("<think>" * ("off" not in args) + report["text"], family("qwen3"))


def test_the_command_line_switches_and_limits_thoughts(capsys):
    assert generate(capsys, "--thinking", "off").reasoning == ""
    whole = generate(capsys).reasoning
    assert generate(capsys, "--thinking", "on").reasoning == whole
    for extra in ((), ("--no-mtp",)):
        cut = generate(capsys, "--thinking-budget", "9", *extra)
        assert cut.reasoning == whole[: len(cut.reasoning)] != whole
        assert cut.response


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--thinking-budget", "-1"], "at least 0"),
        (["--thinking-budget", "512"], "max_tokens must be at least 517"),
    ],
)
def test_bad_budgets_are_one_line_and_code_2(capsys, args, said):
    assert main(["generate", "-p", "x", *args]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said in error
