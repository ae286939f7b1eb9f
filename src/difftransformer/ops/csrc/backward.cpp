// The operator difftransformer::cpu_attention_backward (its schema is in ops/cpu.py).
#include "backward.h"

#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <tuple>

#include "inputs.h"

namespace difftransformer {
namespace {

template <class Type, class In, int maps>
void backward(const Inputs& in, const Tensor& grad, const Tensor& lse, const Tensor& plain, const Tensor& inverse_rms,
              const Tensor& grad_query, const Tensor& grad_key, const Tensor& grad_value, const Tensor& grad_lam,
              const Tensor& grad_weight) {
  const Problem& p = in.problem;
  Operand<Type> keys[2];
  for (int m = 0; m < maps; m++)
    keys[m] = m && p.shared_key ? keys[0] : make_operand<Type, In>(p, in.key, m * p.width, p.width, true);
  Backward<Type, In, maps>{p,
                           View<const In>(in.query),
                           View<const In>(grad),
                           View<const In>(plain),
                           {keys[0], keys[1]},
                           make_operand<Type, In>(p, in.value, 0, p.value_width, false),
                           lse.const_data_ptr<float>(),
                           inverse_rms.const_data_ptr<float>(),
                           in.norm,
                           View<In>(grad_query),
                           grad_key.data_ptr<float>(),
                           grad_value.data_ptr<float>(),
                           grad_lam.data_ptr<float>(),
                           grad_weight.data_ptr<float>()}
      .run();
}

// Sums (B, H, T) to the shape that lam was given in, in one order whatever the number of threads.
Tensor sum_to_lam(const Problem& p, const Tensor& grad, const Tensor& lam) {
  if (lam.sizes() == grad.sizes()) return grad;
  const Tensor out = at::zeros(lam.sizes(), grad.options());
  std::vector<double> sums(out.numel(), 0.0);
  const auto* from = grad.const_data_ptr<float>();
  for (int64_t b = 0; b < p.batch; b++)
    for (int64_t h = 0; h < p.heads; h++)
      for (int64_t t = 0; t < p.queries; t++) {
        const int64_t i = b % lam.size(0), j = h % lam.size(1), k = t % lam.size(2);
        sums[(i * lam.size(1) + j) * lam.size(2) + k] += *from++;
      }
  std::copy(sums.begin(), sums.end(), out.data_ptr<float>());
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad, const Tensor& lse, const Tensor& plain, const Tensor& inverse_rms, const Tensor& query,
    const Tensor& key, const Tensor& value, const Optional& lam, const Optional& attn_mask, bool is_causal,
    std::optional<int64_t> window, const Optional& kv_start, const Optional& kv_lengths, const Optional& cu_seqlens,
    double scale, const Optional& norm_weight, std::optional<double> norm_eps, double norm_factor) {
  Inputs in(query, key, value, lam, attn_mask, is_causal, window, kv_start, kv_lengths, cu_seqlens, scale, norm_weight,
            norm_eps, norm_factor);
  in.problem.arrange_for_backward();
  const Problem& p = in.problem;
  const auto wide = query.options().dtype(at::kFloat);
  const Tensor grad_query = at::empty({p.batch, p.queries, p.heads, query.size(3)}, query.options()).transpose(1, 2);
  const Tensor grad_key = at::zeros(key.sizes(), wide), grad_value = at::zeros(value.sizes(), wide);
  const Tensor grad_lam = at::empty({lam ? p.batch : 0, p.heads, p.queries}, wide);
  const int64_t tasks = norm_eps ? p.batch * p.groups * p.blocks() : 0;
  const Tensor grad_weight = at::empty({tasks, p.value_width}, wide);
  const auto none = [&] { return at::empty({0}, wide); };
  if (in.is_empty()) {
    grad_query.zero_();
    return {grad_query, grad_key.to(query.scalar_type()), grad_value.to(query.scalar_type()),
            lam ? at::zeros(lam->sizes(), wide) : none(), norm_eps ? at::zeros({p.value_width}, wide) : none()};
  }
  const Tensor grad_rows = Inputs::contiguous_rows(grad);
  by_type(query, [&](auto type, auto element) {
    using Type = decltype(type);
    using In = decltype(element);
    if (lam)
      backward<Type, In, 2>(in, grad_rows, lse, plain, inverse_rms, grad_query, grad_key, grad_value, grad_lam,
                            grad_weight);
    else
      backward<Type, In, 1>(in, grad_rows, lse, plain, inverse_rms, grad_query, grad_key, grad_value, grad_lam,
                            grad_weight);
  });
  Tensor weight_sum = none();
  if (norm_eps) {
    std::vector<double> sums(p.value_width, 0.0);
    const auto* from = grad_weight.const_data_ptr<float>();
    for (int64_t i = 0; i < tasks; i++)
      for (auto& sum : sums) sum += *from++;
    weight_sum = at::empty({p.value_width}, wide);
    std::copy(sums.begin(), sums.end(), weight_sum.data_ptr<float>());
  }
  return {grad_query, grad_key.to(query.scalar_type()), grad_value.to(query.scalar_type()),
          lam ? sum_to_lam(p, grad_lam, *lam) : none(), weight_sum};
}

}  // namespace
}  // namespace difftransformer

TORCH_LIBRARY_IMPL(difftransformer, CPU, m) { m.impl("cpu_attention_backward", difftransformer::attention_backward); }
