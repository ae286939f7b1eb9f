// Vectors of fp32 lanes: converting loads and stores, 2^x, transposition. AVX-512 (16 lanes), AVX2 or SVE of 256 bits
// (8), NEON (4).
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#if __ARM_FEATURE_SVE_BITS == 256
#include <arm_sve.h>
#endif
#endif

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace difftransformer {

// Number of lanes, and number of vector registers.
#if defined(__AVX512F__)
constexpr int W = 16, kRegisters = 32;
#elif defined(__AVX2__)
constexpr int W = 8, kRegisters = 16;
#elif __ARM_FEATURE_SVE_BITS == 256
constexpr int W = 8, kRegisters = 32;
#elif defined(__aarch64__)
constexpr int W = 4, kRegisters = 32;
#else
#error "the CPU kernels are written for x86-64 with AVX2 or AVX-512, and for AArch64"
#endif

using Vec = float __attribute__((vector_size(4 * W)));
using Int = int32_t __attribute__((vector_size(4 * W)));
using BFloat16 = c10::BFloat16;
using Half = c10::Half;

// The value of a masked score: never a row's maximum beside a real score, and finite when scaled.
constexpr float kMasked = -1e30f;

inline Vec splat(float x) { return x - Vec{}; }
inline Int splat(int32_t x) { return x - Int{}; }

template <class V>
inline V load_bits(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}
inline Vec load(const float* p) { return load_bits<Vec>(p); }
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }

// Loads or stores the first n lanes; the others become zero, or are not written.
inline Vec load(const float* p, int n) {
  Vec v{};
  std::memcpy(&v, p, sizeof(float) * n);
  return v;
}
inline void store(float* p, Vec v, int n) { std::memcpy(p, &v, sizeof(float) * n); }

// Rounds fp32 to the upper half of its bits, to nearest, ties to even; NaN stays NaN.
inline Int round_to_bf16(Vec v) {
  Int u;
  std::memcpy(&u, &v, sizeof(u));
  const Int rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return (v == v) ? rounded & 0xffff : splat(0x7fc0);
}

#if defined(__AVX512F__)
inline Vec load(const BFloat16* p) {
  const __m512i u = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return (Vec)_mm512_slli_epi32(u, 16);
}
inline Vec load(const Half* p) { return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline void store(Half* p, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
}
inline void store(BFloat16* p, Vec v) {
#if defined(__AVX512BF16__)
  const __m256i u = (__m256i)_mm512_cvtneps_pbh((__m512)v);
#else
  const __m256i u = _mm512_cvtepi32_epi16((__m512i)round_to_bf16(v));
#endif
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), u);
}
#elif defined(__AVX2__)
inline Vec load(const BFloat16* p) {
  const __m256i u = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return (Vec)_mm256_slli_epi32(u, 16);
}
inline Vec load(const Half* p) { return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline void store(Half* p, Vec v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
}
inline void store(BFloat16* p, Vec v) {
  const __m256i u = (__m256i)round_to_bf16(v);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(u, u), 0b1000);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
#elif __ARM_FEATURE_SVE_BITS == 256
inline svuint32_t load_halves(const void* p) { return svld1uh_u32(svptrue_b32(), static_cast<const uint16_t*>(p)); }
inline void store_halves(void* p, svuint32_t u) { svst1h_u32(svptrue_b32(), static_cast<uint16_t*>(p), u); }

inline Vec load(const BFloat16* p) { return svreinterpret_f32_u32(svlsl_n_u32_x(svptrue_b32(), load_halves(p), 16)); }
inline Vec load(const Half* p) { return svcvt_f32_f16_x(svptrue_b32(), svreinterpret_f16_u32(load_halves(p))); }
inline void store(Half* p, Vec v) { store_halves(p, svreinterpret_u32_f16(svcvt_f16_f32_x(svptrue_b32(), v))); }
inline void store(BFloat16* p, Vec v) { store_halves(p, svreinterpret_u32_s32(round_to_bf16(v))); }
#else
inline uint16x4_t load_halves(const void* p) { return vld1_u16(static_cast<const uint16_t*>(p)); }
inline void store_halves(void* p, uint16x4_t u) { vst1_u16(static_cast<uint16_t*>(p), u); }

inline Vec load(const BFloat16* p) { return (Vec)vshll_n_u16(load_halves(p), 16); }
inline Vec load(const Half* p) { return (Vec)vcvt_f32_f16(vreinterpret_f16_u16(load_halves(p))); }
inline void store(Half* p, Vec v) { store_halves(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v))); }
inline void store(BFloat16* p, Vec v) { store_halves(p, vmovn_u32((uint32x4_t)round_to_bf16(v))); }
#endif

// Loads 2 W numbers. Those of bf16 come apart without a shuffle as the ones at even and at odd places, which `in_order`
// mends.
template <class T>
inline void load_pair(const T* p, Vec& first, Vec& second) {
  first = load(p);
  second = load(p + W);
}
inline void load_pair(const BFloat16* p, Vec& even, Vec& odd) {
  const Int u = load_bits<Int>(p);
  even = (Vec)(u << 16);
  odd = (Vec)(u & static_cast<int32_t>(0xffff0000));
}

template <class T>
inline void convert_row(const T* from, int64_t n, float* to) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(to + i, load(from + i));
  for (; i < n; i++) to[i] = static_cast<float>(from[i]);
}
template <class T>
inline void convert_row(const float* from, int64_t n, T* to) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(to + i, load(from + i));
  for (; i < n; i++) to[i] = static_cast<T>(from[i]);
}
inline void convert_row(const float* from, int64_t n, float* to) { std::memcpy(to, from, sizeof(float) * n); }

