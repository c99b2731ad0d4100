#include <string>

#include "metal/arguments.h"
#include "metal_kernels.h"
#include "mlx/allocator.h"
#include "primitives.h"

namespace mlx_mtp {

void Sample::eval_gpu(
    const std::vector<mx::array>& inputs,
    std::vector<mx::array>& outputs) {
  for (auto& out : outputs) {
    out.set_data(mx::allocator::malloc(out.nbytes()));
  }
  int R = outputs[0].size();
  if (R == 0) {
    return;
  }
  metal::Encoder encoder(stream());
  auto logits = metal::flat_rows(encoder, inputs[0]);
  auto uniforms = metal::flat_rows(encoder, inputs[1]);
  auto allowed = has_allowed_ ? metal::flat_rows(encoder, inputs[6]) : logits;
  int V = logits.shape(-1);
  int batch = logits.ndim() > 1 ? logits.shape(0) : 1;
  metal::SampleParams params = {
      .vocab = V,
      .chunk = metal::CHUNK,
      .chunks = metal::ceil_div(V, metal::CHUNK),
      .groups = metal::ceil_div(V, metal::GROUP),
      .rows_per_param = R / batch,
      .filtered = filtered_,
      .temperature_first = temperature_first_,
      .has_allowed = has_allowed_,
      .aligned = metal::is_aligned(logits),
      .logits_stride = metal::row_stride(logits),
      .uniforms_stride = metal::row_stride(uniforms),
      .allowed_stride = metal::row_stride(allowed),
      .temperature_stride = metal::stride(inputs[2], 0),
      .top_k_stride = metal::stride(inputs[3], 0),
      .top_p_stride = metal::stride(inputs[4], 0),
      .min_p_stride = metal::stride(inputs[5], 0)};
  auto partials = metal::scratch(encoder, {R, params.chunks, 4}, mx::float32);
  auto maxima = filtered_
      ? metal::scratch(encoder, {R, params.groups}, mx::float32)
      : partials;

  metal::Kernels kernels(
      encoder,
      kernels::sample,
      params,
      {logits,
       uniforms,
       inputs[2],
       inputs[3],
       inputs[4],
       inputs[5],
       allowed,
       partials,
       maxima,
       outputs[0],
       outputs[1]});
  std::string type = metal::type_name(logits.dtype());
  kernels.run("sample_partials_" + type, {0, 2, 6}, {7, 8}, 256, [&](int) {
    return metal::Grid{R, params.chunks};
  });
  kernels.run(
      "sample_draw_" + type,
      {0, 1, 2, 3, 4, 5, 6, 7, 8},
      {9, 10},
      filtered_ ? 1024 : 256,
      [&](int) { return metal::Grid{R}; });
}

} // namespace mlx_mtp
