// Cached calls. If a call has the same shapes, strides, score, mask and normalizer as an earlier one, and torch's state
// allows it, the call runs here without executing Python code.
//
// Nothing here links against torch. Its state is read with torch's own Python functions, and shapes, strides and
// addresses with the functions of DLPack's C exchange API, which torch publishes as Tensor.__dlpack_c_exchange_api__.
#pragma once

#include <nanobind/nanobind.h>

#include <cstring>
#include <memory>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "abi.h"

namespace regard {

namespace nb = nanobind;

// The parts of DLPack 1.x that are used here: https://github.com/dmlc/dlpack, include/dlpack/dlpack.h.
struct DLTensor {
  void* data;
  int32_t device_type, device_id, ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};

struct DLExchange {
  uint32_t major, minor;
  DLExchange* previous;
  void *allocate, *export_owning, *import_owning;
  int (*export_borrowed)(void* object, DLTensor* out);
  void* current_stream;
};

class Calls {
 public:
  // Positions of a call's tensors inside its Problem, in the order query, key, value, output, tau,
  // kept_weights.
  static constexpr size_t TENSORS_OF_A_CALL = 6;

  // state: torch's functions and constants, by name (see `torch_state.probes`), and "weights", the class of lazy
  // weights.
  explicit Calls(const nb::dict& state) {
    const auto get = [&](const char* name) { return nb::object(state[name]); };
    for (const nb::handle type : get("types")) types_.push_back(nb::borrow(type));
    for (const nb::handle keys : get("plain_keys")) plain_keys_.push_back(nb::cast<uint64_t>(keys));
    for (const nb::handle probe : get("probes")) probes_.push_back(nb::borrow(probe));
    forward_ad_ = get("forward_ad");
    dispatch_keys_ = get("dispatch_keys");
    grad_enabled_ = get("is_grad_enabled");
    num_threads_ = get("get_num_threads");
    new_empty_ = get("new_empty_strided");
    level_ = nb::str("_current_level");
    raw_repr_ = nb::str("raw_repr");
    requires_grad_ = nb::str("requires_grad");
    weights_ = get("weights");
    version_ = interned("_version");
    lead_ = interned("_lead");
    heads_ = interned("_heads");
    single_ = interned("single");
    deferred_ = interned("_deferred");
    const nb::object api = get("dlpack");
    auto* exchange = static_cast<DLExchange*>(PyCapsule_GetPointer(api.ptr(), "dlpack_exchange_api"));
    if (!exchange) throw nb::python_error();
    while (exchange && exchange->major != 1) exchange = exchange->previous;
    if (!exchange || !exchange->export_borrowed) throw std::invalid_argument("torch does not support DLPack 1");
    export_ = exchange->export_borrowed;
  }

  // Adds a call. prepared: an object that `run` returns with τ; its attributes `weights` and `lead` are the problem and
  // the leading axes of the lazy weights. shapes: shape and strides of output, τ and kept weights, in this order; None
  // if no weights are kept.
  void add(nb::handle query, nb::handle key, nb::handle value, nb::handle score, nb::handle mask, nb::handle normalize,
           const Problem& problem, const std::vector<ptrdiff_t>& offsets, nb::handle prepared, nb::handle shapes,
           int lanes) {
    if (offsets.size() != TENSORS_OF_A_CALL) throw std::invalid_argument("a cached call has six tensors");
    Signature signature;
    char* data[3];
    if (!signature.read(export_, query, key, value, data)) return;
    auto call = std::make_shared<Call>();
    call->signature = signature;
    for (const nb::handle part : {score, mask, normalize}) call->parts.push_back(nb::borrow(part));
    call->problem = problem;
    std::memcpy(call->offsets, offsets.data(), sizeof call->offsets);
    call->prepared = nb::borrow(prepared);
    call->weights = nb::object(prepared.attr("weights"));
    call->lead = nb::object(prepared.attr("lead"));
    call->lanes = lanes;
    for (const nb::handle shape : shapes) call->shapes.push_back(nb::borrow(shape));
    if (call->shapes.size() != 6)
      throw std::invalid_argument("a cached call has three results, each with shape and strides");
    calls_.emplace(signature.hash, std::move(call));
  }

  void clear() {
    const auto calls = std::move(calls_);  // destructors may run Python code, which may use this cache
    calls_.clear();
  }

