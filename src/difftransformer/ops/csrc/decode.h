// Few queries and many keys. Chunks of keys run in parallel, read each key and value once, and are merged in order.
#pragma once

#include "forward.h"

namespace difftransformer {

constexpr int64_t kDecodeRows = 8;     // most rows of a group (heads x queries) for which this is the faster kernel
constexpr int64_t kDecodeChunk = 256;  // keys of a task

inline bool is_decoding(const Problem& p) {
  // With few keys, several rows share more work in the other kernels.
  const int64_t rows = p.keys > kDecodeChunk / 2 ? kDecodeRows : kDecodeRows / 2;
  return p.keys > 0 && p.rows() <= rows;
}

template <class In>
inline Vec load_some(const In* p, int64_t n) {
  if (n >= W) return load(p);
  float x[W] = {};
  for (int64_t i = 0; i < n; i++) x[i] = static_cast<float>(p[i]);
  return load(x);
}

// Products of a query with several keys, whose lanes are still to be summed. `stage` writes the query in the form that
// `products` reads, into round_up(width, W) floats.
template <class In>
struct Dot {
  static void stage(const In* from, int64_t width, float* to) {
    convert_row(from, width, to);
    std::fill(to + width, to + round_up(width, W), 0.f);
  }
  template <int keys>
  static void products(const float* query, const In* const (&key)[keys], int64_t width, Vec* out) {
    Vec sum[keys] = {};
    int64_t d = 0;
    for (; d + W <= width; d += W) {
      const Vec part = load(query + d);
#pragma GCC unroll 4
      for (int i = 0; i < keys; i++) sum[i] += part * load(key[i] + d);
    }
    if (d < width)
      for (int i = 0; i < keys; i++) sum[i] += load(query + d) * load_some(key[i] + d, width - d);
    for (int i = 0; i < keys; i++) out[i] = sum[i];
  }
};
#if defined(__AVX512BF16__)
template <>
struct Dot<BFloat16> {
  static __m512bh load_pairs(const BFloat16* p, int64_t n) {
    return (__m512bh)_mm512_maskz_loadu_epi16(n < 2 * W ? (1u << n) - 1 : ~0u, p);
  }
  static void stage(const BFloat16* from, int64_t width, float* to) {
    for (int64_t d = 0; d < width; d += 2 * W, to += W) store(to, (Vec)load_pairs(from + d, width - d));
  }
  template <int keys>
  static void products(const float* query, const BFloat16* const (&key)[keys], int64_t width, Vec* out) {
    __m512 sum[keys] = {};
    for (int64_t d = 0; d < width; d += 2 * W, query += W) {
      const auto part = (__m512bh)load(query);
#pragma GCC unroll 4
      for (int i = 0; i < keys; i++) sum[i] = _mm512_dpbf16_ps(sum[i], part, load_pairs(key[i] + d, width - d));
    }
    for (int i = 0; i < keys; i++) out[i] = (Vec)sum[i];
  }
};
#endif

template <class In, int maps>
struct Decode {
  Runtime& runtime;
  const Problem& p;
  View<const In> query, key, value;
  Output<In> output;
  float* lse;  // (maps, B, H, T), in units of scores

  // The result of a chunk for a row and map: the maximum, the sum, and the weighted values.
  int64_t width() const { return round_up(p.value_width, W); }
  int64_t record() const { return maps * (2 + width()); }
  int64_t chunks() const { return ceil_div(p.keys, kDecodeChunk); }

