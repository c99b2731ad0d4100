// The Python face of recording.h: trees of arrays in, trees of arrays out.
#include "recordings.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "mlx/ops.h"
#include "mlx/utils.h"
#include "recording.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mlx_mtp;

namespace {

enum Kind { ARRAY, NONE, DICT, LIST, TUPLE, NAMED_TUPLE, OTHER };

Kind kind_of(nb::handle tree) {
  if (PyDict_CheckExact(tree.ptr())) {
    return DICT;
  }
  if (PyList_CheckExact(tree.ptr())) {
    return LIST;
  }
  if (PyTuple_CheckExact(tree.ptr())) {
    return TUPLE;
  }
  if (tree.is_none()) {
    return NONE;
  }
  if (nb::isinstance<mx::array>(tree)) {
    return ARRAY;
  }
  if (nb::isinstance<nb::tuple>(tree) && nb::hasattr(tree, "_fields")) {
    return NAMED_TUPLE;
  }
  return OTHER;
}

struct Depth {
  Depth() {
    if (Py_EnterRecursiveCall(" in a tree of arrays")) {
      throw nb::python_error();
    }
  }
  ~Depth() {
    Py_LeaveRecursiveCall();
  }
};

// A tree like this one, with f(array) in place of its arrays.
template <typename F>
nb::object map_arrays(nb::handle tree, F& f) {
  Depth depth;
  switch (auto kind = kind_of(tree)) {
    case ARRAY:
      return f(nb::cast<mx::array>(tree));
    case NONE:
    case OTHER:
      return nb::borrow(tree);
    case DICT: {
      nb::dict out;
      for (auto [key, value] : nb::borrow<nb::dict>(tree)) {
        out[key] = map_arrays(value, f);
      }
      return out;
    }
    default: {
      nb::list out;
      for (auto value : tree) {
        out.append(map_arrays(value, f));
      }
      if (kind == LIST) {
        return out;
      }
      return kind == TUPLE ? nb::tuple(out) : tree.type()(*out);
    }
  }
}

// The arrays of a tree, and what a recording depends on besides their values:
// the tree, shapes, dtypes and the stream.
struct Flat {
  explicit Flat(nb::handle tree) {
    auto stream = mx::default_stream(mx::default_device());
    signature = {stream.index, stream.device == mx::Device::gpu};
    add(tree);
  }

  std::vector<int64_t> signature;
  std::vector<mx::array> arrays;
  bool complete = true; // the tree has arrays and None only

 private:
  void add(nb::handle tree) {
    Depth depth;
    auto kind = kind_of(tree);
    signature.push_back(kind);
    switch (kind) {
      case ARRAY:
        add(nb::cast<const mx::array&>(tree));
        return;
      case NONE:
        return;
      case OTHER:
        complete = false;
        return;
      case DICT:
        signature.push_back(nb::len(tree));
        for (auto [key, value] : nb::borrow<nb::dict>(tree)) {
          complete &= nb::isinstance<nb::str>(key);
          signature.push_back(nb::hash(key));
          add(value);
        }
        return;
      case NAMED_TUPLE:
        signature.push_back(reinterpret_cast<intptr_t>(tree.type().ptr()));
        [[fallthrough]];
      default:
        signature.push_back(nb::len(tree));
        for (auto value : tree) {
          add(value);
        }
    }
  }

  void add(const mx::array& x) {
    signature.push_back(int(x.dtype().val()));
    signature.push_back(x.ndim());
    signature.insert(signature.end(), x.shape().begin(), x.shape().end());
    arrays.push_back(x);
  }
};

// Whether mx.grad, mx.vmap or mx.compile is at work in this thread.
bool in_transformation() {
  mx::array probe(0.0f);
  probe.set_tracer(true);
  return probe.is_tracer();
}

// The recordings of one function in one thread.
class Recordings {
 public:
  // function(*args), recorded when its arguments are the first of their kind.
  nb::object call(nb::handle function, nb::handle args) {
    if (in_transformation() || !Recording::is_available(mx::default_device())) {
      return function(*args);
    }
    Flat flat(args);
    if (!flat.complete) {
      return function(*args);
    }
    auto it = found_.find(flat.signature);
    if (it == found_.end()) {
      return record(function, args, std::move(flat.signature));
    }
    if (!it->second) {
      return function(*args);
    }
    auto& [recording, tree] = *it->second;
    auto outputs = recording(std::move(flat.arrays));
    auto next = outputs.begin();
    auto fill = [&](const mx::array&) { return nb::cast(*next++); };
    return map_arrays(tree, fill);
  }

 private:
  // Every argument is an array of its own in the graph, whatever else it is
  // outside.
  nb::object
  record(nb::handle function, nb::handle args, std::vector<int64_t> signature) {
    std::vector<mx::array> inputs;
    auto own = [&](const mx::array& x) {
      inputs.push_back(mx::stop_gradient(x));
      return nb::cast(inputs.back());
    };
    auto result = function(*map_arrays(args, own));
    bool evaluated =
        std::any_of(inputs.begin(), inputs.end(), [](const mx::array& x) {
          return x.status() != mx::array::Status::unscheduled;
        });
    auto& entry = found_[std::move(signature)];
    Flat flat(result);
    if (evaluated || !flat.complete) {
      return result;
    }
    if (auto recording = Recording::make(inputs, flat.arrays)) {
      auto any = nb::cast(mx::array(0.0f));
      auto same = [&](const mx::array&) { return any; };
      entry.emplace(std::move(*recording), map_arrays(result, same));
    }
    return result;
  }

  // Nothing for what cannot be recorded. The tree of a result has any array in
  // place of its arrays.
  using Entry = std::optional<std::pair<Recording, nb::object>>;
  std::map<std::vector<int64_t>, Entry> found_;
};

} // namespace

void bind_recordings(nb::module_& m) {
  nb::class_<Recordings>(
      m,
      "Recordings",
      nb::is_weak_referenceable(),
      "The recorded graphs of one function, see ``Recorded``.")
      .def(nb::init<>())
      .def(
          "call",
          &Recordings::call,
          "function"_a,
          "args"_a,
          "``function(*args)``, by a recording where there is one.")
      .def_static(
          "synchronize",
          &Recording::synchronize,
          "Wait for the streams that recordings of this thread have.");
}
