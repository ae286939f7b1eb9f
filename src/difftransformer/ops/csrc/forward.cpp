#include "forward.h"

#include "decode.h"
#include "kernels.h"
#include "tiled.h"

namespace difftransformer {
namespace {

template <class In, int maps>
void attend_maps(const Inputs& in, const Outputs& to, Runtime& runtime) {
  using Type = typename ProductsOf<In>::Type;
  const Problem& p = in.problem;
  const View<const In> query(in.query), key(in.key), value(in.value);
  const Output<In> output{View<In>(to.out), View<In>(to.plain), to.inverse_rms, in.norm};
  if (is_decoding(p)) {
    Decode<In, maps>{runtime, p, query, key, value, output, to.lse}.run();
    return;
  }
  Operand<Type> keys[2];
  for (int m = 0; m < maps; m++)
    keys[m] = m && p.shared_key ? keys[0] : make_operand<Type, In>(runtime, p, key, m * p.width, p.width, false);
  const Operand<Type> values = make_operand<Type, In>(runtime, p, value, 0, p.value_width, true);
  Forward<Type, In, maps>{runtime, p, query, {keys[0], keys[1]}, values, output, to.lse}.run();
}

}  // namespace

template <class In>
void attend(const Inputs& in, const Outputs& out, Runtime& runtime) {
  const Problem& p = in.problem;
  if (takes_tiles<In>(p) && !is_decoding(p))
    attend_tiled(in, out, runtime);
  else if (p.maps == 2)
    attend_maps<In, 2>(in, out, runtime);
  else
    attend_maps<In, 1>(in, out, runtime);
}
template void attend<float>(const Inputs&, const Outputs&, Runtime&);
template void attend<BFloat16>(const Inputs&, const Outputs&, Runtime&);
template void attend<Half>(const Inputs&, const Outputs&, Runtime&);

}  // namespace difftransformer
