#include <cmath>

#include "cpu/inputs.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "primitives.h"

namespace mlx_mtp {

namespace {

constexpr float inf = std::numeric_limits<float>::infinity();

struct VerifyTask {
  std::vector<mx::array> in;
  const mx::array* draft_logits{nullptr};
  const mx::array* draft_stats{nullptr};
  const mx::array* draft_lengths{nullptr};
  const mx::array* allowed{nullptr};
  bool temperature_first;
  int32_t* tokens;
  int32_t* accepted;
  float* logprobs;

  int K() const {
    return in[0].shape(1) - 1;
  }

  void operator()() {
    for (int b = 0; b < in[0].shape(0); ++b) {
      accepted[b] = verify(b);
      clear(b, accepted[b] + 1);
    }
  }

  // Fills the slots from `first` on.
  void clear(int b, int first) {
    int T = K() + 1;
    std::fill(tokens + b * T + first, tokens + (b + 1) * T, -1);
    std::fill(logprobs + b * T + first, logprobs + (b + 1) * T, 0.0f);
  }

  // Returns the number of accepted drafts, -1 when a row is unusable.
  int verify(int b) {
    auto params = cpu::row_params(&in[3], b, temperature_first);
    int length = draft_lengths ? cpu::value<int32_t>(*draft_lengths, b) : K();
    if (!params.valid() || length < 0 || length > K()) {
      return -1;
    }
    for (int i = 0; i <= length; ++i) {
      cpu::Row row(in[0], allowed, b * (K() + 1) + i);
      cpu::ShapedRow target;
      if (!target.shape(row, params)) {
        return -1;
      }
      int draft = i < length ? cpu::value<int32_t>(in[1], b, i) : -1;
      if (i < length) {
        int outcome = check(b, i, draft, target);
        if (outcome > 0) {
          emit(b, i, draft, target);
          continue;
        }
        if (outcome < 0) {
          return -1;
        }
      }
      int token = i < length ? correct(b, i, draft, target)
                             : target.draw(final_uniform(b));
      if (token < 0) {
        return -1;
      }
      emit(b, i, token, target);
      return i;
    }
    return -1;
  }

  void emit(int b, int i, int token, const cpu::ShapedRow& target) {
    tokens[b * (K() + 1) + i] = token;
    logprobs[b * (K() + 1) + i] = target.log_softmax(token);
  }

  double final_uniform(int b) {
    return cpu::fine_uniform(
        cpu::value<float>(in[2], b, K()), cpu::value<float>(in[2], b, K() + 1));
  }

  // 1: accepted, 0: rejected, -1: unusable
  int check(int b, int i, int draft, const cpu::ShapedRow& target) {
    if (draft < 0 || draft >= in[0].shape(2)) {
      return -1;
    }
    double p = target.probability(draft);
    if (target.density().point >= 0) {
      return p > 0;
    }
    double q = 1;
    cpu::Density density;
    if (!draft_density(b, i, draft, density)) {
      return -1;
    }
    if (draft_logits) {
      q = density(draft, cpu::Row(*draft_logits, nullptr, b * K() + i)[draft]);
    }
    if (!(q > 0 && q < inf)) {
      return -1;
    }
    return cpu::value<float>(in[2], b, i) * std::min(q, 1.0) < p;
  }

  int correct(int b, int i, int draft, const cpu::ShapedRow& target) {
    double u = final_uniform(b);
    if (target.density().point >= 0) {
      return target.density().point;
    }
    cpu::Density q;
    draft_density(b, i, draft, q);
    // Without draft logits the row of q is only a stand-in.
    cpu::Row row(
        draft_logits ? *draft_logits : in[0],
        nullptr,
        draft_logits ? b * K() + i : 0);
    return target.draw_residual(row, q, u);
  }

  bool draft_density(int b, int i, int draft, cpu::Density& q) {
    float inv_t = inf;
    if (draft_stats) {
      auto* stats = draft_stats->data<float>() +
          cpu::row_offset(*draft_stats, b * K() + i);
      auto stride = draft_stats->strides(-1);
      q.inv_t = inv_t = stats[2 * stride];
      q.threshold = stats[stride];
      q.ref = stats[0] / inv_t;
      q.scale = std::exp(static_cast<double>(q.ref) * inv_t - stats[0]);
    } else if (draft_logits) {
      inv_t = 1 / cpu::value<float>(in[7], b);
    }
    if (inv_t == inf) {
      q = cpu::Density();
      q.point = draft;
    } else if (!draft_stats) {
      cpu::Row row(*draft_logits, nullptr, b * K() + i);
      cpu::ShapedRow shaped;
      if (!shaped.shape(row, {1 / inv_t, 0, 1, 0, true})) {
        return false;
      }
      q = shaped.density();
    }
    return true;
  }
};

} // namespace

void VerifyDraft::eval_cpu(
    const std::vector<mx::array>& inputs,
    std::vector<mx::array>& outputs) {
  for (auto& out : outputs) {
    out.set_data(mx::allocator::malloc(out.nbytes()));
  }
  auto& encoder = mx::cpu::get_command_encoder(stream());
  std::vector<mx::array> in;
  for (auto& x : inputs) {
    encoder.set_input_array(x);
    in.push_back(mx::array::unsafe_weak_copy(x));
  }
  for (auto& out : outputs) {
    encoder.set_output_array(out);
  }
  encoder.dispatch([in = std::move(in),
                    has = has_,
                    temperature_first = temperature_first_,
                    tokens = outputs[0].data<int32_t>(),
                    accepted = outputs[1].data<int32_t>(),
                    logprobs = outputs[2].data<float>()] {
    VerifyTask task;
    task.in = in;
    auto* next = task.in.data() + 8;
    auto take = [&](bool present) { return present ? next++ : nullptr; };
    task.draft_logits = take(has.draft_logits);
    task.draft_stats = take(has.draft_stats);
    task.draft_lengths = take(has.draft_lengths);
    task.allowed = take(has.allowed);
    task.temperature_first = temperature_first;
    task.tokens = tokens;
    task.accepted = accepted;
    task.logprobs = logprobs;
    task();
  });
}

} // namespace mlx_mtp
