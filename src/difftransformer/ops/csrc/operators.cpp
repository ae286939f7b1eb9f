// The operators difftransformer::cpu_attention and cpu_attention_backward (`define` in ops/fused.py has their schemas).
// They use only torch's stable interface, so that a library built with one release of torch runs with the next.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

#include "kernels.h"

namespace difftransformer {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;
using Sizes = std::vector<int64_t>;

Tensor empty(const Sizes& sizes, const Sizes& strides, ScalarType dtype) {
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)), aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}
Tensor empty(const Sizes& sizes, ScalarType dtype = ScalarType::Float) {
  Sizes strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  return empty(sizes, strides, dtype);
}
// Makes a tensor (B, H, T, width) that is (B, T, H, width) in memory, so that the layer's next product needs no copy.
Tensor empty_by_token(int64_t batch, const Problem& p, int64_t width, ScalarType dtype) {
  return empty({batch, p.heads, p.queries, width}, {p.heads * p.queries * width, width, p.heads * width, 1}, dtype);
}
// Makes a contiguous tensor.
Tensor contiguous_like(const Tensor& x) { return empty(Sizes(x.sizes().begin(), x.sizes().end()), x.scalar_type()); }
Tensor zeros(const Tensor& like) {
  Tensor made = empty(Sizes(like.sizes().begin(), like.sizes().end()));
  return torch::stable::zero_(made);
}

float* floats(const Tensor& x) { return static_cast<float*>(x.data_ptr()); }
Rows rows_of(const Tensor& x) { return {x.data_ptr(), {x.stride(0), x.stride(1), x.stride(2)}}; }

// Threads and memory from torch.
class TorchRuntime final : public Runtime {
 public:
  int64_t threads() const override { return torch::stable::get_num_threads(); }
  void run(int64_t count, const std::function<void(int64_t, int64_t)>& work) override {
    torch::stable::parallel_for(0, count, 1, work);
  }
  void* allocate(int64_t bytes) override { return memory_.emplace_back(empty({ceil_div(bytes, 4)})).data_ptr(); }

 private:
  std::vector<Tensor> memory_;
};

// The arguments of a call as the kernels read them, and the tensors that keep them alive.
struct Call : Inputs {
  std::vector<Tensor> kept;

  Call(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& lam, const Optional& attn_mask,
       bool is_causal, std::optional<int64_t> window, const Optional& kv_start, const Optional& kv_lengths,
       const Optional& cu_seqlens, double scale, const Optional& norm_weight, std::optional<double> norm_eps,
       double norm_factor) {
    query = keep_rows(q, "query");
    key = keep_rows(k, "key");
    value = keep_rows(v, "value");
    Problem& p = problem;
    p.maps = lam ? 2 : 1;
    p.batch = q.size(0);
    p.heads = q.size(1);
    p.queries = q.size(2);
    p.width = q.size(3) / p.maps;
    p.groups = k.size(1);
    p.keys = k.size(2);
    p.value_width = v.size(3);
    p.shared_key = k.size(3) == p.width;
    p.scale = static_cast<float>(scale);
    p.is_causal = is_causal;
    p.window = window.value_or(0);
    STD_TORCH_CHECK(p.keys < INT32_MAX, "the CPU kernels take fewer than 2^31 keys, got ", p.keys);
    p.first_key = kv_start ? numbers(*kv_start, "kv_start") : Sizes(p.batch, 0);
    p.last_key = kv_lengths ? numbers(*kv_lengths, "kv_lengths") : Sizes(p.batch, p.keys);
    // The caller checks values if it can read them; here a wrong value must not lead outside the tensors.
    for (auto* bounds : {&p.first_key, &p.last_key})
      for (auto& bound : *bounds) bound = std::clamp<int64_t>(bound, 0, p.keys);
    if (cu_seqlens) {
      p.document_first.resize(p.queries);
      p.document_last.resize(p.queries);
      const Sizes bounds = numbers(*cu_seqlens, "cu_seqlens");
      for (size_t i = 0; i + 1 < bounds.size(); i++)
        for (int64_t t = std::max<int64_t>(bounds[i], 0); t < std::min(bounds[i + 1], p.queries); t++) {
          p.document_first[t] = std::clamp<int64_t>(bounds[i], 0, p.keys);
          p.document_last[t] = std::clamp<int64_t>(bounds[i + 1], 0, p.keys);
        }
    }
    if (attn_mask) {
      p.mask = static_cast<const bool*>(keep(*attn_mask, "attn_mask").data_ptr());
      broadcast(*attn_mask, {p.batch, p.heads, p.queries, p.keys}, p.mask_strides);
    }
    if (lam) {
      const Tensor& wide = keep(torch::stable::to(*lam, ScalarType::Float), "lam");
      p.lam = floats(wide);
      broadcast(wide, {p.batch, p.heads, p.queries}, p.lam_strides);
    }
    if (norm_eps) {
      norm.on = true;
      norm.eps = static_cast<float>(*norm_eps);
      norm.factor = static_cast<float>(norm_factor);
      if (norm_weight)
        norm.weight =
            floats(keep(torch::stable::contiguous(torch::stable::to(*norm_weight, ScalarType::Float)), "norm weight"));
    }
  }

