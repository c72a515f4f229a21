// Programs: what a step ran, counted when it ends; what was called while a CUDA graph was captured, counted by replays.
#pragma once
#include <algorithm>
#include <map>
#include <set>

#include "calls.h"

namespace kcap {

constexpr size_t kMaxKeptBytes = 64u << 20;  // of a capture

// ---- a step's Program, and how often it ran ----

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
  g->shard.add(line + "]}\n");
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
  if (fresh) g->shard.add("{\"t\":\"batch\",\"id\":" + std::to_string(it->second) + shape + "}\n");
  if (details && *details) g->shard.add("{\"t\":\"step\",\"index\":" + std::to_string(index) + shape + details + "}\n");
  if (fresh) g->shard.flush();
  g->shard.batch(it->second)++;
  g->shard.header(hSteps)++;
}

// ---- a graph's ----

// ---- while capturing ----

size_t nodes_so_far(const Capture& capture) {
  return g->count_nodes.load(std::memory_order_relaxed) ? g->banks.nodes_of_capture(capture.stream) : 0;
}

// Keeps the memory of `t` from being given to anything else in this capture, if it is the allocator's; how often it was
// written to since.
size_t keep_memory(Capture& capture, const Tensor& t) {
  const c10::Storage& storage = t.storage();
  const auto type = t.device().type();
  if (!t.is_cpu() && !c10::impl::hasDeviceGuardImpl(type)) return 0;  // another library's
  if (storage.data_ptr().get_deleter() != c10::GetAllocator(type)->raw_deleter()) return 0;  // it only points there
  const size_t bytes = storage.nbytes();
  if (bytes > kMaxTensorBytes || capture.kept_bytes + bytes > kMaxKeptBytes) return 0;
  const auto [kept, fresh] = capture.kept.try_emplace(storage.unsafeGetStorageImpl(), Kept{storage});
  if (fresh) capture.kept_bytes += bytes;
  return kept->second.writes;
}

void add_input(Capture& capture, GraphSample& sample, const std::string& path, const Tensor& t, Keep keep) {
  if (!is_sampled(t, keep)) return;
  const size_t bytes = extent_of(t);
  if (!is_readable(t, bytes)) return;
  SampledTensor tensor{path, keep, t.scalar_type(), t.sizes().vec(), t.strides().vec()};
  sample.inputs.push_back(
      {std::move(tensor), t.const_data_ptr(), bytes, t.device(), t.storage().getWeakStorageImpl(), keep_memory(capture, t)});
}

void add_inputs(Capture& capture, GraphSample& sample, const std::string& path, const IValue& v, Keep keep) {
  if (v.isTensor()) return add_input(capture, sample, path, v.toTensor(), keep);
  if (!is_object_list(v)) return;
  size_t k = 0;
  for (const IValue& item : v.toListRef()) add_inputs(capture, sample, path + "." + std::to_string(k++), item, keep);
}

// Inductor's kernels have no schema: they write to what has such a name.
bool writes(const ArgumentInfo& info) {
  return info.written || info.name.rfind("in_out_ptr", 0) == 0 || info.name.rfind("out_ptr", 0) == 0;
}

void note_write(Capture& capture, const IValue& v) {
  if (v.isTensor() && v.toTensor().defined() && v.toTensor().has_storage()) {
    const auto kept = capture.kept.find(v.toTensor().storage().unsafeGetStorageImpl());
    if (kept != capture.kept.end()) kept->second.writes++;
  } else if (is_object_list(v)) {
    for (const IValue& item : v.toListRef()) note_write(capture, item);
  }
}

void note_writes(Capture& capture, const Operator& op, const Call& call) {
  for (size_t i = 0; i < call.inputs.size() && i < op.arguments.size(); i++)
    if (writes(op.arguments[i])) note_write(capture, call.inputs[i]);
}

