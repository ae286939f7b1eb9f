// Backward with AMX tiles, from the two log-sum-exps alone (the equations are in backward.h). Only sums of a block are
// kept: a first pass over its keys computes rowsum(P_m) and rowsum(P_m * dP), a second computes everything again and
// forms the gradients, 4 + 10 units of 2 n n d. Saving rounded outputs instead of the first pass would lose accuracy,
// because dP - d cancels where attention is peaked.
#pragma once

#include "backward.h"
#include "amx_tiles.h"

#if defined(__AMX_BF16__)

namespace difftransformer {

// Of a step. More of both means fewer passes over the sums of gradients, which are read and written once a product.
constexpr int64_t kBackwardKeys = 128, kBackwardStrips = 4;

template <int maps>
struct TiledBackward {
  static constexpr int kExpDegree = 4;
  Runtime& runtime;
  Tiled t;
  View<const BFloat16> query, key, value;
  OutputGradient<BFloat16> grad;
  const float* lse;
  View<BFloat16> grad_query;
  BFloat16 *grad_key, *grad_value;  // (B, G, S, ...), contiguous
  float *grad_lam, *grad_weight;    // (B, H, T) and (tasks, E)
  // By group: keys by row and by column [key_maps][keys][width], values by row [keys][value_width], and the sums of the
  // gradients in tiles of the same shapes.
  uint16_t *keys = nullptr, *columns = nullptr, *values = nullptr;
  float *key_sums = nullptr, *value_sums = nullptr;

  int64_t of_key(int64_t bg, int m) const { return (bg * t.key_maps() + m % t.key_maps()) * t.keys * t.width; }
  int64_t of_value(int64_t bg) const { return bg * t.keys * t.value_width; }

  // Statistics of a strip's rows, multiplied by the factors that the gradients need.
  struct Lanes {
    alignas(64) float lse[2][kStrip], d[2][kStrip], factor[2][kStrip],
        share[2][kStrip];               // share: 1 and lam over the sum
    alignas(64) float sums[4][kStrip];  // rowsum(P_m), rowsum(P_m * dP)
  };

  struct Scratch {
    Lanes* lanes;
    float *scores, *grad_query, *rows;
    uint16_t *staged, *query_columns, *query_rows, *grad_columns, *grad_rows;
    uint16_t *left[3], *right[2];  // A and dS_m by key, and dS_m by lane, of one step
    int64_t floats;

    Scratch(const Tiled& t, float* base) {
      Carver carve(base);
      const int64_t rows_ = t.p.block_rows, width = std::max(t.width, t.value_width);
      lanes = carve.take<Lanes>(rows_ / kStrip);
      scores = carve.take(3 * 2 * kTile);
      staged = carve.take<uint16_t>(kStrip * width);
      query_columns = carve.take<uint16_t>(rows_ * maps * t.width);
      query_rows = carve.take<uint16_t>(rows_ * maps * t.width);
      grad_columns = carve.take<uint16_t>(rows_ * t.value_width);
      grad_rows = carve.take<uint16_t>(rows_ * t.value_width);
      for (auto& x : left) x = carve.take<uint16_t>(kBackwardKeys * kBackwardStrips * kStrip);
      for (auto& x : right) x = carve.take<uint16_t>(kBackwardKeys * kBackwardStrips * kStrip);
      grad_query = carve.take(rows_ * maps * t.width);
      rows = carve.take(std::max(kStrip * t.width, 2 * t.value_width));
      floats = carve.floats;
    }
  };

