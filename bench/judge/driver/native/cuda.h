// Invocations on a GPU, a batch at a time, each on a set of inputs of its own, which the judge fills while this process
// stands still and the device is idle. When it is idle again this process stands still.
//
// A batch is captured as CUDA graphs where it can be. They are launched before their inputs are there, and wait on the GPU
// for a gate that the judge opens: what is timed then is the graphs alone, while no code of the Solution's runs on the
// host. What cannot be captured is launched, and the host's time counts where the GPU waits for it.
//
// Outputs stay where the Solution made them, as on the CPU: torch has their memory from a pool that the judge can read.
// What lies elsewhere, in memory of the Solution's own, is copied to there in its time.
#pragma once

#include <algorithm>
#include <optional>

#include "place.h"
#include "runtime.h"
#include "shared_memory.h"

namespace kcap {

constexpr uint32_t METHOD_GRAPH = 1;
constexpr uint32_t MOST_IN_GRAPH = 256;  // invocations: where they join streams, to end a capture takes the cube of that
constexpr size_t GATE = 512;  // bytes of the arena for each of the gate's two words, behind the sets

// Python's side of it: functions of torch's, taken before any code from elsewhere ran. All but `make_pool` are written
// in C++; what lies in a pool of another making is in no piece that the judge knows.
struct Torch {
  int device;
  void *stream, *first;  // raw handles: of the stream that graphs are captured and replayed on, and where captures begin
  PyObject *set_stream, *own, *origin, *usual;  // sets a stream by its keywords: of those two, and of the default one
  PyObject *make_graph, *begin, *end, *replay, *empty_cache;
  PyObject *make_pool, *begin_pool, *end_pool, *release_pool;  // pools of outputs; what is allocated is from one

  explicit Torch(PyObject* given) {
    PyObject* values[16];
    for (int i = 0; i < 16; ++i) values[i] = PyTuple_GetItem(given, i);
    device = int(PyLong_AsLong(values[0]));
    stream = reinterpret_cast<void*>(PyLong_AsSize_t(values[1]));
    first = reinterpret_cast<void*>(PyLong_AsSize_t(values[2]));
    set_stream = values[3], own = values[4], origin = values[5], usual = values[6], make_graph = values[7];
    begin = values[8], end = values[9], replay = values[10], empty_cache = values[11];
    make_pool = values[12], begin_pool = values[13], end_pool = values[14], release_pool = values[15];
  }

  void use(PyObject* which) const {
    Owned none(PyTuple_New(0));
    Owned done(PyObject_Call(set_stream, none.object, which));
    if (!done.object) throw std::runtime_error("torch cannot set its stream: " + exception());
  }

  // As Python would: `function(*arguments)`.
  static Owned call(PyObject* function, std::initializer_list<PyObject*> arguments, const char* what) {
    Owned given(PyTuple_New(Py_ssize_t(arguments.size())));
    Py_ssize_t i = 0;
    for (auto* one : arguments) Py_INCREF(one), PyTuple_SET_ITEM(given.object, i++, one);
    Owned done(PyObject_CallObject(function, given.object));
    if (!done.object) throw std::runtime_error(std::string(what) + ": " + exception());
    return done;
  }
};

// Where torch has the outputs of one Workload from. Its memory goes with it.
struct Pool {
  Owned pool, id;

  Pool() = default;
  explicit Pool(const Torch& torch)
      : pool(Torch::call(torch.make_pool, {}, "torch's memory pool")), id(PyObject_GetAttrString(pool.object, "id")) {
    if (!id.object) throw std::runtime_error("torch's memory pool: " + exception());
  }
};

// For as long as it lives, what this thread allocates comes from the pool of outputs.
class FromPool {
 public:
  FromPool(const Torch& torch, const Pool& pool)
      : torch_(torch), pool_(pool), device_(PyLong_FromLong(torch.device)) {
    Torch::call(torch.begin_pool, {device_.object, pool.id.object}, "torch's memory pool");
  }
  FromPool(const FromPool&) = delete;
  ~FromPool() {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    for (auto* function : {torch_.end_pool, torch_.release_pool})
      Owned(PyObject_CallFunctionObjArgs(function, device_.object, pool_.id.object, nullptr));
    PyErr_Clear();
    PyErr_Restore(type, value, traceback);
  }

