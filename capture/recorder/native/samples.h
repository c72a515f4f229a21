// Which invocations are sampled, and how their integer tensors are copied.
#pragma once
#include <c10/core/impl/VirtualGuardImpl.h>
#include <cxxabi.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "signature.h"

namespace kcap {

constexpr int kReservoir = 4, kBanks = 4;
constexpr size_t kMaxTensorBytes = 8u << 20, kBankBytes = 16u << 20, kSamplesPerTurn = 64;

inline double uniform(uint64_t& state) {  // SplitMix64 (public domain), in (0, 1]
  uint64_t z = (state += 0x9E3779B97F4A7C15ull);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return (static_cast<double>((z ^ (z >> 31)) >> 11) + 1.0) * 0x1.0p-53;
}

// Reservoir of kReservoir invocations, seeded by the call's own hash: Algorithm R (Vitter 1985), with the run of
// rejections drawn at once: P(none of the next accepted up to m) = (n/m)^k.
struct Reservoir {
  uint64_t seen = 0, next = 1, state = 0;
  uint64_t epoch = 0, places = 0;  // of the last one taken: its thread's step, and where its tensors were
  uint64_t undrawn = 0;  // likewise the step of the last one that was not drawn
  int filled = 0, misses = 0;

  bool due() { return C10_UNLIKELY(++seen >= next); }
  int slot() { return filled < kReservoir ? filled : std::min(static_cast<int>(uniform(state) * kReservoir), kReservoir - 1); }
  // Layers walk the same pages: what lies where it lay in the same step tells nothing new, and is copied in vain.
  bool knows(uint64_t step, uint64_t where) const { return where && where == places && step == epoch; }
  void taken(uint64_t step, uint64_t where) {
    misses = 0;
    epoch = step;
    places = where;
    if (filled < kReservoir) filled++;
    next = filled < kReservoir ? seen + 1 : seen + 1 + static_cast<uint64_t>(static_cast<double>(seen) * (std::pow(uniform(state), -1.0 / kReservoir) - 1.0));
  }
  void later() { next = seen + 1; }
  void missed() { next = seen + (uint64_t{1} << std::min(misses++, 20)); }  // no room: not asked for again and again
};

// A node of a graph. `name`: its kernel's ("?": not known), "memcpy", "memset"; empty where the GPU runs nothing for it.
struct GraphNode {
  std::string name;
  std::vector<size_t> after;  // the nodes that it waits for
};

// The CUDA driver, found at run time: raw asynchronous copies on the engine's own stream, into pinned memory.
class Cuda {
 public:
  using Handle = void*;
  bool ready() {
    if (!tried_) { tried_ = true; load(); }
    return ring_ != nullptr;
  }
  char* ring() { return ring_; }
  Handle event(int bank) { return events_[bank]; }
  bool capturing(Handle stream) const { int status = 0; return is_capturing_(stream, &status) != 0 || status != 0; }
  bool copy(char* to, const void* from, size_t bytes, Handle stream) {
    return copy_(to, reinterpret_cast<uint64_t>(from), bytes, stream) == 0;
  }
  // How many nodes the graph has that this stream captures into; 0 where none does.
  size_t nodes(Handle stream) const {
    const Handle graph = graph_of(stream);
    size_t count = 0;
    return graph && graph_nodes_(graph, nullptr, &count) == 0 ? count : 0;
  }
  // Those nodes, in the order in which they were added; empty where this driver does not tell.
  std::vector<GraphNode> describe(Handle stream) const {
    size_t count = nodes(stream), edges = 0;
    if (!count || !node_type_ || !kernel_of_node_ || !function_name_ || !graph_edges_) return {};
    const Handle graph = graph_of(stream);
    std::vector<Handle> handles(count);
    if (graph_nodes_(graph, handles.data(), &count) != 0 || count != handles.size()) return {};
    std::vector<GraphNode> described(count);
    std::unordered_map<Handle, size_t> index;
    for (size_t i = 0; i < count; i++) {
      index[handles[i]] = i;
      described[i].name = node_name(handles[i]);
    }
    if (graph_edges_(graph, nullptr, nullptr, nullptr, &edges) != 0) return {};
    std::vector<Handle> from(edges), to(edges);
    std::vector<uint64_t> data(edges);  // CUgraphEdgeData
    if (edges && graph_edges_(graph, from.data(), to.data(), data.data(), &edges) != 0) return {};
    for (size_t i = 0; i < edges; i++) {
      const auto before = index.find(from[i]), after = index.find(to[i]);
      if (before == index.end() || after == index.end() || before->second >= after->second) return {};  // in another order
      described[after->second].after.push_back(before->second);
    }
    return described;
  }
  bool fence(int bank, Handle stream) { return !capturing(stream) && record_(events_[bank], stream) == 0; }
  bool arrived(int bank, bool wait) {
    const Relaxed relaxed(*this);
    return (wait ? wait_ : query_)(events_[bank]) == 0;
  }

