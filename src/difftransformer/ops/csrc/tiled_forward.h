// Forward with AMX tiles as in FlashAttention: O_m += P_m V for each map, and O = O_1 / sum_1 - lam O_2 / sum_2 at the
// end. No buffer of scores grows with n. It takes 6 units of 2 n n d, but the rate of the tiles outweighs that.
//
// There is no running maximum. A row's reference is the largest score of the first keys that it sees. It only needs to
// be within 2^kSlack of the true maximum, since fp32 and bf16 have the range. Norms of queries and keys tell where a
// score might be larger. Only there are scores computed again to find their maximum, and O is rescaled if the reference
// rises. The result is exact for all data, and ordinary data needs neither step.
#pragma once

#include "forward.h"
#include "amx_tiles.h"

#if defined(__AMX_BF16__)

namespace difftransformer {

constexpr int64_t kStepKeys = 256;
constexpr float kSlack = 64;  // powers of two

template <int maps>
struct TiledForward {
  Runtime& runtime;
  Tiled t;
  View<const BFloat16> query, key, value;
  Output<BFloat16> output;
  float* lse;  // (maps, B, H, T), in units of scores
  // By group: keys by row [key_maps][keys][width], values by column of each step [steps][value_width][step's keys], and
  // the largest norm of a key of each step [key_maps][steps].
  uint16_t *keys = nullptr, *values = nullptr;
  float* norms = nullptr;

  int64_t steps() const { return ceil_div(t.keys, kStepKeys); }
  const uint16_t* key_tiles(int64_t bg, int m, int64_t at) const {
    return keys + ((bg * t.key_maps() + m % t.key_maps()) * t.keys + at) * t.width;
  }
  float key_norm(int64_t bg, int m, int64_t step) const {
    return norms[(bg * t.key_maps() + m % t.key_maps()) * steps() + step];
  }

  struct Scratch {
    float *scores, *out, *reference, *sum, *norm, *rows;
    uint16_t *weights, *queries, *staged;
    int64_t floats;

    Scratch(const Tiled& t, float* base) {
      Carver carve(base);
      const int64_t strips = t.strips_of_block() * maps;
      scores = carve.take(3 * kTile);
      weights = carve.take<uint16_t>(kStepKeys * kStrip);
      staged = carve.take<uint16_t>(kStrip * t.width);
      queries = carve.take<uint16_t>(strips * kStrip * t.width);
      out = carve.take(strips * kStrip * t.value_width);
      reference = carve.take(strips * kStrip);
      sum = carve.take(strips * kStrip);
      norm = carve.take(strips * kStrip);
      rows = carve.take(kStrip * t.value_width);
      floats = carve.floats;
    }
  };

  // One strip and map of a task.
  struct Lanes {
    const Block& strip;
    const uint16_t* query;
    float *out, *reference, *sum;
    const float* norm;
  };

  void run() {
    const Problem& p = t.p;
    const int64_t groups = p.batch * p.groups, blocks = p.blocks();
    const auto reserve = [&](int64_t count) { return static_cast<uint16_t*>(runtime.allocate(count * 2)); };
    keys = reserve(groups * t.key_maps() * t.keys * t.width);
    values = reserve(groups * t.keys * t.value_width);
    norms = static_cast<float*>(runtime.allocate(groups * t.key_maps() * steps() * 4));
    parallel_for(runtime, groups * steps(), [&](int64_t begin, int64_t end) {
      std::vector<uint16_t> staged(kStepKeys * std::max(t.width, t.value_width));
      for (int64_t task = begin; task < end; task++) pack(task / steps(), task % steps(), staged.data());
    });
    // Under a causal mask later blocks see more keys. They run first, so that no long block is left at the end.
    for_each_task<TileSession>(runtime, p, blocks, Scratch(t, nullptr).floats,
                               [&](int64_t bg, int64_t index, float* base) {
                                 attend(bg, t.cut(bg / p.groups, bg % p.groups, blocks - 1 - index), Scratch(t, base));
                               });
  }

  void pack(int64_t bg, int64_t step, uint16_t* staged) {
    const Problem& p = t.p;
    const int64_t b = bg / p.groups, g = bg % p.groups, first = step * kStepKeys;
    const int64_t count = std::min(kStepKeys, t.keys - first);
    for (int64_t m = 0; m < t.key_maps(); m++) {
      const Matrix rows = keys_of(p, key, b, g, m * p.width, p.width, t.width, first, count, staged);
      pack_rows(rows, count, t.width, const_cast<uint16_t*>(key_tiles(bg, m, first)));
      float top = 0;
      for (int64_t i = 0; i < count; i++) top = std::max(top, row_norm(rows.row(i), t.width));
      norms[(bg * t.key_maps() + m) * steps() + step] = top;
    }
    const Matrix rows = keys_of(p, value, b, g, 0, p.value_width, t.value_width, first, count, staged);
    pack_columns(rows, count, t.value_width, values + (bg * t.keys + first) * t.value_width);
  }