  // Runs a call. Returns None if the call is not cached, needs the general path, or produces an output that is not
  // finite. Otherwise returns (output, τ, prepared, True, kept weights or None) if a gradient is needed, else (output,
  // lazy weights) if `need_tau` is set, else the output alone.
  nb::object run(const Kernels* kernels, nb::handle query, nb::handle key, nb::handle value, nb::handle score,
                 nb::handle mask, nb::handle normalize, bool need_tau) const {
    Signature signature;
    char* data[TENSORS_OF_A_CALL] = {};
    if (calls_.empty() || !plain_state() || !plain(query) || (!key.is(query) && !plain(key)) ||
        (!value.is(key) && !value.is(query) && !plain(value)) || !signature.read(export_, query, key, value, data))
      return nb::none();
    const std::shared_ptr<const Call> call = find(signature, score, mask, normalize);
    if (!call) return nb::none();
    const bool grad_enabled = truth(ask(grad_enabled_));
    const bool needs_grad = grad_enabled && (requires_grad(query) || requires_grad(key) || requires_grad(value));
    const nb::object output = empty(query, call->shapes[0], call->shapes[1], &data[3]);
    const bool with_tau = need_tau || needs_grad;
    const nb::object tau = with_tau ? empty(query, call->shapes[2], call->shapes[3], &data[4]) : nb::none();
    nb::object kept = nb::none();
    if (needs_grad && kernels->lanes == call->lanes && !call->shapes[4].is_none())
      kept = empty(query, call->shapes[4], call->shapes[5], &data[5]);
    const int threads = nb::cast<int>(ask(num_threads_));
    nb::object weights;
    if (need_tau && !needs_grad) weights = make_weights(*call, tau, query, key, grad_enabled);
    if (!compute(kernels, *call, data, threads)) return nb::none();
    if (needs_grad) return nb::make_tuple(output, tau, call->prepared, true, kept);
    return need_tau ? nb::object(nb::make_tuple(output, weights)) : output;
  }

 private:
  using Export = int (*)(void*, DLTensor*);

  // Shapes, strides and types of query, key and value.
  struct Signature {
    static constexpr int MAX_AXES = MAX_LEAD + 2;
    int64_t numbers[3 * (2 + 2 * MAX_AXES)];
    size_t size = 0;
    uint64_t hash = 14695981039346656037u;  // FNV-1a, by words

    // Reads three tensors and their addresses. Returns false if a tensor is not a dense array in memory.
    bool read(Export export_borrowed, nb::handle query, nb::handle key, nb::handle value, char** data) {
      for (const nb::handle tensor : {query, key, value}) {
        DLTensor t;
        if (export_borrowed(tensor.ptr(), &t) != 0) {
          PyErr_Clear();
          return false;
        }
        if (t.ndim > MAX_AXES || t.device_type != 1 || !t.data || (t.ndim && !t.strides)) return false;  // 1: the CPU
        add(int64_t(t.code) << 32 | int64_t(t.lanes) << 8 | t.bits);
        add(t.ndim);
        for (int i = 0; i < t.ndim; ++i) add(t.shape[i]);
        for (int i = 0; i < t.ndim; ++i) add(t.strides[i]);
        *data++ = static_cast<char*>(t.data) + t.byte_offset;
      }
      return true;
    }
    void add(int64_t number) {
      numbers[size++] = number;
      hash = (hash ^ uint64_t(number)) * 1099511628211u;
    }
    bool operator==(const Signature& other) const {
      return size == other.size && std::memcmp(numbers, other.numbers, size * sizeof *numbers) == 0;
    }
  };

  struct Call {
    Signature signature;
    std::vector<nb::object> parts;  // score, mask, normalizer
    Problem problem;
    ptrdiff_t offsets[TENSORS_OF_A_CALL];
    nb::object prepared, weights, lead;
    std::vector<nb::object> shapes;
    int lanes;  // vector width for which the shape of the kept weights was determined
  };

  static bool compute(const Kernels* kernels, const Call& call, char** data, int threads) {
    Problem p = call.problem;  // other threads may run the same call
    for (size_t i = 0; i < TENSORS_OF_A_CALL; ++i)
      reinterpret_cast<View*>(reinterpret_cast<char*>(&p) + call.offsets[i])->data = data[i];
    nb::gil_scoped_release release;
    return kernels->forward(p, threads);
  }

  std::shared_ptr<const Call> find(const Signature& signature, nb::handle score, nb::handle mask,
                                   nb::handle normalize) const {
    const PyObject* parts[] = {score.ptr(), mask.ptr(), normalize.ptr()};
    const auto [first, last] = calls_.equal_range(signature.hash);
    std::vector<std::shared_ptr<const Call>> candidates;
    for (auto at = first; at != last; ++at) {
      const auto& call = at->second;
      if (!(call->signature == signature)) continue;
      bool same = true, alike = true;
      for (int i = 0; i < 3; ++i) {
        same &= call->parts[i].ptr() == parts[i];
        alike &= Py_TYPE(call->parts[i].ptr()) == Py_TYPE(const_cast<PyObject*>(parts[i]));
      }
      if (same) return call;
      if (alike) candidates.push_back(call);
    }
    // comparisons run Python code, which may change the cache
    for (const auto& call : candidates)
      if (call->parts[0].equal(score) && call->parts[1].equal(mask) && call->parts[2].equal(normalize)) return call;
    return nullptr;
  }

