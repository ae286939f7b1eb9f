// Backward from the two log-sum-exps alone, by blocks of queries. With d_m = rowsum(P_m * dP):
//
//   dP = dO V^T                 dS_1 = P_1 * (dP - d_1)       dS_2 = -lam P_2 * (dP - d_2)       dlam = -d_2
//   dV += (P_1 - lam P_2)^T dO          dQ_m = s dS_m K_m           dK_m += s dS_m^T Q_m
//
// A block keeps P_1, P_2 and dP of all its keys: a first pass computes them and d_m, a second computes dS. This takes
// 10 units, as many as ordinary attention over 2H heads.
//
// dK and dV of a tile of keys are summed over blocks in one fixed order, the order in which threads claim the blocks. A
// block waits for its turn at each tile. All blocks of a group visit the tiles in the same direction, one behind the
// other, and the result has the same bits for any number of threads.
#pragma once

#include <thread>

#include "decode.h"

namespace difftransformer {

// The order in which blocks add to the keys of a tile.
class Turns {
 public:
  explicit Turns(const Problem& p)
      : blocks_(p.blocks()), ranges_(p.batch * blocks_), done_(p.batch * p.groups * blocks_) {
    for (int64_t b = 0; b < p.batch; b++)
      for (int64_t i = 0; i < blocks_; i++) {
        const Block block(p, b, 0, i);
        ranges_[b * blocks_ + i] = {block.first_tile(p), block.last_tile(p)};
      }
    for (auto& tiles : done_) tiles.store(0, std::memory_order_relaxed);
  }
  // Tasks of a group are claimed from its last block to its first.
  int64_t block_of(int64_t task) const { return blocks_ - 1 - task % blocks_; }

  void wait(int64_t batch, int64_t task, int64_t tile) const {
    const int64_t first_task = task - task % blocks_;
    for (int64_t other = task - 1; other >= first_task; other--) {
      const auto [first, last] = ranges_[batch * blocks_ + block_of(other)];
      if (tile < first || tile >= last) continue;
      // `other` itself has waited for the earlier tasks that add to the tile.
      for (int spins = 0; done_[other].load(std::memory_order_acquire) <= tile; spins++) {
        if (spins < 4096)
          spin_pause();
        else
          std::this_thread::yield();
      }
      return;
    }
  }
  void pass(int64_t task, int64_t tile) { done_[task].store(tile + 1, std::memory_order_release); }

 private:
  int64_t blocks_;
  std::vector<std::pair<int64_t, int64_t>> ranges_;
  std::vector<std::atomic<int64_t>> done_;
};

// Turns a tile's scores into P and adds to the sums of P * dP.
template <int degree, bool masked, int maps>
inline void differentiate(float* const* p, float* dp, const Tile& tile, const Block& block, const int32_t* mask,
                          float exponent, float* const* lse, float* const* d, float* const* total) {
  const int64_t lanes = block.lanes;
  for (int64_t i = tile.lane; i < tile.lane + tile.lanes; i += W) {
    Vec norm[maps], sum[maps] = {}, whole[maps] = {};
    for (int m = 0; m < maps; m++) norm[m] = load(lse[m] + i);
    for (int64_t r = 0; r < tile.rows; r++) {
      const int64_t at = r * lanes + i;
      Vec g = load(dp + at);
      Int keep;
      if constexpr (masked) {
        keep = may_attend(block, i, tile.first + r, mask ? mask + at : nullptr);
        g = keep ? g : Vec{};
        store(dp + at, g);
      }
      for (int m = 0; m < maps; m++) {
        Vec x = exp2<degree>((load(p[m] + at) - norm[m]) * exponent);
        if constexpr (masked) x = keep ? x : Vec{};
        store(p[m] + at, x);
        sum[m] += x * g;
        whole[m] += x;
      }
    }
    for (int m = 0; m < maps; m++) {
      store(d[m] + i, load(d[m] + i) + sum[m]);
      store(total[m] + i, load(total[m] + i) + whole[m]);
    }
  }
}

template <class Type, class In, int maps>
struct Backward {
  using Unit = typename Type::Unit;
  using Element = typename Type::Element;
  static constexpr int64_t kPack = Type::kPack;
  Runtime& runtime;
  const Problem& p;
  View<const In> query;
  OutputGradient<In> grad;
  Operand<Type> key[2], value;
  const float* lse;
  View<In> grad_query;
  float *grad_key, *grad_value;   // (B, G, S, ...), zero at the start
  float *grad_lam, *grad_weight;  // (B, H, T) and (tasks, E)

