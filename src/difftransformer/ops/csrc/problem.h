// One attention call as the kernels see it: sizes, which keys a query may see, and the layout of keys and values.
//
// The H/G heads that share a group's keys and values form one list of R*T rows (row = head of the group * T + query). A
// block is up to block_rows of these rows: its queries are the lanes of vectors, and its keys come in tiles of
// tile_keys.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "gemm.h"
#include "runtime.h"

namespace difftransformer {

constexpr int64_t kMaxLanes = 256;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// A tensor of four dimensions whose last one is contiguous; strides in elements.
struct Rows {
  void* data = nullptr;
  int64_t strides[3] = {0, 0, 0};
};
template <class T>
struct View {
  T* data = nullptr;
  int64_t strides[3] = {0, 0, 0};

  View() = default;
  explicit View(const Rows& x) : data(static_cast<T*>(x.data)), strides{x.strides[0], x.strides[1], x.strides[2]} {}
  T* at(int64_t i, int64_t j, int64_t k) const { return data + i * strides[0] + j * strides[1] + k * strides[2]; }
};

struct Problem {
  int64_t batch, heads, groups, queries, keys, width, value_width;
  int64_t block_rows = 64, tile_keys = 128, lane_multiple = W;
  int maps;         // 2, or 1 for softmax attention
  bool shared_key;  // both maps read one key
  float scale;      // > 0
  bool is_causal;
  int64_t window;                                      // in keys; 0 for none
  std::vector<int64_t> first_key, last_key;            // by batch row: kv_start and kv_lengths
  std::vector<int64_t> document_first, document_last;  // by query, empty without cu_seqlens
  const bool* mask = nullptr;
  int64_t mask_strides[4] = {0, 0, 0, 0};
  const float* lam = nullptr;
  int64_t lam_strides[3] = {0, 0, 0};

  int64_t per_group() const { return heads / groups; }
  int64_t rows() const { return per_group() * queries; }
  int64_t blocks() const { return ceil_div(rows(), block_rows); }
  int64_t tiles() const { return ceil_div(keys, tile_keys); }
  int64_t lanes() const { return std::min(block_rows, round_up(rows(), lane_multiple)); }
  float exponent() const { return scale * 1.44269504088896341f; }  // the kernels work in powers of two

  // Whether the call ends before another thread could have started.
  bool is_small() const {
    constexpr int64_t multiply_adds = 1 << 16;
    return batch * heads * queries * keys * (maps * width + value_width) < multiply_adds;
  }
  // Whether a group's keys, values and their gradients fill the cache of a core.
  bool is_large() const {
    constexpr int64_t own_cache_bytes = 2 << 20, bytes = 2 + 4;
    return keys * (maps * width + value_width) * bytes >= own_cache_bytes;
  }
  // Gradients of keys and values are read and written once for each block. Blocks are longer where this traffic exceeds
  // the cache most; with narrow heads the maps do.
  void arrange_for_backward() {
    if (is_large() && maps * width + value_width >= 384) block_rows = 128, tile_keys = 64;
  }

  float lam_of(int64_t b, int64_t h, int64_t t) const {
    return lam[b * lam_strides[0] + h * lam_strides[1] + t * lam_strides[2]];
  }
  // Index into (maps, B, H, T).
  int64_t lse_index(int64_t map, int64_t b, int64_t h, int64_t t) const {
    return ((map * batch + b) * heads + h) * queries + t;
  }

  // Finds the keys low <= j < high that a query may see, apart from attn_mask.
  void range(int64_t b, int64_t query, int64_t& low, int64_t& high) const {
    low = first_key[b];
    high = last_key[b];
    if (is_causal) {
      const int64_t newest = last_key[b] - queries + query;
      high = std::min(high, newest + 1);
      if (window) low = std::max(low, newest - window + 1);
    }
    if (!document_first.empty()) {
      low = std::max(low, document_first[query]);
      high = std::min(high, document_last[query]);
    }
    if (high <= low) low = high = 0;
  }
};

// Headwise RMSNorm of the output with a gain and a factor, fused into the store. weight may be null for a gain of 1.
struct Norm {
  bool on = false;
  const float* weight = nullptr;
  float eps = 0, factor = 1;
};

// Up to block_rows rows of one group. Lanes beyond `count` are padding: they see all keys that the
// block sees, and their results are dropped.
struct Block {
  int64_t batch, group, first, count, lanes;
  int64_t head[kMaxLanes], query[kMaxLanes];  // head counts over the whole call
  alignas(64) int32_t low[kMaxLanes], high[kMaxLanes];
  int64_t first_key, last_key;   // the keys that any lane may see
  int64_t whole_from, whole_to;  // the keys that every lane may see

