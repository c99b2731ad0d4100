"""The thinking budget, alone and in drivers of plain and speculative decoding."""

import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reasoning_support import REAL, THINK, Pieces, controls, qwen3_vocabulary

import mlx_mtp.reasoning as r

QWEN = r.family("qwen3")
CLOSE = r.Transition("\n", "\n\n")
BARE = r.Transition()
CONTROL = Pieces(controls(QWEN))
SPELLED = Pieces()


def make(tokens, pieces=CONTROL, config=QWEN, **kwargs):
    kwargs.setdefault("transition", CLOSE)
    return r.ThinkingBudget(config, pieces.vocabulary, tokens, **kwargs)


# Drivers


class Log(list):
    """Emitted tokens; `forwards` counts forwards of the target."""

    forwards = 0


def plain(budget, model, size):
    """Decodes token by token."""
    out = Log()
    free_to = 0  # what the horizon has promised
    while len(out) < size:
        free_to = max(free_to, len(out) + budget.horizon())
        tokens = budget.forced() or [model(out)]
        assert not budget.forced() or len(out) >= free_to
        out.forwards += 1
        for token in tokens:
            budget.accept(token)
            out.append(token)
    return out[:size]


def emit(budget, out, block, free, exact=False):
    """Emits a block, cut after the first token that makes others due."""
    for i, token in enumerate(block):
        budget.accept(token)
        out.append(token)
        if free and budget.forced():
            assert not exact or i == len(block) - 1
            return


def verified(out, model, guess):
    """What the target makes of drafts: the right ones and one token more."""
    block = []
    for i in range(len(guess) + 1):
        block.append(model(out + block))
        if i < len(guess) and guess[i] != block[-1]:
            break
    return block


def drafted(out, draft, size):
    guess = []
    for _ in range(size):
        guess.append(draft(out + guess))
    return guess


def speculative(budget, model, draft, size, depth, horizon=False):
    """Decodes in blocks, cut where a forced token is due.

    `horizon`: blocks are no longer than `budget.horizon()` and never need a cut.
    """
    out = Log()
    while len(out) < size:
        out.forwards += 1
        forced = budget.forced()
        limit = min(depth, budget.horizon() - 1) if horizon else depth
        block = forced or verified(out, model, drafted(out, draft, limit))
        emit(budget, out, block, not forced, horizon)
    return out[:size]


def looking_ahead(budget, model, draft, size, depth):
    """Drafts only as far as the budget leaves free, found by trying and taking back."""
    out = Log()
    while len(out) < size:
        forced = budget.forced()
        mark = budget.checkpoint()
        guess = []
        while len(guess) < depth and not budget.forced():
            guess.append(draft(out + guess))
            budget.accept(guess[-1])
        budget.restore(mark)
        emit(budget, out, forced or verified(out, model, guess), not forced)
    return out[:size]


def scripted(tokens, then):
    """A model that says `tokens` and then `then` for ever, whatever is forced."""
    return lambda out: tokens[len(out)] if len(out) < len(tokens) else then


