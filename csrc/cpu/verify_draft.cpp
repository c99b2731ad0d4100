#include <cmath>
#include <limits>

#include "cpu/inputs.h"
#include "cpu/parallel.h"
#include "cpu/shaped_row.h"
#include "cpu/task.h"
#include "primitives.h"

namespace mlx_mtp {

namespace {

using cpu::value;
constexpr float inf = std::numeric_limits<float>::infinity();

// The inputs and outputs of one evaluation.
struct Batch {
  std::vector<mx::array> in;
  VerifyDraft::Optional has;
  bool temperature_first;
  int32_t* tokens;
  int32_t* accepted;
  float* logprobs; // null if they are not wanted

  int B() const {
    return in[0].shape(0);
  }
  int T() const {
    return in[0].shape(1);
  }
  int V() const {
    return in[0].shape(2);
  }
  const mx::array* draft_logits() const {
    return has.draft_logits ? &in[8] : nullptr;
  }
  const mx::array* draft_stats() const {
    return has.draft_stats ? &in[8 + has.draft_logits] : nullptr;
  }
  const mx::array* draft_lengths() const {
    return has.draft_lengths ? &in[8 + has.draft_logits + has.draft_stats]
                             : nullptr;
  }
  const mx::array* allowed() const {
    return has.allowed ? &in.back() : nullptr;
  }
};

class Verifier {
 public:
  explicit Verifier(const Batch& batch) : batch_(batch) {}

  void operator()(int b) {
    int T = batch_.T();
    int accepted = verify(b);
    batch_.accepted[b] = accepted;
    for (int i = accepted + 1; i < T; ++i) {
      batch_.tokens[b * T + i] = -1;
      if (batch_.logprobs) {
        batch_.logprobs[b * T + i] = 0;
      }
    }
  }

 private:
  // Emits tokens and returns the number of accepted drafts, -1 for a sequence
  // with an unusable row.
  int verify(int b) {
    auto params = cpu::row_params(&batch_.in[3], b, batch_.temperature_first);
    int K = batch_.T() - 1;
    auto* lengths = batch_.draft_lengths();
    int length = lengths ? value<int32_t>(*lengths, b) : K;
    if (!params.valid() || length < 0 || length > K) {
      return -1;
    }
    for (int i = 0; i < length; ++i) {
      int draft = value<int32_t>(batch_.in[1], b, i);
      if (draft < 0 || draft >= batch_.V() || !shape(b, i, params)) {
        return -1;
      }
      cpu::Density q = draft_density(b, i, draft);
      double q_draft = q.point < 0 ? q(draft, draft_row(b, i)[draft]) : 1;
      if (!(q_draft > 0 && q_draft < inf)) {
        return -1;
      }
      double coin = value<float>(batch_.in[2], b, i);
      if (coin * std::min(q_draft, 1.0) <
          target_.density()(draft, row_[draft])) {
        emit(b, i, draft);
        continue;
      }
      int token = correct(b, i, q);
      if (token < 0) {
        return -1;
      }
      emit(b, i, token);
      return i;
    }
    if (!shape(b, length, params)) {
      return -1;
    }
    emit(b, length, target_.draw(final_uniform(b)));
    return length;
  }

  int correct(int b, int i, const cpu::Density& q) {
    double u = final_uniform(b);
    if (q.point >= 0) {
      return target_.draw_residual(nullptr, q, u);
    }
    auto row = draft_row(b, i);
    return target_.draw_residual(&row, q, u);
  }

  bool shape(int b, int i, const cpu::RowParams& params) {
    row_ = cpu::Row(batch_.in[0], batch_.allowed(), b * batch_.T() + i);
    return target_.shape(row_, params);
  }

  cpu::Row draft_row(int b, int i) const {
    return {*batch_.draft_logits(), nullptr, b * (batch_.T() - 1) + i};
  }

  // What the draft was drawn from, with probabilities NaN for an unusable row.
  // A greedy target accepts its argmax whatever q is.
  cpu::Density draft_density(int b, int i, int draft) {
    cpu::Density point = {draft, 0, inf, 0, 1};
    if (!batch_.has.draft_logits || target_.density().point >= 0) {
      return point;
    }
    auto* stats = batch_.draft_stats();
    if (!stats) {
      float inv_t = cpu::inverse(value<float>(batch_.in[7], b));
      return inv_t == inf ? point : density_of(draft_row(b, i), inv_t, -inf);
    }
    auto* x = stats->data<float>() +
        cpu::row_offset(*stats, b * (batch_.T() - 1) + i);
    float log_sum = x[0];
    float threshold = x[stats->strides(-1)];
    float inv_t = x[2 * stats->strides(-1)];
    if (inv_t == inf) {
      return point;
    }
    // Rounded to float32, a large log-sum is too coarse for a probability.
    if (std::abs(log_sum) >= 64) {
      return density_of(draft_row(b, i), inv_t, threshold);
    }
    float ref = log_sum / inv_t;
    double shift = static_cast<double>(ref) * inv_t - log_sum;
    return {-1, ref, inv_t, threshold, std::exp(shift)};
  }

  cpu::Density density_of(const cpu::Row& row, float inv_t, float threshold) {
    if (inv_t > 0 && draft_.shape(row, inv_t, threshold)) {
      return draft_.density();
    }
    return {-1, 0, inv_t, threshold, std::numeric_limits<double>::quiet_NaN()};
  }

  void emit(int b, int i, int token) {
    batch_.tokens[b * batch_.T() + i] = token;
    if (batch_.logprobs) {
      batch_.logprobs[b * batch_.T() + i] = target_.log_softmax(row_[token]);
    }
  }

  double final_uniform(int b) const {
    int K = batch_.T() - 1;
    return cpu::fine_uniform(
        value<float>(batch_.in[2], b, K), value<float>(batch_.in[2], b, K + 1));
  }

  const Batch& batch_;
  cpu::Row row_;
  cpu::ShapedRow target_;
  cpu::ShapedRow draft_;
};

} // namespace

void VerifyDraft::eval_cpu(
    const std::vector<mx::array>& inputs,
    std::vector<mx::array>& outputs) {
  for (auto& out : outputs) {
    cpu::allocate(out);
  }
  auto task = [has = has_,
               temperature_first = temperature_first_,
               logprobs = logprobs_](cpu::Arrays& in, cpu::Arrays& out) {
    Batch batch = {
        in,
        has,
        temperature_first,
        out[0].data<int32_t>(),
        out[1].data<int32_t>(),
        logprobs ? out[2].data<float>() : nullptr};
    cpu::parallel_for(batch.B(), in[0].size(), [&] { return Verifier(batch); });
  };
  cpu::dispatch(stream(), inputs, outputs, task);
}

} // namespace mlx_mtp
