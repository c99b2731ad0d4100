// The Python face of ops.h: signatures and documentation only.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>

#include "mlx_mtp/ops.h"

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
  for (auto [key, value] : dict) {
    auto name = nb::cast<std::string>(key);
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

} // namespace

NB_MODULE(_ext, m) {
  // Registers mx.array and loads libmlx before our types look them up.
  nb::module_::import_("mlx.core");

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
        Draw one token from each row of logits.
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
          "stream: None | mlx.core.Stream | mlx.core.Device = None) "
          "-> tuple[mlx.core.array, mlx.core.array, mlx.core.array]"),
      R"pbdoc(
        Accept or reject drafted tokens so that the output has exactly the
        distribution of the target.
      )pbdoc");
}