  void run() const {
    const int64_t rows = p.rows(), groups = p.batch * p.groups;
    auto* records = static_cast<float*>(runtime.allocate(groups * chunks() * rows * record() * 4));
    const int64_t queries = rows * maps * round_up(p.width, W), scores = rows * maps * kDecodeChunk;
    std::vector<std::atomic<int64_t>> left(groups);
    for (auto& count : left) count.store(chunks(), std::memory_order_relaxed);
    for_each_task(runtime, p, chunks(), std::max(queries + scores, 2 * width()),
                  [&](int64_t bg, int64_t index, float* scratch) {
                    const Block block(p, bg / p.groups, bg % p.groups, 0);
                    float* group = records + bg * chunks() * rows * record();
                    chunk(block, index, scratch, scratch + queries, group + index * rows * record());
                    // The thread that finishes a group's last chunk merges all of them in order.
                    if (left[bg].fetch_sub(1, std::memory_order_acq_rel) == 1) merge(block, group, scratch);
                  });
  }

  void chunk(const Block& block, int64_t index, float* q, float* scores, float* records) const {
    const int64_t first = std::max(index * kDecodeChunk, block.first_key);
    const int64_t last = std::min((index + 1) * kDecodeChunk, block.last_key);
    const int64_t keys = std::max<int64_t>(last - first, 0), rows = block.count * maps, padded = round_up(p.width, W);
    for (int64_t row = 0; row < rows; row++) {
      float* to = q + row * padded;
      Dot<In>::stage(query.at(block.batch, block.head[row / maps], block.query[row / maps]) + row % maps * p.width,
                     p.width, to);
    }
    for (int64_t row = 0; row < rows; row += maps)
      score_rows(block, first, keys, q + row * padded, scores + row * kDecodeChunk);
    for (int64_t row = 0; row < rows; row++) {
      float* record_ = records + (row / maps) * record() + row % maps * (2 + width());
      soften_row(block, row / maps, first, keys, scores + row * kDecodeChunk, record_);
      std::fill_n(record_ + 2, width(), 0.f);
    }
    for (int64_t row = 0; row < block.count; row++)
      weigh(block, first, keys, scores + row * maps * kDecodeChunk, records + row * record());
  }

  // Computes dot products of a row's queries with the chunk's keys. Keys are read as a whole, both maps' halves in
  // turn, and four at a time, so that a query is loaded once for all of them.
  void score_rows(const Block& block, int64_t first, int64_t keys, const float* q, float* scores) const {
    constexpr int together = 4;
    const int64_t padded = round_up(p.width, W);
    Vec sums[maps][W];
    for (int64_t k = 0; k < keys; k += W) {
      for (int r = 0; r < W; r += together) {
        const In* rows[together];
        for (int i = 0; i < together; i++) {
          rows[i] = key.at(block.batch, block.group, first + std::min(k + r + i, keys - 1));
        }
        for (int m = 0; m < maps; m++) {
          const In* halves[together];
          for (int i = 0; i < together; i++) halves[i] = rows[i] + (p.shared_key ? 0 : m * p.width);
          Dot<In>::template products<together>(q + m * padded, halves, p.width, sums[m] + r);
        }
      }
      for (int m = 0; m < maps; m++) store(scores + m * kDecodeChunk + k, total_of_each(sums[m]));
    }
  }

  // Turns scores into powers of two relative to the chunk's maximum, and masked scores into zero.
  void soften_row(const Block& block, int64_t row, int64_t first, int64_t keys, float* scores, float* record_) const {
    const bool* mask = !p.mask ? nullptr
                               : p.mask + block.batch * p.mask_strides[0] + block.head[row] * p.mask_strides[1] +
                                     block.query[row] * p.mask_strides[2];
    const bool sees_all = !mask && first >= block.low[row] && first + keys <= block.high[row];
    if (!sees_all)
      for (int64_t k = 0; k < keys; k++) {
        const int64_t at = first + k;
        if (at < block.low[row] || at >= block.high[row] || (mask && !mask[at * p.mask_strides[3]]))
          scores[k] = kMasked;
      }
    const int64_t padded = round_up(keys, W);
    std::fill(scores + keys, scores + padded, kMasked);
    Vec top = splat(kMasked), total{};
    for (int64_t k = 0; k < padded; k += W) {
      const Vec score = load(scores + k);
      top = (top < score) ? score : top;
    }
    float lanes[W], maximum = kMasked, sum = 0;
    store(lanes, top);
    for (const float x : lanes) maximum = maximum < x ? x : maximum;
    for (int64_t k = 0; k < padded; k += W) {
      const Vec score = load(scores + k);
      Vec weight = exp2<5>((score - maximum) * p.exponent());
      weight = (score == splat(kMasked)) ? Vec{} : weight;
      total += weight;
      store(scores + k, weight);
    }
    store(lanes, total);
    for (const float x : lanes) sum += x;
    record_[0] = maximum;
    record_[1] = sum;
  }

