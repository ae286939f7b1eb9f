// Runs the kernels without torch, on memory that is NaN until it is written, and compares them with the definition of
// differential attention in double, forward and backward: for processors that only an emulator has, and other
// compilers.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels.h"

using namespace difftransformer;

namespace {

struct Case {
  std::string name;
  int64_t B = 1, H = 2, G = 2, T, S, D = 16, E = 32;
  int maps = 2;
  bool shared_key = false, causal = false, norm = false, mask = false;
  int64_t window = 0;
  std::vector<int64_t> first_key, last_key, documents;  // documents: their bounds
  double scale = 1;                                     // times 1 / sqrt(D)
};

const std::vector<Case> kCases = {
    {.name = "one position", .T = 1, .S = 1},
    {.name = "odd widths", .B = 2, .H = 3, .G = 1, .T = 67, .S = 131, .D = 13, .E = 19},
    {.name = "causal", .T = 129, .S = 129, .causal = true},
    {.name = "more queries than keys", .T = 90, .S = 50, .causal = true},
    {.name = "window", .H = 3, .G = 1, .T = 65, .S = 200, .D = 9, .E = 17, .causal = true, .window = 70},
    {.name = "grouped heads", .H = 4, .G = 2, .T = 50, .S = 70, .D = 32, .E = 64, .causal = true},
    {.name = "shared key", .H = 4, .G = 2, .T = 127, .S = 140, .D = 33, .E = 48, .shared_key = true, .causal = true},
    {.name = "ranges",
     .B = 3,
     .T = 65,
     .S = 200,
     .causal = true,
     .first_key = {0, 65, 131},
     .last_key = {65, 200, 150}},
    {.name = "documents", .T = 150, .S = 150, .causal = true, .documents = {0, 1, 66, 130, 131, 150}},
    {.name = "mask", .B = 2, .T = 65, .S = 131, .mask = true},
    {.name = "softmax", .H = 6, .G = 2, .T = 60, .S = 150, .D = 24, .E = 24, .maps = 1, .causal = true},
    {.name = "decoding", .B = 2, .H = 4, .G = 2, .T = 1, .S = 600, .D = 24, .E = 48, .causal = true},
    {.name = "decoding, odd widths", .H = 2, .G = 1, .T = 3, .S = 300, .D = 11, .E = 71, .causal = true, .norm = true},
    {.name = "norm", .H = 3, .G = 1, .T = 70, .S = 70, .D = 15, .E = 30, .causal = true, .norm = true},
    {.name = "peaked scores", .T = 80, .S = 160, .D = 32, .causal = true, .scale = 30},
    {.name = "long blocks", .H = 1, .G = 1, .T = 40, .S = 920, .D = 64, .E = 256, .causal = true},
};

// Threads of the standard library, and memory that is NaN.
class Threads final : public Runtime {
 public:
  explicit Threads(int64_t threads) : threads_(threads) {}
  ~Threads() override { std::for_each(memory_.begin(), memory_.end(), std::free); }
  int64_t threads() const override { return threads_; }
  void run(int64_t count, const std::function<void(int64_t, int64_t)>& work) override {
    std::vector<std::thread> running;
    for (int64_t i = 0; i < threads_; i++)
      running.emplace_back([&, i] { work(count * i / threads_, count * (i + 1) / threads_); });
    for (auto& thread : running) thread.join();
  }
  void* allocate(int64_t bytes) override {
    const int64_t size = round_up(std::max<int64_t>(bytes, 1), 64);
    memory_.push_back(std::aligned_alloc(64, size));
    return std::memset(memory_.back(), 0xff, size);
  }

 private:
  int64_t threads_;
  std::vector<void*> memory_;
};

// (B, H, T, width), in memory (B, T, H, width); NaN until written.
template <class T>
struct Array {
  int64_t H, rows, width;
  std::vector<T> data;
  Array(int64_t B, int64_t H, int64_t rows, int64_t width)
      : H(H), rows(rows), width(width), data(B * H * rows * width, T(NAN)) {}
  T& at(int64_t b, int64_t h, int64_t t, int64_t e) { return data[((b * rows + t) * H + h) * width + e]; }
  Rows view() { return {data.data(), {rows * H * width, width, H * width}}; }
  void fill(std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (auto& x : data) x = T(normal(random));
  }
};

// Everything that a call reads or writes. Gradients of keys and values lie (B, G, S, width) in memory.
template <class In>
struct Tensors {
  Array<In> query, key, value, grad;
  std::vector<float> lam, weight;
  std::vector<char> mask;  // (B, T, S)
  Array<In> out, plain, grad_query;
  std::vector<In> grad_key, grad_value;
  std::vector<float> lse, inverse_rms, grad_lam, grad_weight;

