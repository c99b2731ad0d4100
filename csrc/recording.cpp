#include "recording.h"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "gpu/encoder.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/stream.h"
#include "mlx/transforms.h"

namespace mlx_mtp {

namespace {

using Arrays = std::vector<mx::array>;
// Of arrays, by their ids.
using Numbers = std::unordered_map<std::uintptr_t, int>;

// Operations of a program. Only between nodes MLX holds back a thread that is
// far ahead of its stream.
constexpr size_t PROGRAM_STEPS = 48;

// Waits, whatever errors the stream has: the first call may raise one that is
// stored and not wait.
void drain(mx::Stream stream) {
  for (int i = 0; i < 2; ++i) {
    try {
      mx::synchronize(stream);
    } catch (const std::exception&) {
    }
  }
}

std::set<mx::Stream>& streams() {
  static thread_local std::set<mx::Stream> streams;
  return streams;
}

// One evaluation of a program.
class Run {
 public:
  Run(const Program& program, mx::Stream stream, Arrays inputs)
      : stream_(stream) {
    values_.reserve(inputs.size() + program.constants.size());
    std::move(inputs.begin(), inputs.end(), std::back_inserter(values_));
    values_.insert(
        values_.end(), program.constants.begin(), program.constants.end());
  }

  const mx::array& value(int i) const {
    return *values_[i];
  }

  void add(const Program::Step& step) {
    Arrays inputs;
    inputs.reserve(step.inputs.size());
    for (auto [value, last] : step.inputs) {
      inputs.push_back(*values_[value]);
      if (last) {
        values_[value].reset();
      }
    }
    // As in MLX every output has a list of the inputs: what nothing else holds
    // can be written over.
    Arrays outputs;
    for (size_t i = 0; i < step.shapes.size(); ++i) {
      outputs.emplace_back(
          step.shapes[i], step.dtypes[i], step.primitive, inputs);
    }
    inputs.clear();
    values_.insert(values_.end(), outputs.begin(), outputs.end());
    eval(outputs);
    keep(outputs[0].inputs(), outputs[step.read]);
    keep(outputs, outputs[step.read]);
    for (auto& x : outputs) {
      x.detach();
    }
  }

  // What was read and written stays until that is done.
  void finish() {
    if (on_gpu()) {
      gpu::Encoder(stream_).keep(used_);
      return;
    }
    auto& encoder = mx::cpu::get_command_encoder(stream_);
    encoder.dispatch(
        [used = used_, temporaries = std::move(encoder.temporaries())] {});
  }

 private:
  bool on_gpu() const {
    return stream_.device == mx::Device::gpu;
  }

  void eval(Arrays& outputs) {
    auto& primitive = outputs[0].primitive();
    if (on_gpu()) {
      primitive.eval_gpu(outputs[0].inputs(), outputs);
    } else {
      primitive.eval_cpu(outputs[0].inputs(), outputs);
    }
  }

  // Not this output: a step that reads it may write over it.
  void keep(const Arrays& arrays, const mx::array& output) {
    for (auto& x : arrays) {
      if (x.data_shared_ptr() != output.data_shared_ptr()) {
        used_.push_back(x.data_shared_ptr());
      }
    }
  }

  mx::Stream stream_;
  std::vector<std::optional<mx::array>> values_;
  std::vector<std::shared_ptr<mx::array::Data>> used_;
};

class RecordedProgram : public mx::Primitive {
 public:
  RecordedProgram(mx::Stream stream, Program program)
      : mx::Primitive(stream), program_(std::move(program)) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    eval(inputs, outputs);
  }
  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    eval(inputs, outputs);
  }

  const char* name() const override {
    return "RecordedProgram";
  }

 private:
  void eval(const Arrays& inputs, Arrays& outputs) {
    Run run(program_, stream(), take(inputs, outputs));
    try {
      for (auto& step : program_.steps) {
        run.add(step);
      }
      for (size_t i = 0; i < outputs.size(); ++i) {
        outputs[i].copy_shared_buffer(run.value(program_.outputs[i]));
      }
      run.finish();
    } catch (...) {
      drain(stream()); // before the buffers go
      throw;
    }
  }

