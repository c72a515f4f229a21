// Takes Samples of single invocations.
#pragma once
#include "state.h"

namespace kcap {

size_t extent_of(const Tensor& t) {  // bytes from its first element to one past its last
  size_t extent = t.numel() ? 1 : 0;
  for (int64_t d = 0; extent && d < t.dim(); d++) extent += static_cast<size_t>((t.size(d) - 1) * t.stride(d));
  return extent * t.element_size();
}

bool is_sampled(const Tensor& t, Keep keep) {
  return keep != Keep::nothing && t.defined() && is_index_type(t) && strided(t);
}

// Whether it may be read: not too large, and not past the end of a storage that was resized away.
bool is_readable(const Tensor& t, size_t bytes) {
  const size_t held = t.unsafeGetTensorImpl()->unsafe_storage().nbytes();
  if (bytes <= kMaxTensorBytes && static_cast<size_t>(t.storage_offset()) * t.element_size() + bytes <= held) return true;
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

}  // namespace kcap
