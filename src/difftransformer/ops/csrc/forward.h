// Forward: O = (P1 - lam P2) V, by blocks of queries.
//
// Scores are computed as K Q^T with queries in the lanes, so that softmax needs no shuffles and K is read in place.
// Each tile keeps P = 2^(s - m) with the maximum m so far, where s - m is formed before it is scaled: a fused s *
// exponent
// - m * exponent would be a multiple of m's last bit, and infinite for scores of 1e10. Combining a row's two maps needs
// both complete sums, so A = P1 c1 - P2 c2 with c_i = 2^(m - m_last) / sum is computed after the last tile, and V is
// multiplied once. This takes 4 units of 2 n n d, as many as ordinary attention over 2H heads.
#pragma once

#include <cmath>

#include "norm.h"

namespace difftransformer {

// Turns a tile of scores [rows][lanes] of one map into 2^((score - reference) * exponent).
template <int degree, bool masked>
inline void soften(float* scores, const Tile& tile, const Block& block, const int32_t* mask, float exponent,
                   float* maximum, float* sum, float* reference) {
  const int64_t lanes = block.lanes, rows = tile.rows;
  for (int64_t i = tile.lane; i < tile.lane + tile.lanes; i += W) {
    float* column = scores + i;
    const auto kept = [&](int64_t r) {
      return may_attend(block, i, tile.first + r, mask ? mask + r * lanes + i : nullptr);
    };
    const Vec before = load(maximum + i);
    Vec top = splat(kMasked);
    for (int64_t r = 0; r < rows; r++) {
      Vec score = load(column + r * lanes);
      if constexpr (masked) {
        score = kept(r) ? score : splat(kMasked);
        store(column + r * lanes, score);
      }
      top = (top < score) ? score : top;
    }
    top = (top < before) ? before : top;
    Vec total{};
    for (int64_t r = 0; r < rows; r++) {
      Vec p = exp2<degree>((load(column + r * lanes) - top) * exponent);
      if constexpr (masked) p = kept(r) ? p : Vec{};
      store(column + r * lanes, p);
      total += p;
    }
    store(maximum + i, top);
    store(reference + i, top);
    // The approximation of 2^0 is not 1 to the last bit, which many tiles would add up.
    const Vec factor = (before == top) ? splat(1.f) : exp2<5>((before - top) * exponent);
    store(sum + i, load(sum + i) * factor + total);
  }
}

// Stores rows k and k + 1 of fp32 lanes as operands of the next product: in fp32 unchanged; in bf16 as pairs for the
// right operand, and on request by row for the left operand.
template <class Type>
struct Rounded;
template <>
struct Rounded<Fp32> {
  static constexpr bool kInPlace = true;
};
#if defined(__AVX512BF16__)
template <>
struct Rounded<Bf16> {
  static constexpr bool kInPlace = false;
  static inline void store_pair(Vec first, Vec second, uint32_t* pairs) {
    store_pair(first, second, pairs, nullptr, nullptr);
  }
  static inline void store_pair(Vec first, Vec second, uint32_t* pairs, BFloat16* row, BFloat16* next_row) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    alignas(64) static constexpr uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    _mm512_storeu_si512(pairs, _mm512_permutexvar_epi16(_mm512_load_si512(order), both));
    if (row) _mm256_storeu_si256(reinterpret_cast<__m256i*>(row), _mm512_castsi512_si256(both));
    if (next_row) _mm256_storeu_si256(reinterpret_cast<__m256i*>(next_row), _mm512_extracti64x4_epi64(both, 1));
  }
};
#endif

template <class Type, class In, int maps>
struct Forward {
  using Unit = typename Type::Unit;
  using Element = typename Type::Element;
  Runtime& runtime;
  const Problem& p;
  View<const In> query;
  Operand<Type> key[2], value;
  Output<In> output;
  float* lse;  // (maps, B, H, T), in units of scores

  struct Scratch {
    float *exponentials[2], *reference[2], *maximum[2], *sum[2], *factor[2], *out, *rows;
    Unit *query[2], *combined;
    Element* staged;
    int32_t* mask;
    int64_t floats;

    Scratch(const Problem& p, float* base) {
      Carver carve(base);
      const int64_t lanes = p.lanes(), tiles = p.tiles();
      const int64_t units = ceil_div(p.width, Type::kPack);
      for (int m = 0; m < maps; m++) {
        query[m] = carve.take<Unit>(units * lanes);
        maximum[m] = carve.take(lanes);
        sum[m] = carve.take(lanes);
        factor[m] = carve.take(lanes);
        reference[m] = carve.take(tiles * lanes);
      }
      staged = carve.take<Element>(lanes * units * Type::kPack);
      out = carve.take(p.value_width * lanes);
      rows = carve.take(p.value_width * lanes);
      combined = carve.take<Unit>(p.tile_keys * lanes / Type::kPack);
      mask = carve.take<int32_t>(p.mask ? p.tile_keys * lanes : 0);
      for (int m = 0; m < maps; m++) exponentials[m] = carve.take(tiles * p.tile_keys * lanes);
      floats = carve.floats;
    }
  };

