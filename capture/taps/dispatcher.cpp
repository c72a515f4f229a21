// The native recorder: a RecordFunction observer that interns every call an engine makes and counts it.
//
// Built once per torch version and compiler against ATen's headers alone (no Python ABI), called through ctypes.
// Compile with -DNDEBUG: without it RecordFunction's layout differs from the wheel's.
// Inside a callback nothing is dispatched, no lock is held while a tensor is looked at, and nothing throws.
#include <ATen/record_function.h>
#include <pthread.h>

#include <deque>
#include <utility>

#include "native/samples.h"
#include "native/shard.h"

namespace kcap {

struct Entry {  // an interned call
  uint32_t id = 0;
  Operator* op = nullptr;
  Entry* region = nullptr;                 // its twin, once another custom operator was recorded inside it
  bool sampled = false;
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
  // Frames lie in their thread, one for each depth.
  static void* operator new(size_t, void* place) { return place; }
  static void operator delete(void*) {}
  static void operator delete(void*, void*) {}
};

// Entries by signature: open addressing, since a lookup is most of what a call costs.
class Known {
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

struct Thread {
  Recorder* owner = nullptr;  // whose entries `known` and `program` hold
  Frame* top = nullptr;
  int aten_depth = 0, depth = 0;
  bool busy = false, stepping = false;
  size_t phase = 3;
  uint64_t epoch = 0;
  std::vector<Entry*> program;
  Known known;
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
constexpr size_t kMaxProgramWords = 64u << 20, kMaxProgram = 4u << 20, kSamplesPerTurn = 64;

struct Recorder {
  std::atomic<bool> open{false}, loose{false}, closed{false};
  std::atomic<size_t> loose_phase{3};
  std::atomic<int64_t> fail_after{-1};  // fault injection
  std::atomic<uint64_t> steps{0};
  Operators operators;
  Shard shard;
  Banks banks{[this](std::string_view text) { shard.write(text); }};
  std::mutex mutex;
  std::atomic<bool> full{false};
  std::deque<Entry> entries;
  std::unordered_map<Hash, Entry*, HashOf> interned;
  std::unordered_map<Hash, std::pair<Entry*, int>, HashOf> variants;  // base -> the first, how many
  std::unordered_map<Hash, Entry*, HashOf> places;                    // base and scalars -> the first
  std::unordered_map<Hash, uint32_t, HashOf> programs, batches;
  std::unordered_map<Hash, std::vector<Entry*>, HashOf> shapes;       // base of a program -> one that ran
  size_t program_words = 0;
  std::string error;
};
Recorder* g = nullptr;
at::CallbackHandle g_handle = 0;

// A new recording begins with nothing known; the frames of operators under way end by themselves.
void adopt(Thread& t) {
  t.owner = g;
  t.epoch++;
  t.program.clear();
  t.known = Known();
  t.operators = OperatorCache();
  t.stepping = false;
}

inline void adopt_if_new(Thread& t) {
  if (C10_UNLIKELY(t.owner != g)) adopt(t);
}

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

// ---- interning ----

std::string arguments_json(const Operator& op, const at::RecordFunction& fn) {
  std::string out = "[";
  Describer describer(op);
  size_t i = 0;
  for (const IValue& v : fn.inputs()) {
    const ArgumentInfo* info = i < op.arguments.size() ? &op.arguments[i] : nullptr;
    std::string value;
    describer.argument(value, v, info, i);
    out += i++ ? ",{" : "{";
    if (info) { out += "\"name\":"; put_string(out, info->name); out += ','; }
    out += "\"value\":" + value;
    if (info && info->keyword) out += ",\"keyword\":true";
    if (info && info->written) out += ",\"written\":true";
    if (info && !info->default_json.empty() && info->default_json == value) out += ",\"default\":true";
    out += '}';
  }
  return out + "]";
}

std::string call_line(const Entry& e, const Operator* parent, const std::string& arguments) {
  std::string out = "{\"t\":\"call\",\"id\":" + std::to_string(e.id) + ",\"operator\":";
  put_string(out, e.op->name);
  if (parent) { out += ",\"parent\":"; put_string(out, parent->base_name); }
  if (!e.op->work) out += ",\"work\":false";
  return out + ",\"args\":" + arguments + "}\n";
}

bool is_object_list(const IValue& v) { return v.isList() && !v.isIntList() && !v.isDoubleList() && !v.isBoolList(); }

bool has_offset(const IValue& v) { return v.isTensor() && v.toTensor().defined() && strided(v.toTensor()); }
int64_t offset_of(const IValue& v) { return v.toTensor().unsafeGetTensorImpl()->storage_offset(); }

uint64_t offsets_of(const IValue& v) {  // a list's tensors drift together
  if (has_offset(v)) return static_cast<uint64_t>(offset_of(v));
  if (!is_object_list(v)) return 0;
  Mixer all;
  for (const IValue& item : v.toListRef()) all.add(has_offset(item) ? offset_of(item) : -1);
  return all.hash().a;
}

void measure_slots(Entry& e, const at::RecordFunction& fn, const Operator* parent) {
  Operator all, none;
  all.serial = e.op->serial;
  all.drifting = all.drifting_offsets = ~0ull;
  Hasher base(all, parent ? parent->serial : 0);
  size_t i = 0;
  for (const IValue& v : fn.inputs()) {
    base.argument(v, i++);
    Hasher one(none, 0);
    if (is_scalar_like(v)) one.argument(v, 0);
    e.scalars.push_back(one.hash.hash().a);
    e.offsets.push_back(offsets_of(v));
  }
  e.base = base.hash.hash();
}

bool samples_anything(const Operator& op, const at::RecordFunction& fn) {
  if (op.drifting.load() || op.drifting_offsets.load()) return true;
  size_t i = 0;
  for (const IValue& v : fn.inputs()) {
    const Keep keep = i < op.arguments.size() ? op.arguments[i].keep : Keep::nothing;
    i++;
    if (keep == Keep::nothing) continue;
    if (is_object_list(v) || (v.isTensor() && v.toTensor().defined() && is_index_type(v.toTensor()))) return true;
  }
  return false;
}

// What two calls of one base differ in drifts: from now on the operator's calls leave it out of their signature.
void note_drift(const Entry& a, const Entry& b) {
  uint64_t scalars = 0, offsets = 0;
  for (size_t i = 0; i < std::min<size_t>({a.scalars.size(), b.scalars.size(), 64}); i++) {
    if (a.scalars[i] != b.scalars[i]) scalars |= 1ull << i;
    if (a.offsets[i] != b.offsets[i]) offsets |= 1ull << i;
  }
  const uint64_t before = a.op->drifting.fetch_or(scalars), before_offsets = a.op->drifting_offsets.fetch_or(offsets);
  if ((before | scalars) == before && (before_offsets | offsets) == before_offsets) return;
  std::string line = "{\"t\":\"drift\",\"operator\":";
  put_string(line, a.op->name);
  g->shard.write(line + ",\"scalars\":" + std::to_string(before | scalars) + ",\"offsets\":" + std::to_string(before_offsets | offsets) + "}\n");
}

Entry* add_entry(Entry&& made) {
  if (g->entries.size() >= kMaxCalls) { g->full = true; return nullptr; }
  made.id = static_cast<uint32_t>(g->entries.size());
  g->entries.push_back(std::move(made));
  return &g->entries.back();
}

// Calls that differ in offsets alone are one at once (each layer's slice of a cache); scalars may mean different things
// (a dimension), so they need kMaxVariants values, or two steps that agree in all else, to be taken for drifting.
void note_variant(Entry* entry) {
  Mixer place;
  place.add(entry->base.a);
  for (uint64_t scalar : entry->scalars) place.add(scalar);
  const auto [first_place, alone] = g->places.try_emplace(place.hash(), entry);
  if (!alone) note_drift(*first_place->second, *entry);
  auto& [first, count] = g->variants.try_emplace(entry->base, entry, 0).first->second;
  if (++count > kMaxVariants) note_drift(*first, *entry);
}

Entry* interned_by_another(Thread& t, const Hash& key) {
  std::lock_guard<std::mutex> guard(g->mutex);
  const auto it = g->interned.find(key);
  if (it == g->interned.end()) return nullptr;
  t.known.add(key, it->second);
  return it->second;
}

Entry* intern_new(Thread& t, const Hash& key, Operator* op, const at::RecordFunction& fn, const Operator* parent) {
  if (g->full) return interned_by_another(t, key);
  Entry made;
  made.op = op;
  measure_slots(made, fn, parent);
  made.sampled = samples_anything(*op, fn);
  for (size_t phase = 0; phase < kPhases; phase++) made.reservoirs[phase].state = key.a ^ (phase + 1);
  const std::string arguments = arguments_json(*op, fn);
  std::lock_guard<std::mutex> guard(g->mutex);
  auto [it, fresh] = g->interned.try_emplace(key, nullptr);
  if (fresh) {
    it->second = add_entry(std::move(made));
    if (!it->second) { g->interned.erase(it); return nullptr; }
    g->shard.write(call_line(*it->second, parent, arguments));
    note_variant(it->second);
  }
  t.known.add(key, it->second);
  return it->second;
}

Entry* intern(Thread& t, const Hash& key, Operator* op, const at::RecordFunction& fn, const Operator* parent) {
  Entry* entry = t.known.find(key);
  return C10_LIKELY(entry != nullptr) ? entry : intern_new(t, key, op, fn, parent);
}

Entry* region_of(Entry* e) {
  std::lock_guard<std::mutex> guard(g->mutex);
  if (e->region) return e->region;
  Entry made;
  made.op = e->op;
  Mixer base;
  base.add(e->base.a);
  base.add(e->base.b);
  base.add(17);
  made.base = base.hash();
  made.scalars = e->scalars;
  made.offsets = e->offsets;
  Entry* region = add_entry(std::move(made));
  if (!region) return nullptr;
  g->shard.write("{\"t\":\"region\",\"id\":" + std::to_string(region->id) + ",\"of\":" + std::to_string(e->id) + "}\n");
  return e->region = region;
}

// ---- samples ----

bool add_tensor(PendingSample& sample, const std::string& path, const Tensor& t, Keep keep) {
  if (keep == Keep::nothing || !t.defined() || !is_index_type(t) || !strided(t)) return true;
  size_t extent = t.numel() ? 1 : 0;
  for (int64_t d = 0; extent && d < t.dim(); d++) extent += static_cast<size_t>((t.size(d) - 1) * t.stride(d));
  const size_t bytes = extent * t.element_size();
  const size_t held = t.unsafeGetTensorImpl()->unsafe_storage().nbytes();  // less than it needs where it was resized away
  if (bytes > kMaxTensorBytes || static_cast<size_t>(t.storage_offset()) * t.element_size() + bytes > held) {
    g->shard.header(hSamplesSkipped)++;
    return true;
  }
  SampledTensor out{path, keep, t.scalar_type(), t.sizes().vec(), t.strides().vec()};
  if (!g->banks.copy(out, t, bytes)) return false;
  sample.tensors.push_back(std::move(out));
  return true;
}

bool add_tensors(PendingSample& sample, const std::string& path, const IValue& v, Keep keep) {
  if (keep == Keep::nothing) return true;
  if (v.isTensor()) return add_tensor(sample, path, v.toTensor(), keep);
  if (!is_object_list(v)) return true;
  size_t k = 0;
  for (const IValue& item : v.toListRef()) {
    if (item.isTensor() && !add_tensor(sample, path + "." + std::to_string(k), item.toTensor(), keep)) return false;
    k++;
  }
  return true;
}

void put_member(std::string& object, const std::string& path) {
  if (!object.empty()) object += ',';
  put_key(object, path.c_str());
}

void put_offsets(std::string& object, const std::string& path, const IValue& v) {
  if (has_offset(v)) {
    put_member(object, path);
    object += std::to_string(offset_of(v));
  } else if (is_object_list(v)) {
    size_t k = 0;
    for (const IValue& item : v.toListRef()) put_offsets(object, path + "." + std::to_string(k++), item);
  }
}

bool take_sample(Thread& t, const Entry& e, const at::RecordFunction& fn, size_t phase, int slot) {
  const Operator& op = *e.op;
  const uint64_t drifting = op.drifting.load(), drifting_offsets = op.drifting_offsets.load();
  Operator none;
  Describer describer(none);
  PendingSample sample;
  std::string scalars, offsets;
  for (size_t i = 0; i < fn.inputs().size(); i++) {
    const IValue& v = fn.inputs()[i];
    const std::string path = std::to_string(i);
    const ArgumentInfo info = i < op.arguments.size() ? op.arguments[i] : ArgumentInfo();
    if (i < 64 && (drifting >> i & 1) && is_scalar_like(v)) {
      put_member(scalars, path);
      describer.value(scalars, v, info.ints);
    }
    if (i < 64 && (drifting_offsets >> i & 1)) put_offsets(offsets, path, v);
    if (!add_tensors(sample, path, v, info.keep)) { g->shard.header(hSamplesSkipped)++; return false; }
  }
  sample.head = "{\"t\":\"sample\",\"call\":" + std::to_string(e.id) + ",\"phase\":" + std::to_string(phase) + ",\"slot\":" + std::to_string(slot);
  if (t.stepping) sample.head += ",\"step\":" + std::to_string(g->steps.load());
  if (!scalars.empty()) sample.head += ",\"scalars\":{" + scalars + "}";
  if (!offsets.empty()) sample.head += ",\"offsets\":{" + offsets + "}";
  g->banks.add(std::move(sample));
  return true;
}

// ---- the callbacks ----

size_t phase_of(const Thread& t) { return t.stepping ? t.phase : g->loose_phase.load(std::memory_order_relaxed); }

void count_loose(Thread& t) {
  const size_t phase = phase_of(t);
  for (const Entry* e : t.program) g->shard.loose(e->id, phase).fetch_add(1, std::memory_order_relaxed);
  t.program.clear();
}

// nullptr where operators nest deeper than is followed.
std::unique_ptr<Frame> push(Thread& t, Entry* entry, uint32_t serial, bool aten) {
  if (C10_UNLIKELY(t.depth >= kMaxDepth)) return nullptr;
  std::unique_ptr<Frame> frame(new (t.frames[t.depth++]) Frame());
  frame->thread = &t;
  frame->below = t.top;
  frame->entry = entry;
  frame->serial = serial;
  frame->epoch = t.epoch;
  frame->position = t.program.size();
  frame->aten = aten;
  t.top = frame.get();
  t.aten_depth += aten;
  return frame;
}

const Operator* parent_of(const Thread& t) { return t.top && t.top->entry ? t.top->entry->op : nullptr; }

void sample_if_due(Thread& t, Entry& e, const at::RecordFunction& fn) {
  const size_t phase = phase_of(t);
  Reservoir& reservoir = e.reservoirs[phase];
  if (!reservoir.due()) return;
  if (take_sample(t, e, fn, phase, reservoir.slot())) reservoir.taken();
  else reservoir.missed();
}

struct Signature {
  Hash key;
  Reality real;
};

inline Signature signature(const Operator& op, const Thread& t, const at::RecordFunction& fn) {
  Hasher hasher(op, t.top ? t.top->serial : 0);
  if (C10_UNLIKELY(t.keys->included().has(c10::DispatchKey::Python)) && tracing_mode_active()) hasher.real = Reality::traced;
  hasher.arguments(fn.inputs());
  return {hasher.hash.hash(), hasher.real};
}

void fail_if_asked() {
  if (C10_UNLIKELY(g->fail_after.load(std::memory_order_relaxed) >= 0) && g->fail_after-- == 0) throw std::runtime_error("made to fail");
}

std::unique_ptr<at::ObserverContext> started(Thread& t, const at::RecordFunction& fn) {
  Operator* op = g->operators.find(t.operators, fn);
  if (C10_UNLIKELY(!op)) return nullptr;
  const Signature found = signature(*op, t, fn);
  if (C10_UNLIKELY(found.real == Reality::transparent)) return nullptr;
  if (C10_UNLIKELY(found.real == Reality::traced)) {
    g->shard.header(hTraced).fetch_add(1, std::memory_order_relaxed);
    return push(t, nullptr, 0, true);
  }
  fail_if_asked();
  Entry* entry = intern(t, found.key, op, fn, parent_of(t));
  if (C10_UNLIKELY(!entry)) {
    g->shard.header(hOverflow).fetch_add(1, std::memory_order_relaxed);
    return push(t, nullptr, 0, op->aten);
  }
  if (!op->aten)
    for (Frame* f = t.top; f && !f->has_kernels; f = f->below) f->has_kernels = true;
  if (C10_UNLIKELY(entry->sampled)) sample_if_due(t, *entry, fn);
  auto frame = push(t, entry, op->serial, op->aten);
  t.program.push_back(entry);
  return frame;
}

void ended(Thread& t, Frame& frame) {
  t.top = frame.below;
  t.depth--;
  t.aten_depth -= frame.aten;
  if (frame.epoch != t.epoch) return;
  if (!frame.aten && frame.entry && t.program.size() > frame.position + 1) {
    Entry* region = frame.has_kernels ? region_of(frame.entry) : nullptr;
    if (region) t.program[frame.position] = region;
    else t.program.resize(frame.position + 1);  // aten operators inside a kernel are its detail
  }
  if (!t.top && (!t.stepping || t.program.size() > kMaxProgram)) {
    count_loose(t);
    if (g->banks.waiting() > kSamplesPerTurn) g->banks.rotate();
  }
}

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& fn) {
  Thread& t = this_thread();
  if (t.aten_depth > 0 || t.busy) return nullptr;
  if (!g->open.load(std::memory_order_relaxed)) return nullptr;
  adopt_if_new(t);
  if (!t.stepping && !g->loose.load(std::memory_order_relaxed)) {
    g->shard.header(hOffStep).fetch_add(1, std::memory_order_relaxed);
    return nullptr;
  }
  t.busy = true;
  std::unique_ptr<at::ObserverContext> frame;
  try {
    frame = started(t, fn);
  } catch (const std::exception& error) {
    failed(error.what());
  } catch (...) {
    failed("unknown error");
  }
  t.busy = false;
  return frame;
}

void on_end(const at::RecordFunction&, at::ObserverContext* context) {
  if (!context) return;
  Frame& frame = *static_cast<Frame*>(context);
  Thread& t = *frame.thread;
  t.busy = true;
  try {
    ended(t, frame);
  } catch (const std::exception& error) {
    failed(error.what());
  }
  t.busy = false;
}

// ---- steps ----

uint32_t intern_program(const std::vector<Entry*>& program) {
  Mixer key, base;
  for (const Entry* e : program) {
    key.add(e->id);
    base.add(e->base.a);
  }
  auto [it, fresh] = g->programs.try_emplace(key.hash(), g->programs.size());
  if (!fresh) return it->second;
  std::string line = "{\"t\":\"program\",\"id\":" + std::to_string(it->second) + ",\"calls\":[";
  for (size_t i = 0; i < program.size(); i++) line += (i ? "," : "") + std::to_string(program[i]->id);
  g->shard.write(line + "]}\n");
  auto [like, first] = g->shapes.try_emplace(base.hash());
  if (first && (g->program_words += program.size()) < kMaxProgramWords) like->second = program;
  else for (size_t i = 0; i < std::min(like->second.size(), program.size()); i++)
    if (like->second[i] != program[i]) note_drift(*like->second[i], *program[i]);
  return it->second;
}

// Counts an ended step: as one more of its batch, or call by call once the table of batches is full.
void count_step(Thread& t, int64_t tokens, int64_t sequences, const char* details) {
  std::lock_guard<std::mutex> guard(g->mutex);
  const uint64_t index = g->steps++;
  const bool full = g->batches.size() >= kMaxBatches || g->program_words >= kMaxProgramWords;
  if (full || t.program.size() > kMaxProgram) {
    count_loose(t);
    g->shard.header(static_cast<Header>(hLooseSteps + t.phase))++;
    g->shard.header(hSteps)++;
    return;
  }
  const uint32_t program = intern_program(t.program);
  Mixer key;
  for (uint64_t word : {uint64_t{program}, uint64_t{t.phase}, static_cast<uint64_t>(tokens), static_cast<uint64_t>(sequences)}) key.add(word);
  auto [it, fresh] = g->batches.try_emplace(key.hash(), g->batches.size());
  const std::string shape = ",\"program\":" + std::to_string(program) + ",\"phase\":" + std::to_string(t.phase) +
                            ",\"tokens\":" + std::to_string(tokens) + ",\"sequences\":" + std::to_string(sequences);
  if (fresh) g->shard.write("{\"t\":\"batch\",\"id\":" + std::to_string(it->second) + shape + "}\n");
  if (details && *details) g->shard.write("{\"t\":\"step\",\"index\":" + std::to_string(index) + shape + details + "}\n");
  g->shard.batch(it->second)++;
  g->shard.header(hSteps)++;
}

void forget_in_child() { if (g) { g->open = false; g->closed = true; } }

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

void fill_names(std::set<std::string>& names, const char* text) {
  std::string name;
  for (const char* c = text;; c++) {
    if (*c && *c != ' ') { name += *c; continue; }
    if (!name.empty()) names.insert(name);
    name.clear();
    if (!*c) return;
  }
}

}  // namespace kcap

using kcap::g;
using kcap::this_thread;

extern "C" {

// `stem`: the shard's path without its ending; the names are separated by blanks. 0, or 1 with kcap_error().
int kcap_open(const char* stem, const char* value_names, const char* range_names, int keep_tokens) {
  if (!g) pthread_atfork(nullptr, nullptr, kcap::forget_in_child);
  if (g && !g->closed) return 1;
  kcap::Recorder* last = g;
  g = new kcap::Recorder();
  if (last) last->shard.release();  // the rest of it stays: frames of operators under way still point to its entries
  return kcap::guarded([&] {
    kcap::fill_names(kcap::policy().value_names, value_names);
    kcap::fill_names(kcap::policy().range_names, range_names);
    kcap::policy().keep_tokens = keep_tokens != 0;
    g->shard.open(stem);
  });
}

// Opens the window. `loose`: every thread's calls count at once; otherwise only calls inside a step.
void kcap_start(int loose) {
  g->loose = loose != 0;
  if (!kcap::g_handle)
    kcap::g_handle = at::addGlobalCallback(at::RecordFunctionCallback(kcap::on_start, kcap::on_end).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  else
    at::reenableCallback(kcap::g_handle);
  g->open = g->error.empty();
}

void kcap_stop() {
  g->open = false;
  if (kcap::g_handle) at::disableCallback(kcap::g_handle);
}

void kcap_set_phase(int phase) { g->loose_phase = static_cast<size_t>(phase); }

void kcap_step_begin(int phase) {
  auto& t = this_thread();
  kcap::adopt_if_new(t);
  t.program.clear();
  t.phase = static_cast<size_t>(phase);
  t.epoch++;
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
      g->banks.rotate();
    }
    t.stepping = false;
    t.epoch++;
    t.program.clear();
  });
}

int kcap_line(const char* line) {
  return kcap::guarded([&] { g->shard.write(std::string(line) + "\n"); });
}

int kcap_close() {
  return kcap::guarded([&] {
    kcap_stop();
    g->closed = true;
    g->shard.header(kcap::hSamplesSkipped) += g->banks.finish();
    g->shard.header(kcap::hClosed) = 1;
    g->shard.close();
  });
}

void kcap_fail_after(int64_t calls) { g->fail_after = calls; }
const char* kcap_error() { return g ? g->error.c_str() : ""; }
}
