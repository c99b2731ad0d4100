// What the kernels use of Metal's <metal_stdlib>, for NVRTC: a simdgroup is a
// warp, a threadgroup a block. Nothing of the CUDA toolkit is included, so that
// a driver and NVRTC are enough to compile.

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

#undef __device__
#define __device__ __attribute__((__device__))
#define METAL_FUNC static __device__ __forceinline__
#define METAL_FUNC_SLOW static __device__ __noinline__
#define INFINITY __int_as_float(0x7f800000)

#define kernel static __device__ __forceinline__
#define device
#define constant const
#define threadgroup
#define TG_ARRAY(T, name, N) __shared__ T name[N]

// The arguments of a kernel are bound by their order instead.
#define buffer(n) maybe_unused
#define threadgroup_position_in_grid maybe_unused
#define thread_index_in_threadgroup maybe_unused
#define threads_per_threadgroup maybe_unused

template <typename To, typename From>
METAL_FUNC To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  memcpy(&y, &x, sizeof(To));
  return y;
}

struct half {
  ushort bits;

  half() = default;
  explicit __device__ half(float x) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  }
  __device__ operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
};

struct bfloat {
  ushort bits;

  bfloat() = default;
  // To the nearest, ties to even.
  explicit __device__ bfloat(float x) {
    uint y = __float_as_uint(x);
    bits = x != x ? 0x7fc0 : (y + 0x7fff + ((y >> 16) & 1)) >> 16;
  }
  __device__ operator float() const {
    return __uint_as_float(uint(bits) << 16);
  }
};

namespace metal {

constexpr uint ALL_LANES = 0xffffffff;

enum class mem_flags { mem_none, mem_device, mem_threadgroup };

METAL_FUNC void threadgroup_barrier(mem_flags) {
  __syncthreads();
}

METAL_FUNC float exp(float x) {
  return expf(x);
}

METAL_FUNC float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

METAL_FUNC float log(float x) {
  return logf(x);
}

METAL_FUNC float floor(float x) {
  return floorf(x);
}

METAL_FUNC float fma(float x, float y, float z) {
  return fmaf(x, y, z);
}

METAL_FUNC uint ctz(uint x) {
  return __clz(__brev(x));
}

METAL_FUNC uint clz(uint x) {
  return __clz(x);
}

METAL_FUNC uint popcount(uint x) {
  return __popc(x);
}

template <typename T>
METAL_FUNC T max(T x, T y) {
  return x > y ? x : y;
}

METAL_FUNC float max(float x, float y) {
  return fmaxf(x, y);
}

template <typename T>
METAL_FUNC T min(T x, T y) {
  return x < y ? x : y;
}

METAL_FUNC float min(float x, float y) {
  return fminf(x, y);
}

template <typename T>
METAL_FUNC T clamp(T x, T low, T high) {
  return min(max(x, low), high);
}

template <typename T>
METAL_FUNC T simd_shuffle(T x, ushort lane) {
  return __shfl_sync(ALL_LANES, x, lane);
}

template <typename T>
METAL_FUNC T simd_shuffle_xor(T x, ushort mask) {
  return __shfl_xor_sync(ALL_LANES, x, mask);
}

template <typename T>
METAL_FUNC T simd_shuffle_up(T x, ushort delta) {
  return __shfl_up_sync(ALL_LANES, x, delta);
}

METAL_FUNC float simd_sum(float x) {
  for (int mask = 16; mask > 0; mask /= 2) {
    x += __shfl_xor_sync(ALL_LANES, x, mask);
  }
  return x;
}

METAL_FUNC uint simd_sum(uint x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(ALL_LANES, x);
#else
  for (int mask = 16; mask > 0; mask /= 2) {
    x += __shfl_xor_sync(ALL_LANES, x, mask);
  }
  return x;
#endif
}

METAL_FUNC float simd_max(float x) {
#if __CUDA_ARCH__ >= 800
  // As an integer that orders like x, which is not NaN then.
  int key = __float_as_int(max(x, -INFINITY));
  key = __reduce_max_sync(ALL_LANES, key ^ ((key >> 31) & 0x7fffffff));
  return __int_as_float(key ^ ((key >> 31) & 0x7fffffff));
#else
  for (int mask = 16; mask > 0; mask /= 2) {
    x = max(x, __shfl_xor_sync(ALL_LANES, x, mask));
  }
  return x;
#endif
}

METAL_FUNC int simd_min(int x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_min_sync(ALL_LANES, x);
#else
  for (int mask = 16; mask > 0; mask /= 2) {
    x = min(x, __shfl_xor_sync(ALL_LANES, x, mask));
  }
  return x;
#endif
}

struct simd_vote {
  typedef ulong vote_t;
  uint lanes;

