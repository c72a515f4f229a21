// A call's signature: its hash on the hot path (mixed as MurmurHash3's finalizer does, public domain), its JSON when it
// is new.
#pragma once
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/macros/Macros.h>
#include <dlfcn.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <type_traits>

#include "groups.h"
#include "operators.h"

namespace kcap {

// A 128-bit running hash.
struct Hash {
  uint64_t a = 0, b = 0;
  bool operator==(const Hash& o) const { return a == o.a && b == o.b; }
};

class Mixer {
 public:
  // Two words in one round, each into its lane; the lanes feed each other, so that a round is a bijection of the state.
  C10_ALWAYS_INLINE void add(uint64_t v, uint64_t w) {
    const uint64_t x = (a_ ^ v) * 0xff51afd7ed558ccdull, y = (b_ + w) * 0xc4ceb9fe1a85ec53ull;
    a_ = x ^ y >> 32;
    b_ = y ^ x >> 29;
  }
  template <class Int, std::enable_if_t<std::is_integral_v<Int>, int> = 0>
  C10_ALWAYS_INLINE void add(Int value) {
    add(static_cast<uint64_t>(value), 0);
  }
  void add(double value) {
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    add(bits);
  }
  // Digit runs count as one: `layers.0.attn` and `layers.31.attn` are the same.
  void add_folded(std::string_view text) {
    bool digit = false;
    for (char c : text) {
      const bool is_digit = c >= '0' && c <= '9';
      if (!(is_digit && digit)) add(is_digit ? '#' : c);
      digit = is_digit;
    }
    add(text.empty() ? 1 : 2);
  }
  void add_text(std::string_view text) {
    for (char c : text) add(c);
    add(text.size());
  }
  C10_ALWAYS_INLINE Hash hash() const { return {a_, b_}; }

