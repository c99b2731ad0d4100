// Argument checks shared by the ops. Every message starts with "[op]".
#pragma once

#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>

#include "mlx/array.h"
#include "mlx/ops.h"

namespace mlx_mtp {

namespace mx = mlx::core;

// A named dimension with its required size, or with -1 where any size will do.
struct Dim {
  const char* name;
  int size = -1;
};

inline std::string to_string(const mx::Shape& shape) {
  std::ostringstream out;
  out << "(";
  for (size_t i = 0; i < shape.size(); ++i) {
    out << (i ? ", " : "") << shape[i];
  }
  out << (shape.size() == 1 ? ",)" : ")");
  return out.str();
}

// "(B=2, T, D=64)"
inline std::string to_string(std::initializer_list<Dim> dims) {
  std::ostringstream out;
  out << "(";
  size_t i = 0;
  for (auto& dim : dims) {
    out << (i++ ? ", " : "") << dim.name;
    if (dim.size >= 0) {
      out << "=" << dim.size;
    }
  }
  out << (dims.size() == 1 ? ",)" : ")");
  return out.str();
}

inline void check_shape(
    const char* op,
    const char* name,
    const mx::array& x,
    std::initializer_list<Dim> dims) {
  bool ok = x.ndim() == dims.size();
  int axis = 0;
  for (auto it = dims.begin(); ok && it != dims.end(); ++it, ++axis) {
    ok = it->size < 0 || x.shape(axis) == it->size;
  }
  if (!ok) {
    throw std::invalid_argument(
        std::string("[") + op + "] " + name + " must have shape " +
        to_string(dims) + " but has shape " + to_string(x.shape()) + ".");
  }
}

inline void check_shape(
    const char* op,
    const char* name,
    const mx::array& x,
    const mx::Shape& shape) {
  if (x.shape() != shape) {
    throw std::invalid_argument(
        std::string("[") + op + "] " + name + " must have shape " +
        to_string(shape) + " but has shape " + to_string(x.shape()) + ".");
  }
}

inline void check_dtype(
    const char* op,
    const char* name,
    const mx::array& x,
    bool ok,
    const std::string& expected) {
  if (!ok) {
    std::ostringstream msg;
    msg << "[" << op << "] " << name << " must be " << expected << " but is "
        << x.dtype() << ".";
    throw std::invalid_argument(msg.str());
  }
}

// float32, float16 or bfloat16
inline void check_float(const char* op, const char* name, const mx::array& x) {
  auto t = x.dtype();
  check_dtype(
      op,
      name,
      x,
      t == mx::float32 || t == mx::float16 || t == mx::bfloat16,
      "float32, float16 or bfloat16");
}

// Any integer array as int32. Wider values saturate: wrapping would turn an
// index that is far out of range into a valid one.
inline mx::array
to_int32(const char* op, const char* name, const mx::array& x, mx::Stream s) {
  auto t = x.dtype();
  check_dtype(op, name, x, mx::issubdtype(t, mx::integer), "an integer array");
  if (t == mx::uint32 || t == mx::int64 || t == mx::uint64) {
    auto lo = mx::array(t == mx::int64 ? INT32_MIN : 0, t);
    auto hi = mx::array(INT32_MAX, t);
    return mx::astype(mx::clip(x, lo, hi, s), mx::int32, s);
  }
  return mx::astype(x, mx::int32, s);
}

} // namespace mlx_mtp
