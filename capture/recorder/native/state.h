// What the recorder holds: its calls, its threads with the operators under way on them, the recorder itself.
#pragma once
#include <ATen/record_function.h>

#include <deque>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "samples.h"
#include "shard.h"

namespace kcap {

// What a kernel that no library holds is launched with, as JSON; the id stands for it in a signature.
struct Launch {
  uint32_t id = 0;
  std::string json;
  Hash gridless;  // the same for any grid
};

// One invocation, by the dispatcher or as Python tells it.
struct Call {
  Operator* op;
  c10::ArrayRef<const IValue> inputs;
  const Launch* launch = nullptr;
  bool detail = false;  // an operator in which it is the only kernel stays one
};

struct Entry {  // an interned call, or (without an operator) a captured graph
  uint32_t id = 0;
  Operator* op = nullptr;
  const Launch* launch = nullptr;
  Entry* region = nullptr;                 // its twin, once another custom operator was recorded inside it
  bool sampled = false;
  uint64_t shapes = 0;                     // of a rounded call: how many distinct ones it stands for
  Hash first;                              // the signature of the first of them, which alone is sampled
  Hash base;                               // the signature without what can drift
  std::vector<uint64_t> scalars, offsets;  // what can drift, per argument
  Reservoir reservoirs[kPhases];
};

struct Recorder;
struct Thread;

struct Frame : at::ObserverContext {  // an operator on this thread's stack
  Frame* below = nullptr;
  Entry* entry = nullptr;
  Thread* thread = nullptr;
  uint64_t epoch = 0;
  size_t position = 0;  // in the Program
  uint32_t serial = 0;  // the operator's
  bool aten = false, has_kernels = false;
  bool has_detail = false;  // one call that is its detail, unless another follows
  bool from_outside = false;  // told of by kcap_call or Python: it ends at `leave`
  bool library = false;  // such a call into a library
  // Frames lie in their thread, one for each depth.
  static void* operator new(size_t, void* memory) { return memory; }
  static void operator delete(void*) {}
  static void operator delete(void*, void*) {}
};

// Entries by signature: open addressing, since a lookup is most of what a call costs.
class EntryTable {
 public:
  Entry* find(const Hash& key) const {
    for (size_t i = key.a & mask_;; i = (i + 1) & mask_) {
      const Slot& slot = slots_[i];
      if (C10_LIKELY(slot.key == key)) return slot.entry;
      if (!slot.entry) return nullptr;
    }
  }
  void add(const Hash& key, Entry* entry) {
    if (++size_ * 2 > mask_) grow();
    put(key, entry);
  }

