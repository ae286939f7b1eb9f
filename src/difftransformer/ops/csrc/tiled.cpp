#include "tiled.h"

#include <cstdlib>
#include <cstring>

#include "tiled_backward.h"
#include "tiled_forward.h"

namespace difftransformer {

#if defined(__AMX_BF16__)

namespace {

template <int maps>
void attend_maps(const Inputs& in, const Outputs& to, Runtime& runtime) {
  using Rows_ = View<const BFloat16>;
  TiledForward<maps>{runtime,         Tiled(in.problem, kStepKeys),
                     Rows_(in.query), Rows_(in.key),
                     Rows_(in.value), {View<BFloat16>(to.out), View<BFloat16>(to.plain), to.inverse_rms, in.norm},
                     to.lse}
      .run();
}

template <int maps>
void differentiate_maps(const Inputs& in, const Outputs& from, const Gradients& grad, Runtime& runtime) {
  using Rows_ = View<const BFloat16>;
  const Tiled tiled(in.problem, kBackwardKeys);
  const Problem& p = tiled.p;
  const int64_t tasks = p.batch * p.groups * p.blocks();
  float* weights = in.norm.on ? static_cast<float*>(runtime.allocate(tasks * p.value_width * 4)) : nullptr;
  TiledBackward<maps>{runtime,
                      tiled,
                      Rows_(in.query),
                      Rows_(in.key),
                      Rows_(in.value),
                      {Rows_(grad.out), Rows_(from.plain), from.inverse_rms, in.norm},
                      from.lse,
                      View<BFloat16>(grad.query),
                      static_cast<BFloat16*>(grad.key),
                      static_cast<BFloat16*>(grad.value),
                      grad.lam,
                      weights}
      .run();
  if (weights) sum_rows(weights, tasks, p.value_width, grad.weight);
}

}  // namespace

void attend_tiled(const Inputs& in, const Outputs& out, Runtime& runtime) {
  (in.problem.maps == 2 ? attend_maps<2> : attend_maps<1>)(in, out, runtime);
}
void differentiate_tiled(const Inputs& in, const Outputs& out, const Gradients& grad, Runtime& runtime) {
  (in.problem.maps == 2 ? differentiate_maps<2> : differentiate_maps<1>)(in, out, grad, runtime);
}

namespace {

class OneThread final : public Runtime {
 public:
  ~OneThread() override {
    for (void* p : memory_) std::free(p);
  }
  int64_t threads() const override { return 1; }
  void run(int64_t count, const std::function<void(int64_t, int64_t)>& work) override { work(0, count); }
  void* allocate(int64_t bytes) override {
    return memory_.emplace_back(std::aligned_alloc(64, round_up(std::max<int64_t>(bytes, 1), 64)));
  }

 private:
  std::vector<void*> memory_;
};

// Runs a call with more than one block, step and tile in every direction, keys for each map, grouped heads and a causal
// mask, and returns the output and all gradients, one after the other.
std::vector<float> try_call() {
  constexpr int64_t H = 2, T = 150, S = 300, D = 40, E = 72;
  const auto numbers = [](int64_t count, uint32_t seed) {
    std::vector<BFloat16> out(count);
    for (auto& x : out) {
      seed = seed * 1664525u + 1013904223u;
      x = static_cast<float>(seed >> 8) / static_cast<float>(1 << 23) - 1.f;
    }
    return out;
  };
  auto query = numbers(H * T * 2 * D, 1), key = numbers(S * 2 * D, 2), value = numbers(S * E, 3),
       grad = numbers(H * T * E, 4);
  std::vector<BFloat16> out(H * T * E), grad_query(query.size()), grad_key(key.size()), grad_value(value.size());
  std::vector<float> lse(2 * H * T), grad_lam(H * T), result;
  const float lam = 0.4f;
  const auto rows = [](std::vector<BFloat16>& x, int64_t count, int64_t width) {
    return Rows{x.data(), {static_cast<int64_t>(x.size()), count * width, width}};
  };
  Inputs in;
  Problem& p = in.problem;
  p.batch = p.groups = 1;
  p.heads = H;
  p.queries = T;
  p.keys = S;
  p.width = D;
  p.value_width = E;
  p.maps = 2;
  p.shared_key = false;
  p.scale = 0.2f;
  p.is_causal = true;
  p.window = 0;
  p.first_key = {0};
  p.last_key = {S};
  p.lam = &lam;
  in.query = rows(query, T, 2 * D);
  in.key = rows(key, S, 2 * D);
  in.value = rows(value, S, E);
  const Outputs outputs{rows(out, T, E), {}, lse.data(), nullptr};
  const Gradients gradients{
      rows(grad, T, E), rows(grad_query, T, 2 * D), grad_key.data(), grad_value.data(), grad_lam.data(), nullptr};
  OneThread runtime;
  attend<BFloat16>(in, outputs, runtime);
  differentiate<BFloat16>(in, outputs, gradients, runtime);
  for (const auto* x : {&out, &grad_query, &grad_key, &grad_value}) result.insert(result.end(), x->begin(), x->end());
  result.insert(result.end(), grad_lam.begin(), grad_lam.end());
  return result;
}

bool agree(const std::vector<float>& a, const std::vector<float>& b) {
  double apart = 0, whole = 0;
  for (size_t i = 0; i < a.size(); i++) {
    apart += (a[i] - b[i]) * (a[i] - b[i]);
    whole += b[i] * b[i];
  }
  return apart <= 1e-4 * whole;  // neighbouring bf16 numbers are 4e-3 apart; NaN agrees with nothing
}

}  // namespace

#else

void attend_tiled(const Inputs&, const Outputs&, Runtime&) {}
void differentiate_tiled(const Inputs&, const Outputs&, const Gradients&, Runtime&) {}

#endif

}  // namespace difftransformer

// Lets later bf16 calls use AMX tiles if the tiled and the buffered kernel agree on a call made here. The process needs
// the system's permission to use tiles.
extern "C" __attribute__((visibility("default"))) bool difftransformer_use_tiles() {
  using namespace difftransformer;
#if defined(__AMX_BF16__)
  use_tiles = false;
  const std::vector<float> buffered = try_call();
  use_tiles = true;
  use_tiles = agree(try_call(), buffered);
#endif
  return use_tiles;
}
