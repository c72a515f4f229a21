// Calls that do not come through the dispatcher: Python or a tap in C++ tells of them, and everything else is the
// dispatcher's own way.
#pragma once
#include <ATen/dlpack.h>

#include <array>
#include <optional>

#include "calls.h"

namespace kcap {

// How a value is handed over: a kind, and a word that holds it or says where it lies.
enum class Kind : uint8_t { none, integer, real, boolean, tensor, text, list, dltensor };

inline std::optional<at::ScalarType> scalar_type(const DLDataType& type) {
  const int size = type.bits / 8;
  if (type.lanes != 1 || type.bits % 8) return std::nullopt;
  const auto by_size = [&](std::array<at::ScalarType, 4> types) -> std::optional<at::ScalarType> {  // of 1, 2, 4, 8 bytes
    const size_t power = size == 1 ? 0 : size == 2 ? 1 : size == 4 ? 2 : size == 8 ? 3 : 4;
    return power < 4 && types[power] != at::ScalarType::Undefined ? std::optional(types[power]) : std::nullopt;
  };
  constexpr auto none = at::ScalarType::Undefined;
  switch (type.code) {
    case kDLInt: return by_size({at::kChar, at::kShort, at::kInt, at::kLong});
    case kDLUInt: return by_size({at::kByte, at::kUInt16, at::kUInt32, at::kUInt64});
    case kDLFloat: return by_size({none, at::kHalf, at::kFloat, at::kDouble});
    case kDLBfloat: return by_size({none, at::kBFloat16, none, none});
    case kDLComplex: return by_size({none, none, at::kComplexHalf, at::kComplexFloat});
    case kDLBool: return by_size({at::kBool, none, none, none});
    case 10: return at::kFloat8_e4m3fn;  // kDLFloat8_e4m3fn and kDLFloat8_e5m2, which older headers do not have
    case 12: return at::kFloat8_e5m2;
    default: return std::nullopt;
  }
}

inline std::optional<c10::Device> device_of(const DLDevice& device) {
  const auto index = static_cast<c10::DeviceIndex>(device.device_id);
  if (device.device_type == kDLCPU || device.device_type == kDLCUDAHost) return c10::Device(c10::kCPU);
  if (device.device_type == kDLCUDA || device.device_type == kDLCUDAManaged) return c10::Device(c10::kCUDA, index);
  return std::nullopt;
}

// Tensors of another library's as PyTorch's, which own nothing. Those of one call that begin at one address share it.
class Borrowed {
 public:
  IValue tensor(const DLTensor& t) {
    const auto type = scalar_type(t.dtype);
    const auto device = device_of(t.device);
    if (!type || !device || t.byte_offset % c10::elementSize(*type)) return std::string("tensor");
    const c10::IntArrayRef sizes(t.shape, static_cast<size_t>(t.ndim));
    const auto key = device->is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
    auto impl = c10::make_intrusive<c10::TensorImpl>(storage(t.data, *device), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(*type));
    const auto offset = static_cast<int64_t>(t.byte_offset / c10::elementSize(*type));
    if (t.strides) impl->set_sizes_and_strides(sizes, {t.strides, sizes.size()}, offset);
    else {
      impl->set_sizes_contiguous(sizes);
      impl->set_storage_offset(offset);
    }
    return Tensor(std::move(impl));
  }

 private:
  static constexpr size_t kUnknown = 1ull << 62;  // bytes: DLPack does not say
  c10::Storage storage(void* data, c10::Device device) {
    for (const c10::Storage& known : storages_)
      if (data && known.data() == data) return known;
    storages_.push_back(c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), kUnknown, at::DataPtr(data, device), nullptr, false)));
    return storages_.back();
  }
  std::vector<c10::Storage> storages_;
};

// Python's tensor whose `_cdata` is the address; alive while Python calls.
inline Tensor tensor_at(void* address) {
  return Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(static_cast<c10::TensorImpl*>(address)));
}

class Unpacker {
 public:
  Unpacker(const uint8_t* kinds, const int64_t* words) : kinds_(kinds), words_(words) {}