  struct Scratch {
    float *p[2], *dp, *lse[2], *d[2], *total[2], *lam, *grad_query[2], *rows;
    Unit *query[2], *grad;               // [units][lanes]
    Element *query_rows[2], *grad_rows;  // [lanes][units * kPack]
    Unit *query_pairs[2], *grad_pairs;   // bf16: [lanes / 2][width]
    Element *combined, *ds;              // [keys of a tile][lanes]
    Unit* ds_pairs;                      // bf16: [keys / 2][lanes]
    int32_t* mask;
    int64_t floats;

    Scratch(const Problem& problem, float* base) {
      Carver carve(base);
      const int64_t lanes = problem.lanes(), E = problem.value_width, D = problem.width;
      const int64_t units = ceil_div(D, kPack), value_units = ceil_div(E, kPack), paired = kPack == 2 ? lanes / 2 : 0;
      for (int m = 0; m < maps; m++) {
        query[m] = carve.take<Unit>(units * lanes);
        query_rows[m] = carve.take<Element>(lanes * units * kPack);
        query_pairs[m] = carve.take<Unit>(paired * D);
        lse[m] = carve.take(lanes);
        d[m] = carve.take(lanes);
        total[m] = carve.take(lanes);
        grad_query[m] = carve.take(D * lanes);
      }
      lam = carve.take(lanes);
      grad = carve.take<Unit>(value_units * lanes);
      grad_rows = carve.take<Element>(lanes * value_units * kPack);
      grad_pairs = carve.take<Unit>(paired * E);
      combined = carve.take<Element>(problem.tile_keys * lanes);
      ds = carve.take<Element>(problem.tile_keys * lanes);
      ds_pairs = carve.take<Unit>(paired * problem.tile_keys);
      rows = carve.take(std::max(D, E) * lanes + E);
      mask = carve.take<int32_t>(problem.mask ? problem.tile_keys * lanes : 0);
      const int64_t whole = problem.tiles() * problem.tile_keys * lanes;
      for (int m = 0; m < maps; m++) p[m] = carve.take(whole);
      dp = carve.take(whole);
      floats = carve.floats;
    }
  };

  void run() const {
    Turns turns(p);
    const int64_t blocks = p.blocks();
    for_each_task(runtime, p, blocks, Scratch(p, nullptr).floats, [&](int64_t bg, int64_t index, float* base) {
      const int64_t task = bg * blocks + index;
      const Block block(p, bg / p.groups, bg % p.groups, turns.block_of(task));
      Scratch scratch(p, base);
      differentiate_block(block, scratch, task, turns);
    });
  }

