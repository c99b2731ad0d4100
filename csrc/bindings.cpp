// The Python face of ops.h: signatures and documentation only.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>

#include "eval.h"
#include "mlx_mtp/ops.h"
#include "recordings.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mlx_mtp;

namespace {

bool temperature_first(const std::string& op, const std::string& order) {
  if (order != "temperature_first" && order != "temperature_last") {
    throw std::invalid_argument(
        "[" + op +
        "] filter_order must be 'temperature_first' or 'temperature_last' but "
        "is '" +
        order + "'.");
  }
  return order == "temperature_first";
}

// draft_params: a dict with the names of the keyword arguments.
SamplingParams params_from(const std::string& op, const nb::dict& dict) {
  SamplingParams params;
  auto type_error = [&](nb::handle key) {
    auto text = "[" + op +
        "] draft_params has a key or value of a wrong type: " +
        nb::cast<std::string>(nb::repr(key)) + ".";
    return nb::type_error(text.c_str());
  };
  for (auto [key, value] : dict) {
    std::string name;
    if (!nb::try_cast(key, name)) {
      throw type_error(key);
    }
    bool is_param = nb::isinstance<nb::float_>(value) ||
        nb::isinstance<nb::int_>(value) || nb::isinstance<mx::array>(value);
    if (name != "filter_order" && !is_param) {
      throw type_error(key);
    }
    if (name == "temperature") {
      params.temperature = nb::cast<Param>(value);
    } else if (name == "top_k") {
      params.top_k = nb::cast<Param>(value);
    } else if (name == "top_p") {
      params.top_p = nb::cast<Param>(value);
    } else if (name == "min_p") {
      params.min_p = nb::cast<Param>(value);
    } else if (name == "filter_order") {
      params.temperature_first =
          temperature_first(op, nb::cast<std::string>(value));
    } else {
      throw std::invalid_argument(
          "[" + op + "] draft_params has no key '" + name + "'.");
    }
  }
  return params;
}

std::vector<mx::array> arrays_from(const nb::args& args) {
  std::vector<mx::array> arrays;
  for (auto arg : args) {
    if (!nb::isinstance<mx::array>(arg)) {
      auto text = "[eval] arrays must be arrays but argument " +
          std::to_string(arrays.size()) + " is " +
          nb::cast<std::string>(nb::repr(arg.type())) + ".";
      throw nb::type_error(text.c_str());
    }
    arrays.push_back(nb::cast<mx::array>(arg));
  }
  return arrays;
}

} // namespace

