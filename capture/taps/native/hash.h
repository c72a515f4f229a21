// 128-bit running hash of a call's signature. Mixing constants: MurmurHash3's finalizer (public domain).
#pragma once
#include <cstdint>
#include <cstring>
#include <string_view>
#include <type_traits>

namespace kcap {

struct Hash {
  uint64_t a = 0x9E3779B97F4A7C15ull, b = 0xC2B2AE3D27D4EB4Full;

  template <class Int, std::enable_if_t<std::is_integral_v<Int>, int> = 0>
  inline void add(Int value) {
    const auto v = static_cast<uint64_t>(value);
    a = (a ^ v) * 0xff51afd7ed558ccdull;
    a ^= a >> 32;
    b = (b + v) * 0xc4ceb9fe1a85ec53;
    b ^= b >> 29;
  }
  inline void add(double v) {
    uint64_t bits;
    std::memcpy(&bits, &v, sizeof bits);
    add(bits);
  }
  // Digit runs count as one: `layers.0.attn` and `layers.31.attn` are the same.
  inline void add_folded(std::string_view text) {
    bool digit = false;
    for (char c : text) {
      const bool is_digit = c >= '0' && c <= '9';
      if (!(is_digit && digit)) add(is_digit ? '#' : c);
      digit = is_digit;
    }
    add(text.empty() ? 1 : 2);
  }
  inline void add_text(std::string_view text) {
    for (char c : text) add(c);
    add(3);
  }
  bool operator==(const Hash& o) const { return a == o.a && b == o.b; }
};

struct HashOf {
  size_t operator()(const Hash& h) const { return h.a; }
};

}  // namespace kcap