  explicit __device__ operator vote_t() const {
    return lanes;
  }
};

METAL_FUNC simd_vote simd_ballot(bool x) {
  return simd_vote{__ballot_sync(ALL_LANES, x)};
}

enum memory_order { memory_order_relaxed };

struct atomic_uint {
  uint value;
};

METAL_FUNC uint atomic_load_explicit(const atomic_uint* x, memory_order) {
  return *(const volatile uint*)&x->value;
}

METAL_FUNC void
atomic_store_explicit(atomic_uint* x, uint value, memory_order) {
  *(volatile uint*)&x->value = value;
}

METAL_FUNC uint
atomic_fetch_add_explicit(atomic_uint* x, uint value, memory_order) {
  return atomicAdd(&x->value, value);
}

} // namespace metal

// From here on: how a kernel becomes a __global__ function of one struct, which
// the host fills with the buffers in the order of their indices.
struct Arguments {
  char* buffers[24];
  alignas(8) char bytes[192];
};

// An argument by its type and its distance from the last one: all kernels end
// with position in the grid, index in the threadgroup, threads.
template <typename T>
struct Argument;

template <typename T>
struct Argument<T*> {
  static __device__ T* get(const Arguments& arguments, int index, int) {
    T* x = reinterpret_cast<T*>(arguments.buffers[index]);
    __builtin_assume(__isGlobal(x));
    return x;
  }
};

template <typename T>
struct Argument<const T&> {
  static __device__ const T& get(const Arguments& arguments, int, int) {
    return reinterpret_cast<const T&>(arguments.bytes);
  }
};

template <>
struct Argument<uint3> {
  static __device__ uint3 get(const Arguments&, int, int from_last) {
    return from_last == 2 ? uint3{blockIdx.x, blockIdx.y, blockIdx.z}
                          : uint3{blockDim.x, blockDim.y, blockDim.z};
  }
};

template <>
struct Argument<uint> {
  static __device__ uint get(const Arguments&, int, int from_last) {
    return from_last == 2 ? blockIdx.x
        : from_last == 1  ? threadIdx.x
                          : blockDim.x;
  }
};

template <int... I>
struct Indices {};

template <int N, int... I>
struct IndicesBelow : IndicesBelow<N - 1, N - 1, I...> {};

template <int... I>
struct IndicesBelow<0, I...> {
  typedef Indices<I...> type;
};

template <typename... T, int... I>
__device__ __forceinline__ void
call(void (*function)(T...), const Arguments& arguments, Indices<I...>) {
  function(Argument<T>::get(arguments, I, int(sizeof...(T)) - 1 - I)...);
}

template <typename... T>
__device__ __forceinline__ void call(
    void (*function)(T...),
    const Arguments& arguments) {
  call(function, arguments, typename IndicesBelow<sizeof...(T)>::type());
}

template <int N>
struct Name {
  char text[N];

  constexpr __device__ Name(const char (&name)[N]) {
    for (int i = 0; i < N; ++i) {
      text[i] = name[i];
    }
  }
};

template <Name name>
struct Kernel;

#define instantiate_kernel(name, func, ...)                                  \
  template <>                                                                \
  struct Kernel<name> {                                                      \
    static __device__ __forceinline__ void run(const Arguments& arguments) { \
      call(func<__VA_ARGS__>, arguments);                                    \
    }                                                                        \
  };

// The only kernel that is compiled, at the end of the text.
#define compile_kernel(name)                              \
  extern "C" __global__ void __launch_bounds__(1024)      \
      name(const __grid_constant__ Arguments arguments) { \
    Kernel<#name>::run(arguments);                        \
  }
