// C = A B or C += A B on blocks that fit into the caches, in fp32, or in bf16 with fp32 sums.
//
// Operands are counted in 32-bit units along the inner dimension K: one fp32, or two bf16 neighbours. A is row-major,
// or (ByColumn, only fp32) column-major, so that keys and values are read in place. B is [K][N] units,
// row-major.
#pragma once

#include "vector.h"

namespace difftransformer {

struct Fp32 {
  using Element = float;
  using Unit = float;
  static constexpr int kPack = 1;  // elements of a unit
  static constexpr int kExpDegree = 5;
  static inline Vec multiply_add(Vec sum, Unit a, Vec b) { return sum + a * b; }
};

#if defined(__AVX512BF16__)
// bf16 with AVX512_BF16's dot product of pairs.
struct Bf16 {
  using Element = BFloat16;
  using Unit = uint32_t;
  static constexpr int kPack = 2;
  static constexpr int kExpDegree = 4;
  static inline Vec multiply_add(Vec sum, Unit a, Vec b) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)), (__m512bh)b);
  }
};
#endif

template <class Type, int rows, int vectors, bool ByColumn, bool partial>
inline void micro(int64_t K, const typename Type::Unit* A, int64_t a_stride, const typename Type::Unit* B,
                  int64_t b_stride, float* C, int64_t c_stride, bool accumulate, int tail) {
  Vec sum[rows][vectors] = {};
#pragma GCC unroll 2
  for (int64_t k = 0; k < K; k++) {
    Vec b[vectors];
#pragma GCC unroll 4
    for (int j = 0; j < vectors; j++) {
      const auto* p = reinterpret_cast<const float*>(B + k * b_stride + j * W);
      b[j] = (partial && j == vectors - 1) ? load(p, tail) : load(p);
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
      const auto a = ByColumn ? A[k * a_stride + i] : A[i * a_stride + k];
#pragma GCC unroll 4
      for (int j = 0; j < vectors; j++) sum[i][j] = Type::multiply_add(sum[i][j], a, b[j]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
    for (int j = 0; j < vectors; j++) {
      float* c = C + i * c_stride + j * W;
      // C is added last: a sum over many keys is one of the tiles' sums, with an error that grows more slowly.
      if (partial && j == vectors - 1)
        store(c, accumulate ? load(c, tail) + sum[i][j] : sum[i][j], tail);
      else
        store(c, accumulate ? load(c) + sum[i][j] : sum[i][j]);
    }
}

// The number of rows of C that a strip of this many vectors keeps in registers.
constexpr int strip_rows(int vectors) {
  if (kRegisters == 16) return vectors == 2 ? 6 : 10;
  // NEON's loads leave fewer registers for the sums.
  return vectors == 4 ? (W == 4 ? 5 : 6) : vectors == 3 ? 8 : vectors == 2 ? 12 : 14;
}
constexpr int kStripVectors = kRegisters == 32 ? 4 : 2;

template <class Type, int rows, int vectors, bool ByColumn, bool partial>
inline void last_rows(int64_t left, int64_t K, const typename Type::Unit* A, int64_t a_stride,
                      const typename Type::Unit* B, int64_t b_stride, float* C, int64_t c_stride, bool accumulate,
                      int tail) {
  if constexpr (rows > 0) {
    if (left == rows)
      micro<Type, rows, vectors, ByColumn, partial>(K, A, a_stride, B, b_stride, C, c_stride, accumulate, tail);
    else
      last_rows<Type, rows - 1, vectors, ByColumn, partial>(left, K, A, a_stride, B, b_stride, C, c_stride, accumulate,
                                                            tail);
  }
}

template <class Type, int vectors, bool ByColumn, bool partial>
void strip(int64_t M, int64_t K, const typename Type::Unit* A, int64_t a_stride, const typename Type::Unit* B,
           int64_t b_stride, float* C, int64_t c_stride, bool accumulate, int tail) {
  constexpr int rows = strip_rows(vectors);
  const int64_t step = ByColumn ? 1 : a_stride;
  int64_t m = 0;
  for (; m + rows <= M; m += rows)
    micro<Type, rows, vectors, ByColumn, partial>(K, A + m * step, a_stride, B, b_stride, C + m * c_stride, c_stride,
                                                  accumulate, tail);
  last_rows<Type, rows - 1, vectors, ByColumn, partial>(M - m, K, A + m * step, a_stride, B, b_stride, C + m * c_stride,
                                                        c_stride, accumulate, tail);
}

template <class Type, int vectors, bool ByColumn>
inline void last_strip(int64_t N, int64_t M, int64_t K, const typename Type::Unit* A, int64_t a_stride,
                       const typename Type::Unit* B, int64_t b_stride, float* C, int64_t c_stride, bool accumulate) {
  if constexpr (vectors > 0) {
    if ((N + W - 1) / W < vectors)
      last_strip<Type, vectors - 1, ByColumn>(N, M, K, A, a_stride, B, b_stride, C, c_stride, accumulate);
    else if (N == vectors * W)
      strip<Type, vectors, ByColumn, false>(M, K, A, a_stride, B, b_stride, C, c_stride, accumulate, W);
    else
      strip<Type, vectors, ByColumn, true>(M, K, A, a_stride, B, b_stride, C, c_stride, accumulate,
                                           static_cast<int>(N % W));
  }
}

// C[M][N] (+)= A[M][K] B[K][N], K and the strides of A and B in units.
template <class Type, bool ByColumn = false>
inline void gemm(int64_t M, int64_t N, int64_t K, const typename Type::Unit* A, int64_t a_stride,
                 const typename Type::Unit* B, int64_t b_stride, float* C, int64_t c_stride, bool accumulate) {
  constexpr int64_t width = kStripVectors * W;
  int64_t n = 0;
  for (; n + width <= N; n += width)
    strip<Type, kStripVectors, ByColumn, false>(M, K, A, a_stride, B + n, b_stride, C + n, c_stride, accumulate, W);
  last_strip<Type, kStripVectors, ByColumn>(N - n, M, K, A, a_stride, B + n, b_stride, C + n, c_stride, accumulate);
}

}  // namespace difftransformer
