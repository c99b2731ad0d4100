#include "ops.h"
#include "ops/checks.h"
#include "primitives.h"

namespace mlx_mtp {

mx::array commit_rows(
    const mx::array& cache,
    const mx::array& rows,
    const mx::array& start,
    const mx::array& count,
    int ring,
    mx::StreamOrDevice s_) {
  const char* op = "commit_rows";
  check_shape(op, "cache", cache, {{"B"}, {"H"}, {"S"}, {"D"}});
  int B = cache.shape(0);
  int S = cache.shape(2);
  check_shape(
      op,
      "rows",
      rows,
      {{"B", B}, {"H", cache.shape(1)}, {"T"}, {"D", cache.shape(3)}});
  check_shape(op, "start", start, {{"B", B}});
  check_shape(op, "count", count, {{"B", B}});
  if (rows.dtype() != cache.dtype()) {
    std::ostringstream msg;
    msg << "[commit_rows] rows must have the dtype of cache, " << cache.dtype()
        << ", but is " << rows.dtype() << ".";
    throw std::invalid_argument(msg.str());
  }
  if (ring < 0 || ring > S) {
    std::ostringstream msg;
    msg << "[commit_rows] ring must be between 0 and the " << S
        << " slots of cache but is " << ring << ".";
    throw std::invalid_argument(msg.str());
  }

  auto stream = mx::to_stream(s_);
  return mx::array(
      cache.shape(),
      cache.dtype(),
      std::make_shared<CommitRows>(stream, ring),
      {cache,
       rows,
       to_int32(op, "start", start, stream),
       to_int32(op, "count", count, stream)});
}

bool CommitRows::is_equivalent(const mx::Primitive& other) const {
  return ring_ == static_cast<const CommitRows&>(other).ring_;
}

} // namespace mlx_mtp