  void attend(int64_t bg, const std::vector<Block>& strips, const Scratch& s) const {
    const int64_t count = static_cast<int64_t>(strips.size());
    int64_t first = t.p.keys, last = 0;
    for (int64_t i = 0; i < count; i++) {
      for (int m = 0; m < maps; m++) load_queries(strips[i], m, s, i * maps + m);
      if (strips[i].first_key < strips[i].last_key) first = std::min(first, strips[i].first_key);
      last = std::max(last, strips[i].last_key);
    }
    std::fill_n(s.out, count * maps * kStrip * t.value_width, 0.f);
    std::fill_n(s.sum, count * maps * kStrip, 0.f);
    std::fill_n(s.reference, count * maps * kStrip, kMasked);
    for (int64_t step = first / kStepKeys; step * kStepKeys < last; step++)
      for (int64_t i = 0; i < count; i++) {
        const int64_t from = std::max(strips[i].first_key, step * kStepKeys) / kStrip * kStrip;
        const int64_t to = std::min(round_up(strips[i].last_key, kStrip), (step + 1) * kStepKeys);
        for (int m = 0; m < maps && from < to; m++)
          add_keys(bg, m, step, from, to, lanes(strips[i], s, i * maps + m), s);
      }
    for (int64_t i = 0; i < count; i++) finish(strips[i], s, i * maps);
  }

  Lanes lanes(const Block& strip, const Scratch& s, int64_t at) const {
    return {strip,
            s.queries + at * kStrip * t.width,
            s.out + at * kStrip * t.value_width,
            s.reference + at * kStrip,
            s.sum + at * kStrip,
            s.norm + at * kStrip};
  }

  void load_queries(const Block& strip, int m, const Scratch& s, int64_t at) const {
    for (int64_t i = 0; i < kStrip; i++) {
      uint16_t* to = s.staged + i * t.width;
      if (i < strip.count)
        copy_row(query.at(strip.batch, strip.head[i], strip.query[i]) + m * t.p.width, t.p.width, t.width, to);
      else
        std::memset(to, 0, sizeof(uint16_t) * t.width);
      s.norm[at * kStrip + i] = row_norm(to, t.width);
    }
    pack_right_columns({s.staged, t.width}, kStrip, t.width, s.queries + at * kStrip * t.width);
  }

  // Keys from .. to of one step, multiples of kStrip.
  void add_keys(int64_t bg, int m, int64_t step, int64_t from, int64_t to, const Lanes& lanes, const Scratch& s) const {
    for (int64_t at = from; at < to && misses_reference(lanes, at, to); at += kStrip)
      refer(bg, m, at, at + kStrip, lanes, s);
    if (!within(lanes, key_norm(bg, m, step))) refer(bg, m, from, to, lanes, s);
    for (int64_t at = from; at < to; at += kStrip) {
      // Two places in turn keep scores at one distance from the weights of the same keys, modulo 4 KiB. Calls were up
      // to a tenth slower at other distances, probably since loads wait for stores whose low address bits agree.
      float* scores = s.scores + (at - from) / kStrip % 2 * kTile;
      uint16_t* weights = s.weights + (at - from) * kStrip;
      score(bg, m, at, lanes, scores);
      if (sees_all(t.p, lanes.strip, at))
        soften<false>(scores, lanes, nullptr, weights);
      else {
        const Keep keep(t.p, lanes.strip, at);
        soften<true>(scores, lanes, &keep, weights);
      }
    }
    // Tile products and vector instructions mixed by the processor take turns on its ports and slow each other down.
    _mm_lfence();
    const int64_t first = step * kStepKeys, keys_ = std::min(kStepKeys, t.keys - first);
    const uint16_t* columns = values + (bg * t.keys + first) * t.value_width + (from - first) * 32;
    for (int64_t e = 0; e < t.value_width; e += 32)
      product<true>((to - from) / kStrip, columns + e * keys_, 1, 2, s.weights, 2, lanes.out + e * kStrip, 2);
  }

  void score(int64_t bg, int m, int64_t at, const Lanes& lanes, float* scores) const {
    const int64_t K = t.width / 32;
    product<false>(K, key_tiles(bg, m, at), K, 1, lanes.query, 2, scores, 2);
  }

  // Whether some lane that sees keys in from .. to has no reference yet.
  static bool misses_reference(const Lanes& lanes, int64_t from, int64_t to) {
    for (int64_t i = 0; i < kStrip; i += W) {
      const Int seen = (load_bits<Int>(lanes.strip.low + i) < static_cast<int32_t>(to)) &
                       (load_bits<Int>(lanes.strip.high + i) > static_cast<int32_t>(from));
      const Int missing = (load(lanes.reference + i) == splat(kMasked)) & seen;
      if (_mm512_movepi32_mask((__m512i)missing)) return true;
    }
    return false;
  }
  // Whether no score can lie more than kSlack above its lane's reference.
  bool within(const Lanes& lanes, float key_norm) const {
    const float slack = kSlack / t.p.exponent();
    for (int64_t i = 0; i < kStrip; i += W) {
      const Vec reference = load(lanes.reference + i), bound = load(lanes.norm + i) * key_norm;
      const Int fits = (bound <= reference + slack) | (reference == splat(kMasked));
      if (_mm512_movepi32_mask((__m512i)fits) != 0xffff) return false;
    }
    return true;
  }

