// What is known of an operator from its schema, looked up by the schema's own name pointers.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <deque>
#include <mutex>
#include <set>
#include <unordered_map>

#include "json.h"

namespace kcap {

// What a Sample keeps of an integer tensor argument.
enum class Keep : uint8_t { nothing, range, values };

struct ArgumentInfo {
  std::string name;
  IntKind ints = IntKind::plain;
  Keep keep = Keep::nothing;
  bool keyword = false, written = false;
  std::string default_json;  // empty: no default
};

struct Operator {
  std::string name;       // aten::add.Tensor
  std::string base_name;  // aten::add, compared on each lookup: a freed schema's memory may be reused
  bool aten = false;      // aten, prim, prims: what runs inside one is its detail
  bool work = true;       // false: a view or an allocation
  bool graph = false;     // as it is called while a graph is captured: its scalars are fixed, and never drift
  bool region = false;    // the engine's own name for what runs in it, where everything counts as it does outside
  bool wrapper = false;   // it is given its layer's name: what it runs is not among its arguments, and it is no kernel
  uint32_t serial = 0;
  c10::DispatchKeySet autocast;  // of the devices for which autocast casts its arguments
  std::vector<ArgumentInfo> arguments;
  // Arguments (bit i) whose scalar, or whose tensor's offset, was seen to drift from step to step.
  std::atomic<uint64_t> drifting{0}, drifting_offsets{0};
  std::atomic<Operator*> in_graph{nullptr};  // its twin
  size_t calls = 0;  // distinct, behind the recorder's mutex
  std::atomic<bool> opened{false};           // something that computes was recorded in a call of the wrapper
};

// As kcap.capture.recorder.sampled_arguments.NAME_GROUPS: names of arguments, then words of names.
enum NameGroup { gValues, gRanges, gPrivate, gCounts, gTokens, gPlaces, gIndices, gOwners, kNameGroups };

struct Policy {  // filled once, before the first call
  std::set<std::string> names[kNameGroups];
  bool keep_tokens = false;
};
inline Policy& policy() { static Policy p; return p; }

inline bool is_allocation(std::string_view base) {
  static const std::set<std::string, std::less<>> names{
      "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
      "aten::_empty_affine_quantized", "aten::resize_", "aten::set_", "aten::detach", "aten::alias",
      "aten::lift_fresh", "aten::lift", "aten::record_stream", "aten::is_pinned", "aten::_pin_memory"};
  return names.count(base) > 0;
}

// Such as `aten::unsqueeze_`: its schema says that it writes, but what it changes is the tensor's shape or strides.
inline bool is_inplace_view(const c10::FunctionSchema& schema) {
  const auto handle = c10::Dispatcher::singleton().findSchema(schema.operator_name());
  return handle && handle->hasTag(at::Tag::inplace_view);
}

// A view returns an alias of an argument and writes nothing. `reshape`, `to` and `contiguous` may copy: they are
// decided from their arguments when the Recording is written.
inline bool is_view(const c10::FunctionSchema& schema) {
  bool given = false, aliases = false;  // what a rank receives may be said to alias, and no argument to
  for (const auto& argument : schema.arguments()) {
    if (argument.alias_info() && argument.alias_info()->isWrite()) return false;
    given |= argument.alias_info() != nullptr;
  }
  for (const auto& result : schema.returns()) aliases |= result.alias_info() != nullptr;
  return given && aliases;
}

// `plan.kv_indptr` and `block_table_ptr` say the same as `kv_indptr` and `block_table`.
inline std::string plain_name(const std::string& argument) {
  std::string name = argument.substr(argument.rfind('.') + 1);
  if (name.size() > 4 && name.compare(name.size() - 4, 4, "_ptr") == 0) name.resize(name.size() - 4);
  return name;
}

// The words of `block_table`, and of `blockTable`.
inline std::vector<std::string> words_of(const std::string& name) {
  std::vector<std::string> words(1);
  char before = 0;
  for (char c : name) {
    const bool upper = c >= 'A' && c <= 'Z';
    if (c == '_' || (upper && ((before >= 'a' && before <= 'z') || (before >= '0' && before <= '9')))) words.emplace_back();
    if (c != '_') words.back() += upper ? static_cast<char>(c - 'A' + 'a') : c;
    before = c;
  }
  return words;
}

// As kcap.capture.recorder.sampled_arguments.walks_memory.
inline bool walks_memory(const std::string& plain) {
  const std::vector<std::string> words = words_of(plain);
  const auto has = [&](NameGroup group) {
    return std::any_of(words.begin(), words.end(), [&](const std::string& word) { return policy().names[group].count(word) > 0; });
  };
  if (has(gPrivate)) return false;
  return has(gCounts) || (!has(gTokens) && (has(gPlaces) || (has(gIndices) && has(gOwners))));
}

inline Keep keep_of(const std::string& argument, bool aten) {
  const Policy& p = policy();
  if (aten) return p.keep_tokens ? Keep::values : p.names[gRanges].count(argument) ? Keep::range : Keep::nothing;
  const std::string plain = plain_name(argument);
  const bool listed = p.names[gValues].count(argument) || p.names[gValues].count(plain);
  return listed || walks_memory(plain) ? Keep::values : Keep::nothing;
}

// As kcap.capture.recorder.sampled_arguments.VOUCHED: what another argument's name has to hold; empty: nothing.
inline std::string voucher_of(const std::string& plain) {
  if (plain == "topk_ids" || plain == "topk_indices") return "expert";
  return plain == "batch" ? "query_start_loc" : "";
}

inline std::string lower_case(std::string name) {
  for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return name;
}

// As kcap.capture.recorder.sampled_arguments.keeps_values.
inline Keep keep_of_external(const std::string& argument, const std::vector<std::string>& beside) {
  if (policy().keep_tokens) return Keep::values;
  const std::string voucher = voucher_of(plain_name(argument));
  if (voucher.empty()) return keep_of(argument, false);
  const bool vouched = std::any_of(beside.begin(), beside.end(), [&](const std::string& name) {
    return name != argument && lower_case(name).find(voucher) != std::string::npos;
  });
  return vouched ? Keep::values : Keep::nothing;
}

inline void put_constant(std::string& out, const IValue& v, IntKind ints);

// An engine's operator looks up by it what it runs: vLLM's `layer_name`, SGLang's `layer_id`.
inline bool names_layer(const std::string& argument) { return argument == "layer_name" || argument == "layer_id"; }

inline c10::DispatchKeySet autocast_kernels(const c10::FunctionSchema& schema) {
  c10::DispatchKeySet keys;
  const auto op = c10::Dispatcher::singleton().findSchema({schema.name(), schema.overload_name()});
  for (c10::DispatchKey key : c10::autocast_dispatch_keyset)
    if (op && op->hasKernelForDispatchKey(key)) keys = keys.add(key);
  return keys;
}

// A thread's own shortcut from a schema's name pointers to its Operator.
struct OperatorCache {
  struct Slot { const char* name = nullptr; const char* overload = nullptr; Operator* op = nullptr; };
  static constexpr size_t kSlots = 2048;
  std::vector<Slot> slots = std::vector<Slot>(kSlots);