 private:
  uint64_t a_ = 0x9E3779B97F4A7C15ull, b_ = 0xC2B2AE3D27D4EB4Full;
};

struct HashOf {
  size_t operator()(const Hash& h) const { return h.a; }
};

enum class Reality : uint8_t {
  real,
  traced,       // fake, meta or symbolic: made by a compiler, never touched further
  transparent,  // a subclass, functorch's wrapper, or a zero without memory: the calls inside it are the real ones
};

constexpr c10::DispatchKeySet kTraced = c10::DispatchKeySet(c10::BackendComponent::MetaBit) | c10::DispatchKeySet(c10::DispatchKey::Functionalize);
constexpr c10::DispatchKeySet kTransparent({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                                            c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
                                            c10::DispatchKey::ZeroTensor});
constexpr c10::DispatchKeySet kLazy({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});  // its memory has other numbers
constexpr c10::DispatchKeySet kUnusual = kTraced | kTransparent | kLazy | c10::sparse_ks | c10::sparse_csr_ks | c10::mkldnn_ks |
                                         c10::DispatchKeySet(c10::DispatchKey::NestedTensor);

C10_ALWAYS_INLINE Reality reality(const c10::TensorImpl& impl) {
  const auto keys = impl.key_set();
  if (C10_LIKELY(!keys.has_any(kTraced | kTransparent) && !impl.has_symbolic_sizes_strides())) return Reality::real;
  const bool jagged = keys.has(c10::DispatchKey::NestedTensor);  // PyTorch hands in dummies of meta tensors
  return keys.has_any(kTransparent) && (jagged || !keys.has_any(kTraced)) ? Reality::transparent : Reality::traced;
}

inline Reality worse(Reality a, Reality b) {
  return a == Reality::traced || b == Reality::traced ? Reality::traced : a == Reality::real ? b : a;
}

inline bool tracing_mode_active() {
  using TLS = c10::impl::TorchDispatchModeTLS;
  using Key = c10::impl::TorchDispatchModeKey;
  return C10_UNLIKELY(TLS::any_modes_set()) &&
         (TLS::get_mode(Key::FAKE) || TLS::get_mode(Key::PROXY) || TLS::get_mode(Key::FUNCTIONAL));
}

// Numbers the memory that a call's tensors live in: equal numbers share it.
struct Storages {
  const void* seen[32];
  int count = 0;
  C10_ALWAYS_INLINE int number(const c10::TensorImpl& impl) {
    const void* p = impl.unsafe_storage().unsafeGetStorageImpl();
    for (int i = 0; i < count; i++)
      if (seen[i] == p) return i;
    if (count == 32) return 32;
    seen[count] = p;
    return count++;
  }
};

// A nested tensor calls itself strided, but asking it for its sizes throws.
inline bool strided(const Tensor& t) {
  return t.layout() == at::kStrided && t.has_storage() && !t.is_nested() && !t.key_set().has_any(kLazy);
}

inline std::string unusual_kind(const Tensor& t) {
  return t.is_conj() ? "conjugated" : t.is_neg() ? "negated" : c10::str(t.layout());
}

// Where the host has the memory that the GPU knows as `data` (pinned and mapped); nullptr: it is the GPU's own.
inline const char* mapped_from(const void* data) {
  using Attribute = int (*)(void*, int, uint64_t);
  static const auto attribute = [] {
    void* driver = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    return driver ? reinterpret_cast<Attribute>(::dlsym(driver, "cuPointerGetAttribute")) : nullptr;
  }();
  constexpr int kMemoryType = 2, kHostPointer = 4;  // CU_POINTER_ATTRIBUTE_MEMORY_TYPE, _HOST_POINTER
  constexpr unsigned kHost = 1;  // CU_MEMORYTYPE_HOST
  const auto address = reinterpret_cast<uint64_t>(data);
  unsigned type = 0;
  const char* pointer = nullptr;
  if (!attribute || attribute(&type, kMemoryType, address) != 0 || type != kHost) return nullptr;
  return attribute(&pointer, kHostPointer, address) == 0 ? pointer : nullptr;
}

inline bool is_scalar(const IValue& v) {
  return v.isInt() || v.isDouble() || v.isBool() || v.isComplexDouble() || (v.isTensor() && is_number(v.toTensor()));
}

// A number, or a list of numbers: of one type, or of any, as a foreach optimizer's `Scalar[]`.
inline bool is_scalar_like(const IValue& v) {
  if (is_scalar(v) || v.isIntList() || v.isDoubleList() || v.isBoolList()) return true;
  if (!v.isList()) return false;
  const auto items = v.toListRef();
  return !items.empty() && std::all_of(items.begin(), items.end(), is_scalar);
}

// A number by the power of two that it does not exceed. Small integers, which may be dimensions, stay as they are.
inline int64_t rounded(int64_t v) {
  constexpr int64_t kSmall = 16;
  if (-kSmall < v && v < kSmall) return v;
  const int64_t width = 64 - __builtin_clzll((v < 0 ? -static_cast<uint64_t>(v) : static_cast<uint64_t>(v)) - 1);
  return v < 0 ? -kSmall - width : kSmall + width;
}
inline double rounded(double v) {
  if (!std::isfinite(v) || v == 0) return v;
  int exponent = 0;
  return std::ldexp(std::copysign(1.0, std::frexp(v, &exponent)), exponent);
}

// `kRounded`: calls whose numbers and sizes lie between the same powers of two are equal.
template <bool kRounded>
class BasicHasher {
 public:
  BasicHasher(uint32_t serial, uint32_t parent, uint64_t drifting, uint64_t drifting_offsets)
      : drifting_(drifting), drifting_offsets_(drifting_offsets) {
    hash.add(serial, parent);
  }
  BasicHasher(const Operator& op, uint32_t parent) : BasicHasher(op.serial, parent, op.drifting.load(), op.drifting_offsets.load()) {}
  Mixer hash;
  Reality real = Reality::real;  // of the arguments so far: once it is not, no accessor is called any more

  // The hash stays in registers from one usual argument to the next.
  C10_ALWAYS_INLINE void arguments(c10::ArrayRef<IValue> values) {
    const bool steady = !(drifting_ | drifting_offsets_) && real == Reality::real;
    Mixer h = hash;
    for (size_t i = 0; i < values.size(); i++) {
      const IValue& v = values[i];
      if (C10_LIKELY(steady && v.isTensor() && usual(*v.toTensor().unsafeGetTensorImpl()))) {
        plain(h, *v.toTensor().unsafeGetTensorImpl());
      } else if (v.isNone()) {
        h.add(1);
      } else if (steady && v.isInt()) {
        h.add(2, static_cast<uint64_t>(held(v.toInt())));
      } else {
        hash = h;
        argument(v, i);
        h = hash;
      }
    }
    hash = h;
  }

  C10_NOINLINE void argument(const IValue& v, size_t index) {
    bit_ = index < 64 ? 1ull << index : 0;
    if (C10_UNLIKELY(drifting_ & bit_) && is_scalar_like(v)) return hash.add(11);
    value(v);
  }

