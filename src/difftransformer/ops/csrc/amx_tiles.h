// Products of bf16 with AMX tiles, and the layouts that they read.
//
// A tile is 1 KiB: 16 rows of 32 bf16, or of 16 fp32. Operands are packed into whole tiles once; missing rows
// and columns are zero. A product makes 2 x 2 tiles of C from two tiles of A and two of B at each step of K.
#pragma once

#include "problem.h"

#if defined(__AMX_BF16__)

namespace difftransformer {

constexpr int64_t kTile = 512;  // bf16 of a tile
constexpr int64_t kStrip = 32;  // rows (lanes) and keys of a 2 x 2 block of scores

// gcc's tile intrinsics do not declare that they read and write memory.
#define DIFFTRANSFORMER_FENCE asm volatile("" ::: "memory")

// Configures the calling thread's tiles while it lives. oneDNN has its own configuration and loads it in each call.
class TileSession {
 public:
  TileSession() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    DIFFTRANSFORMER_FENCE;
    _tile_loadconfig(&config);
  }
  ~TileSession() { _tile_release(); }
  TileSession(const TileSession&) = delete;
};

// C (+)= A B over K steps. a, its tile below, and the distance to the next step in tiles; b, whose second tile follows;
// c, whose second tile follows, and the distance to its two tiles below; and the c of the next product, if it is far
// away and should be fetched meanwhile.
template <bool accumulate>
inline void product(int64_t K, const uint16_t* a, int64_t a_below, int64_t a_next, const uint16_t* b, int64_t b_next,
                    float* c, int64_t c_below, const float* c_ahead = nullptr) {
  float* d = c + c_below * kTile / 2;
  DIFFTRANSFORMER_FENCE;
  if constexpr (accumulate) {
    _tile_loadd(0, c, 64);
    _tile_loadd(1, c + kTile / 2, 64);
    _tile_loadd(2, d, 64);
    _tile_loadd(3, d + kTile / 2, 64);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < K; k++, a += a_next * kTile, b += b_next * kTile) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_loadd(7, b + kTile, 64);
    _tile_loadd(5, a + a_below * kTile, 64);
    if (accumulate && c_ahead && k < 4)
      for (const float* line = c_ahead + k * 8 * 16; line < c_ahead + (k + 1) * 8 * 16; line += 16) {
        __builtin_prefetch(line, 1);
        __builtin_prefetch(line + c_below * kTile / 2, 1);
      }
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, 64);
  _tile_stored(1, c + kTile / 2, 64);
  _tile_stored(2, d, 64);
  _tile_stored(3, d + kTile / 2, 64);
  DIFFTRANSFORMER_FENCE;
}

// The places of a 2 x 2 block of C, [2][2][16][16], by row 0-31 and half of the columns.
inline int64_t place(int64_t row, int64_t half) { return (row / 16 * 2 + half) * (kTile / 2) + row % 16 * 16; }

// Converts two fp32 vectors to bf16: the 16 lanes of the first, then those of the second.
inline __m512i rounded(Vec first, Vec second) { return (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first); }
// The same, with the lanes of both alternating.
inline __m512i in_pairs(__m512i both) {
  alignas(64) static constexpr uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(order), both);
}
// Rounds two vectors to bf16, ties away from zero, with the lanes of both alternating. It takes four cheap
// instructions, where conversion and permutation are slow. NaN stays NaN: one that stems from bf16 has no low bits.
inline __m512i rounded_in_pairs(Vec first, Vec second) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i low = _mm512_srli_epi32(_mm512_add_epi32((__m512i)first, half), 16);
  const __m512i high = _mm512_add_epi32((__m512i)second, half);
  return _mm512_mask_blend_epi16(0xaaaaaaaa, low, high);
}
inline __m512i row_pair(const uint16_t* first, const uint16_t* second) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(first));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second));
  return in_pairs(_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
}

// Rows of bf16, `stride` apart.
struct Matrix {
  const uint16_t* data;
  int64_t stride;
  const uint16_t* row(int64_t i) const { return data + i * stride; }
};

// X, (rows, width) with both multiples of 32, packed in four ways.
// Left operand by row: [rows / 16][width / 32] tiles.
inline void pack_rows(const Matrix& x, int64_t rows, int64_t width, uint16_t* to) {
  for (int64_t i = 0; i < rows; i += 16)
    for (int64_t c = 0; c < width; c += 32)
      for (int64_t r = 0; r < 16; r++, to += 32) std::memcpy(to, x.row(i + r) + c, 64);
}
// Left operand X': [width / 32][rows / 32][2] tiles, so that a product reads one run of memory.
inline void pack_columns(const Matrix& x, int64_t rows, int64_t width, uint16_t* to) {
  for (int64_t i = 0; i < rows; i += 32)
    for (int64_t c = 0; c < width; c += 16) {
      alignas(64) uint32_t pairs[256];
      for (int r = 0; r < 16; r++)
        _mm512_store_si512(pairs + 16 * r, row_pair(x.row(i + 2 * r) + c, x.row(i + 2 * r + 1) + c));
      uint16_t* tile = to + c / 32 * 32 * rows + (i / 16 + c / 16 % 2) * kTile;
      transpose_block(pairs, 16, reinterpret_cast<uint32_t*>(tile), 16);
    }
}
// Right operand X': [width / 32][rows / 16] tiles.
inline void pack_right_columns(const Matrix& x, int64_t rows, int64_t width, uint16_t* to) {
  for (int64_t c = 0; c < width; c += 32)
    for (int64_t i = 0; i < rows; i += 16, to += kTile)
      transpose_block(reinterpret_cast<const uint32_t*>(x.row(i) + c), x.stride / 2, reinterpret_cast<uint32_t*>(to),
                      16);
}
// Right operand X: [rows / 32][width / 16] tiles.
inline void pack_right_rows(const Matrix& x, int64_t rows, int64_t width, uint16_t* to) {
  for (int64_t i = 0; i < rows; i += 32)
    for (int64_t c = 0; c < width; c += 16)
      for (int r = 0; r < 16; r++, to += 32)
        _mm512_storeu_si512(to, row_pair(x.row(i + 2 * r) + c, x.row(i + 2 * r + 1) + c));
}

