#include <algorithm>
#include <optional>
#include <vector>

#include "cpu/task.h"
#include "primitives.h"

// Compiled for several vector widths; the loader picks one for the machine.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && \
    !defined(__clang__)
#define MULTIVERSION \
  __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define MULTIVERSION
#endif

namespace mlx_mtp {

namespace {

// A sum over Dk is one sequential chain, as in MLX's CPU reduction on Linux. A
// tile of LANES value rows, with Dk as the outer axis, runs that many chains
// side by side, so the vector width never changes a result.
constexpr int LANES = 32;
using Lanes = float[LANES];

// state *= g, out = state . k
MULTIVERSION void decay(
    Lanes* __restrict state,
    int Dk,
    float g,
    const float* __restrict k,
    float* __restrict out) {
  Lanes sum = {};
  for (int i = 0; i < Dk; ++i) {
    for (int l = 0; l < LANES; ++l) {
      state[i][l] *= g;
      sum[l] += state[i][l] * k[i];
    }
  }
  std::copy_n(sum, LANES, out);
}

// state += k delta
MULTIVERSION void update(
    Lanes* __restrict state,
    int Dk,
    const float* __restrict k,
    const float* __restrict delta) {
  for (int i = 0; i < Dk; ++i) {
    for (int l = 0; l < LANES; ++l) {
      state[i][l] += k[i] * delta[l];
    }
  }
}

// state += k delta, out = state . q
MULTIVERSION void update_and_read(
    Lanes* __restrict state,
    int Dk,
    const float* __restrict k,
    const float* __restrict delta,
    const float* __restrict q,
    float* __restrict out) {
  Lanes sum = {};
  for (int i = 0; i < Dk; ++i) {
    for (int l = 0; l < LANES; ++l) {
      state[i][l] += k[i] * delta[l];
      sum[l] += state[i][l] * q[i];
    }
  }
  std::copy_n(sum, LANES, out);
}

// Calls f with a value of the C++ type of a floating dtype.
template <typename F>
void dispatch_float(mx::Dtype dtype, F&& f) {
  switch (dtype) {
    case mx::float16:
      return f(mx::float16_t{});
    case mx::bfloat16:
      return f(mx::bfloat16_t{});
    default:
      return f(float{});
  }
}

// A strided floating array seen from a task.
struct View {
  char* data;
  mx::Dtype dtype;
  mx::Shape shape;
  mx::Strides strides;

  explicit View(const mx::array& x)
      : data(const_cast<char*>(x.data<char>())),
        dtype(x.dtype()),
        shape(x.shape()),
        strides(x.strides()) {}

  template <typename T>
  T* at(std::initializer_list<int> index) const {
    int64_t offset = 0;
    int axis = 0;
    for (auto i : index) {
      offset += i * strides[axis++];
    }
    return reinterpret_cast<T*>(data) + offset;
  }

  // n values along an axis, from the element at index.
  void read(std::initializer_list<int> index, int axis, int n, float* dst)
      const {
    dispatch_float(dtype, [&](auto type) {
      auto src = at<decltype(type)>(index);
      for (int i = 0; i < n; ++i) {
        dst[i] = static_cast<float>(src[i * strides[axis]]);
      }
    });
  }

  // n values along the last axis, which has stride 1.
  void write(std::initializer_list<int> index, int n, const float* src) const {
    dispatch_float(dtype, [&](auto type) {
      auto dst = at<decltype(type)>(index);
      for (int i = 0; i < n; ++i) {
        dst[i] = static_cast<decltype(type)>(src[i]);
      }
    });
  }
};

// The inputs of one value head and its work space, in float32. Rows of v and y
// are padded to whole tiles.
struct Head {
  int padded;
  std::vector<float> k, q, v, g, beta, y;
  std::vector<float> tile;

  Head(int T, int Dk, int Dv)
      : padded((Dv + LANES - 1) / LANES * LANES),
        k(T * Dk),
        q(T * Dk),
        v(T * padded),
        g(T),
        beta(T),
        y(T * padded),
        tile(Dk * LANES) {}
};

class Replay {
 public:
  Replay(
      const std::vector<mx::array>& inputs,
      const std::vector<mx::array>& outputs)
      : state_(inputs[0]),
        k_(inputs[1]),
        v_(inputs[2]),
        g_(inputs[3]),
        beta_(inputs[4]),
        steps_(inputs[5].data<int32_t>()),
        steps_stride_(inputs[5].strides(0)),
        out_(outputs[0]),
        B_(v_.shape[0]),
        T_(v_.shape[1]),
        Hk_(k_.shape[2]),
        Hv_(v_.shape[2]),
        Dk_(k_.shape[3]),
        Dv_(v_.shape[3]) {
    if (outputs.size() == 2) {
      q_.emplace(inputs[6]);
      y_.emplace(outputs[1]);
    }
  }