 private:
  // While it lives, this thread may allocate and ask an event without breaking a capture that is under way anywhere.
  class Relaxed {
   public:
    explicit Relaxed(const Cuda& cuda) : exchange_(cuda.exchange_mode_) { exchange_(&mode_); }
    ~Relaxed() { exchange_(&mode_); }

   private:
    int (*exchange_)(int*);
    int mode_ = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED
  };
  struct KernelNode {  // CUDA_KERNEL_NODE_PARAMS_v2
    Handle function;
    unsigned grid[3], block[3], shared;
    void **parameters, **extra;
    Handle kernel, context;
  };
  Handle graph_of(Handle stream) const {
    int status = 0;
    uint64_t id = 0;
    Handle graph = nullptr;
    if (!capture_info_ || !graph_nodes_ || capture_info_(stream, &status, &id, &graph, nullptr, nullptr) != 0) return nullptr;
    return status == 1 ? graph : nullptr;
  }
  // As a profiler names it (libkineto leaves names of 1,024 characters and more as they are).
  std::string node_name(Handle node) const {
    int type = -1;
    if (node_type_(node, &type) != 0) return "";
    if (type == 1 || type == 2) return type == 1 ? "memcpy" : "memset";  // CU_GRAPH_NODE_TYPE_MEMCPY, _MEMSET
    KernelNode kernel{};
    const char* name = nullptr;
    if (type != 0) return "";
    if (kernel_of_node_(node, &kernel) != 0) return "?";
    if (kernel.function) function_name_(&name, kernel.function);
    else if (kernel.kernel && kernel_name_) kernel_name_(&name, kernel.kernel);
    if (!name) return "?";
    constexpr size_t kLongest = 1024;
    int status = -1;
    char* demangled = std::strlen(name) < kLongest ? abi::__cxa_demangle(name, nullptr, nullptr, &status) : nullptr;
    std::string text = demangled && status == 0 ? demangled : name;
    std::free(demangled);
    return text;
  }
  void load() {
    void* lib = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (!lib) return;
    const auto get = [&](auto& f, const char* name) {
      f = reinterpret_cast<std::decay_t<decltype(f)>>(::dlsym(lib, name));
      return f != nullptr;
    };
    int (*allocate)(void**, size_t) = nullptr;
    int (*create)(Handle*, unsigned) = nullptr;
    if (!(get(copy_, "cuMemcpyDtoHAsync_v2") && get(is_capturing_, "cuStreamIsCapturing") && get(record_, "cuEventRecord") &&
          get(query_, "cuEventQuery") && get(wait_, "cuEventSynchronize") && get(allocate, "cuMemAllocHost_v2") &&
          get(create, "cuEventCreate") && get(exchange_mode_, "cuThreadExchangeStreamCaptureMode")))
      return;
    get(capture_info_, "cuStreamGetCaptureInfo_v2");
    get(graph_nodes_, "cuGraphGetNodes");
    get(graph_edges_, "cuGraphGetEdges_v2");
    get(node_type_, "cuGraphNodeGetType");
    get(kernel_of_node_, "cuGraphKernelNodeGetParams_v2");
    get(function_name_, "cuFuncGetName");
    get(kernel_name_, "cuKernelGetName");
    const Relaxed relaxed(*this);
    constexpr unsigned kDisableTiming = 2;  // CU_EVENT_DISABLE_TIMING
    for (auto& event : events_)
      if (create(&event, kDisableTiming) != 0) return;
    void* memory = nullptr;
    if (allocate(&memory, kBanks * kBankBytes) == 0) ring_ = static_cast<char*>(memory);
  }
  bool tried_ = false;
  char* ring_ = nullptr;
  Handle events_[kBanks] = {};
  int (*copy_)(void*, uint64_t, size_t, Handle) = nullptr;
  int (*is_capturing_)(Handle, int*) = nullptr;
  int (*record_)(Handle, Handle) = nullptr;
  int (*query_)(Handle) = nullptr;
  int (*wait_)(Handle) = nullptr;
  int (*exchange_mode_)(int*) = nullptr;
  int (*capture_info_)(Handle, int*, uint64_t*, Handle*, const Handle**, size_t*) = nullptr;
  int (*graph_nodes_)(Handle, Handle*, size_t*) = nullptr;
  int (*graph_edges_)(Handle, Handle*, Handle*, uint64_t*, size_t*) = nullptr;
  int (*node_type_)(Handle, int*) = nullptr;
  int (*kernel_of_node_)(Handle, KernelNode*) = nullptr;
  int (*function_name_)(const char**, Handle) = nullptr;
  int (*kernel_name_)(const char**, Handle) = nullptr;
};

struct SampledTensor {
  std::string path;
  Keep keep;
  at::ScalarType type;
  std::vector<int64_t> shape, strides;
  const char* data = nullptr;  // in the ring, or `own`
  std::vector<char> own;
};

struct PendingSample {
  std::string head;  // the line up to its tensors
  int64_t step = -1;
  std::vector<SampledTensor> tensors;
};

inline int64_t element(const char* p, at::ScalarType type) {
  switch (type) {
    case at::kInt: { int32_t v; std::memcpy(&v, p, 4); return v; }
    case at::kShort: { int16_t v; std::memcpy(&v, p, 2); return v; }
    default: { int64_t v; std::memcpy(&v, p, 8); return v; }
  }
}

inline std::vector<int64_t> elements(const SampledTensor& t) {
  std::vector<int64_t> out;
  const size_t size = c10::elementSize(t.type);
  std::vector<int64_t> index(t.shape.size(), 0);
  int64_t total = 1;
  for (int64_t n : t.shape) total *= n;
  out.reserve(static_cast<size_t>(total));
  int64_t at = 0;
  for (int64_t i = 0; i < total; i++) {
    out.push_back(element(t.data + at * static_cast<int64_t>(size), t.type));
    for (size_t d = t.shape.size(); d-- > 0;) {
      at += t.strides[d];
      if (++index[d] < t.shape[d]) break;
      at -= index[d] * t.strides[d];
      index[d] = 0;
    }
  }
  return out;
}

// As a JSON list, in which a run of kShortestRun equal values or more is [VALUE, COUNT]: block tables are mostly zeros.
constexpr size_t kShortestRun = 4;
inline void put_runs(std::string& out, const std::vector<int64_t>& values) {
  out += '[';
  for (size_t i = 0; i < values.size();) {
    size_t end = i + 1;
    while (end < values.size() && values[end] == values[i]) end++;
    const std::string value = std::to_string(values[i]);
    const bool run = end - i >= kShortestRun;
    for (size_t k = i; k < (run ? i + 1 : end); k++) {
      if (k) out += ',';
      out += run ? "[" + value + "," + std::to_string(end - i) + "]" : value;
    }
    i = end;
  }
  out += ']';
}

inline void put_sampled(std::string& out, const SampledTensor& t) {
  const auto values = elements(t);
  put_key(out, t.path.c_str());
  out += '{';
  if (!values.empty()) {
    const auto [low, high] = std::minmax_element(values.begin(), values.end());
    out += "\"low\":" + std::to_string(*low) + ",\"high\":" + std::to_string(*high);
  }
  if (t.keep == Keep::values) {
    out += values.empty() ? "" : ",";
    out += "\"dtype\":"; put_string(out, dtype_name(t.type));
    out += ",\"shape\":"; put_ints(out, t.shape);
    out += ",\"values\":"; put_runs(out, values);
  }
  out += '}';
}

inline std::string sample_line(const PendingSample& sample) {
  std::string out = sample.head + ",\"tensors\":{";
  bool first = true;
  for (const auto& tensor : sample.tensors) {
    if (!first) out += ',';
    first = false;
    put_sampled(out, tensor);
  }
  return out + "}}\n";
}

inline bool is_index_type(const Tensor& t) {
  const auto type = t.scalar_type();
  return type == at::kInt || type == at::kLong || type == at::kShort;
}

// Samples wait here, in turns, until their copies have arrived: the engine's stream is never waited for. A thread of its
// own writes them.
class Banks {
 public:
  // `write` is called by that thread, and may not throw.
  explicit Banks(std::function<void(std::string_view)> write) : write_(std::move(write)) {}