  void run() const {
    const int64_t blocks = p.blocks();
    // Under a causal mask later blocks see more keys. They run first, so that no long block is left at the end.
    for_each_task(runtime, p, blocks, Scratch(p, nullptr).floats, [&](int64_t bg, int64_t index, float* base) {
      Scratch scratch(p, base);
      attend(Block(p, bg / p.groups, bg % p.groups, blocks - 1 - index), scratch);
    });
  }

  void attend(const Block& block, Scratch& s) const {
    const int64_t lanes = block.lanes;
    for (int m = 0; m < maps; m++) {
      stage_rows<Type, In>(block, query, m * p.width, p.width, s.staged);
      transpose(s.staged, key[m].units, lanes, key[m].units, s.query[m], lanes);
      std::fill_n(s.maximum[m], lanes, kMasked);
      std::fill_n(s.sum[m], lanes, 0.f);
    }
    const int64_t first = block.first_tile(p), last = block.last_tile(p);
    for (int64_t j = first; j < last; j++) {
      const Tile tile(p, block, j, Type::kPack);
      if (p.mask) read_mask(p, block, tile, s.mask);
      for (int m = 0; m < maps; m++) {
        float* scores = s.exponentials[m] + (j - first) * p.tile_keys * lanes;
        key[m].multiply_rows(block, tile, s.query[m], scores);
        const auto soften_tile = tile.masked ? soften<Type::kExpDegree, true> : soften<Type::kExpDegree, false>;
        soften_tile(scores, tile, block, p.mask ? s.mask : nullptr, p.exponent(), s.maximum[m], s.sum[m],
                    s.reference[m] + (j - first) * lanes);
      }
    }
    for (int64_t i = 0; i < block.count; i++)
      for (int m = 0; m < maps; m++) {
        const float sum = s.sum[m][i];
        lse[p.lse_index(m, block.batch, block.head[i], block.query[i])] =
            sum == 0 ? INFINITY : s.maximum[m][i] + std::log2(sum) / p.exponent();
        s.factor[m][i] = sum == 0 ? 0.f : 1.f / sum;
        if (m == 1) s.factor[m][i] *= p.lam_of(block.batch, block.head[i], block.query[i]);
      }
    for (int m = 0; m < maps; m++) std::fill(s.factor[m] + block.count, s.factor[m] + lanes, 0.f);
    std::fill_n(s.out, p.value_width * lanes, 0.f);
    for (int64_t j = first; j < last; j++) {
      const Tile tile(p, block, j, Type::kPack);
      value.add_columns(block, tile, combine(s, j - first, tile, lanes), s.out);
    }
    finish(block, s);
  }

  // Computes A of one tile as a right operand.
  const Unit* combine(const Scratch& s, int64_t index, const Tile& tile, int64_t lanes) const {
    const int64_t rows = tile.rows;
    float* first = s.exponentials[0] + index * p.tile_keys * lanes;
    const float* second = maps == 2 ? s.exponentials[1] + index * p.tile_keys * lanes : nullptr;
    for (int64_t i = tile.lane; i < tile.lane + tile.lanes; i += W) {
      Vec c[maps];
      for (int m = 0; m < maps; m++)
        c[m] = load(s.factor[m] + i) *
               exp2<5>((load(s.reference[m] + index * lanes + i) - load(s.maximum[m] + i)) * p.exponent());
      const auto a = [&](int64_t r) {
        const Vec p1 = c[0] * load(first + r * lanes + i);
        if constexpr (maps == 1)
          return p1;
        else
          return p1 - c[1] * load(second + r * lanes + i);
      };
      if constexpr (Rounded<Type>::kInPlace) {
        for (int64_t r = 0; r < rows; r++) store(first + r * lanes + i, a(r));
      } else {
        for (int64_t r = 0; r < rows; r += 2)
          Rounded<Type>::store_pair(a(r), r + 1 < rows ? a(r + 1) : Vec{}, s.combined + r / 2 * lanes + i);
      }
    }
    if constexpr (Rounded<Type>::kInPlace)
      return first;
    else
      return s.combined;
  }

  // Writes O^T [E][lanes] to rows of the output.
  void finish(const Block& block, const Scratch& s) const {
    const int64_t lanes = block.lanes, width = p.value_width;
    transpose(s.out, lanes, width, lanes, s.rows, width);
    for (int64_t i = 0; i < block.count; i++)
      output.store_row(p, block.batch, block.head[i], block.query[i], s.rows + i * width);
  }
};

}  // namespace difftransformer
