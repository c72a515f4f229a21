// What a Relax VM calls, recorded without Python: its kernels' arguments go to the native recorder as they come.
//
// A VM calls its instrument before and after each function that it calls, and nine in ten of them launch nothing.
// Built against kcap's recorder, and loaded as a module of tvm-ffi; relax_vm/tap.py says what is called what.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ffi = tvm::ffi;

extern "C" {  // of recorder/dispatcher.cpp
int kcap_call(int64_t op, int64_t launch, int count, const uint8_t* kinds, const int64_t* words, int enter, int detail);
int64_t kcap_text(const char* text);
}

namespace {

// What becomes of a call: nothing, it is recorded, or it is held until its step has begun.
enum Listening : int { off, recording, holding };
std::atomic<int> listening{off};
thread_local bool capturing = false;  // what this thread calls is a CUDA graph's, and waits for no step

// As in recorder/native/external.h.
enum Kind : uint8_t { none, integer, real, boolean, tensor, text, list, dltensor };

struct Operator {  // as the recorder numbers it, and what it is launched from (-1: not known)
  int64_t number = -1, launch = -1;
  int32_t arguments = 0;
};

struct TextHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};

class Operators : public std::enable_shared_from_this<Operators> {  // of one library, by name
 public:
  // `ask`: Python's, which is given a kernel's name and how many arguments it has, and answers with an Operator's numbers.
  explicit Operators(ffi::Function ask) : ask_(std::move(ask)) {}

  // A failure ends the tap, and never reaches the VM.
  void called(std::string_view name, const ffi::AnyView* arguments, int32_t count) noexcept {
    try {
      const Operator op = find(name, count);
      if (listening == recording || capturing) record(op, reinterpret_cast<const TVMFFIAny*>(arguments));
      else hold(op, arguments);
    } catch (...) {  // of Python's own failures Python knows
      listening = off;
    }
  }

  // Record the calls that are held if `counts`, and forget them.
  static void release(bool counts) {
    std::vector<HeldCall> calls;
    {
      std::lock_guard<std::mutex> guard(held_mutex());
      calls.swap(held());
    }
    for (const HeldCall& call : calls)
      if (counts) call.operators->record(call.op, reinterpret_cast<const TVMFFIAny*>(call.arguments.data()));
  }

 private:
  struct HeldCall {
    std::shared_ptr<Operators> operators;
    Operator op;
    std::vector<ffi::Any> arguments;
  };
  static constexpr size_t kMostHeld = 4096;  // as MOST_HELD in tap.py: no step begins, and nothing may grow for ever
  static std::mutex& held_mutex() { static std::mutex mutex; return mutex; }
  static std::vector<HeldCall>& held() { static std::vector<HeldCall> calls; return calls; }

  void hold(const Operator& op, const ffi::AnyView* arguments) {
    HeldCall call{shared_from_this(), op, {}};
    for (int32_t i = 0; i < op.arguments; i++) {  // what a bare pointer leads to may be gone by then
      const bool bare = arguments[i].type_index() == kTVMFFIDLTensorPtr;
      call.arguments.push_back(bare ? ffi::Any(nullptr) : ffi::Any(arguments[i]));
    }
    std::lock_guard<std::mutex> guard(held_mutex());
    if (held().size() < kMostHeld) held().push_back(std::move(call));
  }

  void record(const Operator& op, const TVMFFIAny* arguments) {
    thread_local std::vector<uint8_t> kinds;
    thread_local std::vector<int64_t> words;
    kinds.clear();
    words.clear();
    const auto put = [](Kind kind, int64_t word) {
      kinds.push_back(kind);
      words.push_back(word);
    };
    for (const TVMFFIAny* value = arguments; value != arguments + op.arguments; value++) {
      switch (value->type_index) {
        case kTVMFFINone: put(none, 0); break;
        case kTVMFFIInt: put(integer, value->v_int64); break;
        case kTVMFFIFloat: put(real, value->v_int64); break;  // its bits
        case kTVMFFIBool: put(boolean, value->v_int64); break;
        case kTVMFFIDLTensorPtr: put(dltensor, reinterpret_cast<int64_t>(value->v_ptr)); break;
        case kTVMFFITensor: put(dltensor, reinterpret_cast<int64_t>(TVMFFITensorGetDLTensorPtr(value->v_obj))); break;
        default: put(text, type_name(value->type_index));
      }
    }
    kcap_call(op.number, op.launch, op.arguments, kinds.data(), words.data(), 0, 0);
  }