  // Computes both maps' weighted sums of the chunk's values.
  void weigh(const Block& block, int64_t first, int64_t keys, const float* weights, float* record_) const {
    constexpr int most = kRegisters == 32 ? 8 : 4;  // vectors of a pass; with more the sums would leave the registers
    int64_t e = 0;
    for (; e + most * W <= p.value_width; e += most * W)
      weigh_columns<most>(block, first, keys, weights, e, W, record_);
    for (; e + 4 * W <= p.value_width; e += 4 * W) weigh_columns<4>(block, first, keys, weights, e, W, record_);
    for (; e + W <= p.value_width; e += W) weigh_columns<1>(block, first, keys, weights, e, W, record_);
    if (e < p.value_width) weigh_columns<1>(block, first, keys, weights, e, p.value_width - e, record_);
  }

  template <int vectors>
  void weigh_columns(const Block& block, int64_t first, int64_t keys, const float* weights, int64_t e, int64_t last,
                     float* record_) const {
    Vec sum[maps][vectors] = {};
    for (int64_t k = 0; k < keys; k++) {
      const In* row = value.at(block.batch, block.group, first + k) + e;
      Vec v[vectors];
      if constexpr (vectors == 1)
        v[0] = load_some(row, last);
      else
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j += 2) load_pair(row + j * W, v[j], v[j + 1]);
#pragma GCC unroll 8
      for (int j = 0; j < vectors; j++)
#pragma GCC unroll 2
        for (int m = 0; m < maps; m++) sum[m][j] += weights[m * kDecodeChunk + k] * v[j];
    }
    for (int m = 0; m < maps; m++) {
      for (int j = 0; j + 1 < vectors; j += 2) in_order<In>(sum[m][j], sum[m][j + 1]);
      for (int j = 0; j < vectors; j++) store(record_ + m * (2 + width()) + 2 + e + j * W, sum[m][j]);
    }
  }

  // Merges the chunks of a group in order, scaled to one maximum.
  void merge(const Block& block, const float* records, float* sums) const {
    for (int64_t i = 0; i < block.count; i++) {
      float* result = sums + width();
      std::fill_n(result, width(), 0.f);
      for (int m = 0; m < maps; m++) {
        const auto at = [&](int64_t chunk) {
          return records + (chunk * block.count + i) * record() + m * (2 + width());
        };
        float maximum = kMasked, sum = 0;
        for (int64_t c = 0; c < chunks(); c++) maximum = maximum < at(c)[0] ? at(c)[0] : maximum;
        std::fill_n(sums, width(), 0.f);
        for (int64_t c = 0; c < chunks(); c++) {
          const float factor = std::exp2((at(c)[0] - maximum) * p.exponent());
          sum += factor * at(c)[1];
          for (int64_t e = 0; e < width(); e++) sums[e] += factor * at(c)[2 + e];
        }
        lse[p.lse_index(m, block.batch, block.head[i], block.query[i])] =
            sum == 0 ? INFINITY : maximum + std::log2(sum) / p.exponent();
        float weight = sum == 0 ? 0.f : 1.f / sum;
        if (m == 1) weight *= -p.lam_of(block.batch, block.head[i], block.query[i]);
        for (int64_t e = 0; e < width(); e++) result[e] += weight * sums[e];
      }
      output.store_row(p, block.batch, block.head[i], block.query[i], result);
    }
  }
};

}  // namespace difftransformer
