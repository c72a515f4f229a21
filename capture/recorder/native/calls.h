// A call begins, is sampled, and ends: what the dispatcher's observer and the calls from outside share.
#pragma once
#include "interning.h"
#include "muting.h"

namespace kcap {

// ---- a Sample of one invocation ----

size_t extent_of(const Tensor& t) {  // bytes from its first element to one past its last
  size_t extent = t.numel() ? 1 : 0;
  for (int64_t d = 0; extent && d < t.dim(); d++) extent += static_cast<size_t>((t.size(d) - 1) * t.stride(d));
  return extent * t.element_size();
}

bool is_sampled(const Tensor& t, Keep keep) {
  return keep != Keep::nothing && t.defined() && is_index_type(t) && strided(t);
}

// Whether it may be read: not too large, though its elements share memory, and not past the end of a storage that was
// resized away.
bool is_readable(const Tensor& t, size_t bytes) {
  const size_t held = t.unsafeGetTensorImpl()->unsafe_storage().nbytes();
  const bool small = bytes <= kMaxTensorBytes && static_cast<size_t>(t.numel()) <= kMaxTensorBytes / t.element_size();
  if (small && static_cast<size_t>(t.storage_offset()) * t.element_size() + bytes <= held) return true;
  g->shard.header(hSamplesSkipped)++;
  return false;
}

bool add_tensor(PendingSample& sample, const std::string& path, const Tensor& t, Keep keep) {
  if (!is_sampled(t, keep)) return true;
  const size_t bytes = extent_of(t);
  if (!is_readable(t, bytes)) return true;
  SampledTensor out{path, keep, t.scalar_type(), t.sizes().vec(), t.strides().vec()};
  if (!g->banks.copy(out, t.const_data_ptr(), t.device(), bytes)) return false;
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

int64_t step_of(const Thread& t) { return t.stepping ? static_cast<int64_t>(g->steps.load()) : -1; }

std::string sample_head(const Thread& t, const Entry& e, size_t phase, int slot) {
  std::string head = "{\"t\":\"sample\",\"call\":" + std::to_string(e.id) + ",\"phase\":" + std::to_string(phase) + ",\"slot\":" + std::to_string(slot);
  if (t.stepping) head += ",\"step\":" + std::to_string(g->steps.load());
  return head;
}

bool take_sample(Thread& t, const Entry& e, c10::ArrayRef<const IValue> inputs, size_t phase, int slot) {
  const Operator& op = *e.op;
  const uint64_t drifting = op.drifting.load(), drifting_offsets = op.drifting_offsets.load();
  Operator none;
  Describer describer(none);
  PendingSample sample;
  std::string scalars, offsets;
  for (size_t i = 0; i < inputs.size(); i++) {
    const IValue& v = inputs[i];
    const std::string path = std::to_string(i);
    const ArgumentInfo info = i < op.arguments.size() ? op.arguments[i] : ArgumentInfo();
    if (i < 64 && (drifting >> i & 1) && is_scalar_like(v)) {
      put_member(scalars, path);
      describer.value(scalars, v, info.ints);
    }
    if (i < 64 && (drifting_offsets >> i & 1)) put_offsets(offsets, path, v);
    if (!add_tensors(sample, path, v, info.keep)) { g->shard.header(hSamplesSkipped)++; return false; }
  }
  sample.head = sample_head(t, e, phase, slot);
  sample.step = step_of(t);
  if (!scalars.empty()) sample.head += ",\"scalars\":{" + scalars + "}";
  if (!offsets.empty()) sample.head += ",\"offsets\":{" + offsets + "}";
  g->banks.add(std::move(sample));
  return true;
}

// ---- the call itself ----

size_t phase_of(const Thread& t) { return t.stepping ? t.phase : kOther; }

void count_loose(Thread& t) {
  const size_t phase = phase_of(t);
  g->shard.flush();
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

bool may_sample(const Thread& t) { return t.sampled || !t.stepping; }

// Where the tensors are whose values are sampled; 0 where there are none.
uint64_t places_of(const Operator& op, c10::ArrayRef<const IValue> inputs) {
  uint64_t places = 0;
  for (size_t i = 0; i < std::min(inputs.size(), op.arguments.size()); i++) {
    if (!inputs[i].isTensor() || !is_sampled(inputs[i].toTensor(), op.arguments[i].keep)) continue;
    const Tensor& t = inputs[i].toTensor();
    const auto storage = reinterpret_cast<uintptr_t>(t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    places = (places ^ (storage + static_cast<uint64_t>(t.storage_offset()))) * 0x9E3779B97F4A7C15ull;
  }
  return places;
}

// Whether this is the first invocation of a call in a step that has a Sample of each.
bool fills_slot(const Thread& t, Reservoir& reservoir) {
  return C10_UNLIKELY(t.slot >= 0) && t.stepping && std::exchange(reservoir.undrawn, t.epoch) != t.epoch;
}

void sample_if_due(Thread& t, Entry& e, const Call& call) {
  const size_t phase = phase_of(t);
  Reservoir& reservoir = e.reservoirs[phase];
  if (fills_slot(t, reservoir)) take_sample(t, e, call.inputs, phase, t.slot);
  if (!reservoir.due()) return;
  const uint64_t places = t.stepping ? places_of(*e.op, call.inputs) : 0;
  if (!may_sample(t) || reservoir.knows(t.epoch, places)) reservoir.later();
  else if (take_sample(t, e, call.inputs, phase, reservoir.slot())) reservoir.taken(t.epoch, places);
  else reservoir.missed();
}

struct Signature {
  Hash key;
  Reality real;
};

inline Signature signature(const Call& call, const Thread& t) {
  Hasher hasher(*call.op, t.top ? t.top->serial : 0);
  if (C10_UNLIKELY(call.launch != nullptr)) hasher.hash.add(call.launch->id);
  if (C10_UNLIKELY(t.keys->included().has(c10::DispatchKey::Python)) && tracing_mode_active()) hasher.real = Reality::traced;
  hasher.arguments(call.inputs);
  return {hasher.hash.hash(), hasher.real};
}

void fail_if_asked() {
  if (C10_UNLIKELY(g->fail_after.load(std::memory_order_relaxed) >= 0) && g->fail_after-- == 0) throw std::runtime_error("made to fail");
}

// Whether the operator that a `detail` is called in stays a kernel, as far as is known: those around it are regions.
bool keeps_detail(Frame* f) {
  const bool operates = f && !f->from_outside && f->entry && !f->has_kernels && !f->has_detail;
  return operates && (f->has_detail = true);
}

void mark_regions(Thread& t, bool detail = false) {
  Frame* f = detail && keeps_detail(t.top) ? t.top->below : t.top;
  for (; f && !f->has_kernels; f = f->below) f->has_kernels = true;
}

// What a capture notes of a call, beside that it is part of the graph.
void capture_call(Thread& t, Entry& e, const Call& call, bool sampled);

std::unique_ptr<Frame> begun(Thread& t, const Call& call) {
  const Signature identity = signature(call, t);
  if (C10_UNLIKELY(identity.real == Reality::transparent)) return nullptr;
  if (C10_UNLIKELY(identity.real == Reality::traced)) {
    g->shard.header(hTraced).fetch_add(1, std::memory_order_relaxed);
    return push(t, nullptr, 0, true);
  }
  fail_if_asked();
  Entry* entry = intern(t, identity.key, call, parent_of(t));
  if (C10_UNLIKELY(!entry)) {
    g->shard.header(hOverflow).fetch_add(1, std::memory_order_relaxed);
    return push(t, nullptr, 0, call.op->aten);
  }
  if (!call.op->aten && !call.op->region) mark_regions(t, call.detail);
  const bool sampled = C10_UNLIKELY(entry->sampled) && (!entry->shapes || entry->first == identity.key);
  if (C10_UNLIKELY(t.capture != nullptr)) capture_call(t, *entry, call, sampled);
  else if (C10_UNLIKELY(sampled)) sample_if_due(t, *entry, call);
  auto frame = push(t, entry, call.op->serial, call.op->aten);
  t.program.push_back(entry);
  return frame;
}

c10::DispatchKeySet keys_of(c10::ArrayRef<IValue> values) {
  c10::DispatchKeySet keys;
  for (const IValue& v : values) {
    if (v.isTensor()) keys = keys | v.toTensor().key_set();
    else if (is_object_list(v)) keys = keys | keys_of(v.toListRef());
  }
  return keys;
}

// Autocast casts the arguments, which are calls of their own, and calls the operator again: that call is the real one.
C10_NOINLINE bool is_autocast(const Operator& op, c10::ArrayRef<const IValue> inputs, c10::DispatchKeySet active) {
  return op.autocast.has_any(active) && keys_of(inputs).has_any(op.autocast & active);
}

// A boxed call, such as functorch's, shows its whole stack: its arguments are the last there.
inline c10::ArrayRef<const IValue> inputs_of(const Operator& op, const at::RecordFunction& fn) {
  const auto stack = fn.inputs();
  return C10_LIKELY(stack.size() <= op.arguments.size()) ? stack : stack.slice(stack.size() - op.arguments.size());
}

std::unique_ptr<at::ObserverContext> started(Thread& t, const at::RecordFunction& fn) {
  Operator* op = g->operators.find(t.operators, fn);
  if (C10_UNLIKELY(!op)) return nullptr;
  const auto inputs = inputs_of(*op, fn);
  const c10::DispatchKeySet active = c10::autocast_dispatch_keyset - t.keys->excluded();
  if (C10_UNLIKELY(!active.empty()) && is_autocast(*op, inputs, active)) return nullptr;
  if (C10_UNLIKELY(t.capture != nullptr)) op = g->operators.in_graph(op);
  return begun(t, {op, inputs});
}

void count_if_loose(Thread& t) {
  if (t.top || t.capture || (t.stepping && t.program.size() <= kMaxProgram)) return;
  count_loose(t);
  if (C10_UNLIKELY(g->banks.wants_turn())) g->banks.rotate();
}

void capture_end_of_call(Thread& t, size_t position);

// A capture may end, or begin, while the frame is there: then it lies where the capture put it aside, or nowhere.
inline void pop(Thread& t, const Frame& frame) {
  t.depth--;
  if (C10_LIKELY(t.top == &frame)) {
    t.top = frame.below;
    t.aten_depth -= frame.aten;
  } else if (t.capture && t.capture->top == &frame) {
    t.capture->top = frame.below;
    t.capture->aten_depth -= frame.aten;
  }
}

// Whether something that computes was recorded from this position of the Program on.
bool computes(const Thread& t, size_t position) {
  const auto works = [](const Entry* e) { return !e->op || e->op->work; };
  return position < t.program.size() && std::any_of(t.program.begin() + position, t.program.end(), works);
}

// What a call that is no aten operator has become by what was recorded in it.
void classify_region(Thread& t, const Frame& frame) {
  const bool alone = t.program.size() <= frame.position + 1;
  Operator& op = *frame.entry->op;
  if (op.wrapper && computes(t, frame.position + 1)) op.opened = true;
  if (alone && op.region) return t.program.resize(frame.position);  // an engine's name for nothing
  if (op.region || (alone && !op.opened)) return;
  Entry* region = frame.has_kernels || op.opened ? region_of(frame.entry) : nullptr;
  if (region) t.program[frame.position] = region;
  else t.program.resize(frame.position + 1);  // what is inside a kernel is its detail
}

void ended(Thread& t, Frame& frame) {
  pop(t, frame);
  if (frame.epoch != t.epoch) return;
  if ((!frame.aten || frame.has_kernels) && frame.entry) classify_region(t, frame);
  if (C10_UNLIKELY(t.capture != nullptr)) capture_end_of_call(t, frame.position);
  count_if_loose(t);
}

// Whether what this thread calls now is recorded.
inline bool listening(Thread& t) {
  if (C10_UNLIKELY(t.ignored > 0)) return false;
  if (C10_UNLIKELY(t.capture != nullptr) && t.owner == g) return !g->closed.load(std::memory_order_relaxed);
  if (!g->open.load(std::memory_order_relaxed)) return false;
  adopt_if_new(t);
  if (t.stepping || g->loose.load(std::memory_order_relaxed)) return true;
  g->shard.header(hOffStep).fetch_add(1, std::memory_order_relaxed);
  return false;
}

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& fn) {
  Thread& t = this_thread();
  if (t.aten_depth > 0 || t.busy || !listening(t)) return nullptr;
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

void update_observer() {
  static std::mutex mutex;
  static bool there = false;
  std::lock_guard<std::mutex> guard(mutex);
  const bool wanted = g->open.load() || g->captures.load() > 0;
  if (wanted == std::exchange(there, wanted)) return;
  if (wanted) muting().on();
  if (!g_handle) {
    g_handle = at::addGlobalCallback(at::RecordFunctionCallback(on_start, on_end).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  } else if (wanted) {
    at::reenableCallback(g_handle);
  } else {
    at::disableCallback(g_handle);
  }
}

}  // namespace kcap
