// The native recorder: a RecordFunction observer that interns every call an engine makes and counts it.
//
// Built once per torch version and compiler against ATen's headers alone, and called through ctypes, but for the calls that
// Python tells of (native/python.h).
// Compile with -DNDEBUG: without it RecordFunction's layout differs from the wheel's.
// Inside a callback nothing is dispatched, no lock is held while a tensor is looked at, and nothing throws.
#include <pthread.h>

#include "native/programs.h"
#include "native/python.h"

namespace kcap {

void forget_in_child() { if (g) { g->open = false; g->closed = true; } }

// The words of `text`, which blanks separate.
template <class F>
void split(const char* text, F&& each) {
  std::string name;
  for (const char* c = text;; c++) {
    if (*c && *c != ' ') { name += *c; continue; }
    if (!name.empty()) each(std::exchange(name, {}));
    if (!*c) return;
  }
}

}  // namespace kcap

using kcap::g;
using kcap::this_thread;

extern "C" {

// `stem`: the shard's path without its ending; `names`: a text for each NameGroup, separated by blanks. 0, or 1 with
// kcap_error().
int kcap_open(const char* stem, const char* const* names, int keep_tokens) {
  if (!g) pthread_atfork(nullptr, nullptr, kcap::forget_in_child);
  if (g && !g->closed) return 1;
  kcap::Recorder* last = g;
  g = new kcap::Recorder();
  if (last) last->shard.release();  // the rest of it stays: frames of operators under way still point to its entries
  return kcap::guarded([&] {
    for (auto& group : kcap::policy().names) kcap::split(*names++, [&](std::string&& name) { group.insert(name); });
    kcap::policy().keep_tokens = keep_tokens != 0;
    g->shard.open(stem);
  });
}

// Opens the window. `loose`: every thread's calls count at once; otherwise only calls inside a step.
void kcap_start(int loose) {
  g->loose = loose != 0;
  g->open = g->error.empty();
  kcap::update_observer();
}

void kcap_stop() {
  g->open = false;
  kcap::update_observer();
}

// `slot`: of a Sample of each call of the step, beside those drawn; -1: none.
void kcap_step_begin(int phase, int sampled, int slot) {
  auto& t = this_thread();
  kcap::adopt_if_new(t);
  kcap::new_program(t);
  if (std::exchange(t.unfinished, true)) g->banks.drop(static_cast<int64_t>(g->steps.load()));  // the last one did not count
  t.phase = static_cast<size_t>(phase);
  t.sampled = sampled != 0;
  t.slot = slot;
  t.stepping = true;
}

// Between the parts of a step (the forward, the sampling) its thread may do other work.
void kcap_step_pause() { this_thread().stepping = false; }
void kcap_step_resume() { this_thread().stepping = true; }

// `details`: more JSON members of the step's line, each with a leading comma; empty: no line.
int kcap_step_end(int64_t tokens, int64_t sequences, const char* details) {
  return kcap::guarded([&] {
    auto& t = this_thread();
    if (g->open) {
      kcap::count_step(t, tokens, sequences, details);
      t.unfinished = false;
      g->banks.rotate();
    }
    t.stepping = false;
    kcap::new_program(t);
  });
}

// The step's Program without counting it; its number in the shard. The step is over.
int64_t kcap_step_program() {
  int64_t number = -1;
  kcap::guarded([&] {
    auto& t = this_thread();
    std::lock_guard<std::mutex> guard(g->mutex);
    if (g->open && t.program.size() <= kcap::kMaxProgram) number = kcap::intern_program(t.program);
    t.stepping = false;
    kcap::new_program(t);
  });
  return number;
}

// A capture begins on this thread: `nodes`, whether to note which of the graph's nodes each call adds; `stream`, which
// captures (nullptr: torch's current one).
int kcap_graph_begin(int nodes, void* stream) {
  return kcap::guarded([&] {
    if (!g->error.empty() || g->closed) return;
    g->count_nodes = nodes != 0;
    kcap::capture_begin(this_thread(), stream);
  });
}

// How many nodes the capture has, which are kept for its line; asked before it ends.
int64_t kcap_graph_nodes() {
  size_t count = 0;
  kcap::guarded([&] {
    const auto& capture = this_thread().capture;
    if (!capture) return;
    count = kcap::nodes_so_far(*capture);
    if (count) capture->graph_nodes = kcap::g->banks.describe_capture(capture->stream);
  });
  return static_cast<int64_t>(count);
}

int64_t kcap_graph_end(const char* info, int64_t nodes) {
  int64_t number = -1;
  kcap::guarded([&] { number = kcap::graph_captured(this_thread(), info, static_cast<size_t>(nodes)); });
  return number;
}

void kcap_graph_abandon() { kcap::capture_over(this_thread()); }

int kcap_graph_launched() {
  return kcap::guarded([&] {
    auto& t = this_thread();
    if (t.owner == g) kcap::launched(t);
  });
}

// The memory that graphs allocated for themselves, as pairs of addresses; nullptr: it is not known.
int kcap_graph_memory(const uint64_t* bounds, size_t pairs) {
  return kcap::guarded([&] {
    std::vector<std::pair<uintptr_t, uintptr_t>> memory;
    for (size_t i = 0; i < pairs; i++) memory.emplace_back(bounds[2 * i], bounds[2 * i + 1]);
    std::lock_guard<std::mutex> guard(g->mutex);
    g->graph_memory = std::move(memory);
    g->graph_memory_known = bounds != nullptr;
  });
}

// ---- calls from Python, and from taps in C++ ----

// `region`: everything in a call of it counts as it does outside, and it is no kernel itself.
int64_t kcap_operator(const char* name, const char* arguments, int work, int region) {
  int64_t number = -1;
  kcap::guarded([&] {
    std::vector<std::string> names;
    kcap::split(arguments, [&](std::string&& name) { names.push_back(std::move(name)); });
    auto* op = g->operators.external(name, names, work != 0, region != 0);
    std::lock_guard<std::mutex> guard(g->mutex);
    g->externals.push_back(op);
    number = static_cast<int64_t>(g->externals.size()) - 1;
  });
  return number;
}

int64_t kcap_launch(const char* json) {
  int64_t number = -1;
  kcap::guarded([&] {
    std::lock_guard<std::mutex> guard(g->mutex);
    g->launches.push_back({static_cast<uint32_t>(g->launches.size()) + 1, json, kcap::gridless(json)});
    number = static_cast<int64_t>(g->launches.size()) - 1;
  });
  return number;
}

int64_t kcap_text(const char* text) {
  int64_t number = -1;
  kcap::guarded([&] {
    std::lock_guard<std::mutex> guard(g->mutex);
    g->texts.push_back(text);
    number = static_cast<int64_t>(g->texts.size()) - 1;
  });
  return number;
}

// A call by a tap in C++, as record_call; 1 when it was recorded.
int kcap_call(int64_t op, int64_t launch, int count, const uint8_t* kinds, const int64_t* words, int enter, int detail) {
  if (!kcap::may_record(detail != 0)) return 0;
  std::vector<kcap::IValue> inputs;
  if (kcap::guarded([&] { inputs = kcap::unpacked(count, kinds, words); })) return 0;
  return kcap::record_call(op, launch, inputs, enter != 0, detail != 0);
}

PyObject* kcap_python_function(const char* name, PyObject* self) { return kcap::function_for_python(name, self); }

// 1: what this thread calls is not recorded until as many -1 came.
void kcap_ignore(int change) { this_thread().ignored += change; }

// 1: what this thread calls runs in the place of the operator that it is in, and is recorded, too, until -1 comes.
void kcap_replace(int change) {
  auto& t = this_thread();
  if (change > 0) t.replaced_depth = std::exchange(t.aten_depth, 0);
  else t.aten_depth = std::exchange(t.replaced_depth, 0);
}

// A process group, by the name or the handle that operators are given it by. `label`: what the engine calls it.
int kcap_group(const char* name, int64_t handle, int size, int rank, const char* label) {
  return kcap::guarded([&] { kcap::groups().add(name, handle, size, rank, label); });
}

int kcap_line(const char* line) {
  return kcap::guarded([&] { g->shard.write(std::string(line) + "\n"); });
}

int kcap_close() {
  return kcap::guarded([&] {
    g->captures = 0;  // nobody ends those under way
    kcap_stop();
    kcap::muting().off();
    g->closed = true;
    g->shard.header(kcap::hSamplesSkipped) += g->banks.finish();
    for (const kcap::Entry& entry : g->entries)
      if (entry.shapes) kcap::write_shapes(entry);
    g->shard.header(kcap::hClosed) = 1;
    g->shard.close();
  });
}

// Whether nested calls may be kept from the observer. How many libraries' pointers are exchanged for that now.
int kcap_mute(int allowed) {
  kcap::muting().allow(allowed != 0);
  if (!allowed) kcap::muting().off();
  else if (g && g->open) kcap::muting().on();
  return kcap::muting().exchanged();
}

void kcap_fail_after(int64_t calls) { g->fail_after = calls; }
const char* kcap_error() { return g ? g->error.c_str() : ""; }
}
