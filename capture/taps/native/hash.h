// A 128-bit hash of a call's signature: its words are gathered, then mixed in independent pairs, so that the processor
// overlaps the multiplications. The mixing is wyhash's (public domain): a 64 x 64 -> 128 bit product of salted words.
#pragma once
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
  template <class Int, std::enable_if_t<std::is_integral_v<Int>, int> = 0>
  void add(Int value) {
    if (__builtin_expect(used_ == kWords, 0)) mix();
    words_[used_++] = static_cast<uint64_t>(value);
  }
  void add(double value) {
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    add(bits);
  }
  void add(const int64_t* values, size_t count) {
    for (size_t i = 0; i < count; i++) add(values[i]);
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
  Hash hash() {
    mix();
    return hash_;
  }

 private:
  static constexpr size_t kWords = 64;

  static uint64_t salt(uint64_t i) { return (i + 1) * 0x9E3779B97F4A7C15ull; }

  void mix() {
    if (used_ % 2) words_[used_++] = 0;
    uint64_t a = hash_.a * 0xff51afd7ed558ccdull + used_, b = hash_.b * 0xc4ceb9fe1a85ec53ull;
    for (size_t i = 0; i < used_; i += 2) {
      const auto product = static_cast<unsigned __int128>(words_[i] ^ salt(i)) * (words_[i + 1] ^ salt(i + 1));
      const auto low = static_cast<uint64_t>(product), high = static_cast<uint64_t>(product >> 64);
      a += low ^ high;
      b += (low << 32 | low >> 32) + high * 0x2545F4914F6CDD1Dull;
    }
    hash_ = {a ^ a >> 29, b ^ b >> 31};
    used_ = 0;
  }

  size_t used_ = 0;
  Hash hash_;
  uint64_t words_[kWords + 1];
};

struct HashOf {
  size_t operator()(const Hash& h) const { return h.a; }
};

}  // namespace kcap