// Scalars are fixed in a graph: only offsets and the content of integer tensors are left to sample.
void note_inputs(Capture& capture, Entry& e, const Call& call) {
  for (const GraphSample& sampled : capture.samples)
    if (sampled.call == &e) return;
  GraphSample sample{&e};
  const uint64_t drifting = e.op->drifting_offsets.load();
  for (size_t i = 0; i < call.inputs.size() && i < e.op->arguments.size(); i++) {
    const Keep keep = e.op->arguments[i].keep;
    if (keep != Keep::nothing) add_inputs(capture, sample, std::to_string(i), call.inputs[i], keep);
    if (i < 64 && (drifting >> i & 1)) put_offsets(sample.offsets, std::to_string(i), call.inputs[i]);
  }
  if (!sample.inputs.empty() || !sample.offsets.empty()) capture.samples.push_back(std::move(sample));
}

void capture_call(Thread& t, Entry& e, const Call& call, bool sampled) {
  if (sampled) note_inputs(*t.capture, e, call);
  if (!t.capture->kept.empty()) note_writes(*t.capture, *e.op, call);
  if (!g->count_nodes.load(std::memory_order_relaxed)) return;
  const size_t now = nodes_so_far(*t.capture);
  t.capture->nodes.push_back({now, now});
}

void capture_end_of_call(Thread& t, size_t position) {
  auto& nodes = t.capture->nodes;
  if (nodes.empty()) return;
  nodes.resize(t.program.size());
  if (position < nodes.size()) nodes[position].end = nodes_so_far(*t.capture);
}

void capture_begin(Thread& t, void* stream) {
  adopt_if_new(t);
  t.capture = std::make_unique<Capture>();
  t.capture->stream = stream;
  t.capture->program.swap(t.program);
  t.capture->top = std::exchange(t.top, nullptr);
  t.capture->aten_depth = std::exchange(t.aten_depth, 0);
  t.capture->epoch = std::exchange(t.epoch, ++epochs);
  g->captures++;
  update_observer();
}

// The thread goes on where the capture interrupted it; what was captured.
std::pair<std::vector<Entry*>, std::unique_ptr<Capture>> capture_over(Thread& t) {
  auto capture = std::move(t.capture);
  if (!capture) return {};
  std::vector<Entry*> program = std::exchange(t.program, std::move(capture->program));
  t.top = capture->top;
  t.aten_depth = capture->aten_depth;
  t.epoch = capture->epoch;
  if (t.owner == g && !g->closed) g->captures--;
  update_observer();
  return {std::move(program), std::move(capture)};
}

// `kernels`: of each node the number of its name among `names`; `after`: what a node waits for, unless that is the node
// before it alone.
void put_nodes(std::string& line, const std::vector<GraphNode>& nodes) {
  std::map<std::string, size_t> names;
  std::string kernels, texts, after;
  for (size_t i = 0; i < nodes.size(); i++) {
    const auto& [name, waits] = nodes[i];
    const auto [it, fresh] = names.emplace(name, names.size());
    if (fresh) { texts += names.size() > 1 ? "," : ""; put_string(texts, name); }
    kernels += (i ? "," : "") + std::to_string(it->second);
    if (waits == (i ? std::vector<size_t>{i - 1} : std::vector<size_t>{})) continue;
    after += (after.empty() ? "[" : ",[") + std::to_string(i) + ",";
    put_ints(after, waits);
    after += "]";
  }
  line += ",\"names\":[" + texts + "],\"kernels\":[" + kernels + "],\"after\":[" + after + "]";
}