  void operator()() const {
    Head head(T_, Dk_, Dv_);
    for (int b = 0; b < B_; ++b) {
      int n = std::clamp<int>(steps_[b * steps_stride_], 0, T_);
      for (int h = 0; h < Hv_; ++h) {
        read_inputs(b, h, n, head);
        for (int row = 0; row < Dv_; row += LANES) {
          run_tile(b, h, n, row, head);
        }
        if (y_) {
          write_outputs(b, h, n, head);
        }
      }
    }
  }

 private:
  void read_inputs(int b, int h, int n, Head& head) const {
    int hk = h / (Hv_ / Hk_);
    g_.read({b, 0, h}, 1, n, head.g.data());
    beta_.read({b, 0, h}, 1, n, head.beta.data());
    for (int t = 0; t < n; ++t) {
      k_.read({b, t, hk, 0}, 3, Dk_, &head.k[t * Dk_]);
      v_.read({b, t, h, 0}, 3, Dv_, &head.v[t * head.padded]);
      if (q_) {
        q_->read({b, t, hk, 0}, 3, Dk_, &head.q[t * Dk_]);
      }
    }
  }

  // All n steps of LANES value rows, while their state stays in the cache.
  void run_tile(int b, int h, int n, int row, Head& head) const {
    auto tile = reinterpret_cast<Lanes*>(head.tile.data());
    int rows = std::min(LANES, Dv_ - row);
    load_tile(b, h, row, rows, tile);
    for (int t = 0; t < n; ++t) {
      auto k = &head.k[t * Dk_];
      auto v = &head.v[t * head.padded + row];
      Lanes delta;
      decay(tile, Dk_, head.g[t], k, delta);
      for (int l = 0; l < LANES; ++l) {
        delta[l] = (v[l] - delta[l]) * head.beta[t];
      }
      if (y_) {
        auto y = &head.y[t * head.padded + row];
        update_and_read(tile, Dk_, k, delta, &head.q[t * Dk_], y);
      } else {
        update(tile, Dk_, k, delta);
      }
    }
    store_tile(b, h, row, rows, tile);
  }

  void load_tile(int b, int h, int row, int rows, Lanes* tile) const {
    for (int l = 0; l < rows; ++l) {
      auto src = state_.at<float>({b, h, row + l, 0});
      for (int i = 0; i < Dk_; ++i) {
        tile[i][l] = src[i * state_.strides[3]];
      }
    }
  }

  void store_tile(int b, int h, int row, int rows, const Lanes* tile) const {
    for (int l = 0; l < rows; ++l) {
      auto dst = out_.at<float>({b, h, row + l, 0});
      for (int i = 0; i < Dk_; ++i) {
        dst[i] = tile[i][l];
      }
    }
  }

  // Rows of y that were not computed are zero.
  void write_outputs(int b, int h, int n, Head& head) const {
    std::fill(head.y.begin() + n * head.padded, head.y.end(), 0.0f);
    for (int t = 0; t < T_; ++t) {
      y_->write({b, t, h, 0}, Dv_, &head.y[t * head.padded]);
    }
  }

  View state_, k_, v_, g_, beta_;
  const int32_t* steps_;
  int64_t steps_stride_;
  View out_;
  std::optional<View> q_, y_;
  int B_, T_, Hk_, Hv_, Dk_, Dv_;
};

} // namespace

void GatedDeltaReplay::eval_cpu(
    const std::vector<mx::array>& inputs,
    std::vector<mx::array>& outputs) {
  auto& state = inputs[0];
  // mlx counts one reference an output, so only the state alone is donated.
  if (state.is_donatable() && state.flags().row_contiguous) {
    outputs[0].copy_shared_buffer(state);
  } else {
    cpu::allocate(outputs[0]);
  }
  if (outputs.size() == 2) {
    cpu::allocate(outputs[1]);
  }
  cpu::dispatch(
      stream(), inputs, outputs, [](cpu::Arrays& in, cpu::Arrays& out) {
        Replay(in, out)();
      });
}

} // namespace mlx_mtp
