#include <stdexcept>
#include <string>

#include "gpu/arguments.h"
#include "gpu_kernels.h"
#include "mlx/ops.h"
#include "primitives.h"

namespace mlx_mtp {

namespace {

constexpr int MAX_KEY_DIM = 256;
constexpr int ROW_LANES = 8; // threads of one value row

// Value rows of a thread. Two read the keys once, which pays where there is a
// GPU full of threads anyway; of wider ones it has registers for one.
int rows_of_thread(int64_t rows, int key_dim) {
  return key_dim <= 128 && rows >= 16384 ? 2 : 1;
}

// The dtype of the kernel: that of k, v and q where it is one.
mx::Dtype common_dtype(const std::vector<mx::array>& inputs) {
  auto dtype = inputs[1].dtype();
  bool same = inputs[2].dtype() == dtype &&
      (inputs.size() == 6 || inputs[6].dtype() == dtype);
  return same ? dtype : mx::float32;
}

// The state the kernel starts from. Sets the data of `out`, in place if
// possible.
mx::array
start_state(gpu::Encoder& encoder, const mx::array& state, mx::array& out) {
  if (!state.flags().row_contiguous) {
    gpu::copy(encoder, state, out);
    return out;
  }
  // mlx counts one reference an output, so only the state alone is donated.
  if (state.is_donatable()) {
    out.copy_shared_buffer(state);
  } else {
    encoder.allocate(out);
  }
  return state;
}

// Whether every row of x starts at a multiple of 4 elements.
bool has_rows_of_fours(const mx::array& x) {
  bool aligned = x.offset() % (4 * x.itemsize()) == 0;
  for (int axis = 0; axis + 1 < static_cast<int>(x.ndim()); ++axis) {
    aligned &= gpu::stride(x, axis) % 4 == 0;
  }
  return aligned;
}

void set_strides(int (&strides)[3], const mx::array& x) {
  for (int axis = 0; axis < 3; ++axis) {
    strides[axis] = gpu::stride(x, axis);
  }
}

} // namespace

void GatedDeltaReplay::eval_gpu(
    const std::vector<mx::array>& inputs,
    std::vector<mx::array>& outputs) {
  int Dk = inputs[0].shape(3);
  if (Dk > MAX_KEY_DIM) {
    throw std::runtime_error(
        "[gated_delta_replay] The GPU takes key dims up to " +
        std::to_string(MAX_KEY_DIM) + " but Dk is " + std::to_string(Dk) +
        ". Pass stream=mx.cpu.");
  }
  gpu::Encoder encoder(stream());
  bool has_q = outputs.size() == 2;
  auto state = start_state(encoder, inputs[0], outputs[0]);
  auto dtype = common_dtype(inputs);
  auto input = [&](int i) {
    return gpu::rows(encoder, gpu::cast(encoder, inputs[i], dtype));
  };
  auto k = input(1);
  auto v = input(2);
  auto q = has_q ? input(6) : k;
  auto g = gpu::cast(encoder, inputs[3], mx::float32);
  auto beta = gpu::cast(encoder, inputs[4], mx::float32);
  auto& steps = inputs[5];
  bool cast_y = has_q && outputs[1].dtype() != dtype;
  if (has_q && !cast_y) {
    encoder.allocate(outputs[1]);
  }
  auto y = cast_y ? mx::array(v.shape(), dtype, nullptr, {})
                  : outputs[has_q ? 1 : 0];
  if (cast_y) {
    encoder.allocate(y);
    encoder.add_temporary(y);
  }

  gpu::GatedDeltaReplayParams params = {};
  params.steps = v.shape(1);
  params.key_heads = k.shape(2);
  params.value_heads = v.shape(2);
  params.key_dim = Dk;
  params.value_dim = v.shape(3);
  params.has_q = has_q;
  params.aligned = Dk % 4 == 0 && has_rows_of_fours(state) &&
      has_rows_of_fours(k) && has_rows_of_fours(q) &&
      has_rows_of_fours(outputs[0]);
  params.steps_stride = gpu::stride(steps, 0);
  set_strides(params.k_strides, k);
  set_strides(params.v_strides, v);
  set_strides(params.g_strides, g);
  set_strides(params.beta_strides, beta);
  set_strides(params.q_strides, q);
  int B = v.shape(0);
  int64_t rows = int64_t(B) * params.value_heads * params.value_dim;
  if (rows > 0) {
    int each = rows_of_thread(rows, params.key_dim);
    gpu::Kernels kernels(
        encoder,
        kernels::gated_delta_replay,
        params,
        {state, k, v, g, beta, steps, q, outputs[0], y});
    kernels.run(
        std::string("gated_delta_replay_") + gpu::type_name(dtype) +
            (params.key_dim <= 128 ? "_128_" : "_256_") + std::to_string(each),
        {0, 1, 2, 3, 4, 5, 6},
        {7, 8},
        64,
        [&](int threads) {
          int groups =
              gpu::ceil_div(params.value_dim, threads / ROW_LANES * each);
          return gpu::Grid{groups, params.value_heads, B};
        });
  }
  if (cast_y) {
    auto lazy = mx::astype(y, outputs[1].dtype(), stream());
    encoder.eval(lazy);
    outputs[1].copy_shared_buffer(lazy);
  }
}

} // namespace mlx_mtp
