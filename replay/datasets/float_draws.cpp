// The floating-point inputs of many invocations, each element written once. invocations.py says what they are like.
//
// Every random number is a function of a stream, an invocation's number and a place: SplitMix64 (Steele, Lea and Flood,
// 2014), by whose finalizer each bit of a word depends on all bits of what it is made of.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__)
#define VECTORIZED __attribute__((flatten, target_clones("avx2", "default")))
#else
#define VECTORIZED
#endif

namespace {

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;
constexpr uint64_t LINE = 64 / sizeof(float), AHEAD = 16;  // numbers of a cache line, and pieces: those come from afar

uint64_t mix(uint64_t word) {
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EB;
  return word ^ (word >> 31);
}

// The words of one invocation in one stream.
struct Words {
  uint64_t start;

  Words(uint64_t stream, uint64_t number) : start(mix(stream + number * GOLDEN)) {}
  uint64_t operator[](uint64_t place) const { return mix(start + (place + 1) * GOLDEN); }
};

// Two numbers of [0, 1) from each word; its lowest bits are left.
float high(uint64_t word) { return float(word >> 40) * 0x1p-24f; }
float low(uint64_t word) { return float((word >> 16) & 0xFFFFFF) * 0x1p-24f; }

uint64_t below(uint64_t word, uint64_t limit) { return ((word >> 32) * limit) >> 32; }

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// 2 to a `power` between -126 and 127, to a millionth of it: inlined and without a branch, unlike std::exp2.
float exp2_of(float power) {
  float whole = std::floor(power), x = power - whole;
  float of_x = 8.9893397e-3f + x * 1.8775767e-3f;
  for (float each : {5.5826318e-2f, 2.4015361e-1f, 6.9315308e-1f, 9.9999994e-1f}) of_x = each + x * of_x;
  return of_x * from_bits(uint32_t(int32_t(whole) + 127) << 23);
}

void store(float& place, float value) { place = value; }

struct Bfloat16 {
  uint16_t bits;
};

void store(Bfloat16& place, float value) {
  uint32_t bits = bits_of(value);
  place.bits = uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

struct Float16 {
  uint16_t bits;
};

// Rounded to nearest even without a branch, so that compilers vectorize it. The sum with an anchor, a power of two 2^13
// times as large, has as many bits of the number as float16 does. Below 2^-14 numbers are subnormal: they share its
// anchor. Of up to 65,504 alone.
void store(Float16& place, float value) {
  uint32_t bits = bits_of(value);
  int32_t exponent = std::max(int32_t(bits & 0x7F800000), 0x38800000);
  float anchor = from_bits(exponent + (13 << 23));
  int32_t mantissa = bits_of(std::fabs(value) + anchor) - bits_of(anchor);  // with its leading bit
  place.bits = uint16_t((((exponent >> 23) - 113) << 10) + mantissa | (bits >> 16 & 0x8000));
}

struct Pool {
  const float* numbers;
  uint64_t pieces, piece;  // how many, and elements of each

  const float* at(uint64_t word) const { return numbers + below(word, pieces) * piece; }
};

struct Spread {
  float octaves, offset, outlier;
};

struct Streams {
  uint64_t pieces, rows, overall, outliers, parts;

  explicit Streams(uint64_t stream)
      : pieces(stream), rows(mix(pieces)), overall(mix(rows)), outliers(mix(overall)), parts(mix(outliers)) {}
};

struct Shape {
  uint64_t rows, width, parts, least_with_outlier;
};

template <class Element>
void fill(Element* target, const Pool& pool, const Spread& spread, const Shape& shape, const Streams& streams,
          uint64_t number) {
  Words pieces(streams.pieces, number), rows(streams.rows, number), outliers(streams.outliers, number);
  Words parts(streams.parts, number);
  float overall = high(Words(streams.overall, number)[0]);
  uint64_t size = shape.width / shape.parts, written = 0, piece = 0, left = 0;  // of the piece that `source` is in
  bool outlying = shape.width >= shape.least_with_outlier && spread.outlier;
  float norm = std::sqrt(float(shape.width)) * spread.outlier;
  uint64_t wanted = (shape.rows * shape.width + pool.piece - 1) / pool.piece;
  const float *source = nullptr, *coming[AHEAD];
  auto fetch = [&](uint64_t index) {
    if (index >= wanted) return;
    auto* found = coming[index % AHEAD] = pool.at(pieces[index]);
    for (uint64_t i = 0; i < pool.piece; i += LINE) __builtin_prefetch(found + i);
  };
  for (uint64_t i = 0; i < AHEAD; ++i) fetch(i);
  for (uint64_t row = 0; row < shape.rows; ++row) {
    uint64_t word = rows[row];
    float scale = exp2_of(spread.octaves * 2 * (high(word) + overall - 1)), place = 2 * low(word) - 1;
    for (uint64_t part = 0; part < shape.parts; ++part) {
      uint64_t uneven = parts[row * shape.parts + part];
      float own = scale * exp2_of(spread.octaves * (2 * high(uneven) - 1));
      float moved = spread.offset * (place * scale + (low(uneven) - 0.5f) * own);
      for (uint64_t end = written + size; written < end;) {
        if (left == 0) source = coming[piece % AHEAD], left = pool.piece, fetch(piece++ + AHEAD);
        uint64_t count = std::min(left, end - written);
        for (uint64_t i = 0; i < count; ++i) store(target[written + i], source[i] * own + moved);
        written += count, source += count, left -= count;
      }
    }
    if (!outlying) continue;
    word = outliers[row];  // without a branch, which half of the rows would take
    Element& outlier = target[row * shape.width + below(word, shape.width)];
    Element usual = outlier;
    float value = norm * exp2_of(-2 * low(word)) * scale;
    store(outlier, word & 1 ? value : -value);
    if (!(word & 2)) outlier = usual;
  }
}

}  // namespace

// Fill `count` invocations from number `first` on; `stride`: bytes from one to the next; `bits`: 32 of float32, 16 of
// float16 or, with `brain`, of bfloat16.
extern "C" VECTORIZED void kcap_fill_floats(uint8_t* target, uint64_t stride, uint64_t first, uint64_t count, int bits, int brain,
                                 const Pool* pool, const Spread* spread, const Shape* shape, uint64_t stream) {
  Streams streams(stream);
  for (uint64_t i = 0; i < count; ++i, target += stride) {
    if (bits == 32)
      fill(reinterpret_cast<float*>(target), *pool, *spread, *shape, streams, first + i);
    else if (brain)
      fill(reinterpret_cast<Bfloat16*>(target), *pool, *spread, *shape, streams, first + i);
    else
      fill(reinterpret_cast<Float16*>(target), *pool, *spread, *shape, streams, first + i);
  }
}