 private:
  const Torch& torch_;
  const Pool& pool_;
  Owned device_;
};

class Cuda : public Place {
 public:
  // `arena`: the descriptor of the sets; `addresses`: of each output of each invocation, and of the arena.
  Cuda(const Workload& workload, int arena, uint64_t* addresses, const Runtime& cuda, const VirtualMemory& memory,
       const Torch& torch)
      : workload_(workload), addresses_(addresses), cuda_(cuda), memory_(memory), torch_(torch),
        sets_(workload, at::Device(at::kCUDA, c10::DeviceIndex(torch.device))) {
    cuda_.check(cuda_.set_device(torch.device), "no such GPU");
    Torch::call(torch.empty_cache, {}, "torch's cache");  // what another Workload took
    pool_ = Pool(torch);
    size_t gates = (sets_.bytes() + GATE - 1) / GATE * GATE;
    auto mapping = std::make_shared<Mapping>(memory, memory.imported(arena), memory.whole(gates + 2 * GATE));
    sets_.base = mapping->base, sets_.memory = mapping;
    gate_ = reinterpret_cast<uint32_t*>(mapping->base + gates);
    behind_ = reinterpret_cast<uint32_t*>(mapping->base + gates + GATE);
    addresses_[workload.sets * workload.outputs.size()] = reinterpret_cast<uint64_t>(sets_.base);
  }

  Report prepare(const Run& run, PyObject* callable) override {
    Report report;
    bool gated = run.gate && (captures(run) || (!run.count && workload_.graphs));
    launched_before_ = false;
    if (captures(run)) {
      if (captured_ != run.count) capture(run, callable);
      for (auto& row : of_graph_)
        for (auto& tensor : row)
          if (tensor.nbytes()) cuda_.fill(tensor.mutable_data_ptr(), 0xFF, tensor.nbytes(), torch_.stream);
      note(of_graph_);
    }
    torch_.use(gated || captures(run) ? torch_.own : torch_.usual);
    check_cache();
    cuda_.check(cuda_.wait(), "before the batch");
    if (gated && memory_.wait_for(torch_.stream, gate_, run.gate - 1)) {
      cuda_.fill(behind_ + 1, 0, sizeof(uint32_t), torch_.stream);  // a kernel, for which the GPU turns to this process
      memory_.write(torch_.stream, behind_, run.gate - 1);
      if (!memory_.wait_for(torch_.stream, gate_, run.gate)) throw Wrong(DRIVER, "a stream cannot wait for its gate");
      if (captures(run)) replay();
      memory_.write(torch_.stream, behind_, run.gate);
      report.method = METHOD_GRAPH, launched_before_ = true;
    }
    return report;
  }

  Report run(const Run& run, PyObject* callable) override {
    Report report;
    if (captures(run)) {
      report.method = METHOD_GRAPH;
      if (!launched_before_) replay();
    } else {
      launch(run, callable);
      if (run.count <= FEW && !returns_one_memory && share_memory(launched_)) {
        returns_one_memory = true;
        launch(run, callable);
      }
    }
    cuda_.check(cuda_.wait(), "the batch");
    if (!captures(run)) note(launched_);
    return report;
  }

 private:
  using Rows = std::vector<at::Tensor>;

  bool captures(const Run& run) const { return run.count > 1 && !run.upcast && workload_.graphs; }

  void replay() const {
    for (auto& graph : graphs_) Torch::call(torch_.replay, {graph.object}, "a graph's replay");
  }

  void note(const std::vector<Rows>& outputs) const {
    auto* address = addresses_;
    for (auto& row : outputs)
      for (auto& tensor : row) *address++ = reinterpret_cast<uint64_t>(tensor.const_data_ptr());
  }

  // The part of the L2 that outlasts everything else must be what it was before the Solution came.
  void check_cache() const {
    if (cuda_.persisting() != cuda_.persisting_at_first) throw Wrong(RESERVED, "keeps part of the GPU's L2 for itself");
    cuda_.reset_persisting(), cuda_.forget_error();
  }

  Owned invoke(uint32_t i, const Run& run, PyObject* callable) const {
    Owned arguments(sets_.arguments(i, run.upcast));
    Owned returned(PyObject_CallObject(callable, arguments.object));
    if (!returned.object) throw Wrong(RAISED, exception());
    return returned;
  }