  // MLX would keep the data of what is in these lists, as Run does.
  Arrays take(const Arrays& inputs, Arrays& outputs) const {
    if (int(inputs.size()) != program_.input_count) {
      throw std::runtime_error(
          "[Recorded] An evaluation of this array has failed before.");
    }
    auto taken = inputs;
    for (auto& x : outputs) {
      x.inputs().clear();
    }
    return taken;
  }

  Program program_;
};

// The operations between inputs and outputs in an order in which they can run:
// what the last output needs first, and each as late as it can be.
class Walk {
 public:
  Walk(const Arrays& inputs, const Arrays& outputs) {
    for (auto& x : inputs) {
      depends_.emplace(x.id(), true);
    }
    for (auto out = outputs.rbegin(); out != outputs.rend(); ++out) {
      enter(*out);
      while (!stack_.empty()) {
        auto& [node, visited] = stack_.back();
        if (visited < node.inputs().size()) {
          auto next = node.inputs()[visited++];
          enter(next);
        } else {
          leave(node);
          stack_.pop_back();
        }
      }
    }
  }

  Arrays nodes;
  Arrays constants; // what depends on no input

 private:
  void enter(const mx::array& x) {
    bool lazy =
        x.status() == mx::array::Status::unscheduled && x.has_primitive();
    if (lazy && depends_.emplace(x.id(), false).second) {
      for (auto& sibling : x.siblings()) {
        depends_.emplace(sibling.id(), false);
      }
      stack_.emplace_back(x, 0);
    }
  }

  void leave(const mx::array& node) {
    auto& in = node.inputs();
    bool depends = std::any_of(in.begin(), in.end(), [&](auto& x) {
      auto found = depends_.find(x.id());
      return found != depends_.end() && found->second;
    });
    (depends ? nodes : constants).push_back(node);
    for (auto& x : node.outputs()) {
      depends_[x.id()] = depends;
    }
  }

  std::unordered_map<std::uintptr_t, bool> depends_;
  std::vector<std::pair<mx::array, size_t>> stack_; // with the inputs visited
};

bool can_record(const Arrays& nodes) {
  if (nodes.empty()) {
    return false;
  }
  auto stream = nodes[0].primitive().stream();
  bool one = std::all_of(nodes.begin(), nodes.end(), [&](auto& node) {
    return node.primitive().stream() == stream;
  });
  return one && Recording::is_available(stream.device);
}

// The index of the last node that reads an array, or the number of nodes for an
// output.
Numbers last_readers(const Arrays& nodes, const Arrays& outputs) {
  Numbers last;
  for (size_t i = 0; i < nodes.size(); ++i) {
    for (auto& x : nodes[i].inputs()) {
      last[x.id()] = i;
    }
  }
  for (auto& x : outputs) {
    last[x.id()] = nodes.size();
  }
  return last;
}

// A program of the nodes from begin to end, with what it takes and gives.
struct Builder {
  Program program;
  Arrays inputs;
  Arrays outputs;

  // `known` has the arrays of the recording that are no constants.
  Builder(
      const Arrays& nodes,
      size_t begin,
      size_t end,
      const Numbers& known,
      const Numbers& last_readers)
      : last_readers_(last_readers) {
    find_inputs(nodes, begin, end, known);
    number_inputs();
    for (size_t i = begin; i < end; ++i) {
      program.steps.push_back(step(nodes[i], i));
      add_outputs(nodes[i], end);
    }
  }

 private:
  void find_inputs(
      const Arrays& nodes,
      size_t begin,
      size_t end,
      const Numbers& known) {
    Numbers seen;
    for (size_t i = begin; i < end; ++i) {
      for (auto& x : nodes[i].inputs()) {
        last_[x.id()] = i;
        if (seen.emplace(x.id(), 0).second) {
          (known.count(x.id()) ? inputs : program.constants).push_back(x);
        }
      }
      for (auto& x : nodes[i].outputs()) {
        seen.emplace(x.id(), 0);
      }
    }
  }