std::string graph_line(const Entry& e, const std::vector<Entry*>& program, const Capture& capture, size_t nodes, const char* info) {
  std::string line = "{\"t\":\"graph\",\"id\":" + std::to_string(e.id) + ",\"number\":" + std::to_string(g->graphs.size()) + ",\"calls\":[";
  for (size_t i = 0; i < program.size(); i++) line += (i ? "," : "") + std::to_string(program[i]->id);
  line += "]";
  if (g->count_nodes.load()) {
    line += ",\"total\":" + std::to_string(nodes) + ",\"nodes\":[";
    for (size_t i = 0; i < capture.nodes.size(); i++)
      line += (i ? ",[" : "[") + std::to_string(capture.nodes[i].start) + "," + std::to_string(capture.nodes[i].end) + "]";
    line += "]";
    if (!capture.graph_nodes.empty()) put_nodes(line, capture.graph_nodes);
  }
  return line + info + "}\n";
}

// All that a launch copies has to fit into one bank, beside what other calls of the step copy: the smallest first, as
// tables of pages are large and those of experts small.
void keep_what_fits(Graph& graph, const Capture& capture) {
  std::vector<GraphInput*> inputs;
  for (GraphSample& sample : graph.samples)
    for (GraphInput& input : sample.inputs) inputs.push_back(&input);
  std::stable_sort(inputs.begin(), inputs.end(), [](const GraphInput* a, const GraphInput* b) { return a->bytes < b->bytes; });
  std::set<std::pair<const void*, size_t>> copied;
  size_t bytes = 0;
  for (GraphInput* input : inputs) {
    const auto storage = input->storage.lock();
    const auto kept = capture.kept.find(storage.get());
    input->kept = kept != capture.kept.end() && kept->second.writes == input->writes;
    if (copied.count({input->data, input->bytes})) continue;
    if (bytes + input->bytes <= kBankBytes / 2) { bytes += input->bytes; copied.insert({input->data, input->bytes}); }
    else g->shard.header(hSamplesSkipped)++;
  }
  for (GraphSample& sample : graph.samples) {
    auto& all = sample.inputs;
    const auto left_out = [&](const GraphInput& input) { return !copied.count({input.data, input.bytes}); };
    all.erase(std::remove_if(all.begin(), all.end(), left_out), all.end());
  }
}

// `info`: more JSON members, each with a leading comma. The graph's number, or -1 where it cannot be kept.
int64_t graph_captured(Thread& t, const char* info, size_t nodes) {
  auto [program, capture] = capture_over(t);
  if (!capture) return -1;
  std::lock_guard<std::mutex> guard(g->mutex);
  Entry entry_to_add;
  Mixer key;
  for (const Entry* e : program) key.add(e->id);
  entry_to_add.base = key.hash();
  Entry* entry = program.size() > kMaxProgram ? nullptr : add_entry(std::move(entry_to_add));
  if (!entry) return -1;
  g->shard.write(graph_line(*entry, program, *capture, nodes, info));
  Graph& graph = g->graphs.emplace_back();
  graph.entry = entry;
  graph.samples = std::move(capture->samples);
  keep_what_fits(graph, *capture);
  return static_cast<int64_t>(g->graphs.size()) - 1;
}

// ---- replays ----

// Who fills an input: others, before a launch, or a graph.
enum class FilledBy { others, graph, unknown };

FilledBy filled_by(const GraphInput& input) {
  std::lock_guard<std::mutex> guard(g->mutex);
  if (!g->graph_memory_known) return FilledBy::unknown;
  const auto address = reinterpret_cast<uintptr_t>(input.data);
  for (const auto& [from, to] : g->graph_memory)
    if (from <= address && address < to) return FilledBy::graph;
  return FilledBy::others;
}

// A storage may live on with its memory gone, or elsewhere.
bool holds(const c10::StorageImpl& storage, const GraphInput& input) {
  const auto* from = static_cast<const char*>(storage.data());
  const auto* data = static_cast<const char*>(input.data);
  return from <= data && data + input.bytes <= from + storage.nbytes();
}

// What of a launch is copied already: calls share their inputs.
struct Copy { const void* from; size_t bytes; const char* to; };
using Copied = std::vector<Copy>;