  // Copies `data` as the stream will see it when what comes next runs, or as it is now where it is the host's; false: no
  // room now.
  bool copy(SampledTensor& out, const void* data, c10::Device device, size_t bytes) {
    if (device.is_cpu()) return keep(out, static_cast<const char*>(data), bytes);
    if (!device.is_cuda() || !c10::impl::hasDeviceGuardImpl(device.type())) return false;  // another library's, and a torch for CPUs
    if (bytes == 0) return true;
    const auto stream = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(device).native_handle();
    std::lock_guard<std::mutex> guard(mutex_);
    if (!cuda_.ready() || cuda_.capturing(stream)) return false;
    // A copy from host to host would wait for all that the stream has to do.
    if (const char* shared = mapped_from(data)) return keep(out, shared, bytes);
    Bank& bank = banks_[current_];
    const size_t room = (bytes + 255) & ~size_t{255};
    cramped_ = bank.fenced || bank.writing || bank.used + room > kBankBytes || (bank.used && stream != stream_);  // a bank has one fence
    if (cramped_) return false;
    char* to = cuda_.ring() + static_cast<size_t>(current_) * kBankBytes + bank.used;
    if (!cuda_.copy(to, data, bytes, stream)) return false;
    bank.used += room;
    stream_ = stream;
    out.data = to;
    return true;
  }

