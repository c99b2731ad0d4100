// The Python face of ops.h: signatures and documentation only.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>

#include "ops.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mlx_mtp;

namespace {

bool temperature_first(const std::string& op, const std::string& order) {
  if (order != "temperature_first" && order != "temperature_last") {
    throw std::invalid_argument(
        "[" + op +
        "] filter_order must be 'temperature_first' or 'temperature_last' but "
        "is '" +
        order + "'.");
  }
  return order == "temperature_first";
}

} // namespace

NB_MODULE(_ext, m) {
  // Registers mx.array and loads libmlx before our types look them up.
  nb::module_::import_("mlx.core");

  m.def(
      "commit_rows",
      &commit_rows,
      "cache"_a,
      "rows"_a,
      "start"_a,
      "count"_a,
      nb::kw_only(),
      "ring"_a = 0,
      "stream"_a = nb::none(),
      nb::sig(
          "def commit_rows(cache: mlx.core.array, rows: mlx.core.array, "
          "start: mlx.core.array, count: mlx.core.array, *, ring: int = 0, "
          "stream: None | mlx.core.Stream | mlx.core.Device = None) "
          "-> mlx.core.array"));
}