  const Tensor& keep(const Tensor& x, const char* name) {
    STD_TORCH_CHECK(x.is_cpu(), "the CPU kernels read tensors on the CPU, ", name, " is on another device");
    return kept.emplace_back(x);
  }
  Rows keep_rows(const Tensor& x, const char* name) {
    const bool in_rows = x.stride(3) == 1 || x.size(3) == 1;
    return rows_of(keep(in_rows ? x : torch::stable::contiguous(x), name));
  }
  Sizes numbers(const Tensor& x, const char* name) {
    const Tensor wide = torch::stable::contiguous(torch::stable::to(keep(x, name), ScalarType::Long));
    const auto* from = static_cast<const int64_t*>(wide.data_ptr());
    return {from, from + wide.numel()};
  }
  // Strides as after expand().
  static void broadcast(const Tensor& x, const Sizes& sizes, int64_t* strides) {
    const int64_t missing = static_cast<int64_t>(sizes.size()) - x.dim();
    for (int64_t i = 0; i < static_cast<int64_t>(sizes.size()); i++)
      strides[i] = i < missing || (x.size(i - missing) == 1 && sizes[i] != 1) ? 0 : x.stride(i - missing);
  }
  bool is_empty() const {
    return problem.batch == 0 || problem.heads == 0 || problem.queries == 0 || problem.keys == 0;
  }
};

