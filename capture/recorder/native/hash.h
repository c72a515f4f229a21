// A 128-bit running hash of a call's signature. Mixing constants: MurmurHash3's finalizer (public domain).
#pragma once
#include <c10/macros/Macros.h>

#include <cstdint>
#include <cstring>
#include <string_view>
#include <type_traits>

namespace kcap {

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

}  // namespace kcap