  // `stream`: that captures; nullptr: torch's current one.
  size_t nodes_of_capture(Cuda::Handle stream) {
    std::lock_guard<std::mutex> guard(mutex_);
    return cuda_.ready() ? cuda_.nodes(stream ? stream : current_stream()) : 0;
  }
  std::vector<GraphNode> describe_capture(Cuda::Handle stream) {
    std::lock_guard<std::mutex> guard(mutex_);
    return cuda_.ready() ? cuda_.describe(stream ? stream : current_stream()) : std::vector<GraphNode>{};
  }

  void add(PendingSample&& sample) {
    std::lock_guard<std::mutex> guard(mutex_);
    banks_[current_].samples.push_back(std::move(sample));
  }
  uint64_t turn() const { return turn_; }
  bool wants_turn() const { return cramped_ || banks_[current_].samples.size() > kSamplesPerTurn; }

  // Forgets the Samples of a step that does not count.
  void drop(int64_t step) {
    std::lock_guard<std::mutex> guard(mutex_);
    for (Bank& bank : banks_) {
      auto& all = bank.samples;
      all.erase(std::remove_if(all.begin(), all.end(), [&](const PendingSample& one) { return one.step == step; }), all.end());
    }
  }

  // Ends a turn: the bank in use is fenced, the next one is emptied if its copies have arrived.
  void rotate() {
    std::lock_guard<std::mutex> guard(mutex_);
    Bank& bank = banks_[current_];
    cramped_ = false;
    if (bank.writing) return;
    if (bank.samples.empty() && !bank.used && !bank.fenced) return drain_next(false);
    if (bank.used && !bank.fenced) bank.fenced = cuda_.fence(current_, stream_);
    if (bank.used && !bank.fenced) return;  // its stream is being captured: at a later turn
    if (!bank.fenced) flush(bank);
    current_ = (current_ + 1) % kBanks;
    turn_++;
    drain_next(false);
  }
  // Waits until all that arrived is written; how many Samples never arrived.
  size_t finish() {
    for (int i = 0; i < kBanks; i++) rotate_waiting();
    if (writer_.joinable()) {
      {
        std::lock_guard<std::mutex> guard(mutex_);
        finished_ = true;
      }
      changed_.notify_all();
      writer_.join();
    }
    for (const Bank& bank : banks_) lost_ += bank.samples.size();
    return lost_;
  }