 private:
  template <class Number>
  C10_ALWAYS_INLINE static Number held(Number v) {
    if constexpr (kRounded) return rounded(v);
    return v;
  }
  void value(const IValue& v) {
    if (v.isTensor()) return tensor(v.toTensor());
    if (v.isNone()) return hash.add(1);
    if (v.isInt()) { hash.add(2); return hash.add(held(v.toInt())); }
    if (v.isBool()) return hash.add(3 + v.toBool());
    if (v.isDouble()) { hash.add(5); return hash.add(held(v.toDouble())); }
    if (v.isList()) return list(v.toListRef());
    if (v.isString()) return text(v.toStringRef());
    if (v.isDevice()) return device(v.toDevice());
    if (v.isComplexDouble()) { hash.add(15); hash.add(v.toComplexDouble().real()); return hash.add(v.toComplexDouble().imag()); }
    if (v.isObject()) return hash.add(13, object_identity(v));
    if (v.isSymInt() || v.isSymFloat() || v.isSymBool()) real = Reality::traced;
    hash.add(0xABCDEF);
  }
  void device(const c10::Device& device) {
    if (device.is_meta()) real = Reality::traced;
    hash.add(9);
    hash.add(static_cast<int>(device.type()));
  }
  void list(c10::ArrayRef<IValue> items) {
    hash.add(10);
    for (const IValue& item : items) value(item);
    hash.add(items.size());
  }
  void text(const std::string& s) {
    hash.add(8);
    if (!is_json(s) && folds(s)) hash.add_folded(s); else hash.add_text(s);
  }
  C10_ALWAYS_INLINE static bool usual(const c10::TensorImpl& impl) {  // real, strided, no Python scalar
    return !impl.key_set().has_any(kUnusual) && !impl.has_symbolic_sizes_strides() && !impl.is_wrapped_number() &&
           impl.unsafe_storage().unsafeGetStorageImpl();
  }
  static uint64_t kind(const c10::TensorImpl& impl) {  // its top bit tells a tensor from any other value
    return 1ull << 63 | static_cast<uint64_t>(impl.dtype().toScalarType()) << 40 | static_cast<uint64_t>(impl.device().type()) << 32;
  }
  C10_ALWAYS_INLINE void plain(Mixer& h, const c10::TensorImpl& impl) {
    const auto sizes = impl.sizes(), strides = impl.strides();
    const uint64_t offset = kRounded || C10_UNLIKELY(drifting_offsets_ & bit_) ? ~0ull : static_cast<uint64_t>(impl.storage_offset());
    h.add(kind(impl) | sizes.size() << 8 | static_cast<uint64_t>(storages_.number(impl)), offset);
    for (size_t d = 0; d < sizes.size(); d++) h.add(static_cast<uint64_t>(held(sizes[d])), static_cast<uint64_t>(held(strides[d])));
  }
  void tensor(const Tensor& t) {
    if (!t.defined()) return hash.add(0xDEAD);
    const auto& impl = *t.unsafeGetTensorImpl();
    real = worse(real, reality(impl));
    if (C10_UNLIKELY(real != Reality::real)) return;
    if (impl.is_wrapped_number()) return number(t);
    if (!strided(t)) {
      const uint64_t lazy = static_cast<uint64_t>(t.is_conj()) << 17 | static_cast<uint64_t>(t.is_neg()) << 16;
      return hash.add(kind(impl) | 0xBEEF, lazy | static_cast<uint64_t>(t.layout()) << 8 | static_cast<uint64_t>(impl.dim()));
    }
    plain(hash, impl);
  }
  void number(const Tensor& t) {  // read in place: nothing is dispatched
    uint64_t words[2] = {0, 0};
    hash.add(16 + static_cast<uint64_t>(t.scalar_type()));
    if (kRounded && t.scalar_type() == at::kLong) return hash.add(held(*static_cast<const int64_t*>(t.const_data_ptr())));
    if (kRounded && t.scalar_type() == at::kDouble) return hash.add(held(*static_cast<const double*>(t.const_data_ptr())));
    std::memcpy(words, t.const_data_ptr(), std::min<size_t>(t.element_size(), sizeof words));
    hash.add(words[0], words[1]);
  }
  Storages storages_;
  uint64_t drifting_, drifting_offsets_, bit_ = 0;
};
using Hasher = BasicHasher<false>;

// Writes values as JSON; `drifting` arguments become {"drift": type} and drifting offsets null.
class Describer {
 public:
  explicit Describer(const Operator& op)
      : drifting_(op.drifting.load()), drifting_offsets_(op.drifting_offsets.load()), functional_(op.base_name.rfind("_c10d_functional::", 0) == 0) {}

