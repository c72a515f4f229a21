// Values as JSON, in the form that kcap.schemas.recording.values reads. Runs only when a call is seen for the first time.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/jit_type.h>

#include <cmath>
#include <cstdio>
#include <string>

namespace kcap {
using at::IValue;
using at::Tensor;

inline void put_string(std::string& out, std::string_view text) {
  out += '"';
  for (unsigned char c : text) {
    if (c == '"' || c == '\\') { out += '\\'; out += static_cast<char>(c); }
    else if (c < 0x20) { char buffer[8]; std::snprintf(buffer, sizeof buffer, "\\u%04x", c); out += buffer; }
    else out += static_cast<char>(c);
  }
  out += '"';
}

// What Python wrote as JSON already comes as a string with this mark before it.
inline bool is_json(std::string_view text) { return !text.empty() && text[0] == '\x01'; }

inline void put_key(std::string& out, const char* key) { put_string(out, key); out += ':'; }

inline void put_tagged(std::string& out, const char* tag, std::string_view body) {
  out += '{'; put_key(out, tag); put_string(out, body); out += '}';
}

inline void put_double(std::string& out, double value) {
  if (std::isnan(value)) return put_tagged(out, "float", "nan");
  if (std::isinf(value)) return put_tagged(out, "float", value > 0 ? "inf" : "-inf");
  char buffer[40];
  for (int digits = 15; digits <= 17; digits++) {
    std::snprintf(buffer, sizeof buffer, "%.*g", digits, value);
    if (std::strtod(buffer, nullptr) == value) break;
  }
  for (char* c = buffer; *c; c++)
    if (*c == ',') *c = '.';  // as the program's locale writes it
  out += buffer;
  if (std::string_view(buffer).find_first_of(".en") == std::string_view::npos) out += ".0";
}

template <class Range>
inline void put_ints(std::string& out, const Range& values) {
  out += '[';
  bool first = true;
  for (int64_t value : values) {
    if (!first) out += ',';
    first = false;
    out += std::to_string(value);
  }
  out += ']';
}

// torch's own names; ScalarType.h's toString gives C++ ones (Float, Half).
inline const char* dtype_name(at::ScalarType type) {
  switch (type) {
    case at::kByte: return "uint8";
    case at::kChar: return "int8";
    case at::kShort: return "int16";
    case at::kInt: return "int32";
    case at::kLong: return "int64";
    case at::kHalf: return "float16";
    case at::kFloat: return "float32";
    case at::kDouble: return "float64";
    case at::kComplexHalf: return "complex32";
    case at::kComplexFloat: return "complex64";
    case at::kComplexDouble: return "complex128";
    case at::kBool: return "bool";
    case at::kBFloat16: return "bfloat16";
    case at::ScalarType::UInt16: return "uint16";
    case at::ScalarType::UInt32: return "uint32";
    case at::ScalarType::UInt64: return "uint64";
    case at::kFloat8_e5m2: return "float8_e5m2";
    case at::kFloat8_e4m3fn: return "float8_e4m3fn";
    case at::kFloat8_e5m2fnuz: return "float8_e5m2fnuz";
    case at::kFloat8_e4m3fnuz: return "float8_e4m3fnuz";
    case at::kFloat8_e8m0fnu: return "float8_e8m0fnu";
    case at::ScalarType::Float4_e2m1fn_x2: return "float4_e2m1fn_x2";
    default: return nullptr;
  }
}

inline const char* layout_name(int64_t layout) {
  static const char* const names[] = {"strided", "sparse_coo", "sparse_csr", "_mkldnn",
                                      "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged"};
  return layout >= 0 && layout < 8 ? names[layout] : nullptr;
}

inline const char* memory_format_name(int64_t format) {
  static const char* const names[] = {"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"};
  return format >= 0 && format < 4 ? names[format] : nullptr;
}

// What an int in the boxed arguments really is, by the schema's type.
enum class IntKind { plain, dtype, layout, memory_format };

inline IntKind int_kind(const c10::Type& type) {
  if (auto optional = type.castRaw<c10::OptionalType>()) return int_kind(*optional->getElementType());
  switch (type.kind()) {
    case c10::TypeKind::ScalarTypeType: return IntKind::dtype;
    case c10::TypeKind::LayoutType: return IntKind::layout;
    case c10::TypeKind::MemoryFormatType: return IntKind::memory_format;
    default: return IntKind::plain;
  }
}

inline void put_int(std::string& out, int64_t value, IntKind kind) {
  const char* name = nullptr;
  const char* tag = nullptr;
  if (kind == IntKind::dtype) { tag = "dtype"; name = dtype_name(static_cast<at::ScalarType>(value)); }
  if (kind == IntKind::layout) { tag = "layout"; name = layout_name(value); }
  if (kind == IntKind::memory_format) { tag = "memory_format"; name = memory_format_name(value); }
  if (name) put_tagged(out, tag, name);
  else if (tag) put_tagged(out, "opaque", tag);
  else out += std::to_string(value);
}

inline bool is_number(const Tensor& t) { return t.defined() && t.unsafeGetTensorImpl()->is_wrapped_number(); }

// The Python scalar that a wrapped 0-dim tensor stands for; read in place, nothing is dispatched.
inline void put_wrapped_number(std::string& out, const Tensor& t) {
  const void* data = t.const_data_ptr();
  switch (t.scalar_type()) {
    case at::kDouble: return put_double(out, *static_cast<const double*>(data));
    case at::kLong: out += std::to_string(*static_cast<const int64_t*>(data)); return;
    case at::kBool: out += *static_cast<const bool*>(data) ? "true" : "false"; return;
    case at::kComplexDouble: {
      const auto* parts = static_cast<const double*>(data);
      out += "{\"complex\":["; put_double(out, parts[0]); out += ','; put_double(out, parts[1]); out += "]}";
      return;
    }
    default: put_tagged(out, "opaque", "number");
  }
}

inline std::string folded(std::string_view text) {
  std::string out;
  bool digit = false;
  for (char c : text) {
    const bool is_digit = c >= '0' && c <= '9';
    if (!is_digit) out += c;
    else if (!digit) out += '*';
    digit = is_digit;
  }
  return out;
}

inline bool folds(std::string_view text) {  // a module path such as model.layers.3.self_attn
  for (size_t i = 1; i < text.size(); i++)
    if (text[i - 1] == '.' && text[i] >= '0' && text[i] <= '9') return true;
  return false;
}

}  // namespace kcap