// Minimax polynomials of 2^r by degree - 3, the constant first.
#if defined(__AVX512DQ__)
// For 0 <= r <= 1, and exact at both ends, so that a row's dominant weight is: relative error 1.0e-4, 3.4e-6, 1.6e-7.
constexpr float kExp2[3][6] = {
    {1.f, 6.954243183e-1f, 2.263076752e-1f, 7.826796919e-2f},
    {1.f, 6.930321455e-1f, 2.413797677e-1f, 5.203237012e-2f, 1.355574746e-2f},
    {1.f, 6.931517124e-1f, 2.401592731e-1f, 5.581867695e-2f, 8.990994655e-3f, 1.879318617e-3f}};
#else
// For -1/2 <= r <= 1/2: relative error 7.7e-5, 2.7e-6, 2.1e-7.
constexpr float kExp2[3][6] = {
    {9.999238e-1f, 6.931985e-1f, 2.426410e-1f, 5.508868e-2f},
    {9.999992614e-1f, 6.931218147e-1f, 2.402474483e-1f, 5.591786032e-2f, 9.570101911e-3f},
    {1.000000072f, 6.931469671e-1f, 2.402211972e-1f, 5.550713273e-2f, 9.675541334e-3f, 1.327647199e-3f}};
#endif

template <int degree>
inline Vec exp2_of_rest(Vec r) {
  static_assert(degree >= 3 && degree <= 5);
  Vec p = splat(kExp2[degree - 3][degree]);
#pragma GCC unroll 5
  for (int i = degree - 1; i >= 0; i--) p = p * r + kExp2[degree - 3][i];
  return p;
}

// 2^x for x <= 0 and a little above. Results below 2^-126 are 0, and NaN stays NaN. The caller flushes denormal numbers
// (runtime.h).
template <int degree>
inline Vec exp2(Vec x) {
#if defined(__AVX512DQ__)
  const Vec r = (Vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);     // x - floor(x)
  return (Vec)_mm512_scalef_ps((__m512)exp2_of_rest<degree>(r), (__m512)x);  // rounds x down itself
#else
  x = (x < splat(-127.f)) ? splat(-127.f) : x;
  const Vec shifted = x + 12582912.f;  // 1.5 * 2^23: the integer nearest to x lies in the low bits
  const Vec p = exp2_of_rest<degree>(x - (shifted - 12582912.f));
  Int bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits + 127) << 23;  // 0 at -127
  Vec power;
  std::memcpy(&power, &bits, sizeof(power));
  return p * power;
#endif
}

// Interleaves the halves of two vectors: (first[0], second[0], first[1], ...), and the upper lanes likewise.
template <int... i>
inline void zip(Int first, Int second, Int& low, Int& high, std::integer_sequence<int, i...>) {
#if defined(__clang__)
  low = __builtin_shufflevector(first, second, (i / 2 + i % 2 * W)...);
  high = __builtin_shufflevector(first, second, (W / 2 + i / 2 + i % 2 * W)...);
#else
  low = __builtin_shuffle(first, second, Int{(i / 2 + i % 2 * W)...});
  high = __builtin_shuffle(first, second, Int{(W / 2 + i / 2 + i % 2 * W)...});
#endif
}

template <class T>
inline void in_order(Vec& first, Vec& second) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    Int low, high;
    zip((Int)first, (Int)second, low, high, std::make_integer_sequence<int, W>());
    first = (Vec)low;
    second = (Vec)high;
  }
}

// Returns the sums of the lanes of W vectors, that of rows[i] in lane i.
inline Vec total_of_each(Vec (&rows)[W]) {
  for (int half = W / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) {
      Int low, high;
      zip((Int)rows[i], (Int)rows[i + half], low, high, std::make_integer_sequence<int, W>());
      rows[i] = (Vec)low + (Vec)high;
    }
  return rows[0];
}

// W x W block of 32-bit units.
inline void transpose_block(const uint32_t* from, int64_t from_stride, uint32_t* to, int64_t to_stride) {
  Int rows[W], next[W];
  for (int i = 0; i < W; i++) rows[i] = load_bits<Int>(from + i * from_stride);
  // Each stage interleaves row i with row i + W/2; log2(W) stages transpose.
  for (int stage = 1; stage < W; stage *= 2) {
    for (int i = 0; i < W / 2; i++)
      zip(rows[i], rows[i + W / 2], next[2 * i], next[2 * i + 1], std::make_integer_sequence<int, W>());
    std::memcpy(rows, next, sizeof(rows));
  }
  for (int i = 0; i < W; i++) std::memcpy(to + i * to_stride, &rows[i], sizeof(Int));
}

// to[j][i] = from[i][j], 32-bit units.
inline void transpose(const void* from_, int64_t from_stride, int64_t rows, int64_t columns, void* to_,
                      int64_t to_stride) {
  const auto* from = static_cast<const uint32_t*>(from_);
  auto* to = static_cast<uint32_t*>(to_);
  const int64_t whole_rows = rows - rows % W, whole_columns = columns - columns % W;
  for (int64_t i = 0; i < whole_rows; i += W)
    for (int64_t j = 0; j < whole_columns; j += W)
      transpose_block(from + i * from_stride + j, from_stride, to + j * to_stride + i, to_stride);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = i < whole_rows ? whole_columns : 0; j < columns; j++)
      to[j * to_stride + i] = from[i * from_stride + j];
}

}  // namespace difftransformer