 private:
  static bool keep(SampledTensor& out, const char* data, size_t bytes) {
    out.own.assign(data, data + bytes);
    out.data = out.own.data();
    return true;
  }
  static Cuda::Handle current_stream() {
    const c10::impl::VirtualGuardImpl guard_impl(c10::DeviceType::CUDA);
    return guard_impl.getStream(guard_impl.getDevice()).native_handle();
  }
  struct Bank {
    size_t used = 0;
    bool fenced = false, writing = false;  // writing: its memory is still read, samples are the next turn's
    std::vector<PendingSample> samples;
  };
  void drain_next(bool wait) {
    for (int i = 0; i < kBanks; i++)
      if (banks_[i].fenced && !banks_[i].writing && cuda_.arrived(i, wait)) flush(banks_[i]);
  }
  void rotate_waiting() {
    rotate();
    std::unique_lock<std::mutex> lock(mutex_);
    drain_next(true);
    changed_.wait(lock, [&] { return jobs_.empty(); });
  }
  void flush(Bank& bank) {
    if (bank.samples.empty()) { bank = Bank(); return; }
    bank.writing = true;
    jobs_.push_back({&bank, std::move(bank.samples)});
    bank.samples.clear();
    if (!writer_.joinable()) writer_ = std::thread([this] { write_jobs(); });
    changed_.notify_all();
  }
  void write_jobs() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return finished_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      const Job& job = jobs_.front();
      lock.unlock();
      size_t lost = 0;
      try {
        std::string lines;
        for (const auto& sample : job.samples) lines += sample_line(sample);
        write_(lines);
      } catch (const std::exception&) {  // no memory is left
        lost = job.samples.size();
      }
      lock.lock();
      lost_ += lost;
      job.bank->used = 0;
      job.bank->fenced = job.bank->writing = false;
      jobs_.pop_front();
      changed_.notify_all();
    }
  }
  struct Job {
    Bank* bank;
    std::vector<PendingSample> samples;
  };
  std::function<void(std::string_view)> write_;
  std::mutex mutex_;
  Cuda cuda_;
  Bank banks_[kBanks];
  std::deque<Job> jobs_;  // the first is under way
  std::condition_variable changed_;
  std::thread writer_;
  bool finished_ = false;
  size_t lost_ = 0;  // Samples
  int current_ = 0;
  std::atomic<uint64_t> turn_{0};
  std::atomic<bool> cramped_{false};  // a copy found no room
  Cuda::Handle stream_ = nullptr;
};

}  // namespace kcap