  void argument(std::string& out, const IValue& v, const ArgumentInfo* info, size_t index) {
    bit_ = index < 64 ? 1ull << index : 0;
    if ((drifting_ & bit_) && is_scalar_like(v)) return put_tagged(out, "drift", drift_type(v));
    if (Group group; info && group_named(v, *info, group)) return put_group(out, group);
    value(out, v, info ? info->ints : IntKind::plain);
  }

  void value(std::string& out, const IValue& v, IntKind ints) {
    if (v.isTensor()) return tensor(out, v.toTensor());
    if (v.isNone()) { out += "null"; return; }
    if (Group group; group_of(v, group)) return put_group(out, group);
    if (v.isInt()) return put_int(out, v.toInt(), ints);
    if (v.isBool()) { out += v.toBool() ? "true" : "false"; return; }
    if (v.isDouble()) return put_double(out, v.toDouble());
    if (v.isIntList()) return put_ints(out, v.toIntVector());
    if (v.isString() && is_json(v.toStringRef())) { out += v.toStringRef().substr(1); return; }
    if (v.isString()) return folds(v.toStringRef()) ? put_tagged(out, "folded", folded(v.toStringRef())) : put_string(out, v.toStringRef());
    if (v.isDevice()) return put_tagged(out, "device", c10::DeviceTypeName(v.toDevice().type(), true));
    if (v.isComplexDouble()) {
      out += "{\"complex\":["; put_double(out, v.toComplexDouble().real());
      out += ','; put_double(out, v.toComplexDouble().imag()); out += "]}";
      return;
    }
    if (v.isList()) {
      out += '[';
      bool first = true;
      for (const IValue& item : v.toListRef()) { if (!first) out += ','; first = false; value(out, item, ints); }
      out += ']';
      return;
    }
    put_tagged(out, "opaque", v.tagKind());
  }

 private:
  // What is no name or address by itself, but with the argument's own name is.
  bool group_named(const IValue& v, const ArgumentInfo& info, Group& out) const {
    if (v.isInt()) return info.name == "handle" && groups().named("handle/" + std::to_string(v.toInt()), out);
    return functional_ && v.isString() && info.name == "group_name" && group_registered(v.toStringRef(), out);
  }
  static const char* drift_type(const IValue& v) {
    if (v.isTensor()) return "number";
    if (v.isInt()) return "int";
    if (v.isBool()) return "bool";
    if (v.isDouble()) return "float";
    if (v.isComplexDouble()) return "complex";
    return v.isIntList() ? "int[]" : v.isDoubleList() ? "float[]" : v.isBoolList() ? "bool[]" : "number[]";
  }
  void tensor(std::string& out, const Tensor& t) {
    if (!t.defined()) { out += "null"; return; }
    if (is_number(t)) return put_wrapped_number(out, t);
    const char* type = dtype_name(t.scalar_type());
    if (!strided(t)) return put_tagged(out, "opaque", "tensor " + unusual_kind(t));
    if (!type) return put_tagged(out, "opaque", std::string("tensor ") + c10::toString(t.scalar_type()));
    out += "{\"tensor\":{\"shape\":";
    put_ints(out, t.sizes());
    out += ",\"dtype\":"; put_string(out, type);
    if (!t.is_contiguous()) { out += ",\"strides\":"; put_ints(out, t.strides()); }
    if (drifting_offsets_ & bit_) out += ",\"offset\":null";
    else if (t.storage_offset()) out += ",\"offset\":" + std::to_string(t.storage_offset());
    out += ",\"device\":"; put_string(out, c10::DeviceTypeName(t.device().type(), true));
    out += ",\"storage\":" + std::to_string(storages_.number(*t.unsafeGetTensorImpl()));
    if (t.is_cuda() && mapped_from(t.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get())) out += ",\"mapped\":true";
    out += "}}";
  }
  Storages storages_;
  uint64_t drifting_, drifting_offsets_, bit_ = 0;
  bool functional_;
};

inline void put_constant(std::string& out, const IValue& v, IntKind ints) {
  static Operator none;
  Describer(none).value(out, v, ints);
}

}  // namespace kcap
