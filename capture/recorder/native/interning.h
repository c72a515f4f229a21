// Gives each distinct call its Entry, and notices what of it drifts.
#pragma once
#include "state.h"

namespace kcap {

std::string arguments_json(const Call& call) {
  const Operator& op = *call.op;
  std::string out = "[";
  Describer describer(op);
  size_t i = 0;
  for (const IValue& v : call.inputs) {
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
  if (parent) { out += ",\"parent\":"; put_string(out, parent->name); }
  if (e.op->region) out += ",\"kind\":\"region\"";
  if (!e.op->work) out += ",\"work\":false";
  if (e.op->graph) out += ",\"graph\":true";
  if (e.launch) out += ",\"launch\":" + e.launch->json;
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

Hash gridless(std::string_view launch) {
  const size_t from = launch.find("\"grid\":["), to = from == launch.npos ? from : launch.find(']', from);
  Mixer all;
  all.add_text(launch.substr(0, from));
  if (to != launch.npos) all.add_text(launch.substr(to));
  return all.hash();
}

uint32_t launch_id(const Launch* launch) { return launch ? launch->id : 0; }

void measure_slots(Entry& e, const Call& call, const Operator* parent) {
  Operator all, none;
  all.serial = e.op->serial;
  all.drifting = all.drifting_offsets = ~0ull;
  Hasher base(all, parent ? parent->serial : 0);
  base.hash.add(launch_id(call.launch));
  size_t i = 0;
  for (const IValue& v : call.inputs) {
    base.argument(v, i++);
    Hasher scalar(none, 0);
    if (is_scalar_like(v)) scalar.argument(v, 0);
    e.scalars.push_back(scalar.hash.hash().a);
    e.offsets.push_back(offsets_of(v));
  }
  e.base = base.hash.hash();
}

bool samples_anything(const Call& call) {
  const Operator& op = *call.op;
  if (op.drifting.load() || op.drifting_offsets.load()) return true;
  size_t i = 0;
  for (const IValue& v : call.inputs) {
    const Keep keep = i < op.arguments.size() ? op.arguments[i].keep : Keep::nothing;
    i++;
    if (keep == Keep::nothing) continue;
    if (is_object_list(v) || (v.isTensor() && v.toTensor().defined() && is_index_type(v.toTensor()))) return true;
  }
  return false;
}

// What two calls of one base differ in drifts: from now on the operator's calls leave it out of their signature.
void note_drift(const Entry& a, const Entry& b) {
  if (!a.op || !b.op) return;  // graphs
  uint64_t scalars = 0, offsets = 0;
  for (size_t i = 0; i < std::min<size_t>({a.scalars.size(), b.scalars.size(), 64}); i++) {
    if (a.scalars[i] != b.scalars[i]) scalars |= 1ull << i;
    if (a.offsets[i] != b.offsets[i]) offsets |= 1ull << i;
  }
  if (a.op->graph) scalars = 0;
  const uint64_t before = a.op->drifting.fetch_or(scalars), before_offsets = a.op->drifting_offsets.fetch_or(offsets);
  if ((before | scalars) == before && (before_offsets | offsets) == before_offsets) return;
  std::string line = "{\"t\":\"drift\",\"operator\":";
  put_string(line, a.op->name);
  if (a.op->graph) line += ",\"graph\":true";
  g->shard.add(line + ",\"scalars\":" + std::to_string(before | scalars) + ",\"offsets\":" + std::to_string(before_offsets | offsets) + "}\n");
}

Entry* add_entry(Entry&& entry_to_add) {
  if (g->entries.size() >= kMaxCalls) { g->full = true; return nullptr; }
  entry_to_add.id = static_cast<uint32_t>(g->entries.size());
  g->entries.push_back(std::move(entry_to_add));
  return &g->entries.back();
}

// Calls that differ in offsets alone are one at once (each layer's slice of a cache); scalars may mean different things
// (a dimension), so they need kMaxVariants values, or two steps that agree in all else, to be taken for drifting.
void note_variant(Entry* entry) {
  Mixer with_scalars;
  with_scalars.add(entry->base.a);
  for (uint64_t scalar : entry->scalars) with_scalars.add(scalar);
  const auto [first_like, alone] = g->by_scalars.try_emplace(with_scalars.hash(), entry);
  if (!alone) note_drift(*first_like->second, *entry);
  auto& [first, count] = g->variants.try_emplace(entry->base, entry, 0).first->second;
  if (++count > kMaxVariants) note_drift(*first, *entry);
}

void remember(Thread& t, const Hash& key, Entry* entry) {
  if (g->interned.size() >= kMaxKeys && !g->interned.count(key)) return;
  g->interned[key] = entry;
  t.entries.add(key, entry);
}

void write_shapes(const Entry& e) {
  g->shard.add("{\"t\":\"shapes\",\"call\":" + std::to_string(e.id) + ",\"shapes\":" + std::to_string(e.shapes) + "}\n");
}

bool is_power_of_two(uint64_t n) { return n && !(n & (n - 1)); }

// An operator has kMaxExact calls by their exact signature; the recorder half of those that it can number.
bool is_rounded(const Operator& op) { return op.calls >= kMaxExact || g->entries.size() >= kMaxCalls / 2; }

Hash rounded_key(const Call& call, const Operator* parent) {
  BasicHasher<true> hasher(*call.op, parent ? parent->serial : 0);
  hasher.hash.add(0x524F554E44);
  if (call.launch) hasher.hash.add(call.launch->gridless.a, call.launch->gridless.b);
  hasher.arguments(call.inputs);
  return hasher.hash.hash();
}

// What `key` stands for, if it or, of a rounded one, its like is known; else `key` becomes the name that it is to have.
Entry* known(Thread& t, Hash& key, const Call& call, const Operator* parent) {
  std::lock_guard<std::mutex> guard(g->mutex);
  auto it = g->interned.find(key);
  if (it != g->interned.end()) {
    t.entries.add(key, it->second);
    return it->second;
  }
  if (!is_rounded(*call.op)) return nullptr;
  const Hash name = rounded_key(call, parent);
  it = g->interned.find(name);
  if (it == g->interned.end()) { key = name; return nullptr; }
  Entry* entry = it->second;
  if (g->interned.size() < kMaxKeys && is_power_of_two(++entry->shapes)) write_shapes(*entry);
  remember(t, key, entry);
  return entry;
}

Entry* intern_new(Thread& t, const Hash& key, const Call& call, const Operator* parent) {
  Hash name = key;
  if (Entry* entry = known(t, name, call, parent)) return entry;
  if (g->full) return nullptr;
  Entry entry_to_add;
  entry_to_add.op = call.op;
  entry_to_add.launch = call.launch;
  measure_slots(entry_to_add, call, parent);
  entry_to_add.sampled = samples_anything(call);
  entry_to_add.shapes = name == key ? 0 : 1;
  entry_to_add.first = key;
  for (size_t phase = 0; phase < kPhases; phase++) entry_to_add.reservoirs[phase].state = key.a ^ (phase + 1);
  const std::string arguments = arguments_json(call);
  std::lock_guard<std::mutex> guard(g->mutex);
  auto [it, fresh] = g->interned.try_emplace(name, nullptr);
  Entry* entry = it->second;
  if (fresh) {
    entry = it->second = add_entry(std::move(entry_to_add));
    if (!entry) { g->interned.erase(it); return nullptr; }
    call.op->calls++;
    g->shard.add(call_line(*entry, parent, arguments));
    if (entry->shapes) write_shapes(*entry);
    else note_variant(entry);
  }
  remember(t, key, entry);
  return entry;
}

Entry* intern(Thread& t, const Hash& key, const Call& call, const Operator* parent) {
  Entry* entry = t.entries.find(key);
  return C10_LIKELY(entry != nullptr) ? entry : intern_new(t, key, call, parent);
}

Entry* region_of(Entry* e) {
  std::lock_guard<std::mutex> guard(g->mutex);
  if (e->region) return e->region;
  Entry entry_to_add;
  entry_to_add.op = e->op;
  Mixer base;
  base.add(e->base.a);
  base.add(e->base.b);
  base.add(17);
  entry_to_add.base = base.hash();
  entry_to_add.scalars = e->scalars;
  entry_to_add.offsets = e->offsets;
  Entry* region = add_entry(std::move(entry_to_add));
  if (!region) return nullptr;
  g->shard.add("{\"t\":\"region\",\"id\":" + std::to_string(region->id) + ",\"of\":" + std::to_string(e->id) + "}\n");
  return e->region = region;
}

}  // namespace kcap