  void differentiate_block(const Block& block, Scratch& s, int64_t task, Turns& turns) const {
    stage(block, s, task);
    if (is_decoding(p)) refer(block, s);
    const int64_t lanes = block.lanes, first = block.first_tile(p), last = block.last_tile(p);
    const int64_t b = block.batch, g = block.group;
    for (int64_t j = first; j < last; j++) {
      const Tile tile(p, block, j, Type::kPack);
      const int64_t offset = (j - first) * p.tile_keys * lanes;
      float* maps_[2] = {s.p[0] + offset, maps == 2 ? s.p[1] + offset : nullptr};
      for (int m = 0; m < maps; m++) key[m].multiply_rows(block, tile, s.query[m], maps_[m]);
      value.multiply_rows(block, tile, s.grad, s.dp + offset);
      if (p.mask) read_mask(p, block, tile, s.mask);
      const auto differentiate_tile =
          tile.masked ? differentiate<Type::kExpDegree, true, maps> : differentiate<Type::kExpDegree, false, maps>;
      differentiate_tile(maps_, s.dp + offset, tile, block, p.mask ? s.mask : nullptr, p.exponent(), s.lse, s.d,
                         s.total);
    }
    for (int m = 0; m < maps; m++)
      for (int64_t i = 0; i < lanes; i++) {
        s.total[m][i] = s.total[m][i] == 0 ? 0.f : 1.f / s.total[m][i];
        s.d[m][i] *= s.total[m][i];
      }
    if constexpr (maps == 2)
      for (int64_t i = 0; i < block.count; i++) grad_lam[p.lse_index(0, b, block.head[i], block.query[i])] = -s.d[1][i];

    for (int m = 0; m < maps; m++) std::fill_n(s.grad_query[m], p.width * lanes, 0.f);
    const int64_t key_width = (p.shared_key ? 1 : maps) * p.width;
    for (int64_t j = first; j < last; j++) {
      const Tile tile(p, block, j, Type::kPack);
      const int64_t offset = (j - first) * p.tile_keys * lanes, key_row = (b * p.groups + g) * p.keys + tile.first;
      combine(s, offset, tile, lanes);
      turns.wait(b, task, j);
      add_rows(tile, lanes, s.combined, s.grad_rows, s.grad_pairs, p.value_width, grad_value + key_row * p.value_width,
               p.value_width);
      for (int m = 0; m < maps; m++) {
        score_gradient(s, offset, tile, lanes, m);
        add_rows(tile, lanes, s.ds, s.query_rows[m], s.query_pairs[m], p.width,
                 grad_key + key_row * key_width + (p.shared_key ? 0 : m) * p.width, key_width);
        key[m].add_columns(block, tile, kPack == 1 ? reinterpret_cast<const Unit*>(s.ds) : s.ds_pairs, s.grad_query[m]);
      }
      turns.pass(task, j);
    }
    for (int m = 0; m < maps; m++) {
      transpose(s.grad_query[m], lanes, p.width, lanes, s.rows, p.width);
      for (int64_t i = 0; i < block.count; i++)
        convert_row(s.rows + i * p.width, p.width, grad_query.at(b, block.head[i], block.query[i]) + m * p.width);
    }
  }

  // Finds the largest scores of this pass. The kernel for few queries has added their products up in another order, and
  // scores of 1e10 that differ in the last bit are hundreds of powers of two apart.
  void refer(const Block& block, Scratch& s) const {
    for (int m = 0; m < maps; m++) {
      std::fill_n(s.lse[m], block.lanes, kMasked);
      for (int64_t j = block.first_tile(p); j < block.last_tile(p); j++) {
        const Tile tile(p, block, j, Type::kPack);
        if (p.mask) read_mask(p, block, tile, s.mask);
        key[m].multiply_rows(block, tile, s.query[m], s.p[m]);
        soften<3, true>(s.p[m], tile, block, p.mask ? s.mask : nullptr, p.exponent(), s.lse[m], s.total[m], s.d[m]);
      }
      for (int64_t i = 0; i < block.lanes; i++)
        if (s.total[m][i] == 0) s.lse[m][i] = INFINITY;
      std::fill_n(s.total[m], block.lanes, 0.f);
      std::fill_n(s.d[m], block.lanes, 0.f);
    }
  }

  // C[keys of the tile][width] += X Y with X [keys][lanes] and Y [lanes][width], by row and for bf16 in pairs of lanes.
  static void add_rows(const Tile& tile, int64_t lanes, const Element* x, const Element* y_rows, const Unit* y_pairs,
                       int64_t width, float* C, int64_t stride) {
    const Unit* y = kPack == 1 ? reinterpret_cast<const Unit*>(y_rows) : y_pairs;
    const int64_t first = tile.lane / kPack;
    gemm<Type>(tile.rows, width, tile.lanes / kPack, reinterpret_cast<const Unit*>(x) + first, lanes / kPack,
               y + first * width, width, C, stride, true);
  }