  // Raises references to the largest score of the keys if there is none yet or the score is more than kSlack / 2 above.
  void refer(int64_t bg, int m, int64_t from, int64_t to, const Lanes& lanes, const Scratch& s) const {
    Vec top[2] = {splat(kMasked), splat(kMasked)};
    for (int64_t at = from; at < to; at += kStrip) {
      score(bg, m, at, lanes, s.scores);
      const Keep keep(t.p, lanes.strip, at);
      for (int64_t half = 0; half < 2; half++)
        for (int64_t i = 0; i < kStrip; i++)
          top[half] = keep.largest(i, half, top[half], load(s.scores + place(i, half)));
    }
    for (int64_t half = 0; half < 2; half++) {
      float *at = lanes.reference + half * W, *sum = lanes.sum + half * W;
      const Vec reference = load(at), high = top[half];
      const Int seen = top[half] != splat(kMasked);
      const Int stays = (reference != splat(kMasked)) & (high <= reference + kSlack / 2 / t.p.exponent());
      const Vec next = (seen & ~stays) ? high : reference;
      if (!_mm512_movepi32_mask((__m512i)(seen & ~stays))) continue;
      store(at, next);
      const Vec factor = exp2<5>((reference - next) * t.p.exponent());
      store(sum, load(sum) * factor);
      for (int64_t e = 0; e < t.value_width; e++) {
        float* o = lanes.out + e / 16 * kTile + half * (kTile / 2) + e % 16 * 16;
        store(o, load(o) * factor);
      }
    }
  }

  // Turns 32 x 32 scores into P, a right operand of two tiles.
  template <bool masked>
  void soften(const float* scores, const Lanes& lanes, const Keep* keep, uint16_t* weights) const {
    const Vec exponent = splat(t.p.exponent());
    for (int64_t half = 0; half < 2; half++) {
      const Vec reference = load(lanes.reference + half * W);
      Vec total[2] = {};
      for (int64_t tile = 0; tile < kStrip; tile += 16) {
        const float* from = scores + place(tile, half);
        uint16_t* to = weights + half * kTile + tile * 16;
#pragma GCC unroll 8
        for (int64_t i = 0; i < 16; i += 2) {
          Vec first = exp2<3>((load(from + i * 16) - reference) * exponent);
          Vec second = exp2<3>((load(from + i * 16 + 16) - reference) * exponent);
          if constexpr (masked) {
            first = keep->zero_others(tile + i, half, first);
            second = keep->zero_others(tile + i + 1, half, second);
          }
          total[0] += first;
          total[1] += second;
          _mm512_store_si512(to + i * 16, rounded_in_pairs(first, second));
        }
      }
      float* sum = lanes.sum + half * W;
      store(sum, load(sum) + (total[0] + total[1]));
    }
  }

  void finish(const Block& strip, const Scratch& s, int64_t at) const {
    alignas(64) float factor[maps][kStrip];
    for (int m = 0; m < maps; m++)
      for (int64_t i = 0; i < kStrip; i++) {
        const float sum = s.sum[(at + m) * kStrip + i], one = sum == 0 ? 0.f : 1.f / sum;
        factor[m][i] = one;
        if (i >= strip.count) continue;
        if (m == 1) factor[m][i] = one * t.p.lam_of(strip.batch, strip.head[i], strip.query[i]);
        lse[t.p.lse_index(m, strip.batch, strip.head[i], strip.query[i])] =
            sum == 0 ? INFINITY : s.reference[(at + m) * kStrip + i] + std::log2(sum) / t.p.exponent();
      }
    const float* out[2];
    for (int m = 0; m < maps; m++) out[m] = s.out + (at + m) * kStrip * t.value_width;
    for (int64_t e = 0; e < t.value_width; e += 16)
      for (int64_t half = 0; half < 2; half++) {
        alignas(64) float block[W * W];
        for (int64_t i = 0; i < W; i++) {
          const int64_t from = e * kStrip + half * (kTile / 2) + i * 16;
          Vec x = load(out[0] + from) * load(factor[0] + half * W);
          if constexpr (maps == 2) x -= load(out[1] + from) * load(factor[1] + half * W);
          store(block + i * W, x);
        }
        transpose_block(reinterpret_cast<uint32_t*>(block), W,
                        reinterpret_cast<uint32_t*>(s.rows + half * W * t.value_width + e), t.value_width);
      }
    for (int64_t i = 0; i < strip.count; i++)
      output.store_row(t.p, strip.batch, strip.head[i], strip.query[i], s.rows + i * t.value_width);
  }
};

}  // namespace difftransformer

#endif