  IValue next() {
    const int64_t word = *words_++;
    switch (static_cast<Kind>(*kinds_++)) {
      case Kind::integer: return word;
      case Kind::real: { double value; std::memcpy(&value, &word, sizeof value); return value; }
      case Kind::boolean: return word != 0;
      case Kind::tensor: return tensor_at(reinterpret_cast<void*>(word));
      case Kind::text: return text(word);
      case Kind::list: return list(word);
      case Kind::dltensor: return borrowed_.tensor(*reinterpret_cast<const DLTensor*>(word));
      default: return IValue();
    }
  }

 private:
  static IValue text(int64_t number) {
    std::lock_guard<std::mutex> guard(g->mutex);  // taps in C++ call without Python's lock
    return g->texts.at(static_cast<size_t>(number));
  }
  // Of one kind of numbers they are a list that may drift, as the dispatcher's are.
  IValue list(int64_t size) {
    const Kind first = size ? static_cast<Kind>(*kinds_) : Kind::none;
    const bool alike = std::all_of(kinds_, kinds_ + size, [&](uint8_t kind) { return static_cast<Kind>(kind) == first; });
    c10::TypePtr type = c10::AnyType::get();
    if (alike && first == Kind::integer) type = c10::IntType::get();
    if (alike && first == Kind::real) type = c10::FloatType::get();
    if (alike && first == Kind::boolean) type = c10::BoolType::get();
    c10::impl::GenericList out(type);
    out.reserve(static_cast<size_t>(size));
    for (int64_t i = 0; i < size; i++) out.push_back(next());
    return out;
  }
  const uint8_t* kinds_;
  const int64_t* words_;
  Borrowed borrowed_;
};

// By their numbers; `launch` -1: none.
inline std::pair<Operator*, const Launch*> numbered(int64_t op, int64_t launch) {
  std::lock_guard<std::mutex> guard(g->mutex);
  return {g->externals.at(static_cast<size_t>(op)), launch < 0 ? nullptr : &g->launches.at(static_cast<size_t>(launch))};
}

inline bool in_library(const Thread& t) {
  for (const Frame* f = t.top; f; f = f->below)
    if (f->library) return true;
  return false;
}

inline std::vector<IValue> unpacked(int count, const uint8_t* kinds, const int64_t* words) {
  std::vector<IValue> inputs;
  inputs.reserve(static_cast<size_t>(count));
  Unpacker values(kinds, words);
  for (int i = 0; i < count; i++) inputs.push_back(values.next());
  return inputs;
}

// Whether a call that this thread makes now may be recorded.
inline bool may_record(bool detail) {
  auto& t = this_thread();
  return !(t.aten_depth > 0 || t.busy || !listening(t) || (detail && in_library(t)));
}

// One call, of which may_record was asked; whether it was recorded. `enter`: others may run in it until `leave`.
// `detail`: not inside a library's call, and alone in an operator that stays a kernel.
inline bool record_call(int64_t op, int64_t launch, const std::vector<IValue>& inputs, bool enter, bool detail) {
  auto& t = this_thread();
  if (t.owner != g) return false;  // another recording began while the values were read: the numbers are not of it
  t.busy = true;
  std::unique_ptr<Frame> frame;
  guarded([&] {
    auto [called, launched] = numbered(op, launch);
    const bool region = called->region;
    if (t.capture) called = g->operators.in_graph(called);
    frame = begun(t, {called, c10::ArrayRef<const IValue>(inputs.data(), inputs.size()), launched, detail});
    if (!frame) return;
    frame->from_outside = enter;
    frame->library = enter && !region;
    if (enter) return;
    ended(t, *frame);
    if (t.capture && !t.capture->nodes.empty()) t.capture->nodes.back().end++;  // the launch to come
  });
  t.busy = false;
  return enter ? frame.release() != nullptr : frame != nullptr;
}

// The call that was entered last on this thread has ended.
inline void leave() {
  auto& t = this_thread();
  if (t.top && t.top->from_outside) guarded([&] { ended(t, *t.top); });
}

}  // namespace kcap