  Block(const Problem& p, int64_t batch, int64_t group, int64_t index)
      : batch(batch),
        group(group),
        first(index * p.block_rows),
        count(std::min(p.block_rows, p.rows() - first)),
        lanes(p.lanes()) {
    first_key = whole_to = p.keys;
    last_key = whole_from = 0;
    for (int64_t i = 0; i < lanes; i++) {
      low[i] = 0;
      high[i] = INT32_MAX;
      head[i] = query[i] = 0;
      if (i >= count) continue;
      head[i] = group * p.per_group() + (first + i) / p.queries;
      query[i] = (first + i) % p.queries;
      int64_t from, to;
      p.range(batch, query[i], from, to);
      low[i] = static_cast<int32_t>(from);
      high[i] = static_cast<int32_t>(to);
      whole_from = std::max(whole_from, from);
      whole_to = std::min(whole_to, to);
      if (from < to) {
        first_key = std::min(first_key, from);
        last_key = std::max(last_key, to);
      }
    }
    if (last_key <= first_key) first_key = last_key = 0;
    std::fill(low + count, low + lanes, static_cast<int32_t>(first_key));
    std::fill(high + count, high + lanes, static_cast<int32_t>(last_key));
  }
  int64_t first_tile(const Problem& p) const { return first_key / p.tile_keys; }
  int64_t last_tile(const Problem& p) const { return ceil_div(last_key, p.tile_keys); }
};

// The keys of one tile that a block works on, and the lanes that see any of them.
struct Tile {
  int64_t first, rows;      // first is a multiple of pack: bf16 takes keys in pairs
  int64_t lane = 0, lanes;  // whole vectors
  bool masked;

  Tile(const Problem& p, const Block& block, int64_t index, int64_t pack) {
    first = std::max(index * p.tile_keys, block.first_key / pack * pack);
    const int64_t last = std::min((index + 1) * p.tile_keys, block.last_key);
    rows = last - first;
    masked = p.mask || first < block.whole_from || last > block.whole_to;
    int64_t end = block.lanes;
    if (masked) {
      const auto blind = [&](int64_t i) { return block.low[i] >= last || block.high[i] <= first; };
      while (lane < end && blind(lane)) lane++;
      while (end > lane && blind(end - 1)) end--;
      lane = lane / W * W;
      end = round_up(end, W);
    }
    lanes = end - lane;
  }
};

// attn_mask of a tile, [rows][lanes]: -1 if a lane may attend.
inline void read_mask(const Problem& p, const Block& block, const Tile& tile, int32_t* out) {
  for (int64_t i = 0; i < block.lanes; i++) {
    const bool* mask = p.mask + block.batch * p.mask_strides[0] + block.head[i] * p.mask_strides[1] +
                       block.query[i] * p.mask_strides[2] + tile.first * p.mask_strides[3];
    for (int64_t r = 0; r < tile.rows; r++) out[r * block.lanes + i] = mask[r * p.mask_strides[3]] ? -1 : 0;
  }
}

// A mask with the bits of all lanes, from `lane` on, that may attend to a key.
inline Int may_attend(const Block& block, int64_t lane, int64_t key_, const int32_t* mask) {
  const auto key = static_cast<int32_t>(key_);
  Int keep = (load_bits<Int>(block.low + lane) <= key) & (load_bits<Int>(block.high + lane) > key);
  return mask ? keep & load_bits<Int>(mask) : keep;
}

// The keys of one map or the values, (B, G, S, width), as left operands: by row in place (or converted), and by column,
// in fp32 from the same memory, in bf16 from tiles [width][tile_keys / 2] of pairs of keys.
template <class Type>
struct Operand {
  using Unit = typename Type::Unit;
  int64_t width, units;  // units of a row
  const Unit* rows = nullptr;
  int64_t strides[3];  // in units
  const Unit* columns = nullptr;
  int64_t groups, tiles, tile_keys;

