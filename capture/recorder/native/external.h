// Calls that do not come through the dispatcher: Python tells of them, and everything else is the dispatcher's own way.
#pragma once
#include "calls.h"

namespace kcap {

// How Python hands over a value: a kind, and a word that holds it or says where it lies.
enum class Kind : uint8_t { none, integer, real, boolean, tensor, text, list };

class Unpacker {
 public:
  Unpacker(const uint8_t* kinds, const int64_t* words) : kinds_(kinds), words_(words) {}

  IValue next() {
    const int64_t word = *words_++;
    switch (static_cast<Kind>(*kinds_++)) {
      case Kind::integer: return word;
      case Kind::real: { double value; std::memcpy(&value, &word, sizeof value); return value; }
      case Kind::boolean: return word != 0;
      case Kind::tensor: return tensor(word);
      case Kind::text: return g->texts.at(static_cast<size_t>(word));
      case Kind::list: return list(word);
      default: return IValue();
    }
  }

 private:
  static Tensor tensor(int64_t address) {  // Python's `tensor._cdata`, alive while it calls
    return Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(reinterpret_cast<c10::TensorImpl*>(address)));
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
};

bool in_library(const Thread& t) {
  for (const Frame* f = t.top; f; f = f->below)
    if (f->library) return true;
  return false;
}

// Begins a call of `op`; nullptr where it is not recorded.
std::unique_ptr<Frame> begin_from_python(Thread& t, Operator* op, const Launch* launch, int count, const uint8_t* kinds, const int64_t* words, bool detail) {
  std::vector<IValue> inputs;
  inputs.reserve(static_cast<size_t>(count));
  Unpacker values(kinds, words);
  for (int i = 0; i < count; i++) inputs.push_back(values.next());
  if (t.capture) op = g->operators.in_graph(op);
  return begun(t, {op, c10::ArrayRef<const IValue>(inputs.data(), inputs.size()), launch, detail});
}

}  // namespace kcap