  void number_inputs() {
    for (auto& x : inputs) {
      number(x);
    }
    program.input_count = inputs.size();
    for (auto x : program.constants) {
      x.wait(); // they are no inputs, for which MLX would wait
      number(x);
    }
  }

  void number(const mx::array& x) {
    int next = numbers_.size();
    numbers_.emplace(x.id(), next);
  }

  Program::Step step(const mx::array& node, int index) {
    Program::Step step = {node.primitive_ptr(), {}, {}, {}, 0};
    auto& in = node.inputs();
    for (auto x = in.begin(); x != in.end(); ++x) {
      bool again = std::any_of(
          x + 1, in.end(), [&](auto& y) { return y.id() == x->id(); });
      bool last = last_.at(x->id()) == index && !again;
      step.inputs.push_back({numbers_.at(x->id()), last});
    }
    for (auto& x : node.outputs()) {
      if (last_readers_.count(x.id())) {
        step.read = step.shapes.size();
      }
      step.shapes.push_back(x.shape());
      step.dtypes.push_back(x.dtype());
    }
    return step;
  }

  void add_outputs(const mx::array& node, int end) {
    for (auto& x : node.outputs()) {
      number(x);
      auto reader = last_readers_.find(x.id());
      if (reader != last_readers_.end() && reader->second >= end) {
        last_[x.id()] = end;
        outputs.push_back(x);
        program.outputs.push_back(numbers_.at(x.id()));
      }
    }
  }

  const Numbers& last_readers_;
  Numbers numbers_; // of the values of the program
  Numbers last_; // who reads them last, `end` if they stay
};

} // namespace

bool Recording::is_available(mx::Device device) {
  return device == mx::Device::cpu || gpu::Encoder::can_keep();
}

void Recording::synchronize() {
  for (auto stream : streams()) {
    drain(stream);
  }
}

std::optional<Recording> Recording::make(
    const std::vector<mx::array>& inputs,
    const std::vector<mx::array>& outputs) {
  Walk walk(inputs, outputs);
  auto& nodes = walk.nodes;
  if (!can_record(nodes)) {
    return std::nullopt;
  }
  mx::eval(walk.constants);
  auto stream = nodes[0].primitive().stream();
  streams().insert(stream);
  auto last = last_readers(nodes, outputs);
  Numbers numbers;
  int count = 0;
  for (auto& x : inputs) {
    numbers.emplace(x.id(), count++);
  }
  Recording out;
  for (size_t begin = 0; begin < nodes.size(); begin += PROGRAM_STEPS) {
    auto end = std::min(begin + PROGRAM_STEPS, nodes.size());
    Builder built(nodes, begin, end, numbers, last);
    Part part;
    for (auto& x : built.inputs) {
      part.inputs.push_back(numbers.at(x.id()));
    }
    for (auto& x : built.outputs) {
      numbers.emplace(x.id(), count++);
      part.shapes.push_back(x.shape());
      part.dtypes.push_back(x.dtype());
    }
    part.program =
        std::make_shared<RecordedProgram>(stream, std::move(built.program));
    out.parts_.push_back(std::move(part));
  }
  for (auto& x : outputs) {
    if (numbers.emplace(x.id(), count).second) {
      out.constants_.push_back(x);
      ++count;
    }
    out.outputs_.push_back(numbers.at(x.id()));
  }
  return out;
}

std::vector<mx::array> Recording::operator()(
    std::vector<mx::array> inputs) const {
  auto values = std::move(inputs);
  auto take = [&](const std::vector<int>& numbers) {
    Arrays taken;
    taken.reserve(numbers.size());
    for (int i : numbers) {
      taken.push_back(values[i]);
    }
    return taken;
  };
  for (auto& part : parts_) {
    auto made = mx::array::make_arrays(
        part.shapes, part.dtypes, part.program, take(part.inputs));
    values.insert(values.end(), made.begin(), made.end());
  }
  values.insert(values.end(), constants_.begin(), constants_.end());
  return take(outputs_);
}

} // namespace mlx_mtp
