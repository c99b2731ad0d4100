#include <limits>

#include "cpu/inputs.h"
#include "cpu/parallel.h"
#include "cpu/shaped_row.h"
#include "cpu/task.h"
#include "primitives.h"

namespace mlx_mtp {

namespace {

// The inputs and outputs of one evaluation.
struct Batch {
  std::vector<mx::array> in;
  bool has_allowed;
  bool temperature_first;
  int32_t* tokens;
  float* stats;
};

class Sampler {
 public:
  explicit Sampler(const Batch& batch) : batch_(batch) {}

  void operator()(int64_t r) {
    auto& in = batch_.in;
    auto params =
        cpu::row_params(&in[2], sequence(r), batch_.temperature_first);
    cpu::Row row(in[0], batch_.has_allowed ? &in[6] : nullptr, r);
    float* stats = batch_.stats + 3 * r;
    if (!params.valid() || !shaped_.shape(row, params)) {
      batch_.tokens[r] = -1;
      std::fill_n(stats, 3, std::numeric_limits<float>::quiet_NaN());
      return;
    }
    auto* u = in[1].data<float>() + cpu::row_offset(in[1], r);
    batch_.tokens[r] =
        shaped_.draw(cpu::fine_uniform(u[0], u[in[1].strides(-1)]));
    stats[0] = shaped_.log_sum();
    stats[1] = shaped_.density().threshold;
    stats[2] = shaped_.density().inv_t;
  }

 private:
  // The index along the first axis of the r-th row.
  int64_t sequence(int64_t r) const {
    auto& logits = batch_.in[0];
    if (logits.ndim() == 1) {
      return 0;
    }
    return r * logits.shape(-1) * logits.shape(0) / logits.size();
  }

  const Batch& batch_;
  cpu::ShapedRow shaped_;
};

} // namespace

void Sample::eval_cpu(
    const std::vector<mx::array>& inputs,
    std::vector<mx::array>& outputs) {
  for (auto& out : outputs) {
    cpu::allocate(out);
  }
  auto task = [has_allowed = has_allowed_,
               temperature_first = temperature_first_](
                  cpu::Arrays& in, cpu::Arrays& out) {
    Batch batch = {
        in,
        has_allowed,
        temperature_first,
        out[0].data<int32_t>(),
        out[1].data<float>()};
    auto& logits = in[0];
    cpu::parallel_for(logits.size() / logits.shape(-1), logits.size(), [&] {
      return Sampler(batch);
    });
  };
  cpu::dispatch(stream(), inputs, outputs, task);
}

} // namespace mlx_mtp
