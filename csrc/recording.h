// A graph that is built once and evaluated again and again.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "mlx/array.h"
#include "mlx/stream.h"

namespace mlx_mtp {

namespace mx = mlx::core;

// Operations in the order in which they run. Their values are numbered: the
// inputs, the constants, then what each step makes.
struct Program {
  struct Input {
    int value;
    bool last; // no step reads it again
  };
  struct Step {
    std::shared_ptr<mx::Primitive> primitive;
    std::vector<Input> inputs;
    std::vector<mx::Shape> shapes; // of the outputs
    std::vector<mx::Dtype> dtypes;
    int read; // an output that something reads
  };

  int input_count;
  std::vector<mx::array> constants;
  std::vector<Step> steps;
  std::vector<int> outputs;
};

// The way from inputs to outputs of a lazy graph, cut into programs. A call
// makes one node of each, so that MLX neither builds the nodes in it nor walks
// over them: of a small model that is much of the host's work. The results are
// those of the graph, bit by bit. What depends on no input is evaluated once,
// and held.
class Recording {
 public:
  // Not on Metal.
  static bool is_available(mx::Device device);

  // Nothing where it is not available or the operations are on several streams.
  static std::optional<Recording> make(
      const std::vector<mx::array>& inputs,
      const std::vector<mx::array>& outputs);

  // Waits for all streams that recordings of this thread have, whatever their
  // errors.
  static void synchronize();

  // Lazy outputs for inputs of the same shapes and dtypes.
  std::vector<mx::array> operator()(std::vector<mx::array> inputs) const;

 private:
  struct Part {
    std::shared_ptr<mx::Primitive> program;
    std::vector<int> inputs;
    std::vector<mx::Shape> shapes; // of the outputs
    std::vector<mx::Dtype> dtypes;
  };

  // Values are numbered: the inputs, what each part makes, the constants.
  std::vector<Part> parts_;
  std::vector<mx::array> constants_; // that are outputs
  std::vector<int> outputs_;
};

} // namespace mlx_mtp