 private:
  struct Slot { Hash key{0, 0}; Entry* entry = nullptr; };
  void put(const Hash& key, Entry* entry) {
    size_t i = key.a & mask_;
    while (slots_[i].entry) i = (i + 1) & mask_;
    slots_[i] = {key, entry};
  }
  void grow() {
    std::vector<Slot> old((mask_ + 1) * 2);
    old.swap(slots_);
    mask_ = slots_.size() - 1;
    for (const Slot& slot : old)
      if (slot.entry) put(slot.key, slot.entry);
  }
  size_t mask_ = 1023, size_ = 0;
  std::vector<Slot> slots_ = std::vector<Slot>(1024);
};

constexpr int kMaxDepth = 64;

// An integer tensor that a captured call reads. Its storage is held weakly, as what lies outside the graph's own memory
// may go at any time. `kept`: the capture gave its memory to nothing else and nothing wrote there later, so that a launch
// leaves there what it read.
struct GraphInput {
  SampledTensor tensor;
  const void* data;
  size_t bytes;
  c10::Device device;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  size_t writes = 0;  // to its storage, before the call
  bool kept = false;
};

struct GraphSample {  // the first invocation of a call in a graph
  Entry* call;
  std::string offsets;
  std::vector<GraphInput> inputs;
};

struct Graph {
  Entry* entry = nullptr;
  std::vector<GraphSample> samples;
};

// A Sample that lacks what its graph computes itself, until the graph has been launched.
struct UnfinishedSample {
  PendingSample sample;
  std::vector<const GraphInput*> inputs;
  Reservoir* reservoir;  // nullptr: not drawn
  uint64_t turn;
};

struct NodeRange { size_t start = 0, end = 0; };  // of the graph's nodes, those that a call added

struct Kept {  // until the capture ends: its memory is given to nothing else
  c10::Storage storage;
  size_t writes = 0;  // so far
};

// A capture under way on a thread, and what it interrupted.
struct Capture {
  std::vector<Entry*> program;
  Frame* top;
  int aten_depth;
  uint64_t epoch;
  std::vector<GraphSample> samples;
  std::unordered_map<const void*, Kept> kept;  // by their StorageImpl
  size_t kept_bytes = 0;
  std::vector<NodeRange> nodes;  // one for each call of the graph; empty unless they are asked for
  std::vector<GraphNode> graph_nodes;  // all, in the order in which they were added; likewise
  void* stream;  // the one that captures; nullptr: torch's current one
};

struct Thread {
  Recorder* owner = nullptr;  // whose entries `entries` and `program` hold
  Frame* top = nullptr;
  int aten_depth = 0, depth = 0, ignored = 0;
  int replaced_depth = 0;  // `aten_depth`, while something runs in the place of such an operator
  bool busy = false, stepping = false, sampled = true, unfinished = false;
  size_t phase = 3;
  int slot = -1;  // of a Sample of each call of the step, beside those drawn
  uint64_t epoch = 0;  // of `program`: frames know by it whether theirs is still there
  std::vector<Entry*> program;
  std::unique_ptr<Capture> capture;
  std::vector<UnfinishedSample> unfinished_samples;  // of the graph that is being launched
  EntryTable entries;
  OperatorCache operators;
  // Of this thread's dispatcher: a mode is active only while the Python key is in.
  const c10::impl::PODLocalDispatchKeySet* keys = &c10::impl::raw_local_dispatch_key_set;
  alignas(Frame) char frames[kMaxDepth][sizeof(Frame)];
};

// A plain pointer in static TLS: no guard and no call at each access. What frees it as the thread ends is made with it.
__attribute__((tls_model("initial-exec"))) thread_local Thread* tls_state = nullptr;
struct ThreadEnd {
  ~ThreadEnd() { delete std::exchange(tls_state, nullptr); }
};
C10_NOINLINE void make_state() {
  thread_local ThreadEnd end;
  static_cast<void>(&end);
  tls_state = new Thread();
}
inline Thread& this_thread() {
  if (C10_UNLIKELY(!tls_state)) make_state();
  return *tls_state;
}

constexpr int kMaxVariants = 16;
constexpr size_t kMaxExact = 256;      // calls of one operator; further ones are rounded
constexpr size_t kMaxKeys = 1 << 18;   // signatures whose call is remembered
constexpr size_t kOther = 3;  // the phase of what runs outside any step
constexpr size_t kMaxProgramWords = 64u << 20, kMaxProgram = 4u << 20;

void failed(const char* reason) noexcept;

struct Recorder {
  std::atomic<bool> open{false}, loose{false}, closed{false};
  std::atomic<int> captures{0};         // under way
  std::atomic<bool> count_nodes{false};
  std::atomic<int64_t> fail_after{-1};  // fault injection
  std::atomic<uint64_t> steps{0};
  Operators operators;
  Shard shard;
  Banks banks{[this](std::string_view text) {
    try {
      shard.write(text);
    } catch (const std::exception& error) {
      failed(error.what());
    }
  }};
  std::mutex mutex;
  std::atomic<bool> full{false};
  std::deque<Entry> entries;
  std::unordered_map<Hash, Entry*, HashOf> interned;
  std::unordered_map<Hash, std::pair<Entry*, int>, HashOf> variants;  // base -> the first, how many
  std::unordered_map<Hash, Entry*, HashOf> by_scalars;                    // base and scalars -> the first
  std::unordered_map<Hash, uint32_t, HashOf> programs, batches;
  std::unordered_map<Hash, std::vector<Entry*>, HashOf> shapes;       // base of a program -> one that ran
  size_t program_words = 0;
  std::deque<Graph> graphs;
  std::deque<Launch> launches;
  std::vector<Operator*> externals;
  std::vector<std::string> texts;
  std::vector<std::pair<uintptr_t, uintptr_t>> graph_memory;  // that graphs allocated for themselves: from, to
  bool graph_memory_known = true;
  std::string error;
};
Recorder* g = nullptr;
at::CallbackHandle g_handle = 0;

std::atomic<uint64_t> epochs{0};  // of all threads, whose calls share their Samples

void new_program(Thread& t) {
  t.program.clear();
  t.epoch = ++epochs;
}

// A new recording begins with nothing known; the frames of operators under way end by themselves.
void adopt(Thread& t) {
  t.owner = g;
  if (t.capture) {  // which the last recording left
    t.top = t.capture->top;
    t.aten_depth = t.capture->aten_depth;
  }
  new_program(t);
  t.entries = EntryTable();
  t.operators = OperatorCache();
  t.stepping = false;
  t.capture.reset();
  t.unfinished_samples.clear();
}

inline void adopt_if_new(Thread& t) {
  if (C10_UNLIKELY(t.owner != g)) adopt(t);
}

// The observer is there while somebody listens: an open window, or a graph that is being captured.
void update_observer();

void failed(const char* reason) noexcept {
  g->open = false;
  try {
    std::lock_guard<std::mutex> guard(g->mutex);
    if (!g->error.empty()) return;
    g->error = reason;
    g->shard.header(hFailed) = 1;
    std::string line = "{\"t\":\"tap\",\"name\":\"dispatcher\",\"status\":\"failed\",\"detail\":";
    put_string(line, reason);
    g->shard.write(line + "}\n");
  } catch (...) {  // a full disk: the header says it
  }
}

// 0, or 1 where `body` threw, which ends the recording.
template <class F>
int guarded(F&& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    if (g) { failed(error.what()); g->error = error.what(); }
    return 1;
  }
}

}  // namespace kcap
