// A Relax VM's instrument: it passes on to Python what launches a kernel, and nothing else of what a VM calls.
//
// A VM calls its instrument before and after each function that it calls, and nine in ten of them are vm.builtin.*.
#include <tvm/ffi/c_api.h>

#include <cstring>

namespace {

// How the names of what launches no kernel begin; as HOST in relax_vm.py.
constexpr const char* HOST[] = {"vm.builtin.", "shape_func"};

TVMFFIByteArray text_of(const TVMFFIAny& value) {
  switch (value.type_index) {
    case kTVMFFIRawStr: return {value.v_c_str, std::strlen(value.v_c_str)};
    case kTVMFFISmallStr: return TVMFFISmallBytesGetContentByteArray(&value);
    case kTVMFFIStr: return *TVMFFIBytesGetByteArrayPtr(value.v_obj);
    default: return {"", 0};
  }
}

// `arguments`: the function, its name, whether it is before the call, what it returned, then its own.
int instrument(void* told, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result) {
  if (count < 3 || !arguments[2].v_int64) return 0;
  TVMFFIByteArray name = text_of(arguments[1]);
  for (const char* prefix : HOST) {
    size_t length = std::strlen(prefix);
    if (name.size >= length && !std::memcmp(name.data, prefix, length)) return 0;
  }
  return TVMFFIFunctionCall(told, const_cast<TVMFFIAny*>(arguments), count, result);
}

}  // namespace

// Have the VM whose `set_instrument` this is tell `told`, a Function that must outlive it; 0 where that worked.
extern "C" int kcap_instrument(TVMFFIObjectHandle set_instrument, TVMFFIObjectHandle told) {
  TVMFFIObjectHandle function = nullptr;
  if (int failed = TVMFFIFunctionCreate(told, instrument, nullptr, &function)) return failed;
  TVMFFIAny argument{}, result{};
  argument.type_index = kTVMFFIFunction;
  argument.v_obj = static_cast<TVMFFIObject*>(function);
  int failed = TVMFFIFunctionCall(set_instrument, &argument, 1, &result);
  TVMFFIObjectDecRef(function);
  return failed;
}
