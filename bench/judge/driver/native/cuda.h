// Invocations on a GPU, a batch at a time, each on a set of inputs of its own. All are filled and the device is idle when the
// judge lets the batch run; when it is idle again this process stands still.
//
// A batch is captured as a CUDA graph where it can be: what is timed then is the replay, in which no code of the
// Solution's runs on the host. What cannot be captured is launched, and the host's time counts where the GPU waits for it.
//
// Unlike on the CPU, inputs are filled here, from a copy of the pool: code that takes the driver's place can see them before
// the judge's clock runs.
#pragma once

#include "place.h"
#include "runtime.h"

namespace kcap {

constexpr uint32_t METHOD_GRAPH = 1;

// Python's side of it: functions of torch's, written in C++, taken before any code from elsewhere ran.
struct Torch {
  int device;
  void* stream;                       // raw handle of the stream that graphs are captured and replayed on
  PyObject *set_stream, *own, *usual; // sets a stream by its keywords: that stream's, and the default one's
  PyObject *make_graph, *begin, *end, *replay, *empty_cache;

  explicit Torch(PyObject* given) {
    PyObject* values[10];
    for (int i = 0; i < 10; ++i) values[i] = PyTuple_GetItem(given, i);
    device = int(PyLong_AsLong(values[0]));
    stream = reinterpret_cast<void*>(PyLong_AsSize_t(values[1]));
    set_stream = values[2], own = values[3], usual = values[4], make_graph = values[5];
    begin = values[6], end = values[7], replay = values[8], empty_cache = values[9];
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

struct Memory {
  const Runtime* cuda = nullptr;
  uint8_t* base = nullptr;
  Memory() = default;
  Memory(const Runtime& cuda, size_t size) : cuda(&cuda) {
    cuda.check(cuda.allocate(reinterpret_cast<void**>(&base), size ? size : 1), "no memory for the inputs");
  }
  Memory(const Memory&) = delete;
  Memory& operator=(Memory&& other) noexcept {
    std::swap(cuda, other.cuda), std::swap(base, other.base);
    return *this;
  }
  ~Memory() { if (base) cuda->release(base); }
};

// Host memory that the GPU copies to many times as fast as to other, where it may be had; made when it is first needed.
class Staging {
 public:
  static constexpr size_t SIZE = 32 << 20;
  explicit Staging(const Runtime& cuda) : cuda_(cuda) {}
  Staging(const Staging&) = delete;
  ~Staging() { if (pinned_) cuda_.release_pinned(pinned_); }

  const uint8_t* read(const uint8_t* from, size_t size) {
    if (!pinned_ && plain_.empty() && cuda_.allocate_pinned(reinterpret_cast<void**>(&pinned_), SIZE)) {
      pinned_ = nullptr, plain_.resize(SIZE);
      cuda_.forget_error();
    }
    uint8_t* to = pinned_ ? pinned_ : plain_.data();
    cuda_.check(cuda_.copy(to, from, size, TO_HOST, nullptr), "copying inputs back");
    cuda_.check(cuda_.wait(), "copying inputs back");
    return to;
  }

 private:
  const Runtime& cuda_;
  uint8_t* pinned_ = nullptr;
  std::vector<uint8_t> plain_;
};

class Cuda : public Place {
 public:
  Cuda(const Workload& workload, const uint8_t* pool, const Runtime& cuda, const Torch& torch)
      : workload_(workload), host_pool_(pool), cuda_(cuda), torch_(torch),
        sets_(workload, at::Device(at::kCUDA, c10::DeviceIndex(torch.device))), staging_(cuda) {
    cuda_.check(cuda_.set_device(torch.device), "no such GPU");
    Torch::call(torch.empty_cache, {}, "torch's cache");  // it keeps the memory of graphs that are gone
    pool_ = Memory(cuda_, workload.pool_bytes);
    auto arena = std::make_shared<Memory>(cuda_, sets_.bytes());
    sets_.base = arena->base, sets_.memory = arena;
    cuda_.check(cuda_.copy(pool_.base, pool, workload.pool_bytes, FROM_HOST, nullptr), "copying inputs");
  }

  void prepare(const Run& run, PyObject* callable) override {
    if (captures(run) && captured_ != run.count) capture(run, callable);
    torch_.use(captures(run) ? torch_.own : torch_.usual);
    fill(run, run.count, captures(run), captures(run) ? torch_.stream : nullptr);
    check_cache();
    cuda_.check(cuda_.wait(), "before the batch");
  }

  Report run(const Run& run, PyObject* callable) override {
    Report report;
    last_ = run;
    if (captures(run)) {
      report.method = METHOD_GRAPH;
      Torch::call(torch_.replay, {graph_.object}, "a graph's replay");
    } else {
      launch(run, callable, report);
      if (run.count <= FEW && !returns_one_memory && share_memory(launched_)) {
        returns_one_memory = true;
        launch(run, callable, report);
      }
    }
    cuda_.check(cuda_.wait(), "the batch");
    return report;
  }

  void deliver(uint32_t i, uint8_t* memory) override {
    auto* slot = memory + i * workload_.slot_bytes;
    auto& tensors = captures(last_) ? outputs_ : launched_;
    bool aside = aside_.base && !captures(last_);
    const auto* kept = aside_.base + i * workload_.slot_bytes;
    if (aside) cuda_.check(cuda_.copy(slot, kept, workload_.slot_bytes, TO_HOST, nullptr), "outputs");
    for (size_t j = 0; !aside && j < workload_.outputs.size(); ++j) {
      auto* to = slot + workload_.outputs[j].offset;
      if (workload_.destination)
        cuda_.check(cuda_.copy(to, sets_.output(i, j), workload_.outputs[j].bytes, TO_HOST, nullptr), "outputs");
      else
        copy_row(to, tensors[i][j], TO_HOST);
    }
    cuda_.check(cuda_.wait(), "copying outputs");
    check_inputs(last_, i);
  }

 private:
  using Outputs = std::vector<std::vector<at::Tensor>>;

  bool captures(const Run& run) const { return run.count > 1 && run.first == 0 && !run.upcast && workload_.graphs; }

  void fill(const Run& run, uint32_t count, bool graph, void* stream) {
    for (uint32_t i = 0; i < count; ++i) {
      for (size_t j = 0; workload_.destination && j < workload_.outputs.size(); ++j)
        cuda_.fill(sets_.output(i, j), 0xFF, workload_.outputs[j].bytes, stream);
      if (graph && !workload_.destination)
        for (auto& tensor : outputs_[i])
          if (plain(tensor) && tensor.is_cuda() && tensor.nbytes())
            cuda_.fill(tensor.mutable_data_ptr(), 0xFF, tensor.nbytes(), stream);
    }
    for (uint32_t i = 0; i < count; ++i)  // after the outputs: one may be an input itself
      for (size_t j = 0; j < workload_.inputs.size(); ++j)
        if (auto& input = workload_.inputs[j]; input.is_tensor() && input.bytes)
          cuda_.copy(sets_.input(i, j), content(pool_.base, run, i, j), input.bytes, ON_DEVICE, stream);
  }

  // Where in the pool the content of an input begins.
  const uint8_t* content(const uint8_t* pool, const Run& run, uint32_t i, size_t j) const {
    uint64_t number = run.first + i;
    return pool + workload_.inputs[j].begin(run.seed, number, j, workload_.variant(run.seed, number));
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
  void launch(const Run& run, PyObject* callable, Report& report) {
    launched_.clear();
    if (returns_one_memory && !aside_.base) aside_ = Memory(cuda_, workload_.slot_bytes * workload_.sets);
    for (uint32_t i = 0; i < run.count; ++i) {
      report.iteration = i;
      Owned returned(invoke(i, run, callable));
      if (workload_.destination) continue;
      launched_.push_back(outputs(run, returned));
      for (size_t j = 0; aside_.base && j < workload_.outputs.size(); ++j)
        copy_row(aside_.base + i * workload_.slot_bytes + workload_.outputs[j].offset, launched_[i][j], ON_DEVICE);
    }
  }

  void copy_row(uint8_t* to, const at::Tensor& row, int way) const {
    int from_host = way == TO_HOST ? HOST_TO_HOST : FROM_HOST;  // of a scalar that was returned as such
    cuda_.check(cuda_.copy(to, row.const_data_ptr(), row.nbytes(), row.is_cuda() ? way : from_host, nullptr), "outputs");
  }

  // Called once before, for all that is made at a first call: code is compiled and loaded, libraries take workspaces.
  void capture(const Run& run, PyObject* callable) {
    outputs_.clear(), results_.clear(), captured_ = 0;
    graph_ = Torch::call(torch_.make_graph, {}, "a CUDA graph");
    torch_.use(torch_.own);
    fill(run, 1, false, torch_.stream);
    invoke(0, run, callable);
    fill(run, run.count, false, torch_.stream);
    cuda_.check(cuda_.wait(), "before a capture");
    NoCollection still;  // memory of another graph that is freed meanwhile ends a capture
    try {
      Owned mode(PyUnicode_FromString("thread_local"));
      Torch::call(torch_.begin, {graph_.object, Py_None, mode.object}, "a capture");
      for (uint32_t i = 0; i < run.count; ++i) {
        results_.push_back(invoke(i, run, callable));
        if (!workload_.destination) outputs_.push_back(outputs(run, results_[i]));
      }
      Torch::call(torch_.end, {graph_.object}, "the end of a capture");
      if (share_memory(outputs_)) throw std::runtime_error("it returns the same memory in several invocations");
    } catch (const std::exception& error) {
      throw Wrong(NO_GRAPH, error.what());
    }
    captured_ = run.count;
  }

  std::vector<at::Tensor> outputs(const Run& run, const Owned& returned) const {
    return rows_of(workload_, run, returned.object, sets_.device);
  }

  void check_inputs(const Run& run, uint32_t i) {
    for (size_t j = 0; j < workload_.inputs.size(); ++j) {
      auto& input = workload_.inputs[j];
      if (!input.is_tensor() || input.written) continue;
      const auto* was = content(host_pool_, run, i, j);
      for (size_t at = 0; at < input.bytes; at += Staging::SIZE) {
        size_t size = std::min(input.bytes - at, Staging::SIZE);
        if (!same(staging_.read(sets_.input(i, j) + at, size), was + at, size))
          throw Wrong(INPUT, "changed its input " + input.name);
      }
    }
  }

  const Workload& workload_;
  const uint8_t* host_pool_;
  const Runtime& cuda_;
  const Torch& torch_;
  Sets sets_;
  Memory pool_;
  Memory aside_;  // of outputs that several invocations return in the same memory
  Owned graph_;
  std::vector<Owned> results_;
  Outputs outputs_, launched_;
  Staging staging_;
  uint32_t captured_ = 0;
  Run last_;
};

}  // namespace kcap
