#include "backward.h"

#include "kernels.h"

namespace difftransformer {
namespace {

template <class In, int maps>
void differentiate_maps(const Inputs& in, const Outputs& from, const Gradients& grad, Runtime& runtime) {
  using Type = typename ProductsOf<In>::Type;
  Problem p = in.problem;
  p.arrange_for_backward();
  const View<const In> key(in.key), value(in.value);
  Operand<Type> keys[2];
  for (int m = 0; m < maps; m++)
    keys[m] = m && p.shared_key ? keys[0] : make_operand<Type, In>(runtime, p, key, m * p.width, p.width, true);
  Backward<Type, In, maps>{runtime,
                           p,
                           View<const In>(in.query),
                           View<const In>(grad.out),
                           View<const In>(from.plain),
                           {keys[0], keys[1]},
                           make_operand<Type, In>(runtime, p, value, 0, p.value_width, false),
                           from.lse,
                           from.inverse_rms,
                           in.norm,
                           View<In>(grad.query),
                           grad.key,
                           grad.value,
                           grad.lam,
                           grad.weight}
      .run();
}

}  // namespace

int64_t weight_rows(const Problem& problem) {
  Problem p = problem;
  p.arrange_for_backward();
  return p.batch * p.groups * p.blocks();
}

template <class In>
void differentiate(const Inputs& in, const Outputs& out, const Gradients& grad, Runtime& runtime) {
  if (in.problem.maps == 2)
    differentiate_maps<In, 2>(in, out, grad, runtime);
  else
    differentiate_maps<In, 1>(in, out, grad, runtime);
}
template void differentiate<float>(const Inputs&, const Outputs&, const Gradients&, Runtime&);
template void differentiate<BFloat16>(const Inputs&, const Outputs&, const Gradients&, Runtime&);
template void differentiate<Half>(const Inputs&, const Outputs&, const Gradients&, Runtime&);

}  // namespace difftransformer
