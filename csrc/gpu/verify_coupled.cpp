#include "gpu/verify.h"
#include "gpu_kernels.h"

namespace mlx_mtp {

namespace {

// Buffers 0 to 17, as those of verify_draft but for the seed, the position and
// the racers.
std::vector<mx::array> make_buffers(
    gpu::Encoder& encoder,
    const std::vector<mx::array>& inputs,
    const VerifyDraft::Optional& has) {
  auto target = gpu::rows(encoder, inputs[0]);
  return {
      target,
      target,
      inputs[1],
      gpu::rows(encoder, inputs[2]),
      encoder.resident(inputs[4]),
      encoder.resident(inputs[5]),
      encoder.resident(inputs[6]),
      encoder.resident(inputs[7]),
      inputs[3],
      target,
      has.draft_lengths ? inputs[8] : target,
      has.allowed ? gpu::rows(encoder, inputs.back()) : target};
}

} // namespace

void VerifyCoupled::eval_gpu(
    const std::vector<mx::array>& inputs,
    std::vector<mx::array>& outputs) {
  gpu::Encoder encoder(stream());
  for (auto& out : outputs) {
    encoder.allocate(out);
  }
  int B = inputs[0].shape(0);
  if (B == 0) {
    return;
  }
  VerifyDraft::Optional has = {false, false, has_lengths_, has_allowed_};
  auto buffers = make_buffers(encoder, inputs, has);
  int rows = B * inputs[0].shape(1);
  gpu::VerifyCoupledParams params = {
      .verify = gpu::verify_params(
          buffers, rows, temperature_first_, filtered_, true, has),
      .seed_stride = gpu::stride(buffers[3], 0),
      .position_stride = gpu::stride(buffers[8], 0)};
  int64_t racers = int64_t(rows) * params.verify.chunks * sizeof(gpu::Racer);
  auto scratch = gpu::verify_scratch(encoder, params.verify, rows, 1, racers);
  buffers.insert(buffers.end(), scratch.begin(), scratch.end());
  buffers.insert(buffers.end(), outputs.begin(), outputs.end());

  std::string type = gpu::type_name(buffers[0].dtype());
  gpu::Kernels verify(encoder, kernels::verify_draft, params.verify, buffers);
  gpu::shape_rows(verify, type, params.verify, rows, false);
  gpu::Kernels kernels(encoder, kernels::verify_coupled, params, buffers);
  type = (filtered_ ? "filtered_" : "") + type;
  kernels.run(
      "verify_coupled_race_" + type,
      {0, 3, 4, 8, 10, 11, 12, 13, 14},
      {16},
      128,
      [&](int) { return gpu::Grid{rows, params.verify.chunks}; });
  kernels.run(
      "verify_coupled_finish_" + type,
      {0, 2, 4, 10, 11, 12, 14, 16},
      {18, 19, 20},
      128,
      [&](int) { return gpu::Grid{B}; });
}

} // namespace mlx_mtp
