// Process groups of collectives: their size, this process's rank in them, and what the engine calls them.
#pragma once
#include <mutex>
#include <unordered_map>

#include "operators.h"
#if __has_include(<torch/csrc/distributed/c10d/GroupRegistry.hpp>)
#define USE_C10D 1
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#endif

namespace kcap {

struct Group { int size = 0, rank = 0; std::string label; };

// Those that an operator is given by name, or by a handle that only its library can read: `handle/N` where that is a
// small number. c10d's own are there for their label, as `c10d/NAME`.
class Groups {
 public:
  void add(const std::string& name, int64_t handle, int size, int rank, const std::string& label) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (!name.empty()) by_name_[name] = {size, rank, label};
    if (handle) by_handle_[handle] = {size, rank, label};
    any_ = true;
  }
  bool named(const std::string& name, Group& out) { return find(by_name_, name, out); }
  bool held(int64_t handle, Group& out) { return find(by_handle_, handle, out); }

 private:
  template <class Map, class Key>
  bool find(const Map& map, const Key& key, Group& out) {
    if (!any_) return false;
    std::lock_guard<std::mutex> guard(mutex_);
    const auto it = map.find(key);
    if (it == map.end()) return false;
    out = it->second;
    return true;
  }
  std::atomic<bool> any_{false};
  std::mutex mutex_;
  std::unordered_map<std::string, Group> by_name_;
  std::unordered_map<int64_t, Group> by_handle_;
};
inline Groups& groups() { static Groups all; return all; }

#ifdef USE_C10D
// The group that a c10d operator is given; nullptr where `v` is something else.
inline const c10d::ProcessGroup* process_group(const IValue& v) {
  if (!v.isObject() || v.toObjectRef().type()->name()->name() != "ProcessGroup") return nullptr;
  const IValue& slot = v.toObjectRef().getSlot(0);
  return slot.isCapsule() ? static_cast<const c10d::ProcessGroup*>(slot.toCapsule().get()) : nullptr;
}
// What the engine calls the group; what the program does (a device mesh names its own), or nothing.
inline std::string label_of(const c10d::ProcessGroup& group) {
  try {
    if (Group named; groups().named("c10d/" + group.getGroupName(), named)) return named.label;
    const std::string& description = group.getGroupDesc();
    return description == "undefined" ? "" : description == "default_pg" ? "world" : description;
  } catch (const std::exception&) {
    return "";  // a group without a backend has no name
  }
}
inline void put(const c10d::ProcessGroup& group, Group& out) { out = {group.getSize(), group.getRank(), label_of(group)}; }
inline bool group_held(const IValue& v, Group& out) {
  const auto* group = process_group(v);
  if (group) put(*group, out);
  return group != nullptr;
}
inline uint64_t object_identity(const IValue& v) { return reinterpret_cast<uintptr_t>(process_group(v)); }
// The group that a functional collective is given by its name.
inline bool group_registered(const std::string& name, Group& out) {
  try {
    put(*c10d::resolve_process_group(name), out);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}
#else
inline bool group_held(const IValue&, Group&) { return false; }
inline uint64_t object_identity(const IValue&) { return 0; }
inline bool group_registered(const std::string&, Group&) { return false; }
#endif

inline bool group_of(const IValue& v, Group& out) {
  if (v.isString()) return groups().named(v.toStringRef(), out);
  return v.isInt() ? groups().held(v.toInt(), out) : group_held(v, out);
}

inline void put_group(std::string& out, const Group& group) {
  out += "{\"group\":{\"size\":" + std::to_string(group.size) + ",\"rank\":" + std::to_string(group.rank);
  if (!group.label.empty()) { out += ",\"name\":"; put_string(out, group.label); }
  out += "}}";
}

}  // namespace kcap