  Slot& slot(const char* name, const char* overload) {
    return slots[((reinterpret_cast<uintptr_t>(name) >> 3) ^ (reinterpret_cast<uintptr_t>(overload) >> 5)) & (kSlots - 1)];
  }
};

class Operators {
 public:
  // nullptr: a range without a schema (a profiler scope, a dynamo region), which is no operator.
  Operator* find(OperatorCache& cache, const at::RecordFunction& fn) {
    const char* name = fn.name();
    const char* overload = fn.overload_name();
    auto& slot = cache.slot(name, overload);
    if (C10_LIKELY(slot.name == name && slot.overload == overload && slot.op->base_name == name)) return slot.op;
    Operator* op = find_slow(fn);
    if (op) slot = {name, overload, op};
    return op;
  }

  // What is called from outside the dispatcher: `arguments` are the names of its parameters.
  Operator* external(const std::string& name, const std::vector<std::string>& arguments, bool work, bool region) {
    std::lock_guard<std::mutex> guard(mutex_);
    Operator& op = all_.emplace_back();
    op.name = name;
    op.base_name = name.substr(0, name.find('.'));
    op.serial = static_cast<uint32_t>(all_.size());
    op.work = work;
    op.region = region;
    for (const auto& argument : arguments) {
      ArgumentInfo info;
      info.name = argument;
      info.keep = keep_of_external(argument, arguments);
      op.arguments.push_back(std::move(info));
    }
    return &op;
  }

  Operator* in_graph(Operator* op) {
    Operator* twin = op->in_graph.load(std::memory_order_acquire);
    return C10_LIKELY(twin != nullptr) ? twin : make_twin(op);
  }

 private:
  Operator* find_slow(const at::RecordFunction& fn) {
    if (fn.num_inputs() == 0 && fn.overload_name()[0] == '\0' && !std::strstr(fn.name(), "::")) return nullptr;
    const auto schema = fn.operator_schema();
    if (!schema) return nullptr;
    std::string name = schema->name();
    if (!schema->overload_name().empty()) name += "." + schema->overload_name();
    std::lock_guard<std::mutex> guard(mutex_);
    auto [it, fresh] = by_name_.try_emplace(name, nullptr);
    if (fresh) it->second = make(name, *schema);
    return it->second;
  }

  Operator* make_twin(Operator* op) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (Operator* twin = op->in_graph.load()) return twin;
    Operator& twin = all_.emplace_back();
    twin.name = op->name;
    twin.base_name = op->base_name;
    twin.aten = op->aten;
    twin.work = op->work;
    twin.graph = true;
    twin.region = op->region;
    twin.wrapper = op->wrapper;
    twin.autocast = op->autocast;
    twin.arguments = op->arguments;
    twin.serial = static_cast<uint32_t>(all_.size());
    op->in_graph.store(&twin, std::memory_order_release);
    return &twin;
  }

  Operator* make(const std::string& name, const c10::FunctionSchema& schema) {
    Operator& op = all_.emplace_back();
    op.name = name;
    op.base_name = schema.name();
    op.serial = static_cast<uint32_t>(all_.size());
    const std::string space = op.base_name.substr(0, op.base_name.find("::"));
    op.aten = space == "aten" || space == "prim" || space == "prims";
    op.work = !(is_view(schema) || is_inplace_view(schema) || is_allocation(op.base_name));
    op.autocast = autocast_kernels(schema);
    for (const auto& argument : schema.arguments()) {
      ArgumentInfo info;
      info.name = argument.name();
      info.ints = int_kind(*argument.real_type());
      info.keep = keep_of(argument.name(), op.aten);
      info.keyword = argument.kwarg_only();
      info.written = argument.alias_info() && argument.alias_info()->isWrite();
      if (argument.default_value()) put_constant(info.default_json, *argument.default_value(), info.ints);
      op.wrapper |= !op.aten && names_layer(info.name);
      op.arguments.push_back(std::move(info));
    }
    return &op;
  }

  std::mutex mutex_;
  std::deque<Operator> all_;
  std::unordered_map<std::string, Operator*> by_name_;
};

}  // namespace kcap