  explicit Tensors(const Case& c)
      : query(c.B, c.H, c.T, c.maps * c.D),
        key(c.B, c.G, c.S, (c.shared_key ? 1 : c.maps) * c.D),
        value(c.B, c.G, c.S, c.E),
        grad(c.B, c.H, c.T, c.E),
        lam(c.B * c.H * c.T),
        weight(c.E),
        mask(c.B * c.T * c.S),
        out(c.B, c.H, c.T, c.E),
        plain(c.B, c.H, c.T, c.E),
        grad_query(c.B, c.H, c.T, c.maps * c.D),
        grad_key(key.data.size(), In(NAN)),
        grad_value(value.data.size(), In(NAN)),
        lse(c.maps * c.B * c.H * c.T, NAN),
        inverse_rms(c.B * c.H * c.T, NAN),
        grad_lam(c.B * c.H * c.T, NAN),
        grad_weight(c.E, NAN) {
    std::mt19937 random(static_cast<unsigned>(c.T + 1000 * c.S));
    std::normal_distribution<float> normal;
    for (auto* x : {&query, &key, &value, &grad}) x->fill(random);
    for (auto& x : lam) x = 0.5f + 0.2f * normal(random);
    for (auto& x : weight) x = 1.f + 0.2f * normal(random);
    for (auto& x : mask) x = random() % 3 != 0;
    if (c.mask) std::fill_n(mask.begin() + 3 * c.S, c.S, 0);  // a query that sees nothing
    // What lies at keys outside the ranges is not to be read.
    for (int64_t b = 0; b < (c.last_key.empty() ? 0 : c.B); b++)
      for (auto* x : {&key, &value})
        for (int64_t g = 0; g < c.G; g++)
          for (int64_t s = 0; s < c.S; s++)
            if (s < c.first_key[b] || s >= c.last_key[b]) std::fill_n(&x->at(b, g, s, 0), x->width, In(NAN));
  }
};

float scale_of(const Case& c) { return static_cast<float>(c.scale / std::sqrt(static_cast<double>(c.D))); }
constexpr float kEps = 1e-5f, kFactor = 0.8f;

template <class In>
void run_kernels(const Case& c, Tensors<In>& x, int64_t threads) {
  Inputs in;
  Problem& p = in.problem;
  p.batch = c.B, p.heads = c.H, p.groups = c.G, p.queries = c.T, p.keys = c.S, p.width = c.D, p.value_width = c.E;
  p.maps = c.maps, p.shared_key = c.shared_key, p.scale = scale_of(c), p.is_causal = c.causal, p.window = c.window;
  p.first_key = c.first_key.empty() ? std::vector<int64_t>(c.B, 0) : c.first_key;
  p.last_key = c.last_key.empty() ? std::vector<int64_t>(c.B, c.S) : c.last_key;
  for (size_t i = 0; i + 1 < c.documents.size(); i++)
    for (int64_t t = c.documents[i]; t < c.documents[i + 1]; t++) {
      p.document_first.push_back(c.documents[i]);
      p.document_last.push_back(c.documents[i + 1]);
    }
  if (c.mask) {
    p.mask = reinterpret_cast<const bool*>(x.mask.data());
    const int64_t strides[4] = {c.T * c.S, 0, c.S, 1};
    std::copy_n(strides, 4, p.mask_strides);
  }
  if (c.maps == 2) {
    p.lam = x.lam.data();
    const int64_t strides[3] = {c.H * c.T, c.T, 1};
    std::copy_n(strides, 3, p.lam_strides);
  }
  if (c.norm) in.norm = {true, x.weight.data(), kEps, kFactor};
  in.query = x.query.view(), in.key = x.key.view(), in.value = x.value.view();
  const Outputs outputs{x.out.view(), x.plain.view(), x.lse.data(), x.inverse_rms.data()};
  Threads runtime(threads);
  attend<In>(in, outputs, runtime);
  const Gradients gradients{x.grad.view(),       x.grad_query.view(), x.grad_key.data(),
                            x.grad_value.data(), x.grad_lam.data(),   x.grad_weight.data()};
  differentiate<In>(in, outputs, gradients, runtime);
}

bool may_attend(const Case& c, const std::vector<char>& mask, int64_t b, int64_t t, int64_t s) {
  const int64_t first = c.first_key.empty() ? 0 : c.first_key[b], last = c.last_key.empty() ? c.S : c.last_key[b];
  if (s < first || s >= last) return false;
  const int64_t newest = last - c.T + t;
  if (c.causal && s > newest) return false;
  if (c.window && s <= newest - c.window) return false;
  for (int64_t bound : c.documents)
    if ((t < bound) != (s < bound)) return false;
  return !c.mask || mask[(b * c.T + t) * c.S + s];
}

struct Reference {
  std::vector<double> out, lse, query, key, value, lam, weight;
};

// The definition, and its derivatives by the chain rule; arrays as those of Tensors.
template <class In>
Reference define(const Case& c, Tensors<In>& x) {
  Reference r;
  r.out.resize(x.out.data.size());
  r.lse.resize(x.lse.size());
  r.query.resize(x.query.data.size());
  r.key.resize(x.key.data.size());
  r.value.resize(x.value.data.size());
  r.lam.resize(x.lam.size());
  r.weight.resize(c.E);
  const double scale = scale_of(c);
  const auto key_at = [&](int m) { return c.shared_key ? 0 : m * c.D; };
  for (int64_t b = 0; b < c.B; b++)
    for (int64_t h = 0; h < c.H; h++)
      for (int64_t t = 0; t < c.T; t++) {
        const int64_t g = h / (c.H / c.G), row = (b * c.H + h) * c.T + t, by_token = (b * c.T + t) * c.H + h;
        const double lam = x.lam[row];
        std::vector<double> P[2], dP(c.S), plain(c.E), dplain(c.E);
        for (int m = 0; m < c.maps; m++) {
          P[m].assign(c.S, -INFINITY);
          double top = -INFINITY, sum = 0;
          for (int64_t s = 0; s < c.S; s++) {
            if (!may_attend(c, x.mask, b, t, s)) continue;
            P[m][s] = 0;
            for (int64_t d = 0; d < c.D; d++)
              P[m][s] += scale * static_cast<double>(x.query.at(b, h, t, m * c.D + d)) *
                         static_cast<double>(x.key.at(b, g, s, key_at(m) + d));
            top = std::max(top, P[m][s]);
          }
          for (auto& p : P[m]) sum += p = top == -INFINITY ? 0 : std::exp(p - top);
          for (auto& p : P[m]) p = sum ? p / sum : 0;
          r.lse[m * c.B * c.H * c.T + row] = sum ? (top + std::log(sum)) / scale : INFINITY;
        }
        const auto weight_of = [&](int64_t s) { return P[0][s] - (c.maps == 2 ? lam * P[1][s] : 0); };
        for (int64_t s = 0; s < c.S; s++)
          for (int64_t e = 0; e < c.E && weight_of(s) != 0; e++)
            plain[e] += weight_of(s) * static_cast<double>(x.value.at(b, g, s, e));
        double squares = 0, mean = 0;
        for (double y : plain) squares += y * y / static_cast<double>(c.E);
        const double inverse = c.norm ? 1 / std::sqrt(squares + static_cast<double>(kEps)) : 1;
        for (int64_t e = 0; e < c.E; e++) {
          const double gain = c.norm ? static_cast<double>(kFactor) * x.weight[e] : 1, dy = x.grad.at(b, h, t, e);
          r.out[by_token * c.E + e] = gain * inverse * plain[e];
          dplain[e] = gain * dy;
          mean += dplain[e] * inverse * plain[e] / static_cast<double>(c.E);
          r.weight[e] += static_cast<double>(kFactor) * dy * inverse * plain[e];
        }
        for (int64_t e = 0; c.norm && e < c.E; e++) dplain[e] = inverse * (dplain[e] - inverse * plain[e] * mean);
        for (int64_t s = 0; s < c.S; s++)
          for (int64_t e = 0; e < c.E && may_attend(c, x.mask, b, t, s); e++) {
            dP[s] += dplain[e] * static_cast<double>(x.value.at(b, g, s, e));
            r.value[((b * c.G + g) * c.S + s) * c.E + e] += weight_of(s) * dplain[e];
          }
        for (int m = 0; m < c.maps; m++) {
          double sum = 0;
          for (int64_t s = 0; s < c.S; s++) sum += P[m][s] * dP[s];
          if (m == 1) r.lam[row] = -sum;
          for (int64_t s = 0; s < c.S; s++) {
            const double dS = (m == 1 ? -lam : 1) * P[m][s] * (dP[s] - sum) * scale;
            for (int64_t d = 0; d < c.D && dS != 0; d++) {
              r.query[by_token * c.maps * c.D + m * c.D + d] +=
                  dS * static_cast<double>(x.key.at(b, g, s, key_at(m) + d));
              r.key[((b * c.G + g) * c.S + s) * x.key.width + key_at(m) + d] +=
                  dS * static_cast<double>(x.query.at(b, h, t, m * c.D + d));
            }
          }
        }
      }
  return r;
}

// The largest difference over the largest value, which is of the order of one but where all are zero; infinite where
// only one is NaN or infinite.
template <class T>
double error_of(const std::vector<T>& made, const std::vector<double>& right) {
  double difference = 0, largest = 0.01;
  for (size_t i = 0; i < right.size(); i++) {
    const double x = static_cast<double>(made[i]);
    if (std::isinf(right[i]) && x == right[i]) continue;
    if (!std::isfinite(x) || !std::isfinite(right[i])) return INFINITY;
    difference = std::max(difference, std::abs(x - right[i]));
    largest = std::max(largest, std::abs(right[i]));
  }
  return difference / largest;
}

template <class In>
bool same_bits(const Tensors<In>& a, const Tensors<In>& b) {
  const auto same = [](const auto& x, const auto& y) {
    return std::memcmp(x.data(), y.data(), sizeof(x[0]) * x.size()) == 0;
  };
  return same(a.out.data, b.out.data) && same(a.grad_query.data, b.grad_query.data) && same(a.grad_key, b.grad_key) &&
         same(a.grad_value, b.grad_value) && same(a.grad_lam, b.grad_lam) && same(a.grad_weight, b.grad_weight);
}

// One line; whether all is as it should be.
template <class In>
bool check(const Case& c, const char* type, double tolerance) {
  Tensors<In> x(c), other(c);
  run_kernels(c, x, 1);
  run_kernels(c, other, 3);
  const Reference right = define(c, x);
  const std::pair<const char*, double> errors[] = {
      {"out", error_of(x.out.data, right.out)},
      {"lse", error_of(x.lse, right.lse)},
      {"query", error_of(x.grad_query.data, right.query)},
      {"key", error_of(x.grad_key, right.key)},
      {"value", error_of(x.grad_value, right.value)},
      {"lam", c.maps == 2 ? error_of(x.grad_lam, right.lam) : 0},
      {"weight", c.norm ? error_of(x.grad_weight, right.weight) : 0},
  };
  bool good = same_bits(x, other);
  std::printf("%s, %s:%s", c.name.c_str(), type, good ? "" : " not the same bits on 1 and 3 threads");
  for (const auto& [name, error] : errors) {
    std::printf(" %s %.1e", name, error);
    good = good && error <= tolerance;
  }
  std::printf("%s\n", good ? "" : " FAILED");
  return good;
}

}  // namespace

// With an argument, each case in one dtype: float32, bfloat16 and float16 in turns.
int main(int argc, char**) {
  const bool every_dtype = argc == 1;
  std::printf("%d lanes\n", W);
  int failed = 0, turn = 0;
  for (const Case& c : kCases) {
    if (every_dtype || turn == 0) failed += !check<float>(c, "float32", 2e-5);
    if (every_dtype || turn == 1) failed += !check<BFloat16>(c, "bfloat16", 1e-2);
    if (every_dtype || turn == 2) failed += !check<Half>(c, "float16", 1e-3);
    turn = (turn + 1) % 3;
  }
  std::printf("%d failed\n", failed);
  return failed ? 1 : 0;
}