// The norm of a row, rounded up.
inline float row_norm(const uint16_t* x, int64_t width) {
  Vec sum{};
  for (int64_t c = 0; c < width; c += W) {
    const Vec v = load(reinterpret_cast<const BFloat16*>(x + c));
    sum += v * v;
  }
  return std::sqrt(_mm512_reduce_add_ps((__m512)sum)) * 1.0001f;
}

// Copies rows of a tensor to (rows, padded), zeros beyond `width`.
inline void copy_row(const BFloat16* from, int64_t width, int64_t padded, uint16_t* to) {
  std::memcpy(to, from, sizeof(uint16_t) * width);
  std::memset(to + width, 0, sizeof(uint16_t) * (padded - width));
}

// Keys first .. first + count of a group, `padded` wide: where they lie if they fill whole tiles, else a copy. In the
// copy, keys that no query may see are zero, since their memory may hold anything.
inline Matrix keys_of(const Problem& p, const View<const BFloat16>& x, int64_t b, int64_t g, int64_t offset,
                      int64_t width, int64_t padded, int64_t first, int64_t count, uint16_t* copy) {
  if (width == padded && first >= p.first_key[b] && first + count <= p.last_key[b])
    return {reinterpret_cast<const uint16_t*>(x.at(b, g, first) + offset), x.strides[2]};
  for (int64_t i = 0; i < count; i++) {
    const int64_t key = first + i;
    if (key >= p.first_key[b] && key < p.last_key[b])
      copy_row(x.at(b, g, key) + offset, width, padded, copy + i * padded);
    else
      std::memset(copy + i * padded, 0, sizeof(uint16_t) * padded);
  }
  return {copy, padded};
}

// Whether some lane of a strip sees one of kStrip keys, and whether every lane sees all of them.
inline bool sees_some(const Block& strip, int64_t key) {
  return key < strip.last_key && key + kStrip > strip.first_key;
}
inline bool sees_all(const Problem& p, const Block& strip, int64_t key) {
  return !p.mask && key >= strip.whole_from && key + kStrip <= strip.whole_to;
}

// For each of kStrip keys, the lanes that may attend to it.
struct Keep {
  uint32_t lanes[kStrip];

  Keep(const Problem& p, const Block& strip, int64_t key) {
    for (int64_t i = 0; i < kStrip; i++) {
      const Int at = splat(static_cast<int32_t>(key + i));
      lanes[i] = 0;
      for (int64_t lane = 0; lane < kStrip; lane += W)
        lanes[i] |= static_cast<uint32_t>(_mm512_cmple_epi32_mask(load_bits<__m512i>(strip.low + lane), (__m512i)at) &
                                          _mm512_cmpgt_epi32_mask(load_bits<__m512i>(strip.high + lane), (__m512i)at))
                    << lane;
    }
    if (!p.mask) return;
    const int64_t keys = std::min(kStrip, p.keys - key);
    for (int64_t lane = 0; lane < kStrip; lane++) {
      const bool* mask = p.mask + strip.batch * p.mask_strides[0] + strip.head[lane] * p.mask_strides[1] +
                         strip.query[lane] * p.mask_strides[2] + key * p.mask_strides[3];
      for (int64_t i = 0; i < keys; i++) lanes[i] &= ~(static_cast<uint32_t>(!mask[i * p.mask_strides[3]]) << lane);
    }
  }
  Vec zero_others(int64_t key, int64_t half, Vec x) const {
    return (Vec)_mm512_maskz_mov_ps(static_cast<__mmask16>(lanes[key] >> (16 * half)), (__m512)x);
  }
  Vec largest(int64_t key, int64_t half, Vec top, Vec x) const {
    return (Vec)_mm512_mask_max_ps((__m512)top, static_cast<__mmask16>(lanes[key] >> (16 * half)), (__m512)top,
                                   (__m512)x);
  }
};

// A call as the tiled kernels divide it: tasks of block_rows rows of a group, in strips of 32 rows.
struct Tiled {
  Problem p, strips;
  int64_t width, value_width, keys;  // padded to whole tiles

  Tiled(const Problem& problem, int64_t step_keys) : p(problem) {
    p.block_rows = p.rows() < 1024 ? 128 : 256;
    p.tile_keys = step_keys;
    p.lane_multiple = kStrip;
    strips = p;
    strips.block_rows = kStrip;
    width = round_up(p.width, kStrip);
    value_width = round_up(p.value_width, kStrip);
    keys = round_up(p.keys, kStrip);
  }
  int64_t key_maps() const { return p.shared_key ? 1 : p.maps; }
  int64_t strips_of_block() const { return p.block_rows / kStrip; }

  // The strips of a task.
  std::vector<Block> cut(int64_t b, int64_t g, int64_t index) const {
    std::vector<Block> out;
    const int64_t first = index * strips_of_block();
    const int64_t last = std::min(first + strips_of_block(), strips.blocks());
    for (int64_t i = first; i < last; i++) out.emplace_back(strips, b, g, i);
    return out;
  }
};

}  // namespace difftransformer

#endif