  // Whether no dispatch mode, transform, tracing, autocast or forward-mode AD is active.
  bool plain_state() const {
    for (const nb::object& probe : probes_) {
      const nb::object result = ask(probe);
      if (!result.is_none() && truth(result)) return false;
    }
    const nb::object level = nb::steal(PyObject_GetAttr(forward_ad_.ptr(), level_.ptr()));
    if (!level.is_valid()) {
      PyErr_Clear();
      return false;
    }
    return nb::cast<int>(level) < 0;
  }

  // Whether this is a dense CPU tensor: not negated, batched, functional, sparse, nested or of another class.
  bool plain(nb::handle tensor) const {
    bool known = false;
    for (const nb::object& type : types_) known |= reinterpret_cast<PyTypeObject*>(type.ptr()) == Py_TYPE(tensor.ptr());
    if (!known) return false;
    PyObject* arguments[] = {tensor.ptr()};
    const nb::object keys = checked(PyObject_Vectorcall(dispatch_keys_.ptr(), arguments, 1, nullptr));
    PyObject* self[] = {keys.ptr()};
    const nb::object number = checked(PyObject_VectorcallMethod(raw_repr_.ptr(), self, 1, nullptr));
    const uint64_t raw = nb::cast<uint64_t>(number);
    for (const uint64_t plain : plain_keys_)
      if (raw == plain) return true;
    return false;
  }

  bool requires_grad(nb::handle tensor) const {
    return truth(checked(PyObject_GetAttr(tensor.ptr(), requires_grad_.ptr())));
  }

  // Allocates a float32 tensor and writes its address. Calls query.new_empty: torch.empty uses the default device.
  nb::object empty(nb::handle query, const nb::object& shape, const nb::object& strides, char** data) const {
    PyObject* arguments[] = {query.ptr(), shape.ptr(), strides.ptr()};
    nb::object tensor = checked(PyObject_Vectorcall(new_empty_.ptr(), arguments, 3, nullptr));
    DLTensor t;
    if (export_(tensor.ptr(), &t) != 0) throw nb::python_error();
    if (!t.data) throw std::runtime_error("torch allocated a result without memory");
    *data = static_cast<char*>(t.data) + t.byte_offset;
    return tensor;
  }

  // Creates the lazy weights, as `Weights.of_cached_call` does. After each call, the kernels have evicted Python's code
  // from the CPU caches, so running it would take longer than these few functions.
  nb::object make_weights(const Call& call, const nb::object& tau, nb::handle query, nb::handle key,
                          bool grad_enabled) const {
    const nb::object weights = checked(PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(weights_.ptr()), 0));
    const nb::object versions = nb::make_tuple(version(query), version(key));
    set(weights, lead_, call.lead);
    if (PyTuple_Size(call.lead.ptr()) == 0) set(weights, heads_, single_);
    set(weights, deferred_, nb::make_tuple(call.weights, tau, query, key, versions, grad_enabled));
    return weights;
  }

  // Returns a tensor's version counter, or None for an inference tensor, which has none.
  nb::object version(nb::handle tensor) const {
    PyObject* number = PyObject_GetAttr(tensor.ptr(), version_.ptr());
    if (number) return nb::steal(number);
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) throw nb::python_error();
    PyErr_Clear();
    return nb::none();
  }

  static void set(const nb::object& object, const nb::object& name, const nb::object& value) {
    if (PyObject_SetAttr(object.ptr(), name.ptr(), value.ptr()) != 0) throw nb::python_error();
  }
  static nb::object interned(const char* name) { return checked(PyUnicode_InternFromString(name)); }
  static nb::object checked(PyObject* result) {
    if (!result) throw nb::python_error();
    return nb::steal(result);
  }
  static nb::object ask(const nb::object& function) {
    return checked(PyObject_Vectorcall(function.ptr(), nullptr, 0, nullptr));
  }
  static bool truth(const nb::object& object) {
    if (object.ptr() == Py_True || object.ptr() == Py_False) return object.ptr() == Py_True;
    const int result = PyObject_IsTrue(object.ptr());
    if (result < 0) throw nb::python_error();
    return result != 0;
  }

  std::vector<nb::object> types_, probes_;
  std::vector<uint64_t> plain_keys_;
  nb::object forward_ad_, dispatch_keys_, grad_enabled_, num_threads_, new_empty_, level_, raw_repr_, requires_grad_;
  nb::object weights_, version_, lead_, heads_, single_, deferred_;
  Export export_ = nullptr;
  std::unordered_multimap<uint64_t, std::shared_ptr<const Call>> calls_;
};

}  // namespace regard
