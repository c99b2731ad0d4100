#include <limits>

#include "cpu/inputs.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "primitives.h"

namespace mlx_mtp {

namespace {

struct SampleTask {
  std::vector<mx::array> in;
  int32_t* tokens;
  float* stats;
  bool temperature_first;
  bool has_allowed;

  void operator()() {
    int64_t rows = in[0].size() / in[0].shape(-1);
    int64_t per_batch = rows && in[0].ndim() > 1 ? rows / in[0].shape(0) : 1;
    for (int64_t r = 0; r < rows; ++r) {
      draw(r, r / per_batch);
    }
  }

  void draw(int64_t r, int64_t b) {
    cpu::Row row(in[0], has_allowed ? &in[6] : nullptr, r);
    auto params = cpu::row_params(&in[2], b, temperature_first);
    auto* u = in[1].data<float>() + cpu::row_offset(in[1], r);
    cpu::ShapedRow shaped;
    if (!params.valid() || !shaped.shape(row, params)) {
      tokens[r] = -1;
      std::fill_n(stats + 3 * r, 3, std::numeric_limits<float>::quiet_NaN());
      return;
    }
    tokens[r] = shaped.draw(cpu::fine_uniform(u[0], u[in[1].strides(-1)]));
    stats[3 * r] = shaped.log_sum();
    stats[3 * r + 1] = shaped.density().threshold;
    stats[3 * r + 2] = shaped.density().inv_t;
  }
};

} // namespace

void Sample::eval_cpu(
    const std::vector<mx::array>& inputs,
    std::vector<mx::array>& outputs) {
  for (auto& out : outputs) {
    out.set_data(mx::allocator::malloc(out.nbytes()));
  }
  SampleTask task = {
      {},
      outputs[0].data<int32_t>(),
      outputs[1].data<float>(),
      temperature_first_,
      has_allowed_};
  auto& encoder = mx::cpu::get_command_encoder(stream());
  for (auto& in : inputs) {
    encoder.set_input_array(in);
    task.in.push_back(mx::array::unsafe_weak_copy(in));
  }
  for (auto& out : outputs) {
    encoder.set_output_array(out);
  }
  encoder.dispatch(std::move(task));
}

} // namespace mlx_mtp