// Copies what is there when the stream comes to it; false: no room now.
bool copy_input(PendingSample& sample, const GraphInput& input, Copied& copied) {
  SampledTensor out = input.tensor;
  const auto copy = std::find_if(copied.begin(), copied.end(), [&](const Copy& other) { return other.from == input.data && other.bytes >= input.bytes; });
  if (copy != copied.end()) out.data = copy->to;
  else if (!g->banks.copy(out, input.data, input.device, input.bytes)) return false;
  else if (out.own.empty()) copied.push_back({input.data, input.bytes, out.data});
  sample.tensors.push_back(std::move(out));
  return true;
}

void missed(Reservoir* reservoir) {
  g->shard.header(hSamplesSkipped)++;
  if (reservoir) reservoir->missed();
}

// `reservoir`: that it was drawn by; nullptr: it was not.
void sample_call(Thread& t, const GraphSample& from, size_t phase, int slot, Reservoir* reservoir, Copied& copied) {
  UnfinishedSample unfinished{{}, {}, reservoir, g->banks.turn()};
  PendingSample& sample = unfinished.sample;
  sample.head = sample_head(t, *from.call, phase, slot);
  sample.step = step_of(t);
  if (!from.offsets.empty()) sample.head += ",\"offsets\":{" + from.offsets + "}";
  for (const GraphInput& input : from.inputs) {
    const FilledBy by = filled_by(input);
    if (by == FilledBy::graph && input.kept) unfinished.inputs.push_back(&input);
    if (by != FilledBy::others) continue;
    const auto storage = input.storage.lock();
    if (storage && holds(*storage, input) && !copy_input(sample, input, copied)) return missed(reservoir);
  }
  if (!unfinished.inputs.empty()) return t.unfinished_samples.push_back(std::move(unfinished));
  if (!sample.tensors.empty() || (from.inputs.empty() && !from.offsets.empty())) g->banks.add(std::move(sample));
  if (reservoir) reservoir->taken(t.epoch, 0);
}

void sample_graph(Thread& t, const Graph& graph) {
  const size_t phase = phase_of(t);
  Copied copied;
  for (const GraphSample& from : graph.samples) {
    Reservoir& reservoir = from.call->reservoirs[phase];
    if (fills_slot(t, reservoir)) sample_call(t, from, phase, t.slot, nullptr, copied);
    if (!reservoir.due()) continue;
    if (!may_sample(t)) reservoir.later();
    else sample_call(t, from, phase, reservoir.slot(), &reservoir, copied);
  }
}

bool launching(Thread& t, const Graph& graph) {
  mark_regions(t);
  t.program.push_back(graph.entry);
  count_if_loose(t);  // which may end a turn
  t.unfinished_samples.clear();
  if (!graph.samples.empty()) sample_graph(t, graph);
  return !t.unfinished_samples.empty();
}

// The graph of this number is about to be launched on this thread; whether kcap_graph_launched is to be called after.
bool launching(int64_t graph) {
  bool unfinished = false;
  guarded([&] {
    Thread& t = this_thread();
    if (!t.capture && listening(t)) unfinished = launching(t, g->graphs.at(static_cast<size_t>(graph)));
  });
  return unfinished;
}

void launched(Thread& t) {
  Copied copied;
  for (UnfinishedSample& unfinished : t.unfinished_samples) {
    const auto& inputs = unfinished.inputs;
    const bool whole = unfinished.turn == g->banks.turn() &&  // else the bank that holds the copies is another's by now
                       std::all_of(inputs.begin(), inputs.end(), [&](const GraphInput* input) { return copy_input(unfinished.sample, *input, copied); });
    if (!whole) { missed(unfinished.reservoir); continue; }
    g->banks.add(std::move(unfinished.sample));
    if (unfinished.reservoir) unfinished.reservoir->taken(t.epoch, 0);
  }
  t.unfinished_samples.clear();
}

}  // namespace kcap