// Calls `work` with a value of the inputs' type.
template <class Work>
void by_type(ScalarType dtype, const Work& work) {
  switch (dtype) {
    case ScalarType::Float:
      return work(float{});
    case ScalarType::Half:
      return work(Half{});
    case ScalarType::BFloat16:
      return work(BFloat16{});
    default:
      STD_TORCH_CHECK(false, "the CPU kernels take float32, bfloat16 and float16, got another dtype");
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention(Tensor query, Tensor key, Tensor value, Optional lam,
                                                     Optional attn_mask, bool is_causal, std::optional<int64_t> window,
                                                     Optional kv_start, Optional kv_lengths, Optional cu_seqlens,
                                                     double scale, Optional norm_weight, std::optional<double> norm_eps,
                                                     double norm_factor) {
  const Call in(query, key, value, lam, attn_mask, is_causal, window, kv_start, kv_lengths, cu_seqlens, scale,
                norm_weight, norm_eps, norm_factor);
  const Problem& p = in.problem;
  const ScalarType dtype = query.scalar_type();
  const int64_t normed = norm_eps ? p.batch : 0;
  Tensor out = empty_by_token(p.batch, p, p.value_width, dtype);
  Tensor plain = empty_by_token(normed, p, p.value_width, dtype);
  Tensor lse = empty({p.maps, p.batch, p.heads, p.queries});
  Tensor inverse_rms = empty({normed, p.heads, p.queries});
  if (in.is_empty()) {
    for (Tensor* x : {&out, &plain, &inverse_rms}) torch::stable::zero_(*x);
    torch::stable::fill_(lse, INFINITY);
  } else {
    TorchRuntime runtime;
    const Outputs outputs{rows_of(out), rows_of(plain), floats(lse), floats(inverse_rms)};
    by_type(dtype, [&](auto number) { attend<decltype(number)>(in, outputs, runtime); });
  }
  return {out, lse, plain, inverse_rms};
}

// Sums (B, H, T) to the shape in which lam was given, in the same order for any number of threads.
Tensor sum_to_lam(const Problem& p, const Tensor& grad, const Tensor& lam) {
  const int64_t sizes[3] = {lam.size(0), lam.size(1), lam.size(2)};
  if (sizes[0] == p.batch && sizes[1] == p.heads && sizes[2] == p.queries) return grad;
  const Tensor out = empty({sizes[0], sizes[1], sizes[2]});
  std::vector<double> sums(out.numel(), 0.0);
  const float* from = floats(grad);
  for (int64_t b = 0; b < p.batch; b++)
    for (int64_t h = 0; h < p.heads; h++)
      for (int64_t t = 0; t < p.queries; t++)
        sums[(b % sizes[0] * sizes[1] + h % sizes[1]) * sizes[2] + t % sizes[2]] += *from++;
  std::copy(sums.begin(), sums.end(), floats(out));
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    Tensor grad, Tensor lse, Tensor plain, Tensor inverse_rms, Tensor query, Tensor key, Tensor value, Optional lam,
    Optional attn_mask, bool is_causal, std::optional<int64_t> window, Optional kv_start, Optional kv_lengths,
    Optional cu_seqlens, double scale, Optional norm_weight, std::optional<double> norm_eps, double norm_factor) {
  Call in(query, key, value, lam, attn_mask, is_causal, window, kv_start, kv_lengths, cu_seqlens, scale, norm_weight,
          norm_eps, norm_factor);
  const Problem& p = in.problem;
  const ScalarType dtype = query.scalar_type();
  Tensor grad_query = empty_by_token(p.batch, p, query.size(3), dtype);
  Tensor grad_key = contiguous_like(key), grad_value = contiguous_like(value);
  const Tensor grad_lam = empty({lam ? p.batch : 0, p.heads, p.queries});
  Tensor grad_weight = empty({norm_eps ? p.value_width : 0});
  if (in.is_empty()) {
    for (Tensor* x : {&grad_query, &grad_key, &grad_value, &grad_weight}) torch::stable::zero_(*x);
    return {grad_query, grad_key, grad_value, lam ? zeros(*lam) : empty({0}), grad_weight};
  }
  const Gradients gradients{in.keep_rows(grad, "the output's gradient"),
                            rows_of(grad_query),
                            grad_key.data_ptr(),
                            grad_value.data_ptr(),
                            floats(grad_lam),
                            floats(grad_weight)};
  const Outputs outputs{{}, rows_of(plain), floats(lse), floats(inverse_rms)};
  TorchRuntime runtime;
  by_type(dtype, [&](auto number) { differentiate<decltype(number)>(in, outputs, gradients, runtime); });
  return {grad_query, grad_key, grad_value, lam ? sum_to_lam(p, grad_lam, *lam) : empty({0}), grad_weight};
}

}  // namespace
}  // namespace difftransformer

STABLE_TORCH_LIBRARY_IMPL(difftransformer, CPU, m) {
  m.impl("cpu_attention", TORCH_BOX(&difftransformer::attention));
  m.impl("cpu_attention_backward", TORCH_BOX(&difftransformer::attention_backward));
}
