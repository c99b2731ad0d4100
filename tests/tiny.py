"""Small models and scripted parts that drive the shipped round."""

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models import llama, qwen3_5
from mlx_lm.models.cache import KVCache

from mlx_mtp.drafters import Drafts, HeadConfig, MTPHead, MTPHeadDrafter
from mlx_mtp.sampling import SamplingParams, stream_key
from mlx_mtp.state import KVAdapter
from mlx_mtp.targets import TargetOutput


def tiny_llama(vocab=128, seed=1):
    mx.random.seed(seed)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            rms_norm_eps=1e-6,
            vocab_size=vocab,
            tie_word_embeddings=False,
        )
    )
    mx.eval(model.parameters())
    return model


def qwen_config(vocab=128, layers=4, hidden=64):
    """Three Gated DeltaNet layers to one of attention, as in the real models."""
    return {
        "model_type": "qwen3_5",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": vocab,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "tie_word_embeddings": False,
        "full_attention_interval": min(4, layers),
        "rope_parameters": {
            "type": "default",
            "rope_theta": 100000.0,
            "partial_rotary_factor": 0.25,
        },
    }


def tiny_qwen(seed=2, **config):
    mx.random.seed(seed)
    model = qwen3_5.Model(
        qwen3_5.ModelArgs(model_type="qwen3_5", text_config=qwen_config(**config))
    )
    model.eval()
    mx.eval(model.parameters())
    return model


def random_head(target, seed=3, mtp=None, **config):
    """A head that was never trained: its drafts are hardly ever accepted.

    Args:
        mtp (dict, optional): More entries of its config.
    """
    mx.random.seed(seed)
    head = MTPHead(HeadConfig.from_dict({**qwen_config(**config), **(mtp or {})}))
    mx.eval(head.parameters())
    return MTPHeadDrafter(head, target)


class TableTarget:
    """``logits = table[previous, newest]``; the previous token is read from a cache.

    Args:
        table (array): ``(V, V, V)``.
    """

    hidden_size = 1

    def __init__(self, table):
        self.table, self.vocab_size = table, table.shape[0]
        self.adapters = [KVAdapter()]

    def weights(self):
        return self.table

    def make_cache(self):
        return [KVCache()]

    def forward(self, tokens, views):
        (view,) = views
        places = mx.arange(tokens.shape[1]) - 1
        if isinstance(view.offset, int):
            places = mx.broadcast_to(places + view.offset, tokens.shape)
        else:
            places = places + view.offset[:, None]
        rows = tokens[:, None, :, None].astype(mx.float32)
        seen = view.update_and_fetch(rows, rows)[0][:, 0, :, 0].astype(mx.int32)
        previous = mx.take_along_axis(seen, mx.maximum(places, 0), axis=1)
        return TargetOutput(self.table[previous, tokens])

    prefill = forward


class StatelessDrafter:
    """What the drafters of these tests have in common."""

    name = "scripted"
    max_depth = 32
    needs_hidden = needs_shared_kv = greedy_only = False

    def check(self, target):
        pass

    def weights(self):
        return ()

    def forwards(self, depth):
        return depth

    def begin(self, prompt, capacity):
        return ()

    def prefill(self, state, following, hidden, attended):
        return state

    def grow(self, state, capacity):
        return state


class TableDrafter(StatelessDrafter):
    """Draws each draft from ``table[token before it]``, ``(V, V)``."""

    def __init__(self, table):
        self.table = table

    def propose(self, state, context):
        newest = mx.maximum(context.count - 1, 0)[:, None]
        token = mx.take_along_axis(context.tokens, newest, axis=1)[:, 0]
        tokens, logits, stats = [], [], []
        for i in range(context.depth):
            row = self.table[mx.maximum(token, 0)]
            token, stat = context.draw(row, i)
            tokens.append(token)
            logits.append(row)
            stats.append(stat)
        drafts = Drafts(mx.stack(tokens, axis=1))
        if stats[0] is not None:
            drafts = drafts._replace(
                logits=mx.stack(logits, axis=1), stats=mx.stack(stats, axis=1)
            )
        return drafts, state


class ScriptedDrafter(StatelessDrafter):
    """Proposes the known continuation with one wrong token, so that round r accepts
    ``plan[r]`` drafts (more than the depth: all). The plan is repeated.

    Args:
        truth (list[int]): What the target emits.
        vocab (int): V.
        plan (list[int]): Accepted drafts by round.
    """

    def __init__(self, truth, vocab, plan=(99,)):
        self.truth, self.vocab, self.plan = truth, vocab, plan

    def begin(self, prompt, capacity):
        # The script is state, so that another one needs no other trace.
        truth = mx.zeros((1, 512), mx.int32)
        truth[0, : len(self.truth)] = mx.array(self.truth, mx.int32)
        plan = mx.array([[self.plan[i % len(self.plan)] for i in range(512)]])
        return truth, plan, mx.zeros((1,), mx.int32), mx.zeros((1,), mx.int32)

    def propose(self, state, context):
        truth, plan, place, rounds = state
        place = place + context.count
        slots = mx.arange(context.depth)
        tokens = mx.take_along_axis(truth, place[:, None] + slots, axis=1)
        right = mx.take_along_axis(plan, rounds[:, None], axis=1)
        tokens = mx.where(slots == right, (tokens + 1) % self.vocab, tokens)
        return Drafts(tokens), (truth, plan, place, rounds + 1)


def plain_tokens(model, prompt, count, cache=None, **options):
    """mlx_lm's own greedy tokens."""
    steps = generate_step(
        mx.array(prompt), model, max_tokens=count, prompt_cache=cache, **options
    )
    return [token for token, _ in steps]


def random_prompt(length, vocab, seed):
    return mx.random.randint(0, vocab, (length,), key=mx.random.key(seed)).tolist()


def start_row(
    round_, prompt, capacity, params=None, draft_params=None, seed=0, caches=None
):
    """The state of one stream behind its first token, and the counts of that token."""
    params = params or SamplingParams()
    target, drafter = round_.target, round_.drafter
    rows = mx.array([prompt], mx.int32)
    caches = target.make_cache() if caches is None else caches
    draft_state = drafter.begin(rows, capacity)
    if len(prompt) > 1:
        out = target.prefill(rows[:, :-1], caches)
        draft_state = drafter.prefill(draft_state, rows[:, 1:], out.hidden, capacity)
    out = target.prefill(rows[:, -1:], caches)
    state, proposal = round_.begin(
        [
            adapter.adopt(cache, round_.width, capacity)
            for adapter, cache in zip(round_.adapters, caches, strict=True)
        ],
        len(prompt),
        draft_state,
        out.hidden,
        stream_key(seed),
        params.arrays(1),
        (draft_params or params).arrays(1),
    )
    tokens, accepted, _ = round_.accept(state, proposal, out.logits)
    state, counts = round_.commit(state, proposal, tokens, accepted)
    mx.eval(state, counts)
    return state, counts


def tile(state, batch, seed):
    """One stream's state as ``batch`` rows with keys of their own."""
    rows = tree_map(lambda x: mx.repeat(x, batch, axis=0), state)
    return {**rows, "keys": mx.random.split(mx.random.key(seed), batch)}


def emitted(counts):
    """The tokens of each row of ``counts``, as ``RoundResult`` has them."""
    return [row[2 : 3 + row[0]] for row in counts.tolist()]
