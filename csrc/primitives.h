// The graph nodes of the ops. Checks and construction are in ops/, evaluation
// in one file a backend and op.
#pragma once

#include "mlx/primitives.h"

namespace mlx_mtp {

namespace mx = mlx::core;

// inputs: cache, rows, start (int32), count (int32)
class CommitRows : public mx::UnaryPrimitive {
 public:
  CommitRows(mx::Stream stream, int ring)
      : mx::UnaryPrimitive(stream), ring_(ring) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override;
  void eval_gpu(const std::vector<mx::array>& inputs, mx::array& out) override;

  const char* name() const override {
    return "CommitRows";
  }
  bool is_equivalent(const mx::Primitive& other) const override;
  std::vector<mx::Shape> output_shapes(
      const std::vector<mx::array>& inputs) override {
    return {inputs[0].shape()};
  }

 private:
  int ring_;
};

// inputs: state, k, v, g, beta, steps (int32) and optionally q
// outputs: state, and y with q
class GatedDeltaReplay : public mx::Primitive {
 public:
  explicit GatedDeltaReplay(mx::Stream stream) : mx::Primitive(stream) {}

  void eval_cpu(
      const std::vector<mx::array>& inputs,
      std::vector<mx::array>& outputs) override;
  void eval_gpu(
      const std::vector<mx::array>& inputs,
      std::vector<mx::array>& outputs) override;

  const char* name() const override {
    return "GatedDeltaReplay";
  }
  bool is_equivalent(const mx::Primitive& other) const override {
    return true;
  }
  std::vector<mx::Shape> output_shapes(
      const std::vector<mx::array>& inputs) override;
};

// inputs: logits, uniforms, temperature, top_k, top_p, min_p, [allowed]
class Sample : public mx::Primitive {
 public:
  Sample(
      mx::Stream stream,
      bool temperature_first,
      bool filtered,
      bool has_allowed)
      : mx::Primitive(stream),
        temperature_first_(temperature_first),
        filtered_(filtered),
        has_allowed_(has_allowed) {}

  void eval_cpu(
      const std::vector<mx::array>& inputs,
      std::vector<mx::array>& outputs) override;
  void eval_gpu(
      const std::vector<mx::array>& inputs,
      std::vector<mx::array>& outputs) override;

  const char* name() const override {
    return "Sample";
  }
  bool is_equivalent(const mx::Primitive& other) const override;
  std::vector<mx::Shape> output_shapes(
      const std::vector<mx::array>& inputs) override;

 private:
  bool temperature_first_;
  bool filtered_; // false only if top_k, top_p and min_p are off in every row
  bool has_allowed_;
};

// inputs: target_logits, draft_tokens, seed, position, temperature, top_k,
// top_p, min_p, [draft_lengths], [allowed]
class VerifyCoupled : public mx::Primitive {
 public:
  VerifyCoupled(
      mx::Stream stream,
      bool temperature_first,
      bool filtered,
      bool has_lengths,
      bool has_allowed)
      : mx::Primitive(stream),
        temperature_first_(temperature_first),
        filtered_(filtered),
        has_lengths_(has_lengths),
        has_allowed_(has_allowed) {}

  void eval_cpu(
      const std::vector<mx::array>& inputs,
      std::vector<mx::array>& outputs) override;
  void eval_gpu(
      const std::vector<mx::array>& inputs,
      std::vector<mx::array>& outputs) override;

  const char* name() const override {
    return "VerifyCoupled";
  }
  bool is_equivalent(const mx::Primitive& other) const override;
  std::vector<mx::Shape> output_shapes(
      const std::vector<mx::array>& inputs) override;

 private:
  bool temperature_first_;
  bool filtered_; // as in Sample
  bool has_lengths_;
  bool has_allowed_;
};

// inputs: target_logits, draft_tokens, uniforms, temperature, top_k, top_p,
// min_p, draft_temperature, then those of `Optional` that are present, in order
class VerifyDraft : public mx::Primitive {
 public:
  struct Optional {
    bool draft_logits;
    bool draft_stats;
    bool draft_lengths;
    bool allowed;
    bool operator==(const Optional&) const = default;
  };

  VerifyDraft(
      mx::Stream stream,
      bool temperature_first,
      bool filtered,
      bool logprobs,
      Optional has)
      : mx::Primitive(stream),
        temperature_first_(temperature_first),
        filtered_(filtered),
        logprobs_(logprobs),
        has_(has) {}

  void eval_cpu(
      const std::vector<mx::array>& inputs,
      std::vector<mx::array>& outputs) override;
  void eval_gpu(
      const std::vector<mx::array>& inputs,
      std::vector<mx::array>& outputs) override;

  const char* name() const override {
    return "VerifyDraft";
  }
  bool is_equivalent(const mx::Primitive& other) const override;
  std::vector<mx::Shape> output_shapes(
      const std::vector<mx::array>& inputs) override;

 private:
  bool temperature_first_;
  bool filtered_; // as in Sample
  bool logprobs_;
  Optional has_;
};

} // namespace mlx_mtp