  Operator find(std::string_view name, int32_t arguments) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      const auto it = known_.find(name);
      if (it != known_.end() && it->second.arguments == arguments) return it->second;
    }
    const auto numbers = ask_(ffi::String(name.data(), name.size()), arguments).cast<ffi::Array<int64_t>>();  // which may wait
    std::lock_guard<std::mutex> guard(mutex_);
    return known_[std::string(name)] = {numbers[0], numbers[1], arguments};
  }
  int64_t type_name(int32_t type) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto [it, fresh] = type_names_.try_emplace(type, 0);
    if (fresh) {
      const TVMFFITypeInfo* info = TVMFFIGetTypeInfo(type);
      it->second = kcap_text(info ? std::string(info->type_key.data, info->type_key.size).c_str() : "object");
    }
    return it->second;
  }
  ffi::Function ask_;
  std::mutex mutex_;
  std::unordered_map<std::string, Operator, TextHash, std::equal_to<>> known_;
  std::unordered_map<int32_t, int64_t> type_names_;
};

std::string_view text_of(const TVMFFIAny& value) {
  TVMFFIByteArray bytes{"", 0};
  if (value.type_index == kTVMFFIRawStr) return value.v_c_str;
  if (value.type_index == kTVMFFISmallStr) bytes = TVMFFISmallBytesGetContentByteArray(&value);
  if (value.type_index == kTVMFFIStr) bytes = *TVMFFIBytesGetByteArrayPtr(value.v_obj);
  return {bytes.data, bytes.size};
}

// A VM's instrument. It is given the function, its name, whether it is before the call, the result, then the arguments.
// `host`: how the names of what launches no kernel begin.
ffi::Function instrument(ffi::Array<ffi::String> host, ffi::Function ask) {
  std::vector<std::string> prefixes;
  for (const ffi::String& prefix : host) prefixes.emplace_back(prefix);
  auto operators = std::make_shared<Operators>(std::move(ask));
  return ffi::Function::FromPacked([prefixes, operators](ffi::PackedArgs all, ffi::Any*) {
    constexpr int kOwn = 4;
    const auto* arguments = reinterpret_cast<const TVMFFIAny*>(all.data());
    if (listening == off || all.size() < kOwn || !arguments[2].v_int64) return;
    const std::string_view name = text_of(arguments[1]);
    for (const std::string& prefix : prefixes)
      if (name.starts_with(prefix)) return;
    operators->called(name, all.data() + kOwn, all.size() - kOwn);
  });
}

// `function`, a kernel that no instrument sees, which tells of its calls.
ffi::Function kernel(ffi::Function function, ffi::String name, ffi::Function ask) {
  auto operators = std::make_shared<Operators>(std::move(ask));
  return ffi::Function::FromPacked([=](ffi::PackedArgs all, ffi::Any* result) {
    if (listening != off) operators->called({name.data(), name.size()}, all.data(), all.size());
    function.CallPacked(all, result);
  });
}

// `function`, with Python told before and after; neither may raise.
ffi::Function around(ffi::Function function, ffi::Function before, ffi::Function after) {
  return ffi::Function::FromPacked([=](ffi::PackedArgs all, ffi::Any* result) {
    struct Leaving {
      const ffi::Function& after;
      ~Leaving() { after(); }
    };
    before();
    const Leaving leaving{after};
    function.CallPacked(all, result);
  });
}

void listen(int to) {
  listening = to;
  if (to != holding) Operators::release(to == recording);
}

void set_capturing(bool to) { capturing = to; }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(instrument, instrument)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kernel, kernel)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(around, around)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(listen, listen)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(capturing, set_capturing)
