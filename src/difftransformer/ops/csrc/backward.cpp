#include "backward.h"

#include "kernels.h"
#include "tiled.h"

namespace difftransformer {
namespace {

// Converts sums in fp32 to gradients of some type; gradients in fp32 need no copy.
template <class In>
struct Sums {
  Runtime& runtime;
  In* to;
  int64_t count;
  float* sums;

  Sums(Runtime& runtime, void* to_, int64_t count) : runtime(runtime), to(static_cast<In*>(to_)), count(count) {
    if constexpr (std::is_same_v<In, float>)
      sums = to;
    else
      sums = static_cast<float*>(runtime.allocate(count * 4));
    by_pieces([&](int64_t begin, int64_t size) { std::fill_n(sums + begin, size, 0.f); });
  }
  void store() const {
    if constexpr (!std::is_same_v<In, float>)
      by_pieces([&](int64_t begin, int64_t size) { convert_row(sums + begin, size, to + begin); });
  }
  template <class Work>
  void by_pieces(const Work& work) const {
    constexpr int64_t piece = 1 << 14;
    parallel_for(runtime, ceil_div(count, piece), [&](int64_t begin, int64_t end) {
      const int64_t last = std::min(end * piece, count);
      for (int64_t at = begin * piece; at < last; at += piece) work(at, std::min(piece, last - at));
    });
  }
};

template <class In, int maps>
void differentiate_maps(const Inputs& in, const Outputs& from, const Gradients& grad, Runtime& runtime) {
  using Type = typename ProductsOf<In>::Type;
  Problem p = in.problem;
  p.arrange_for_backward();
  const View<const In> key(in.key), value(in.value);
  Operand<Type> keys[2];
  for (int m = 0; m < maps; m++)
    keys[m] = m && p.shared_key ? keys[0] : make_operand<Type, In>(runtime, p, key, m * p.width, p.width, true);
  const int64_t tasks = p.batch * p.groups * p.blocks(), rows = p.batch * p.groups * p.keys;
  float* weights = in.norm.on ? static_cast<float*>(runtime.allocate(tasks * p.value_width * 4)) : nullptr;
  const Sums<In> grad_key(runtime, grad.key, rows * (p.shared_key ? 1 : maps) * p.width);
  const Sums<In> grad_value(runtime, grad.value, rows * p.value_width);
  Backward<Type, In, maps>{runtime,
                           p,
                           View<const In>(in.query),
                           {View<const In>(grad.out), View<const In>(from.plain), from.inverse_rms, in.norm},
                           {keys[0], keys[1]},
                           make_operand<Type, In>(runtime, p, value, 0, p.value_width, false),
                           from.lse,
                           View<In>(grad.query),
                           grad_key.sums,
                           grad_value.sums,
                           grad.lam,
                           weights}
      .run();
  grad_key.store();
  grad_value.store();
  if (weights) sum_rows(weights, tasks, p.value_width, grad.weight);
}

}  // namespace

void sum_rows(const float* rows, int64_t count, int64_t width, float* to) {
  std::vector<double> sums(width, 0.0);
  for (int64_t i = 0; i < count; i++)
    for (auto& sum : sums) sum += *rows++;
  std::copy(sums.begin(), sums.end(), to);
}

template <class In>
void differentiate(const Inputs& in, const Outputs& out, const Gradients& grad, Runtime& runtime) {
  if (takes_tiles<In>(in.problem))
    differentiate_tiled(in, out, grad, runtime);
  else if (in.problem.maps == 2)
    differentiate_maps<In, 2>(in, out, grad, runtime);
  else
    differentiate_maps<In, 1>(in, out, grad, runtime);
}
template void differentiate<float>(const Inputs&, const Outputs&, const Gradients&, Runtime&);
template void differentiate<BFloat16>(const Inputs&, const Outputs&, const Gradients&, Runtime&);
template void differentiate<Half>(const Inputs&, const Outputs&, const Gradients&, Runtime&);

}  // namespace difftransformer