  // Every invocation in its turn. Where several return the same memory, each one's is copied behind it, in its time.
  void launch(const Run& run, PyObject* callable) {
    launched_.clear();
    if (!run.count) return;  // whoever asks for nothing wants to know what the way takes
    std::optional<FromPool> taken;  // not at first: graphs that a Solution captures then have their memory elsewhere
    if (called_) taken.emplace(torch_, pool_);
    for (uint32_t i = 0; i < run.count; ++i) {
      invocation = i;
      Owned returned(invoke(i, run, callable));
      if (workload_.destination) continue;
      launched_.push_back(rows_of(workload_, run, returned.object, sets_.device));
      for (auto& row : launched_[i])
        if (returns_one_memory || elsewhere(row)) {
          std::optional<FromPool> copy;
          if (!called_) copy.emplace(torch_, pool_);
          row = copied(row);
        }
    }
    called_ = true;
  }

  // Neither in the pool nor in the arena, where an input that is written is an output.
  bool elsewhere(const at::Tensor& row) const {
    auto* place = static_cast<const uint8_t*>(row.const_data_ptr());
    return row.nbytes() && !pieces.hold(place) && !(place >= sets_.base && place < sets_.base + sets_.bytes());
  }

  at::Tensor copied(const at::Tensor& row) const {
    return row.is_cuda() ? row.detach().clone() : row.detach().to(sets_.device);
  }

  // Called once before, for all that is made at a first call: code is compiled and loaded, libraries take workspaces.
  // The capture begins on another stream: torch waits for the default one then, which CUDA refuses while ours captures.
  void capture(const Run& run, PyObject* callable) {
    of_graph_.clear(), results_.clear(), graphs_.clear(), captured_ = 0;
    pool_ = Pool(torch_);  // torch captures no more in one whose graphs are all gone
    torch_.use(torch_.own);
    invoke(0, run, callable);
    cuda_.check(cuda_.wait(), "before a capture");
    NoCollection still;  // memory of another graph that is freed meanwhile ends a capture
    std::vector<Rows> returned;
    try {
      while (results_.size() < run.count) capture_more(run, callable, returned);
      if (share_memory(returned)) throw std::runtime_error("it returns the same memory in several invocations");
    } catch (const std::exception& error) {
      of_graph_.clear();
      throw Wrong(NO_GRAPH, error.what());
    }
    torch_.use(torch_.own), replay();  // a first replay uploads them, which behind a gate might wait
    cuda_.check(cuda_.wait(), "a first replay");
    captured_ = run.count;
  }

  void capture_more(const Run& run, PyObject* callable, std::vector<Rows>& returned) {
    graphs_.push_back(Torch::call(torch_.make_graph, {}, "a CUDA graph"));
    Owned mode(PyUnicode_FromString("thread_local"));
    torch_.use(torch_.origin);
    Torch::call(torch_.begin, {graphs_.back().object, pool_.id.object, mode.object}, "a capture");
    cuda_.follow(torch_.first, torch_.stream), torch_.use(torch_.own);
    for (uint32_t i = uint32_t(results_.size()), end = std::min(i + MOST_IN_GRAPH, run.count); i < end; ++i) {
      results_.push_back(invoke(i, run, callable));
      if (workload_.destination) continue;
      returned.push_back(rows_of(workload_, run, results_[i].object, sets_.device));
      of_graph_.push_back(returned[i]);
      for (auto& row : of_graph_[i])
        if (elsewhere(row)) row = copied(row);
    }
    cuda_.follow(torch_.stream, torch_.first), torch_.use(torch_.origin);
    Torch::call(torch_.end, {graphs_.back().object}, "the end of a capture");
  }

  const Workload& workload_;
  uint64_t* addresses_;
  const Runtime& cuda_;
  const VirtualMemory& memory_;
  const Torch& torch_;
  Sets sets_;
  Pool pool_;  // ends after what lies in it
  std::vector<Owned> graphs_;  // one after another
  std::vector<Owned> results_;
  std::vector<Rows> of_graph_, launched_;  // outputs of each invocation
  uint32_t captured_ = 0;
  uint32_t *gate_, *behind_;  // what the judge opens, and where it sees that all is done that has come through
  bool called_ = false, launched_before_ = false;
};

}  // namespace kcap