  void run() {
    const Problem& p = t.p;
    const int64_t groups = p.batch * p.groups, blocks = p.blocks(), steps = ceil_div(t.keys, p.tile_keys);
    const auto reserve = [&](int64_t count) { return static_cast<uint16_t*>(runtime.allocate(count * 2)); };
    keys = reserve(of_key(groups, 0));
    columns = reserve(of_key(groups, 0));
    values = reserve(of_value(groups));
    key_sums = static_cast<float*>(runtime.allocate(of_key(groups, 0) * 4));
    value_sums = static_cast<float*>(runtime.allocate(of_value(groups) * 4));
    parallel_for(runtime, groups * steps, [&](int64_t begin, int64_t end) {
      std::vector<uint16_t> staged(p.tile_keys * std::max(t.width, t.value_width));
      for (int64_t task = begin; task < end; task++) pack(task / steps, task % steps * p.tile_keys, staged.data());
    });
    Turns turns(p);
    for_each_task<TileSession>(runtime, p, blocks, Scratch(t, nullptr).floats,
                               [&](int64_t bg, int64_t index, float* base) {
                                 const int64_t task = bg * blocks + index;
                                 const auto strips = t.cut(bg / p.groups, bg % p.groups, turns.block_of(task));
                                 differentiate(bg, strips, Scratch(t, base), task, turns);
                               });
    parallel_for(runtime, groups * steps, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; task++) unpack(task / steps, task % steps * p.tile_keys);
    });
  }

  void pack(int64_t bg, int64_t first, uint16_t* staged) {
    const Problem& p = t.p;
    const int64_t b = bg / p.groups, g = bg % p.groups, count = std::min(p.tile_keys, t.keys - first);
    for (int m = 0; m < t.key_maps(); m++) {
      const int64_t at = of_key(bg, m) + first * t.width;
      const Matrix rows = keys_of(p, key, b, g, m * p.width, p.width, t.width, first, count, staged);
      pack_rows(rows, count, t.width, keys + at);
      pack_columns(rows, count, t.width, columns + at);
      std::fill_n(key_sums + at, count * t.width, 0.f);
    }
    const int64_t at = of_value(bg) + first * t.value_width;
    pack_rows(keys_of(p, value, b, g, 0, p.value_width, t.value_width, first, count, staged), count, t.value_width,
              values + at);
    std::fill_n(value_sums + at, count * t.value_width, 0.f);
  }

  // Writes the sums, [keys / 16][width / 16] tiles, to rows of the gradients.
  void unpack(int64_t bg, int64_t first) const {
    const int64_t last = std::min(first + t.p.tile_keys, t.p.keys), all = t.key_maps() * t.p.width;
    std::vector<float> row(std::max(t.width, t.value_width));
    const auto gather = [&](const float* sums, int64_t key, int64_t padded, int64_t width, BFloat16* to) {
      for (int64_t c = 0; c < padded; c += 16)
        store(row.data() + c, load(sums + key / 16 * 16 * padded + c * 16 + key % 16 * 16));
      convert_row(row.data(), width, to);
    };
    for (int64_t i = first; i < last; i++) {
      for (int m = 0; m < t.key_maps(); m++)
        gather(key_sums + of_key(bg, m), i, t.width, t.p.width, grad_key + (bg * t.p.keys + i) * all + m * t.p.width);
      gather(value_sums + of_value(bg), i, t.value_width, t.p.value_width,
             grad_value + (bg * t.p.keys + i) * t.p.value_width);
    }
  }

  void differentiate(int64_t bg, const std::vector<Block>& strips, const Scratch& s, int64_t task, Turns& turns) const {
    const int64_t count = static_cast<int64_t>(strips.size());
    if (grad_weight) std::fill_n(grad_weight + task * t.p.value_width, t.p.value_width, 0.f);
    int64_t first = t.p.keys, last = 0;
    for (int64_t i = 0; i < count; i++) {
      load_rows(strips[i], s, i, task);
      if (strips[i].first_key < strips[i].last_key) first = std::min(first, strips[i].first_key);
      last = std::max(last, strips[i].last_key);
    }
    const int64_t first_step = first / kBackwardKeys, last_step = ceil_div(last, kBackwardKeys);
    for (int64_t step = first_step; step < last_step; step++)
      for (int64_t i = 0; i < count; i++) sum_step(bg, strips[i], s, i, step);
    for (int64_t i = 0; i < count; i++) finish_sums(strips[i], s.lanes[i]);
    std::fill_n(s.grad_query, count * kStrip * maps * t.width, 0.f);
    for (int64_t step = first_step; step < last_step; step++) {
      turns.wait(bg / t.p.groups, task, step);
      for (int64_t i = 0; i < count; i += kBackwardStrips)
        add_step(bg, &strips[i], std::min(kBackwardStrips, count - i), s, i, step);
      turns.pass(task, step);
    }
    for (int64_t i = 0; i < count; i++)
      for (int m = 0; m < maps; m++) store_grad_query(strips[i], m, s, i);
  }

  // Loads queries, output gradients, and what the forward pass kept, of strip i.
  void load_rows(const Block& strip, const Scratch& s, int64_t i, int64_t task) const {
    const Problem& p = t.p;
    for (int m = 0; m < maps; m++) {
      for (int64_t r = 0; r < kStrip; r++) {
        uint16_t* to = s.staged + r * t.width;
        if (r < strip.count)
          copy_row(query.at(strip.batch, strip.head[r], strip.query[r]) + m * p.width, p.width, t.width, to);
        else
          std::memset(to, 0, sizeof(uint16_t) * t.width);
      }
      const int64_t at = (i * maps + m) * kStrip * t.width;
      pack_right_columns({s.staged, t.width}, kStrip, t.width, s.query_columns + at);
      pack_right_rows({s.staged, t.width}, kStrip, t.width, s.query_rows + at);
    }
    for (int64_t r = 0; r < kStrip; r++) {
      uint16_t* to = s.staged + r * t.value_width;
      std::memset(to, 0, sizeof(uint16_t) * t.value_width);
      if (r >= strip.count) continue;
      grad.load_row(p, strip.batch, strip.head[r], strip.query[r], s.rows, s.rows + t.value_width,
                    grad_weight ? grad_weight + task * p.value_width : nullptr);
      convert_row(s.rows, p.value_width, reinterpret_cast<BFloat16*>(to));
    }
    pack_right_columns({s.staged, t.value_width}, kStrip, t.value_width, s.grad_columns + i * kStrip * t.value_width);
    pack_right_rows({s.staged, t.value_width}, kStrip, t.value_width, s.grad_rows + i * kStrip * t.value_width);
    Lanes& lanes = s.lanes[i];
    std::memset(lanes.sums, 0, sizeof(lanes.sums));
    for (int64_t r = 0; r < kStrip; r++) {
      const bool there = r < strip.count;
      for (int m = 0; m < maps; m++)
        lanes.lse[m][r] = there ? lse[p.lse_index(m, strip.batch, strip.head[r], strip.query[r])] : INFINITY;
      lanes.share[0][r] = 1.f;
      lanes.share[1][r] = maps == 2 && there ? p.lam_of(strip.batch, strip.head[r], strip.query[r]) : 0.f;
    }
  }

  // Computes scores of both maps and dP of 32 keys and a strip.
  void products(int64_t bg, int64_t at, const Scratch& s, int64_t i) const {
    const int64_t K = t.width / 32, E = t.value_width / 32;
    for (int m = 0; m < maps; m++)
      product<false>(K, keys + of_key(bg, m) + at * t.width, K, 1, s.query_columns + (i * maps + m) * kStrip * t.width,
                     2, s.scores + m * 2 * kTile, 2);
    product<false>(E, values + of_value(bg) + at * t.value_width, E, 1, s.grad_columns + i * kStrip * t.value_width, 2,
                   s.scores + 4 * kTile, 2);
  }

  // Adds a step's keys to the sums of a strip.
  void sum_step(int64_t bg, const Block& strip, const Scratch& s, int64_t i, int64_t step) const {
    Lanes& lanes = s.lanes[i];
    const int64_t first = std::max(step * kBackwardKeys, strip.first_key / kStrip * kStrip);
    const int64_t last = std::min((step + 1) * kBackwardKeys, strip.last_key);
    for (int64_t at = first; at < last; at += kStrip) {
      products(bg, at, s, i);
      if (sees_all(t.p, strip, at))
        add_sums<false>(s.scores, lanes, nullptr);
      else {
        const Keep keep(t.p, strip, at);
        add_sums<true>(s.scores, lanes, &keep);
      }
    }
  }
  void finish_sums(const Block& strip, Lanes& lanes) const {
    for (int m = 0; m < maps; m++)
      for (int64_t r = 0; r < kStrip; r++) {
        // Not a part of lse, which ends in thousands where scores are of 1e10.
        const float sum = lanes.sums[m][r], inverse = sum == 0 ? 0.f : 1.f / sum, d = lanes.sums[2 + m][r] * inverse;
        lanes.share[m][r] *= inverse;
        lanes.factor[m][r] = (m == 0 ? t.p.scale : -t.p.scale) * lanes.share[m][r];
        lanes.d[m][r] = d * lanes.factor[m][r];
        if (m == 1 && r < strip.count) grad_lam[t.p.lse_index(0, strip.batch, strip.head[r], strip.query[r])] = -d;
      }
  }

  template <bool masked>
  Vec weight(const float* scores, const Lanes& lanes, const Keep* keep, int m, int64_t key_, int64_t half) const {
    const Vec score = load(scores + m * 2 * kTile + place(key_, half));
    const Vec p = exp2<kExpDegree>((score - load(lanes.lse[m] + half * W)) * t.p.exponent());
    return masked ? keep->zero_others(key_, half, p) : p;
  }
  template <bool masked>
  static Vec output_gradient(const float* scores, const Keep* keep, int64_t key_, int64_t half) {
    const Vec g = load(scores + 4 * kTile + place(key_, half));
    return masked ? keep->zero_others(key_, half, g) : g;
  }

  template <bool masked>
  void add_sums(const float* scores, Lanes& lanes, const Keep* keep) const {
    for (int64_t half = 0; half < 2; half++) {
      Vec sum[maps], weighted[maps];
      for (int m = 0; m < maps; m++) {
        sum[m] = load(lanes.sums[m] + half * W);
        weighted[m] = load(lanes.sums[2 + m] + half * W);
      }
#pragma GCC unroll 2
      for (int64_t i = 0; i < kStrip; i++) {
        const Vec g = output_gradient<masked>(scores, keep, i, half);
#pragma GCC unroll 2
        for (int m = 0; m < maps; m++) {
          const Vec p = weight<masked>(scores, lanes, keep, m, i, half);
          sum[m] += p;
          weighted[m] += p * g;
        }
      }
      for (int m = 0; m < maps; m++) {
        store(lanes.sums[m] + half * W, sum[m]);
        store(lanes.sums[2 + m] + half * W, weighted[m]);
      }
    }
  }

  // Adds a step's keys to dV, dK and dQ for L strips of the task, from strip i on.
  void add_step(int64_t bg, const Block* strips, int64_t L, const Scratch& s, int64_t i, int64_t step) const {
    const int64_t first = step * kBackwardKeys, R = std::min(kBackwardKeys, t.keys - first) / kStrip;
    bool any = false;
    for (int64_t r = 0; r < R; r++)
      for (int64_t l = 0; l < L; l++) any |= sees_some(strips[l], first + r * kStrip);
    if (!any) return;
    for (int64_t r = 0; r < R; r++)
      for (int64_t l = 0; l < L; l++) {
        uint16_t *left[3], *right[2];
        for (int x = 0; x <= maps; x++) left[x] = s.left[x] + (2 * r * L + l) * kTile;
        for (int m = 0; m < maps; m++) right[m] = s.right[m] + (r * L + l) * 2 * kTile;
        const int64_t at = first + r * kStrip;
        if (!sees_some(strips[l], at)) {
          for (int x = 0; x <= maps; x++)
            for (int64_t below = 0; below < 2; below++)
              std::memset(left[x] + below * L * kTile, 0, sizeof(uint16_t) * kTile);
          for (int m = 0; m < maps; m++) std::memset(right[m], 0, sizeof(uint16_t) * 2 * kTile);
          continue;
        }
        products(bg, at, s, i + l);
        if (sees_all(t.p, strips[l], at))
          form<false>(s.scores, s.lanes[i + l], nullptr, left, right, L);
        else {
          const Keep keep(t.p, strips[l], at);
          form<true>(s.scores, s.lanes[i + l], &keep, left, right, L);
        }
      }
    const int64_t D = t.width / 16, E = t.value_width / 16;
    for (int64_t r = 0; r < R; r++) {
      const int64_t at = first + r * kStrip;
      float* sums = value_sums + of_value(bg) + at * t.value_width;
      for (int64_t e = 0; e < E; e += 2, sums += kTile)
        product<true>(L, s.left[0] + 2 * r * L * kTile, L, 1, s.grad_rows + i * kStrip * t.value_width + e * kTile, E,
                      sums, E, sums + kTile);
      for (int m = 0; m < maps; m++) {
        sums = key_sums + of_key(bg, m) + at * t.width;
        for (int64_t c = 0; c < D; c += 2, sums += kTile)
          product<true>(L, s.left[1 + m] + 2 * r * L * kTile, L, 1,
                        s.query_rows + (i * maps + m) * kStrip * t.width + c * kTile, maps * D, sums, D, sums + kTile);
      }
    }
    for (int m = 0; m < maps; m++)
      for (int64_t l = 0; l < L; l++)
        for (int64_t c = 0; c < D; c += 2)
          product<true>(R, columns + of_key(bg, m) + first * t.width + c * R * kTile, 1, 2, s.right[m] + l * 2 * kTile,
                        2 * L, s.grad_query + ((i + l) * maps + m) * kStrip * t.width + c * kTile, 2);
  }

  // Stores 32 keys x 32 lanes: A and dS_m as left operands, a tile row of 32 lanes for each key, and dS_m as right
  // operands, whose lanes are, after unpacking, in the order 0-3, 8-11, 16-19, 24-27 | 4-7, 12-15, 20-23, 28-31.
  template <bool masked>
  void form(const float* scores, const Lanes& lanes, const Keep* keep, uint16_t* const* left, uint16_t* const* right,
            int64_t L) const {
    for (int64_t i = 0; i < kStrip; i += 2) {
      __m512i ds[2][maps];
#pragma GCC unroll 2
      for (int64_t j = 0; j < 2; j++) {
        Vec a[2], s[maps][2];
#pragma GCC unroll 2
        for (int64_t half = 0; half < 2; half++) {
          const Vec g = output_gradient<masked>(scores, keep, i + j, half);
          Vec p[maps];
#pragma GCC unroll 2
          for (int m = 0; m < maps; m++) {
            p[m] = weight<masked>(scores, lanes, keep, m, i + j, half);
            s[m][half] = p[m] * (g * load(lanes.factor[m] + half * W) - load(lanes.d[m] + half * W));
          }
          a[half] = load(lanes.share[0] + half * W) * p[0];
          if constexpr (maps == 2) a[half] -= load(lanes.share[1] + half * W) * p[1];
        }
        const int64_t to = (i + j) / 16 * L * kTile + (i + j) % 16 * 32;
        _mm512_store_si512(left[0] + to, rounded(a[0], a[1]));
#pragma GCC unroll 2
        for (int m = 0; m < maps; m++) {
          ds[j][m] = rounded(s[m][0], s[m][1]);
          _mm512_store_si512(left[1 + m] + to, ds[j][m]);
        }
      }
#pragma GCC unroll 2
      for (int m = 0; m < maps; m++) {
        _mm512_store_si512(right[m] + i * 16, _mm512_unpacklo_epi16(ds[0][m], ds[1][m]));
        _mm512_store_si512(right[m] + kTile + i * 16, _mm512_unpackhi_epi16(ds[0][m], ds[1][m]));
      }
    }
  }

  // Writes dQ of a strip, [width / 32] blocks of 2 x 2 tiles, to rows.
  void store_grad_query(const Block& strip, int m, const Scratch& s, int64_t i) const {
    const float* from = s.grad_query + (i * maps + m) * kStrip * t.width;
    for (int64_t c = 0; c < t.width; c += 16)
      for (int64_t half = 0; half < 2; half++) {
        alignas(64) float block[W * W];
        transpose_block(reinterpret_cast<const uint32_t*>(from + c * kStrip + half * (kTile / 2)), W,
                        reinterpret_cast<uint32_t*>(block), W);
        for (int64_t r = 0; r < W; r++)
          store(s.rows + (r / 4 * 8 + half * 4 + r % 4) * t.width + c, load(block + r * W));
      }
    for (int64_t r = 0; r < strip.count; r++)
      convert_row(s.rows + r * t.width, t.p.width,
                  grad_query.at(strip.batch, strip.head[r], strip.query[r]) + m * t.p.width);
  }
};

}  // namespace difftransformer

#endif
