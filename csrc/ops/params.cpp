#include "ops/params.h"

#include <cmath>
#include <map>

#include "ops/checks.h"

namespace mlx_mtp {

namespace {

constexpr size_t MAX_NUMBERS = 64;

// One array for each number: calls have the same few again and again.
mx::array number(float value) {
  static thread_local std::map<float, mx::array> numbers;
  auto it = numbers.find(value);
  if (it != numbers.end()) {
    return it->second;
  }
  if (numbers.size() == MAX_NUMBERS) {
    numbers.clear();
  }
  return numbers.emplace(value, mx::array(value, mx::float32)).first->second;
}

mx::array param_array(
    const char* op,
    const char* name,
    const Param& param,
    std::optional<int> batch,
    mx::Stream s,
    bool (*ok)(float),
    const char* condition) {
  if (auto* value = std::get_if<float>(&param)) {
    if (!ok(*value)) {
      std::ostringstream msg;
      msg << "[" << op << "] " << name << " must be " << condition << " but is "
          << *value << ".";
      throw std::invalid_argument(msg.str());
    }
    return number(*value);
  }
  auto& x = std::get<mx::array>(param);
  if (x.ndim() != 0 && !(batch && x.shape() == mx::Shape{*batch})) {
    throw std::invalid_argument(
        std::string("[") + op + "] " + name + " must have shape ()" +
        (batch ? " or " + to_string(mx::Shape{*batch}) : "") +
        " but has shape " + to_string(x.shape()) + ".");
  }
  auto t = x.dtype();
  check_dtype(
      op,
      name,
      x,
      mx::issubdtype(t, mx::floating) || mx::issubdtype(t, mx::integer),
      "a real array");
  return mx::astype(x, mx::float32, s);
}

} // namespace

bool may_filter(const SamplingParams& params) {
  auto is = [](const Param& p, float off) {
    auto* value = std::get_if<float>(&p);
    return value && *value == off;
  };
  return !is(params.top_k, 0) || !is(params.top_p, 1) || !is(params.min_p, 0);
}

std::vector<mx::array> param_arrays(
    const char* op,
    const SamplingParams& params,
    std::optional<int> batch,
    mx::Stream s) {
  return {
      param_array(
          op,
          "temperature",
          params.temperature,
          batch,
          s,
          [](float x) { return x >= 0 && std::isfinite(x); },
          "finite and at least 0"),
      param_array(
          op,
          "top_k",
          params.top_k,
          batch,
          s,
          [](float x) { return x >= 0 && x == std::floor(x); },
          "a whole number and at least 0"),
      param_array(
          op,
          "top_p",
          params.top_p,
          batch,
          s,
          [](float x) { return x > 0 && x <= 1; },
          "in (0, 1]"),
      param_array(
          op,
          "min_p",
          params.min_p,
          batch,
          s,
          [](float x) { return x >= 0 && x <= 1; },
          "in [0, 1]")};
}

mx::array mask_array(
    const char* op,
    const mx::array& allowed,
    const mx::array& logits,
    mx::Stream s) {
  auto shape = logits.shape();
  shape.back() = (shape.back() + 31) / 32;
  check_shape(op, "allowed", allowed, shape);
  // llguidance and xgrammar write the same bits as int32.
  if (allowed.dtype() == mx::int32) {
    return mx::view(allowed, mx::uint32, s);
  }
  check_dtype(op, "allowed", allowed, allowed.dtype() == mx::uint32, "uint32");
  return allowed;
}

} // namespace mlx_mtp