  // Stores queries and output gradients in the layouts that the products need.
  void stage(const Block& block, Scratch& s, int64_t task) const {
    const int64_t lanes = block.lanes;
    for (int m = 0; m < maps; m++) {
      stage_rows<Type, In>(block, query, m * p.width, p.width, s.query_rows[m]);
      lay_out(s.query_rows[m], p.width, lanes, s.query[m], s.query_pairs[m]);
      std::fill_n(s.d[m], lanes, 0.f);
      std::fill_n(s.total[m], lanes, 0.f);
      for (int64_t i = 0; i < lanes; i++)
        s.lse[m][i] = i < block.count ? lse[p.lse_index(m, block.batch, block.head[i], block.query[i])] : INFINITY;
    }
    if constexpr (maps == 2)
      for (int64_t i = 0; i < lanes; i++)
        s.lam[i] = i < block.count ? p.lam_of(block.batch, block.head[i], block.query[i]) : 0.f;
    stage_gradient(block, s, task);
    lay_out(s.grad_rows, p.value_width, lanes, s.grad, s.grad_pairs);
  }

  void lay_out(const Element* rows, int64_t width, int64_t lanes, Unit* transposed, Unit* pairs) const {
    const int64_t units = ceil_div(width, kPack);
    transpose(rows, units, lanes, units, transposed, lanes);
    if constexpr (kPack == 2)
      for (int64_t i = 0; i < lanes / 2; i++)
        interleave(rows + 2 * i * units * 2, rows + (2 * i + 1) * units * 2, width, pairs + i * width);
  }

  void stage_gradient(const Block& block, Scratch& s, int64_t task) const {
    if (!grad.norm.on) return stage_rows<Type, In>(block, grad.grad, 0, p.value_width, s.grad_rows);
    const int64_t E = p.value_width, stride = round_up(E, kPack);
    float* weight_gradient = grad_weight + task * E;
    std::fill_n(weight_gradient, E, 0.f);
    for (int64_t i = 0; i < block.lanes; i++) {
      Element* to = s.grad_rows + i * stride;
      if (i >= block.count) {
        std::memset(static_cast<void*>(to), 0, sizeof(Element) * stride);
        continue;
      }
      grad.load_row(p, block.batch, block.head[i], block.query[i], s.rows, s.rows + E, weight_gradient);
      convert_row(s.rows, E, to);
      if (E < stride) to[E] = Element(0.f);
    }
  }

  // A = P1 - lam P2 by row.
  void combine(const Scratch& s, int64_t offset, const Tile& tile, int64_t lanes) const {
    for (int64_t i = tile.lane; i < tile.lane + tile.lanes; i += W) {
      const Vec one = load(s.total[0] + i), lam = maps == 2 ? load(s.lam + i) * load(s.total[1] + i) : Vec{};
      for (int64_t r = 0; r < tile.rows; r++) {
        const int64_t at = r * lanes + i;
        Vec a = one * load(s.p[0] + offset + at);
        if constexpr (maps == 2) a -= lam * load(s.p[1] + offset + at);
        store(s.combined + at, a);
      }
    }
  }

  // s dS_m, by row and for bf16 also in pairs of keys.
  void score_gradient(const Scratch& s, int64_t offset, const Tile& tile, int64_t lanes, int m) const {
    const int64_t rows = tile.rows;
    const float* dp = s.dp + offset;
    const float* prob = s.p[m] + offset;
    for (int64_t i = tile.lane; i < tile.lane + tile.lanes; i += W) {
      const Vec factor = load(s.total[m] + i) * (m == 0 ? splat(p.scale) : load(s.lam + i) * -p.scale);
      const Vec shift = load(s.d[m] + i) * factor;
      const auto ds = [&](int64_t r) {
        return load(prob + r * lanes + i) * (load(dp + r * lanes + i) * factor - shift);
      };
      if constexpr (kPack == 1) {
        for (int64_t r = 0; r < rows; r++) store(s.ds + r * lanes + i, ds(r));
      } else {
        for (int64_t r = 0; r < rows; r += 2) {
          const bool both = r + 1 < rows;
          Element* row = s.ds + r * lanes + i;
          Rounded<Type>::store_pair(ds(r), both ? ds(r + 1) : Vec{}, s.ds_pairs + r / 2 * lanes + i, row,
                                    both ? row + lanes : nullptr);
        }
      }
    }
  }
};

}  // namespace difftransformer