  const Unit* row(int64_t b, int64_t g, int64_t key) const {
    return rows + b * strides[0] + g * strides[1] + key * strides[2];
  }

  // C[width][lanes] += X^T B for the keys of a tile; B is [rows][lanes].
  void add_columns(const Block& block, const Tile& tile, const Unit* B, float* C) const {
    if constexpr (Type::kPack == 1) {
      gemm<Type, true>(width, tile.lanes, tile.rows, row(block.batch, block.group, tile.first), strides[2],
                       B + tile.lane, block.lanes, C + tile.lane, block.lanes, true);
    } else {
      const Unit* base =
          columns + ((block.batch * groups + block.group) * tiles + tile.first / tile_keys) * width * (tile_keys / 2);
      gemm<Type>(width, tile.lanes, ceil_div(tile.rows, 2), base + tile.first % tile_keys / 2, tile_keys / 2,
                 B + tile.lane, block.lanes, C + tile.lane, block.lanes, true);
    }
  }
  // C[rows of the tile][lanes] = X B; B is [units][lanes].
  void multiply_rows(const Block& block, const Tile& tile, const Unit* B, float* C) const {
    gemm<Type>(tile.rows, tile.lanes, units, row(block.batch, block.group, tile.first), strides[2], B + tile.lane,
               block.lanes, C + tile.lane, block.lanes, false);
  }
};

// Pairs of bf16 rows as one row of units: (first[i], second[i]).
inline void interleave(const BFloat16* first, const BFloat16* second, int64_t n, uint32_t* out) {
  const auto* a = reinterpret_cast<const uint16_t*>(first);
  const auto* b = reinterpret_cast<const uint16_t*>(second);
  for (int64_t i = 0; i < n; i++) out[i] = a[i] | static_cast<uint32_t>(b[i]) << 16;
}

template <class Type, class In>
Operand<Type> make_operand(Runtime& runtime, const Problem& p, const View<const In>& from, int64_t offset,
                           int64_t width, bool by_column) {
  using Unit = typename Type::Unit;
  using Element = typename Type::Element;
  Operand<Type> out;
  out.width = width;
  out.units = ceil_div(width, Type::kPack);
  out.groups = p.groups;
  out.tiles = p.tiles();
  out.tile_keys = p.tile_keys;
  const int64_t pack = Type::kPack;
  // Every block reads all rows again. Rows far apart, as in (B, S, G, width), take a page each and use few sets of a
  // cache. Gathering them first pays off from 1,000 rows, or from 2,000 if the other map's half lies between them.
  const bool scattered = p.rows() >= (from.strides[2] > 4 * width ? 1024 : 2048) && from.strides[2] > width;
  const bool in_place = std::is_same_v<In, Element> && !scattered && width % pack == 0 && offset % pack == 0 &&
                        from.strides[0] % pack == 0 && from.strides[1] % pack == 0 && from.strides[2] % pack == 0;
  if (in_place) {
    out.rows = reinterpret_cast<const Unit*>(from.data + offset);
    for (int i = 0; i < 3; i++) out.strides[i] = from.strides[i] / pack;
  } else {
    out.rows = static_cast<const Unit*>(runtime.allocate(p.batch * p.groups * p.keys * out.units * 4));
    out.strides[2] = out.units;
    out.strides[1] = out.strides[2] * p.keys;
    out.strides[0] = out.strides[1] * p.groups;
  }
  by_column = by_column && pack == 2;
  if (by_column) {
    out.columns =
        static_cast<const Unit*>(runtime.allocate(p.batch * p.groups * out.tiles * width * (p.tile_keys / 2) * 4));
  }
  if (in_place && !by_column) return out;
  parallel_for(runtime, p.batch * p.groups * out.tiles, [&](int64_t begin, int64_t end) {
    std::vector<uint32_t> pairs(by_column ? p.tile_keys / 2 * width : 0);
    const std::vector<In> zeros(width, In(0.f));
    for (int64_t task = begin; task < end; task++) {
      const int64_t tile = task % out.tiles, g = task / out.tiles % p.groups, b = task / out.tiles / p.groups;
      const int64_t first = tile * p.tile_keys, last = std::min(first + p.tile_keys, p.keys);
      if (!in_place)
        for (int64_t key = first; key < last; key++) {
          auto* to = reinterpret_cast<Element*>(const_cast<Unit*>(out.row(b, g, key)));
          if constexpr (std::is_same_v<In, Element>)
            std::memcpy(to, from.at(b, g, key) + offset, sizeof(In) * width);
          else if constexpr (pack == 1)
            convert_row(from.at(b, g, key) + offset, width, to);
          if (width % pack) to[width] = Element(0.f);
        }
      if constexpr (std::is_same_v<In, BFloat16> && pack == 2)
        if (by_column) {
          // Keys that no query may see are set to zero, since their memory may hold anything.
          const auto row = [&](int64_t key) {
            return key >= p.first_key[b] && key < std::min(last, p.last_key[b]) ? from.at(b, g, key) + offset
                                                                                : zeros.data();
          };
          for (int64_t pair = 0; pair < p.tile_keys / 2; pair++)
            interleave(row(first + 2 * pair), row(first + 2 * pair + 1), width, pairs.data() + pair * width);
          transpose(pairs.data(), width, p.tile_keys / 2, width,
                    const_cast<Unit*>(out.columns) + task * width * (p.tile_keys / 2), p.tile_keys / 2);
        }
    }
  });
  return out;
}

// Rows of a block as elements [lanes][units * kPack], padding zero.
template <class Type, class In>
void stage_rows(const Block& block, const View<const In>& x, int64_t offset, int64_t width,
                typename Type::Element* to) {
  const int64_t stride = round_up(width, Type::kPack);
  for (int64_t i = 0; i < block.lanes; i++, to += stride) {
    if (i >= block.count) {
      std::memset(static_cast<void*>(to), 0, sizeof(*to) * stride);
      continue;
    }
    const In* from = x.at(block.batch, block.head[i], block.query[i]) + offset;
    if constexpr (std::is_same_v<In, typename Type::Element>)
      std::memcpy(to, from, sizeof(In) * width);
    else
      convert_row(from, width, to);
    if (width < stride) to[width] = typename Type::Element(0.f);
  }
}

// Calls work(group, index, scratch) for all indices of all groups; a group's indices are claimed in order. If a group's
// keys, values and gradients fill the cache of a core, threads work on one group together and share the larger cache;
// smaller groups stay in one core each. A Session lives as long as a thread works.
struct NoSession {};
template <class Session = NoSession, class Work>
void for_each_task(Runtime& runtime, const Problem& p, int64_t per_group, int64_t scratch_floats, const Work& work) {
  const int64_t groups = p.batch * p.groups;
  const int64_t threads = p.is_small() ? 1 : std::min<int64_t>(runtime.threads(), groups * per_group);
  const int64_t stride = round_up(scratch_floats, 16) + 16;
  float* base = static_cast<float*>(runtime.allocate(threads * stride * 4));
  std::vector<std::atomic<int64_t>> next(groups);
  for (auto& index : next) index.store(0, std::memory_order_relaxed);
  parallel_for(runtime, threads, [&](int64_t begin, int64_t end) {
    [[maybe_unused]] const Session session;
    for (int64_t thread = begin; thread < end; thread++)
      for (int64_t i = 0; i < groups; i++) {
        const int64_t group = ((p.is_large() ? 0 : thread * groups / threads) + i) % groups;
        for (int64_t index; (index = next[group].fetch_add(1)) < per_group;) work(group, index, base + thread * stride);
      }
  });
}

// Hands out consecutive pieces of scratch memory; without a base it only counts bytes.
struct Carver {
  float* next;
  int64_t floats = 0;
  explicit Carver(float* base) : next(base) {}
  template <class T = float>
  T* take(int64_t count) {
    const int64_t size = round_up(count * static_cast<int64_t>(sizeof(T)), 64) / 4;
    auto* piece = reinterpret_cast<T*>(next);
    if (next) next += size;
    floats += size;
    return piece;
  }
};

}  // namespace difftransformer
