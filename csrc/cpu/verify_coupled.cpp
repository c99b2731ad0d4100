#include "cpu/inputs.h"
#include "cpu/parallel.h"
#include "cpu/shaped_row.h"
#include "cpu/task.h"
#include "primitives.h"

namespace mlx_mtp {

namespace {

using cpu::value;

// The inputs and outputs of one evaluation.
struct Batch {
  std::vector<mx::array> in;
  bool temperature_first;
  bool has_lengths;
  bool has_allowed;
  int32_t* tokens;
  int32_t* accepted;
  float* logprobs;
};

class Verifier {
 public:
  explicit Verifier(const Batch& batch) : batch_(batch) {}

  void operator()(int b) {
    int T = batch_.in[0].shape(1);
    int accepted = verify(b, T);
    batch_.accepted[b] = accepted;
    for (int i = accepted + 1; i < T; ++i) {
      batch_.tokens[b * T + i] = -1;
      batch_.logprobs[b * T + i] = 0;
    }
  }

 private:
  // Emits tokens and returns the number of accepted drafts, -1 for a sequence
  // with an unusable row.
  int verify(int b, int T) {
    auto& in = batch_.in;
    auto params = cpu::row_params(&in[4], b, batch_.temperature_first);
    int length = batch_.has_lengths ? value<int32_t>(in[8], b) : T - 1;
    if (!params.valid() || length < 0 || length >= T) {
      return -1;
    }
    cpu::Noise noise = {
        {value<uint32_t>(in[2], b, 0), value<uint32_t>(in[2], b, 1)}, 0};
    auto position = static_cast<uint32_t>(value<int32_t>(in[3], b));
    for (int i = 0;; ++i) {
      cpu::Row row(in[0], batch_.has_allowed ? &in.back() : nullptr, b * T + i);
      if (!shaped_.shape(row, params)) {
        return -1;
      }
      noise.position = position + i;
      int token = shaped_.race(noise);
      batch_.tokens[b * T + i] = token;
      batch_.logprobs[b * T + i] = shaped_.log_softmax(row[token]);
      if (i == length || token != value<int32_t>(in[1], b, i)) {
        return i;
      }
    }
  }

  const Batch& batch_;
  cpu::ShapedRow shaped_;
};

} // namespace

void VerifyCoupled::eval_cpu(
    const std::vector<mx::array>& inputs,
    std::vector<mx::array>& outputs) {
  for (auto& out : outputs) {
    cpu::allocate(out);
  }
  auto task = [temperature_first = temperature_first_,
               has_lengths = has_lengths_,
               has_allowed = has_allowed_](cpu::Arrays& in, cpu::Arrays& out) {
    Batch batch = {
        in,
        temperature_first,
        has_lengths,
        has_allowed,
        out[0].data<int32_t>(),
        out[1].data<int32_t>(),
        out[2].data<float>()};
    cpu::parallel_for(
        in[0].shape(0), in[0].size(), [&] { return Verifier(batch); });
  };
  cpu::dispatch(stream(), inputs, outputs, task);
}

} // namespace mlx_mtp