NB_MODULE(_ext, m) {
  // Registers mx.array and loads libmlx before our types look them up.
  nb::module_::import_("mlx.core");

  bind_recordings(m);

  m.def(
      "commit_rows",
      &commit_rows,
      "cache"_a,
      "rows"_a,
      "start"_a,
      "count"_a,
      nb::kw_only(),
      "ring"_a = 0,
      "stream"_a = nb::none(),
      nb::sig(
          "def commit_rows(cache: mlx.core.array, rows: mlx.core.array, "
          "start: mlx.core.array, count: mlx.core.array, *, ring: int = 0, "
          "stream: None | mlx.core.Stream | mlx.core.Device = None) "
          "-> mlx.core.array"),
      R"pbdoc(
        Write the first ``count[b]`` staged rows of each sequence into a cache.

        Row ``i`` of sequence ``b`` goes to slot ``start[b] + i``, or to slot
        ``(start[b] + i) % ring`` of a ring buffer that fills the first ``ring``
        slots. All other slots keep their values. The cache is updated in place
        when nothing else refers to it, so the time does not depend on its size:
        drop the old array, as in ``cache = commit_rows(cache, ...)``. Otherwise
        the result is a copy. An ``async_eval`` still in flight counts as a
        reference.

        Nothing is ever written outside the cache. ``count`` is clamped to
        ``[0, min(T, S)]`` and then ``start`` to ``[0, S - count]``; with a ring
        ``count`` is clamped to ``[0, min(T, ring)]`` and ``start`` is taken
        modulo ``ring``, also when negative. Values are copied bit by bit.

        Dims: ``B`` sequences, ``H`` heads, ``S`` slots, ``T`` staged rows,
        ``D`` head dim.

        Args:
            cache (array): Shape ``(B, H, S, D)``, any dtype.
            rows (array): Shape ``(B, H, T, D)``, the dtype of ``cache``.
            start (array): First slot, shape ``(B,)``, any integer dtype.
            count (array): Rows to write, shape ``(B,)``, any integer dtype.
            ring (int): Slots of the ring buffer. 0 is no ring. Default: ``0``.
            stream (Stream, optional): Stream or device. Default: ``None``.

        Returns:
            array: The cache with the rows written.

        Raises:
            ValueError: A shape, a dtype or ``ring`` does not fit.

        Example:
            >>> cache = mx.zeros((1, 1, 4, 1))
            >>> rows = mx.array([1.0, 2.0, 3.0]).reshape(1, 1, 3, 1)
            >>> cache = commit_rows(cache, rows, mx.array([1]), mx.array([2]))
            >>> cache.flatten()
            array([0, 1, 2, 0], dtype=float32)
      )pbdoc");
  m.def(
      "eval",
      [](const nb::args& args, int spin_us) {
        auto arrays = arrays_from(args);
        nb::gil_scoped_release release;
        eval(std::move(arrays), spin_us);
      },
      "arrays"_a,
      "spin_us"_a = 200,
      nb::sig("def eval(*arrays: mlx.core.array, spin_us: int = 200) -> None"),
      R"pbdoc(
        Evaluate arrays, as ``mx.eval`` does, with less to wait for.

        A thread that sleeps until a GPU is done wakes late, by about 30
        microseconds on an H200. This one looks for the results for ``spin_us``
        before it sleeps, which keeps a core busy. Worth it where the host needs
        the result of a few short kernels, such as one ``verify_draft``. Where no
        array is computed on a GPU it is ``mx.eval``.

        Args:
            *arrays (array): Of any streams. Not trees of arrays.
            spin_us (int): Microseconds, at least 0. Default: ``200``.

        Raises:
            TypeError: An argument is no array, or ``spin_us`` no int32.
            ValueError: ``spin_us`` is negative.

        Example:
            >>> x = mx.ones(2) + 1
            >>> ops.eval(x)
      )pbdoc");
  m.def(
      "gated_delta_replay",
      [](const mx::array& state,
         const mx::array& k,
         const mx::array& v,
         const mx::array& g,
         const mx::array& beta,
         const mx::array& steps,
         const std::optional<mx::array>& q,
         mx::StreamOrDevice s) -> nb::object {
        auto [out, y] = gated_delta_replay(state, k, v, g, beta, steps, q, s);
        return y ? nb::make_tuple(out, *y) : nb::cast(out);
      },
      "state"_a,
      "k"_a,
      "v"_a,
      "g"_a,
      "beta"_a,
      "steps"_a,
      "q"_a = nb::none(),
      nb::kw_only(),
      "stream"_a = nb::none(),
      nb::sig(
          "def gated_delta_replay(state: mlx.core.array, k: mlx.core.array, "
          "v: mlx.core.array, g: mlx.core.array, beta: mlx.core.array, "
          "steps: mlx.core.array, q: mlx.core.array | None = None, *, "
          "stream: None | mlx.core.Stream | mlx.core.Device = None) "
          "-> mlx.core.array | tuple[mlx.core.array, mlx.core.array]"),
      R"pbdoc(
        The state of a Gated DeltaNet after the first ``steps[b]`` steps.

        One step of a value head, with ``S`` its state of shape ``(Dv, Dk)``, is

        .. code-block:: python

          S = S * g
          S = S + outer((v - S @ k) * beta, k)
          y = S @ q

        (Yang et al. 2024, "Gated Delta Networks", equation 10). Value head ``h``
        uses key head ``h // (Hv // Hk)``. Math is in float32, each sum over
        ``Dk`` runs from the first element to the last: on Linux x86-64 the result
        is bit-equal to the recurrence of ``mlx_lm`` on the CPU. Without ``q`` the
        state is updated in place when nothing else refers to it.

        Dims: ``B`` sequences, ``T`` steps, ``Hk`` key heads, ``Hv`` value heads
        (a multiple of ``Hk``), ``Dk`` and ``Dv`` key and value head dims.

        Args:
            state (array): Shape ``(B, Hv, Dv, Dk)``, float32.
            k (array): Shape ``(B, T, Hk, Dk)``.
            v (array): Shape ``(B, T, Hv, Dv)``.
            g (array): Decay in [0, 1], shape ``(B, T, Hv)``.
            beta (array): Write strength, shape ``(B, T, Hv)``.
            steps (array): Steps to take, shape ``(B,)``, any integer dtype,
              clamped to ``[0, T]``. With 0 the state is returned unchanged.
            q (array, optional): Shape ``(B, T, Hk, Dk)``. Default: ``None``.
            stream (Stream, optional): Stream or device. Default: ``None``.

        ``k``, ``v``, ``g``, ``beta`` and ``q`` are float32, float16 or bfloat16
        with any strides. NaN and infinity spread as in the formula.

        Returns:
            array or tuple(array, array): The new state and, with ``q``, the
            outputs ``y`` of shape ``(B, T, Hv, Dv)`` and the dtype of ``q``. Rows
            of ``y`` from ``steps[b]`` on are zero.

        Raises:
            ValueError: A shape or a dtype does not fit.

        Example:
            >>> one = mx.ones((1, 2, 1, 1))
            >>> g = mx.full((1, 2, 1), 0.5)
            >>> gated_delta_replay(one[:, :1], one, one, g, g, mx.array([1]))
            array([[[[0.75]]]], dtype=float32)
      )pbdoc");
  m.def(
      "sample",
      [](const mx::array& logits,
         const mx::array& uniforms,
         const Param& temperature,
         const Param& top_k,
         const Param& top_p,
         const Param& min_p,
         const std::string& order,
         const std::optional<mx::array>& allowed,
         mx::StreamOrDevice s) {
        SamplingParams params = {
            temperature,
            top_k,
            top_p,
            min_p,
            temperature_first("sample", order)};
        return sample(logits, uniforms, params, allowed, s);
      },
      "logits"_a,
      "uniforms"_a,
      nb::kw_only(),
      "temperature"_a = 1.0f,
      "top_k"_a = 0,
      "top_p"_a = 1.0f,
      "min_p"_a = 0.0f,
      "filter_order"_a = "temperature_first",
      "allowed"_a = nb::none(),
      "stream"_a = nb::none(),
      nb::sig(
          "def sample(logits: mlx.core.array, uniforms: mlx.core.array, *, "
          "temperature: float | mlx.core.array = 1.0, "
          "top_k: int | mlx.core.array = 0, "
          "top_p: float | mlx.core.array = 1.0, "
          "min_p: float | mlx.core.array = 0.0, "
          "filter_order: str = 'temperature_first', "
          "allowed: mlx.core.array | None = None, "
          "stream: None | mlx.core.Stream | mlx.core.Device = None) "
          "-> tuple[mlx.core.array, mlx.core.array]"),
      R"pbdoc(
        Draw one token from the shaped distribution of each row of logits.

        ``filter_order="temperature_first"`` (Hugging Face, vLLM) divides the
        logits by ``temperature``, keeps the ``top_k`` largest, then the smallest
        set ``{z >= t}`` with ``top_p`` of the mass of those, then the tokens
        with at least ``min_p`` times the largest probability.
        ``"temperature_last"`` (``mlx_lm.sample_utils.make_sampler``) measures all
        three on the full row at temperature 1 and then divides by
        ``temperature``. What is left is renormalised. Ties at a threshold are
        all kept. Temperature 0, or one so small that ``1 / temperature``
        overflows float32, is the argmax, the lowest id on ties.

        A draw is the inverse of the cumulative distribution, in id order and
        summed in float64, at ``u[0] + u[1] * 2**-24``: one float32 uniform is too
        coarse for a large vocabulary. Random numbers are an input, so that the
        op is a pure function.

        A row is unusable if it holds NaN or ``+inf``, has no finite logit that
        is allowed, or its parameters are out of range. Then its token is -1
        and its statistics are NaN.

        Dims: ``V`` vocabulary, ``B`` size of the first axis of ``logits``.

        Args:
            logits (array): Shape ``(..., V)``, float32, float16 or bfloat16 with
              any strides. ``-inf`` is a token with no probability.
            uniforms (array): In [0, 1), shape ``(..., 2)``, float32.
            temperature (float or array): At least 0. Default: ``1.0``.
            top_k (int or array): 0, or at least ``V``, is off. Default: ``0``.
            top_p (float or array): In (0, 1]. 1 is off. Default: ``1.0``.
            min_p (float or array): In [0, 1]. 0 is off. Default: ``0.0``.
              Each parameter is a number or an array of shape ``()`` or ``(B,)``.
            filter_order (str): ``"temperature_first"`` or
              ``"temperature_last"``. Default: ``"temperature_first"``.
            allowed (array, optional): Bit mask, shape
              ``(..., (V + 31) // 32)``, uint32 or int32: bit ``i % 32`` of word
              ``i // 32`` allows token ``i`` (the layout of llguidance). It
              comes before everything else. Default: ``None``.
            stream (Stream, optional): Stream or device. Default: ``None``.

        Returns:
            tuple(array, array): The tokens, shape ``(...)`` int32, and
            statistics, shape ``(..., 3)`` float32, that give the probability of
            every token of the distribution drawn from. With ``(l, t, r)`` of a
            row it is ``exp(z * r - l)`` for a logit ``z >= t`` (and allowed)
            and 0 otherwise. A row at temperature 0 has ``(0, max, inf)``.

        Raises:
            ValueError: A shape, a dtype or a number does not fit.

        Example:
            >>> logits = mx.log(mx.array([[0.5, 0.3, 0.2]]))
            >>> tokens, stats = sample(logits, mx.array([[0.9, 0.0]]), top_k=2)
            >>> tokens  # {0, 1} are left with 0.625 and 0.375
            array([1], dtype=int32)
      )pbdoc");
  m.def(
      "verify_draft",
      [](const mx::array& target_logits,
         const mx::array& draft_tokens,
         const std::optional<mx::array>& draft_logits,
         const mx::array& uniforms,
         const std::optional<mx::array>& draft_stats,
         const Param& temperature,
         const Param& top_k,
         const Param& top_p,
         const Param& min_p,
         const std::string& order,
         const std::optional<nb::dict>& draft_params,
         const std::optional<mx::array>& draft_lengths,
         const std::optional<mx::array>& allowed,
         bool logprobs,
         mx::StreamOrDevice s) {
        const std::string op = "verify_draft";
        SamplingParams params = {
            temperature, top_k, top_p, min_p, temperature_first(op, order)};
        std::optional<SamplingParams> draft;
        if (draft_params) {
          draft = params_from(op, *draft_params);
        }
        return verify_draft(
            target_logits,
            draft_tokens,
            draft_logits,
            uniforms,
            draft_stats,
            params,
            draft,
            draft_lengths,
            allowed,
            logprobs,
            s);
      },
      "target_logits"_a,
      "draft_tokens"_a,
      "draft_logits"_a = nb::none(),
      nb::kw_only(),
      "uniforms"_a,
      "draft_stats"_a = nb::none(),
      "temperature"_a = 1.0f,
      "top_k"_a = 0,
      "top_p"_a = 1.0f,
      "min_p"_a = 0.0f,
      "filter_order"_a = "temperature_first",
      "draft_params"_a = nb::none(),
      "draft_lengths"_a = nb::none(),
      "allowed"_a = nb::none(),
      "logprobs"_a = true,
      "stream"_a = nb::none(),
      nb::sig(
          "def verify_draft(target_logits: mlx.core.array, "
          "draft_tokens: mlx.core.array, "
          "draft_logits: mlx.core.array | None = None, *, "
          "uniforms: mlx.core.array, "
          "draft_stats: mlx.core.array | None = None, "
          "temperature: float | mlx.core.array = 1.0, "
          "top_k: int | mlx.core.array = 0, "
          "top_p: float | mlx.core.array = 1.0, "
          "min_p: float | mlx.core.array = 0.0, "
          "filter_order: str = 'temperature_first', "
          "draft_params: dict | None = None, "
          "draft_lengths: mlx.core.array | None = None, "
          "allowed: mlx.core.array | None = None, "
          "logprobs: bool = True, "
          "stream: None | mlx.core.Stream | mlx.core.Device = None) "
          "-> tuple[mlx.core.array, mlx.core.array, mlx.core.array]"),
      R"pbdoc(
        Accept the longest valid prefix of drafted tokens and add one token.

        Exact rejection sampling (Leviathan et al. 2023, "Fast Inference from
        Transformers via Speculative Decoding"): whatever the drafts were drawn
        from, the emitted tokens have the shaped distribution of the target, see
        :func:`sample`. Row ``i`` of the target is what comes after ``i`` accepted
        drafts. With ``p`` and ``q`` the distributions of the target and the draft
        at that row, draft ``i`` is accepted while ``uniforms[i] * q < p``. At the
        first failure a correction is drawn from ``max(p - q, 0)``,
        renormalised, or from ``p`` if rounding leaves nothing. After
        ``draft_lengths`` accepted drafts a bonus is drawn from the next row. With
        temperature 0 a draft is accepted if it is the argmax of its row.

        ``q`` is the softmax of ``draft_logits / temperature`` at the temperature
        of the draft, or what ``draft_stats`` say. Without ``draft_logits``, and
        for a draft at temperature 0, it is a point mass at the draft.

        Rows after the first rejection do not count. A sequence is flagged with
        ``accepted = -1``, and emits nothing, if a row that counts is unusable: a
        target row as in :func:`sample`, a draft outside ``[0, V)``, a draft that
        was not possible (``q`` of it is 0 or NaN), NaN or ``+inf`` in a row of
        draft logits that has to be read, a length outside ``[0, K]``. Draft
        logits are not read at temperature 0. No other sequence is affected.

        Dims: ``B`` sequences, ``K`` drafts (0 is plain sampling), ``T = K + 1``
        verified positions, ``V`` vocabulary.

        Args:
            target_logits (array): Shape ``(B, T, V)``, float32, float16 or
              bfloat16 with any strides.
            draft_tokens (array): Shape ``(B, K)``, any integer dtype.
            draft_logits (array, optional): Shape ``(B, K, V)``, dtypes as for
              the target. Where the draft was drawn under a token mask, the
              masked logits. Default: ``None``.
            uniforms (array): In [0, 1), shape ``(B, K + 2)``, float32. The first
              ``K`` are the coins, the last two the final draw, whatever was
              accepted. They must be independent of those that drew the drafts.
            draft_stats (array, optional): What :func:`sample` returned with the
              drafts, shape ``(B, K, 3)``, float32. Required for filtered drafts,
              and spares a pass over the draft logits. Default: ``None``.
            temperature, top_k, top_p, min_p, filter_order: The shape of the
              target, as in :func:`sample`.
            draft_params (dict, optional): The same parameters of the draft, by
              name. Default: ``None``, the temperature of the target and no
              filters.
            draft_lengths (array, optional): Drafts of each sequence, shape
              ``(B,)``, any integer dtype. Default: ``None``, ``K``.
            allowed (array, optional): Bit mask of the target, shape
              ``(B, T, (V + 31) // 32)``, as in :func:`sample`. Default: ``None``.
            logprobs (bool): Whether to compute the log-probabilities.
              Default: ``True``.
            stream (Stream, optional): Stream or device. Default: ``None``.

        Returns:
            tuple(array, array, array): The emitted tokens, shape ``(B, T)``
            int32, -1 after the last one. The number of accepted drafts, shape
            ``(B,)`` int32: ``accepted + 1`` tokens are emitted. The
            log-softmax of the target at the emitted tokens, after the mask,
            before temperature and filters, shape ``(B, T)`` float32, 0 after the
            last one; shape ``(B, 0)`` without ``logprobs``.

        Raises:
            ValueError: A shape, a dtype or a number does not fit, or filtered
              drafts come without ``draft_stats``.

        Example:
            >>> target = mx.log(mx.array([[[0.9, 0.1], [0.2, 0.8], [0.5, 0.5]]]))
            >>> drafts = mx.array([[0, 0]])
            >>> u = mx.array([[0.5, 0.5, 0.3, 0.0]])
            >>> tokens, accepted, logprobs = verify_draft(target, drafts, uniforms=u)
            >>> tokens, accepted  # 0.5 < 0.9 is accepted, 0.5 < 0.2 is not
            (array([[0, 1, -1]], dtype=int32), array([1], dtype=int32))
      )pbdoc");
  m.def(
      "verify_coupled",
      [](const mx::array& target_logits,
         const mx::array& draft_tokens,
         const mx::array& seed,
         const mx::array& position,
         const Param& temperature,
         const Param& top_k,
         const Param& top_p,
         const Param& min_p,
         const std::string& order,
         const std::optional<mx::array>& draft_lengths,
         const std::optional<mx::array>& allowed,
         mx::StreamOrDevice s) {
        SamplingParams params = {
            temperature,
            top_k,
            top_p,
            min_p,
            temperature_first("verify_coupled", order)};
        return verify_coupled(
            target_logits,
            draft_tokens,
            seed,
            position,
            params,
            draft_lengths,
            allowed,
            s);
      },
      "target_logits"_a,
      "draft_tokens"_a,
      nb::kw_only(),
      "seed"_a,
      "position"_a,
      "temperature"_a = 1.0f,
      "top_k"_a = 0,
      "top_p"_a = 1.0f,
      "min_p"_a = 0.0f,
      "filter_order"_a = "temperature_first",
      "draft_lengths"_a = nb::none(),
      "allowed"_a = nb::none(),
      "stream"_a = nb::none(),
      nb::sig(
          "def verify_coupled(target_logits: mlx.core.array, "
          "draft_tokens: mlx.core.array, *, "
          "seed: mlx.core.array, "
          "position: mlx.core.array, "
          "temperature: float | mlx.core.array = 1.0, "
          "top_k: int | mlx.core.array = 0, "
          "top_p: float | mlx.core.array = 1.0, "
          "min_p: float | mlx.core.array = 0.0, "
          "filter_order: str = 'temperature_first', "
          "draft_lengths: mlx.core.array | None = None, "
          "allowed: mlx.core.array | None = None, "
          "stream: None | mlx.core.Stream | mlx.core.Device = None) "
          "-> tuple[mlx.core.array, mlx.core.array, mlx.core.array]"),
      R"pbdoc(
        Accept the drafts that sampling without drafts would have emitted.

        The token at position ``t`` is the argmax of ``z / temperature + G`` over the
        shaped distribution of its row (see :func:`sample`), with Gumbel noise ``G``
        that depends on ``seed``, ``t`` and the token id alone (Maddison et al. 2014,
        "A* Sampling"). So it is a draw from that distribution, and the same one
        whatever is drafted: a stream is a function of the model, the prompt and the
        seed. A draft is accepted if it is that token. Drafts drawn by this op from
        the drafter's logits, with the same seed and position, are accepted more
        often than independent ones. With no drafts (``K = 0``) it is plain sampling.

        ``G = -log(-log(1 - v))`` with ``v`` from the 64 bits that Threefry-2x32-20
        with key ``seed[b]`` gives for the counter ``(t, id)``. Only tokens that
        survive the filters get noise. Ties go to the lowest id; temperature 0 is the
        argmax.

        A sequence is flagged with ``accepted = -1``, and emits nothing, if a row up
        to the first rejection is unusable as in :func:`sample`, or its length is
        outside ``[0, K]``.

        Dims: ``B`` sequences, ``K`` drafts, ``T = K + 1`` verified positions, ``V``
        vocabulary.

        Args:
            target_logits (array): Shape ``(B, T, V)``, float32, float16 or
              bfloat16 with any strides.
            draft_tokens (array): Shape ``(B, K)``, any integer dtype.
            seed (array): One key a sequence, shape ``(B, 2)``, uint32.
            position (array): Of the first row's token, shape ``(B,)``, any integer
              dtype. Row ``i`` is at ``position + i``.
            temperature, top_k, top_p, min_p, filter_order: As in :func:`sample`.
            draft_lengths (array, optional): Drafts of each sequence, shape
              ``(B,)``, any integer dtype. Default: ``None``, ``K``.
            allowed (array, optional): Bit mask of the target, shape
              ``(B, T, (V + 31) // 32)``, as in :func:`sample`. Default: ``None``.
            stream (Stream, optional): Stream or device. Default: ``None``.

        Returns:
            tuple(array, array, array): Tokens, accepted and log-probabilities, as
            :func:`verify_draft` returns them.

        Raises:
            ValueError: A shape, a dtype or a number does not fit.

        Example:
            >>> logits = mx.log(mx.array([[[0.6, 0.4], [0.6, 0.4]]]))
            >>> at = {"seed": mx.random.key(1)[None], "position": mx.array([7])}
            >>> first, _, _ = verify_coupled(logits[:, :1], mx.zeros((1, 0), int), **at)
            >>> _, accepted, _ = verify_coupled(logits, first, **at)
            >>> accepted
            array([1], dtype=int32)
      )pbdoc");
}