def noisy(vocabulary_tokens, seed, common):
    """A greedy model: the next token is a fixed function of the last three."""

    def model(out):
        source = random.Random(str((seed, out[-3:], len(out) // 7)))
        pool = common if source.random() < 0.15 else vocabulary_tokens
        return source.choice(pool)

    return model


def imperfect(model, seed):
    """A drafter that is right two times out of three."""

    def draft(out):
        source = random.Random(str((seed, len(out), out[-2:])))
        return model(out) if source.random() < 0.67 else -1

    return draft


A, B, EOS = ord("a"), ord("b"), ord("$")
OPEN, SHUT = CONTROL.controls["<think>"], CONTROL.controls["</think>"]
FORCED = CONTROL.encode("\n</think>\n\n")
# A model that thinks for ever, and answers once the thought is closed.


def thinker(out):
    return B if SHUT in out else A


# Setup errors


@pytest.mark.parametrize("name", ["tokens", "max_tokens", "answer_reserve"])
def test_negative_numbers_are_refused_and_zero_is_not(name):
    kwargs = {"tokens": 5, name: -1}
    with pytest.raises(r.BudgetError, match=rf"{name} must be at least 0 but is -1"):
        make(kwargs.pop("tokens"), **kwargs)
    make(0, answer_reserve=0)


@pytest.mark.parametrize("value", [1.5, True, "8"])
def test_numbers_must_be_integers(value):
    with pytest.raises(TypeError, match="tokens must be an int"):
        make(value)


def test_max_tokens_needs_room_for_everything():
    kwargs = {"primed": True, "answer_reserve": 7}
    required = 10 + 3 + len(FORCED) + 7
    with pytest.raises(r.InsufficientTokens) as error:
        make(10, max_tokens=required - 1, **kwargs)
    assert (error.value.required, error.value.actual) == (required, required - 1)
    for part in ("10 thinking", "7 answer", f"{len(FORCED)} closing", str(required)):
        assert part in str(error.value)
    make(10, max_tokens=required, **kwargs)
    make(10, max_tokens=None, **kwargs)
    # Not primed, the opener takes a token too.
    with pytest.raises(r.InsufficientTokens):
        make(10, max_tokens=required, answer_reserve=7)


def test_a_sum_beyond_any_machine_integer_is_just_insufficient():
    with pytest.raises(r.InsufficientTokens):
        make(1 << 70, max_tokens=100)


def test_a_family_without_a_transition_needs_one():
    tagged = r.family("qwen3_5")
    with pytest.raises(r.UnsupportedTransition, match=r"qwen3_5 .*transition="):
        r.ThinkingBudget(tagged, CONTROL.vocabulary, 5)
    r.ThinkingBudget(tagged, CONTROL.vocabulary, 5, transition=BARE)


def test_an_override_enables_r1_and_beats_a_declaration():
    r1 = r.family("deepseek_r1")
    pieces = Pieces(["<think>", "</think>"])
    made = r.ThinkingBudget(r1, pieces.vocabulary, 0, primed=True, transition=BARE)
    assert list(made.forced()) == pieces.encode("</think>")
    mine = make(0, primed=True, transition=r.Transition("stop", "!"))
    assert list(mine.forced()) == CONTROL.encode("stop</think>!")


@pytest.mark.parametrize(("start", "end"), [("<think>", ""), ("", "</think>")])
def test_empty_delimiters_are_refused(start, end):
    with pytest.raises(r.UnencodableText) as error:
        make(5, config=r.ReasoningConfig(start, end))
    assert error.value.text == ""


def test_a_transition_that_the_tokenizer_loses_is_refused():
    lossy = r.Vocabulary(lambda text: [65], lambda id: bytes([id]), {})
    with pytest.raises(r.UnencodableText, match="must close the thought"):
        r.ThinkingBudget(QWEN, lossy, 5)


@pytest.mark.parametrize("id", [-1, 1 << 31])
def test_ids_out_of_range_are_refused(id):
    odd = Pieces(["<think>", "</think>"])
    broken = r.Vocabulary(
        lambda text: [id, *odd.encode(text)],
        lambda i: odd.bytes[i] if 0 <= i < len(odd.bytes) else b"",
        odd.controls,
    )
    with pytest.raises(r.InvalidTokenId, match=str(id)):
        r.ThinkingBudget(THINK, broken, 5, transition=BARE)


def test_forced_ids_beyond_the_model_are_refused_before_any_token():
    with pytest.raises(r.InvalidTokenId) as error:
        make(5, vocab_size=200)
    assert error.value.size == 200


def test_soft_close_needs_a_closer_of_one_token_and_sane_settings():
    with pytest.raises(r.BudgetError, match="one token"):
        make(5, SPELLED, soft=r.SoftClose())
    with pytest.raises(r.BudgetError, match="window"):
        r.SoftClose(window=0)
    with pytest.raises(r.BudgetError, match="repeats"):
        r.LoopGuard(repeats=1)


# The real Qwen3 vocabulary


def test_qwen3_transition_text_and_tokens_are_exact():
    before, after = QWEN.transition.before, QWEN.transition.after
    assert before == (
        "\n\n Considering the limited time by the user, I have to give the solution "
        "based on the thinking directly now.\n"
    )
    assert after == "\n\n"
    vocabulary = qwen3_vocabulary()
    budget = r.ThinkingBudget(QWEN, vocabulary, 0, primed=True)
    forced = list(budget.forced())
    assert len(forced) == 24
    assert forced[:2] == [271, 55777] and 82796 not in forced
    assert vocabulary.encode("</think>") == [151668]
    assert vocabulary.encode("<tool_call>") == [151657]
    assert vocabulary.encode("<think>") == [151667]


@pytest.mark.parametrize("name", REAL)
def test_a_forced_transition_costs_one_forward(name):
    vocabulary = REAL[name]()
    (word,) = set(vocabulary.encode("a"))
    close = vocabulary.controls["</think>"]
    budget = r.ThinkingBudget(
        QWEN, vocabulary, 5, primed=True, transition=r.QWEN_TRANSITION
    )
    size = len(vocabulary.encode(r.QWEN_TRANSITION.before + "</think>\n\n"))
    out = speculative(budget, lambda out: word, lambda out: word, 5 + size + 6, 4)
    assert out[5 : 5 + size].count(close) == 1
    budget = r.ThinkingBudget(
        QWEN, vocabulary, 5, primed=True, transition=r.QWEN_TRANSITION
    )
    whole = Log()
    rounds = 0
    while not budget.closed:
        rounds += 1
        for token in budget.forced() or [word] * min(budget.horizon(), 5):
            budget.accept(token)
            whole.append(token)
    assert rounds == 2 and len(whole) == 5 + size


# What it does


@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 40])
def test_the_transition_comes_after_exactly_so_many_tokens_then_all_is_free(tokens):
    budget = make(tokens, primed=True)
    out = plain(budget, thinker, tokens + len(FORCED) + 20)
    assert out == [A] * tokens + FORCED + [B] * 20
    assert budget.spent == tokens and budget.closed and not budget.stood_down


def test_a_natural_close_disables_it():
    budget = make(10, primed=True)
    out = plain(budget, scripted([A] * 3 + [SHUT], B), 60)
    assert out == [A] * 3 + [SHUT] + [B] * 56
    assert budget.spent == 3


def test_an_answer_without_a_thought_is_never_limited():
    budget = make(3)
    assert plain(budget, lambda out: B, 50) == [B] * 50
    assert budget.spent == 0


def test_an_opener_generated_over_several_tokens_is_seen():
    budget = make(2, SPELLED)
    opener = SPELLED.spell("<think>")
    out = plain(budget, scripted(opener, A), len(opener) + 20)
    assert SPELLED.text(out).startswith("<think>aa\n</think>\n\na")


def test_zero_closes_at_once_primed_or_not():
    assert list(make(0, primed=True).forced()) == FORCED
    budget = make(0)
    assert not budget.forced() and budget.horizon() == 1
    budget.accept(OPEN)
    assert list(budget.forced()) == FORCED


@pytest.mark.parametrize("size", range(1, len("</think>")))
def test_a_close_begun_at_the_limit_is_completed_and_not_doubled(size):
    script = [A] * 4 + SPELLED.spell("</think>")[:size]
    budget = make(4 + size, SPELLED, primed=True)
    text = SPELLED.text(plain(budget, scripted(script, ord("x")), 30))
    assert text == "aaaa</think>" + "x" * 18
    assert budget.spent == 4


@pytest.mark.parametrize("size", range(3, len("◁/think".encode()) + 1))
def test_a_close_with_wide_characters_is_completed_too(size):
    """`size` bytes, whole characters, are written when the limit is met."""
    wide = r.ReasoningConfig("◁think▷", "◁/think▷")
    budget = make(4 + size, SPELLED, wide, primed=True)
    model = scripted(SPELLED.spell("aaaa◁/think▷")[: 4 + size], 0x96)
    text = SPELLED.text(plain(budget, model, 30))
    assert text.startswith("aaaa◁/think▷")


def test_a_lone_bracket_at_the_limit_becomes_the_close_against_the_models_will():
    budget = make(3, SPELLED, primed=True)
    out = plain(budget, scripted(SPELLED.spell("aa<b c"), ord("x")), 12)
    assert SPELLED.text(out).startswith("aa</think>")


def test_a_close_begun_right_at_the_start_is_completed_too():
    budget = make(1, SPELLED, primed=True)
    out = plain(budget, scripted([SPELLED.id(b"\n<")], ord("x")), 11)
    assert SPELLED.text(out) == "\n</think>xxx"


def test_a_prefix_that_diverged_before_the_limit_is_charged():
    budget = make(7, SPELLED, primed=True)
    out = plain(budget, scripted(SPELLED.spell("a</thb c"), ord("x")), 30)
    assert SPELLED.text(out).startswith("a</thb \n</think>\n\n")
    assert budget.spent == 7


def test_contextual_tokenisations_of_a_close_are_seen():
    for pieces in (
        [b"a.</", b"think", b">\n\nb"],
        [b".</think>\n"],
        [b"<", b"/think>x"],
    ):
        budget = make(20, SPELLED, primed=True)
        for piece in pieces:
            budget.accept(SPELLED.id(piece))
        assert budget.closed and budget.horizon() > 1
        assert plain(budget, lambda out: B, 40) == [B] * 40


def test_an_implicit_end_stops_it_and_a_begun_one_is_completed():
    tool = CONTROL.controls["<tool_call>"]
    budget = make(5, primed=True)
    out = plain(budget, scripted([A, tool], B), 30)
    assert out == [A, tool] + [B] * 28
    spelled = make(6, SPELLED, primed=True)
    text = SPELLED.text(plain(spelled, scripted(SPELLED.spell("a<tool"), B), 30))
    assert text == "a<tool_call>" + "b" * 18


def test_a_second_thought_continues_the_count():
    budget = make(5, primed=True)
    script = [A, A, A, SHUT, ord("\n"), OPEN, A, A]
    out = plain(budget, scripted(script, A), 8 + len(FORCED) + 4)
    assert out == script + FORCED + [A] * 4
    assert budget.spent == 5


def test_an_echoed_opener_is_free():
    budget = make(2, primed=True)
    out = plain(budget, scripted([OPEN], A), 3 + len(FORCED))
    assert out == [OPEN, A, A, *FORCED]


def test_special_tokens_inside_a_thought_are_charged():
    pieces = Pieces(["<think>", "</think>"], special=["<|x|>"])
    budget = make(3, pieces, primed=True)
    for _ in range(3):
        budget.accept(pieces.controls["<|x|>"])
    assert budget.forced()


def test_a_literal_tag_in_the_answer_is_not_limited():
    budget = make(2, primed=True)
    script = CONTROL.encode("aa\n</think>\n\n") + CONTROL.encode("Use `<think>` so. ")
    out = plain(budget, scripted(script, B), len(script) + 30)
    assert out == script + [B] * 30


def test_a_character_begun_on_the_last_token_is_completed_first():
    emoji = list("🙂".encode())
    for begun in (1, 2, 3):
        budget = make(2 + begun, primed=True)
        out = plain(budget, scripted([A, A, *emoji], B), 6 + len(FORCED) + 3)
        assert out == [A, A, *emoji, *FORCED, B, B, B]
        assert budget.spent == 6


def test_bytes_that_never_complete_a_character_are_cut_after_three():
    budget = make(2, primed=True)
    out = plain(budget, lambda out: 0xF0, 5 + len(FORCED))
    assert out == [0xF0] * 5 + FORCED
    assert budget.spent == 5


def test_an_ignored_forced_token_stands_down_once():
    budget = make(1, primed=True)
    budget.accept(A)
    budget.accept(B)
    assert budget.stood_down == f"token {FORCED[0]} was due but {B} was emitted"
    assert not budget.forced() and budget.horizon() > 1 << 40
    assert plain(budget, lambda out: A, 50) == [A] * 50


def test_every_budget_has_its_own_state():
    first, second = make(3, primed=True), make(3, primed=True)
    plain(first, thinker, 20)
    assert second.spent == 0 and second.horizon() == 3


def test_case_14_three_openings_and_every_alignment():
    for depth in range(1, 6):
        for lead in range(depth + 2):
            for opening in ("prompt", "generated", "off"):
                script = [] if opening == "prompt" else [ord("\n")] * lead
                script += [OPEN] if opening == "generated" else []

                def model(out, script=script):
                    return script[len(out)] if len(out) < len(script) else thinker(out)

                budget = make(5, primed=opening == "prompt")
                out = speculative(budget, model, model, 40, depth)
                n = len(script)
                closed = [] if opening == "off" else FORCED
                thought = [A] * (40 - n if opening == "off" else 5)
                assert out[n : n + len(thought)] == thought
                rest = out[n + len(thought) :]
                assert rest == (closed + [B] * 40)[: len(rest)]


# The answer reserve


@pytest.mark.parametrize("preamble", [0, 3, 9])
def test_the_reserve_moves_the_deadline_while_decoding(preamble):
    """Tokens before the thought leave it less room; the answer keeps its reserve."""
    reserve, limit = 6, 40
    budget = make(10, max_tokens=limit, answer_reserve=reserve)
    out = plain(budget, scripted([ord("\n")] * preamble + [OPEN], A), limit)
    end = out.index(SHUT) + len(FORCED) - 1
    assert limit - end >= reserve
    late = make(10, max_tokens=30, answer_reserve=reserve)
    out = plain(late, scripted([ord("\n")] * 12 + [OPEN], A), 30)
    assert 30 - (out.index(SHUT) + len(FORCED) - 1) >= reserve
    assert late.spent < 10


def test_max_tokens_alone_can_limit_a_thought():
    budget = make(None, max_tokens=30, answer_reserve=8, primed=True)
    out = plain(budget, thinker, 30)
    assert out.count(B) >= 8 and budget.spent == 30 - 8 - 3 - len(FORCED)
    assert make(None, primed=True).horizon() > 1 << 40


def test_second_thoughts_keep_the_reserve():
    budget = make(None, max_tokens=40, answer_reserve=5, primed=True)
    script = [A, A, SHUT, *[B] * 10, ord("\n"), OPEN]
    out = plain(budget, scripted(script, A), 40)
    last = len(out) - 1 - out[::-1].index(SHUT)
    assert 40 - (last + 3) >= 5


# Harmony


def test_a_harmony_thought_is_cut_into_the_final_channel():
    config = r.family("gpt_oss")
    pieces = Pieces(controls(config))
    budget = r.ThinkingBudget(config, pieces.vocabulary, 2)
    script = pieces.encode("<|channel|>analysis<|message|>")
    out = plain(budget, scripted(script, A), len(script) + 60)
    text = pieces.text(out)
    head = "<|channel|>analysis<|message|>aa<|end|><|start|>assistant<|channel|>final"
    assert text.startswith(head + "<|message|>aaa")
    assert budget.spent == 2


# Soft close and loops


def test_the_soft_close_pulls_harder_towards_the_end():
    budget = make(10, primed=True, soft=r.SoftClose(window=4, strength=8.0))
    seen = []
    for _ in range(10):
        seen.append(budget.bias())
        budget.accept(A)
    assert seen[:7] == [None] * 7
    assert seen[7:] == [{SHUT: 2.0}, {SHUT: 4.0}, {SHUT: 6.0}]
    assert budget.bias() is None and list(budget.forced()) == FORCED
    assert budget.biases and not make(10).biases


def test_the_horizon_ends_where_the_soft_close_begins():
    budget = make(10, primed=True, soft=r.SoftClose(window=4))
    for _ in range(10):
        free = budget.horizon()
        mark = budget.checkpoint()
        for _ in range(free):
            assert budget.bias() is None and not budget.forced()
            budget.accept(A)
        assert budget.bias() is not None or budget.forced()
        budget.restore(mark)
        budget.accept(A)


@pytest.mark.parametrize("period", [1, 2, 5, 16])
def test_a_loop_is_closed_and_a_thought_without_one_is_not(period):
    guard = r.LoopGuard(longest=16, repeats=4, every=8)
    loop = [ord("k") + i for i in range(period)]
    model = lambda out: loop[len(out) % period] if SHUT not in out else B  # noqa: E731
    budget = make(1000, primed=True, loops=guard)
    out = plain(budget, model, 200)
    assert SHUT in out and budget.spent <= 4 * period + 8
    source = random.Random(0)
    words = [source.randrange(97, 122) for _ in range(400)]
    budget = make(1000, primed=True, loops=guard)
    assert SHUT not in plain(budget, scripted(words, A), 400)


def test_loops_are_found_at_the_same_token_with_lookahead():
    guard = r.LoopGuard(longest=4, repeats=3, every=4)
    model = lambda out: [A, B, A, ord("c")][len(out) // 9 % 4] if SHUT not in out else B  # noqa: E731
    draft = imperfect(model, 1)
    expected = plain(make(500, primed=True, loops=guard), model, 120)
    assert SHUT in expected
    for depth in (1, 3, 8):
        fresh = [make(500, primed=True, loops=guard) for _ in range(3)]
        assert speculative(fresh[0], model, draft, 120, depth) == expected
        assert speculative(fresh[1], model, draft, 120, depth, True) == expected
        assert looking_ahead(fresh[2], model, draft, 120, depth) == expected


def test_a_lookahead_does_not_disturb_the_tokens_a_loop_is_found_in():
    budget = make(500, primed=True, loops=r.LoopGuard(longest=2, repeats=6, every=12))
    for _ in range(5):
        budget.accept(A)
        budget.accept(B)
    mark = budget.checkpoint()
    for token in b"cdefghijkl":
        budget.accept(token)
    budget.restore(mark)
    budget.accept(A)
    assert not budget.forced()
    budget.accept(B)
    assert list(budget.forced()) == FORCED


# Checkpoints


def test_a_rejected_lookahead_changes_nothing():
    budget = make(6, primed=True)
    for _ in range(4):
        budget.accept(A)
    mark = budget.checkpoint()
    for token in (A, A, *FORCED, B, OPEN, A):
        budget.accept(token)
    budget.restore(mark)
    assert (budget.spent, budget.horizon(), budget.inside) == (4, 2, True)
    assert plain(budget, lambda out: B, 2 + len(FORCED)) == [B, B, *FORCED]


def test_restore_across_a_half_read_character_and_delimiter():
    for prefix in (b"ab\xf0\x9f", b"ab</th", b"ab```"):
        budget, twin = make(50, SPELLED, primed=True), make(50, SPELLED, primed=True)
        for byte in prefix:
            budget.accept(byte)
            twin.accept(byte)
        mark = budget.checkpoint()
        for byte in b"xyz</think>\n\n`<think>` \xf0":
            budget.accept(byte)
        budget.restore(mark)
        for byte in b"ink>\n<think>abc":
            budget.accept(byte)
            twin.accept(byte)
            states = [each.checkpoint() for each in (budget, twin)]
            # The last field is a cache of tokens seen.
            assert states[0][0] == states[1][0]
            assert states[0][1][:-1] == states[1][1][:-1]


# Any model, any driver


@settings(deadline=None, max_examples=120)
@given(
    seed=st.integers(0, 10**6),
    tokens=st.one_of(st.none(), st.integers(0, 20)),
    depth=st.integers(1, 8),
    primed=st.booleans(),
    spelled=st.booleans(),
    capped=st.booleans(),
)
def test_all_drivers_give_the_same_stream_and_keep_the_limit(
    seed, tokens, depth, primed, spelled, capped
):
    pieces = SPELLED if spelled else CONTROL
    words = pieces.spell("<think></think> \n`ab") + list("é🙂".encode())
    common = pieces.encode("\n<think></think>") if not spelled else words[:15]
    model = noisy(words, seed, common)
    draft = imperfect(model, seed)
    size = 90
    kwargs = {"primed": primed, "transition": CLOSE}
    if capped:
        kwargs |= {"max_tokens": size, "answer_reserve": 9}

    def fresh():
        return make(tokens, pieces, **kwargs)

    budget = fresh()
    expected = plain(budget, model, size)
    if tokens is not None:
        assert budget.spent <= tokens + 3
    assert not budget.stood_down
    assert speculative(fresh(), model, draft, size, depth) == expected
    assert speculative(fresh(), model, draft, size, depth, True) == expected
    assert looking_ahead(fresh(), model, draft, size, depth) == expected

    emitter = r.ReasoningEmitter(QWEN, pieces.vocabulary, primed=primed)
    budget = fresh()
    for token in expected:
        emitter.push(token, forced=bool(budget.forced()))
        budget.accept(token)
        assert emitter.inside == budget.inside
        assert emitter.closed == budget.closed
    assert emitter.finish()[-1].reasoning_tokens == budget.spent


@pytest.mark.parametrize("name", ["demo", "qwen3.5"])
@pytest.mark.parametrize("depth", range(1, 9))
def test_the_boundary_at_every_offset_of_a_block_on_real_vocabularies(name, depth):
    vocabulary = REAL[name]()
    thought = vocabulary.encode("Also 7 + 8 = 15, 写 🙂 naïve: 12 und 👩‍🚀. ") * 2
    answer = vocabulary.encode("It is 125.")
    close = vocabulary.controls["</think>"]
    config = r.family("qwen3_5")

    def model(out):
        if close not in out:
            return thought[len(out) % len(thought)]
        return answer[(len(out) - out.index(close)) % len(answer)]

    draft = imperfect(model, depth)
    for tokens in range(depth + 1, 2 * depth + 3):

        def fresh(tokens=tokens):
            return r.ThinkingBudget(
                config, vocabulary, tokens, primed=True, transition=CLOSE
            )

        budget = fresh()
        expected = plain(budget, model, 60)
        assert tokens <= budget.spent <= tokens + 3
        text = b"".join(map(vocabulary.piece, expected)).decode(errors="replace")
        assert "\ufffd" not in text.removesuffix("\ufffd")
        for guess in (model, draft):
            assert speculative(fresh(), model, guess, 60, depth) == expected
            assert speculative(fresh(), model, guess, 60, depth, True) == expected


def test_memory_does_not_grow_with_the_stream():
    vocabulary = REAL["demo"]()
    loop = vocabulary.encode("Some words `code`,\n<think> 🙂 and so on.\n")
    budget = r.ThinkingBudget(
        QWEN, vocabulary, None, transition=CLOSE, loops=r.LoopGuard(every=1 << 30)
    )
    emitter = r.ReasoningEmitter(QWEN, vocabulary)

    def run(rounds):
        for token in loop * rounds:
            emitter.push(token)
            budget.accept(token)

    run(20)
    tracemalloc.start()
    run(20)
    before, _ = tracemalloc.get_traced_memory()
    run(1000)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 20_000


def test_far_from_the_boundary_a_whole_block_runs_without_asking():
    budget = make(100, primed=True)
    assert budget.horizon() == 100
    for i in range(100):
        assert budget.horizon() == 100 - i
        budget.accept(A)
    assert budget.horizon() == 0 and budget.forced()
