// GPU evaluation of builds without a GPU backend.
#include <stdexcept>
#include <string>

#include "primitives.h"

namespace mlx_mtp {

namespace {

[[noreturn]] void no_gpu(const std::string& op) {
  throw std::runtime_error(
      "[" + op +
      "] This build of mlx-mtp has no GPU kernels. Pass stream=mx.cpu or call "
      "mx.set_default_device(mx.cpu) first.");
}

} // namespace

void CommitRows::eval_gpu(const std::vector<mx::array>&, mx::array&) {
  no_gpu("commit_rows");
}

void GatedDeltaReplay::eval_gpu(
    const std::vector<mx::array>&,
    std::vector<mx::array>&) {
  no_gpu("gated_delta_replay");
}

void Sample::eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) {
  no_gpu("sample");
}

void VerifyDraft::eval_gpu(
    const std::vector<mx::array>&,
    std::vector<mx::array>&) {
  no_gpu("verify_draft");
}

} // namespace mlx_mtp
