#include <string>

#include "gpu/arguments.h"
#include "gpu_kernels.h"
#include "primitives.h"

namespace mlx_mtp {

void Sample::eval_gpu(
    const std::vector<mx::array>& inputs,
    std::vector<mx::array>& outputs) {
  gpu::Encoder encoder(stream());
  for (auto& out : outputs) {
    encoder.allocate(out);
  }
  int R = outputs[0].size();
  if (R == 0) {
    return;
  }
  auto logits = gpu::flat_rows(encoder, inputs[0]);
  auto uniforms = gpu::flat_rows(encoder, inputs[1]);
  auto allowed = has_allowed_ ? gpu::flat_rows(encoder, inputs[6]) : logits;
  int V = logits.shape(-1);
  int batch = logits.ndim() > 1 ? logits.shape(0) : 1;
  int chunk = gpu::chunk_size(R, V);
  gpu::SampleParams params = {
      .vocab = V,
      .chunk = chunk,
      .chunks = gpu::ceil_div(V, chunk),
      .groups = gpu::ceil_div(V, gpu::GROUP),
      .rows_per_param = R / batch,
      .filtered = filtered_,
      .temperature_first = temperature_first_,
      .has_allowed = has_allowed_,
      .aligned = gpu::is_aligned(logits),
      .logits_stride = gpu::row_stride(logits),
      .uniforms_stride = gpu::row_stride(uniforms),
      .allowed_stride = gpu::row_stride(allowed),
      .temperature_stride = gpu::stride(inputs[2], 0),
      .top_k_stride = gpu::stride(inputs[3], 0),
      .top_p_stride = gpu::stride(inputs[4], 0),
      .min_p_stride = gpu::stride(inputs[5], 0)};
  int64_t partials = int64_t(R) * params.chunks * sizeof(gpu::Partial);
  int64_t maxima = int64_t(R) * params.groups * sizeof(float);
  auto memory = gpu::scratch(encoder, {partials, filtered_ ? maxima : 1});

  gpu::Kernels kernels(
      encoder,
      kernels::sample,
      params,
      {logits,
       uniforms,
       encoder.resident(inputs[2]),
       encoder.resident(inputs[3]),
       encoder.resident(inputs[4]),
       encoder.resident(inputs[5]),
       allowed,
       memory[0],
       memory[1],
       outputs[0],
       outputs[1]});
  std::string type = gpu::type_name(logits.dtype());
  kernels.run("sample_partials_" + type, {0, 2, 6}, {7, 8}, 128, [&](int) {
    return gpu::Grid{R, params.chunks};
  });
  kernels.run(
      (filtered_ ? "sample_draw_filtered_" : "sample_draw_") + type,
      {0, 1, 2, 3, 4, 5, 6, 7, 8},
      {9, 10},
      512,
      [&](int) { return gpu::Grid{R}; });
}

} // namespace mlx_mtp
