// The operators difftransformer::cpu_attention and cpu_attention_backward (schemas in ops/cpu.py).
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <ATen/Dispatch.h>

#include <cpuid.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <tuple>

#include "backward.h"
#include "decode.h"

namespace difftransformer {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

// The inputs of a call, in the forms that the kernels read.
struct Inputs {
  Tensor query, key, value, lam, mask, weight;
  Problem problem;
  Norm norm;

  Inputs(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& lam_, const Optional& attn_mask, bool is_causal,
         std::optional<int64_t> window, const Optional& kv_start, const Optional& kv_lengths, const Optional& cu_seqlens, double scale,
         const Optional& norm_weight, std::optional<double> norm_eps, double norm_factor)
      : query(contiguous_rows(q)), key(contiguous_rows(k)), value(contiguous_rows(v)) {
    Problem& p = problem;
    p.maps = lam_ ? 2 : 1;
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
    TORCH_CHECK(p.keys < INT32_MAX, "the CPU kernels take fewer than 2^31 keys, got ", p.keys);
    p.first_key = kv_start ? numbers(*kv_start) : std::vector<int64_t>(p.batch, 0);
    p.last_key = kv_lengths ? numbers(*kv_lengths) : std::vector<int64_t>(p.batch, p.keys);
    // Values are checked by the caller where they can be read; a wrong one must not reach outside the tensors.
    for (auto* bounds : {&p.first_key, &p.last_key})
      for (auto& bound : *bounds) bound = std::clamp<int64_t>(bound, 0, p.keys);
    if (cu_seqlens) {
      p.document_first.resize(p.queries);
      p.document_last.resize(p.queries);
      const std::vector<int64_t> bounds = numbers(*cu_seqlens);
      for (size_t i = 0; i + 1 < bounds.size(); i++)
        for (int64_t t = std::max<int64_t>(bounds[i], 0); t < std::min(bounds[i + 1], p.queries); t++) {
          p.document_first[t] = std::clamp<int64_t>(bounds[i], 0, p.keys);
          p.document_last[t] = std::clamp<int64_t>(bounds[i + 1], 0, p.keys);
        }
    }
    if (attn_mask) {
      mask = attn_mask->expand({p.batch, p.heads, p.queries, p.keys});
      p.mask = mask.const_data_ptr<bool>();
      for (int i = 0; i < 4; i++) p.mask_strides[i] = mask.stride(i);
    }
    if (lam_) {
      lam = lam_->to(at::kFloat).expand({p.batch, p.heads, p.queries});
      p.lam = lam.const_data_ptr<float>();
      for (int i = 0; i < 3; i++) p.lam_strides[i] = lam.stride(i);
    }
    if (norm_eps) {
      norm.on = true;
      norm.eps = static_cast<float>(*norm_eps);
      norm.factor = static_cast<float>(norm_factor);
      if (norm_weight) {
        weight = norm_weight->to(at::kFloat).contiguous();
        norm.weight = weight.const_data_ptr<float>();
      }
    }
  }

  static Tensor contiguous_rows(const Tensor& x) { return x.stride(3) == 1 || x.size(3) == 1 ? x : x.contiguous(); }
  static std::vector<int64_t> numbers(const Tensor& x) {
    const Tensor wide = x.to(at::kLong).contiguous();
    return {wide.const_data_ptr<int64_t>(), wide.const_data_ptr<int64_t>() + wide.numel()};
  }
  bool is_empty() const { return problem.batch == 0 || problem.heads == 0 || problem.queries == 0 || problem.keys == 0; }
};

template <class Type, class In, int maps> void forward(const Inputs& in, const Output<In>& output, float* lse) {
  const Problem& p = in.problem;
  const View<const In> query(in.query), key(in.key), value(in.value);
  if (p.rows() <= kDecodeRows && p.keys > kTile) {
    Decode<In, maps>{p, query, key, value, output, lse}.run();
    return;
  }
  Operand<Type> keys[2];
  for (int m = 0; m < maps; m++)
    keys[m] = m && p.shared_key ? keys[0] : make_operand<Type, In>(p, in.key, m * p.width, p.width, false);
  Forward<Type, In, maps>{p, query, {keys[0], keys[1]}, make_operand<Type, In>(p, in.value, 0, p.value_width, true), output, lse}.run();
}

// Calls work with the type that products are made in and the type of the inputs.
template <class Work> void by_type(const Tensor& query, const Work& work) {
  switch (query.scalar_type()) {
    case at::kFloat:
      return work(Fp32{}, float{});
    case at::kHalf:
      return work(Fp32{}, Half{});
    case at::kBFloat16:
#if defined(__AVX512BF16__)
      return work(Bf16{}, BFloat16{});
#else
      return work(Fp32{}, BFloat16{});
#endif
    default:
      TORCH_CHECK(false, "the CPU kernels take float32, bfloat16 and float16, got ", query.scalar_type());
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const Optional& lam, const Optional& attn_mask, bool is_causal,
    std::optional<int64_t> window, const Optional& kv_start, const Optional& kv_lengths, const Optional& cu_seqlens, double scale,
    const Optional& norm_weight, std::optional<double> norm_eps, double norm_factor) {
  const Inputs in(query, key, value, lam, attn_mask, is_causal, window, kv_start, kv_lengths, cu_seqlens, scale, norm_weight, norm_eps,
                  norm_factor);
  const Problem& p = in.problem;
  const auto wide = query.options().dtype(at::kFloat);
  // (B, T, H, E) in memory: the layer's next product reads it without a copy.
  const auto rows = [&](int64_t batch) {
    return at::empty({batch, p.queries, p.heads, p.value_width}, query.options()).transpose(1, 2);
  };
  const Tensor out = rows(p.batch), plain = rows(norm_eps ? p.batch : 0);
  const Tensor lse = at::empty({p.maps, p.batch, p.heads, p.queries}, wide);
  const Tensor inverse_rms = at::empty({norm_eps ? p.batch : 0, p.heads, p.queries}, wide);
  if (in.is_empty()) {
    out.zero_();
    plain.zero_();
    lse.fill_(INFINITY);
    inverse_rms.zero_();
    return {out, lse, plain, inverse_rms};
  }
  by_type(query, [&](auto type, auto element) {
    using Type = decltype(type);
    using In = decltype(element);
    const Output<In> output{View<In>(out), View<In>(plain), inverse_rms.data_ptr<float>(), in.norm};
    if (lam)
      forward<Type, In, 2>(in, output, lse.data_ptr<float>());
    else
      forward<Type, In, 1>(in, output, lse.data_ptr<float>());
  });
  return {out, lse, plain, inverse_rms};
}

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
    const Tensor& grad, const Tensor& lse, const Tensor& plain, const Tensor& inverse_rms, const Tensor& query, const Tensor& key,
    const Tensor& value, const Optional& lam, const Optional& attn_mask, bool is_causal, std::optional<int64_t> window,
    const Optional& kv_start, const Optional& kv_lengths, const Optional& cu_seqlens, double scale, const Optional& norm_weight,
    std::optional<double> norm_eps, double norm_factor) {
  const Inputs in(query, key, value, lam, attn_mask, is_causal, window, kv_start, kv_lengths, cu_seqlens, scale, norm_weight, norm_eps,
                  norm_factor);
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
      backward<Type, In, 2>(in, grad_rows, lse, plain, inverse_rms, grad_query, grad_key, grad_value, grad_lam, grad_weight);
    else
      backward<Type, In, 1>(in, grad_rows, lse, plain, inverse_rms, grad_query, grad_key, grad_value, grad_lam, grad_weight);
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

#if defined(DIFFTRANSFORMER_BRGEMM) && defined(__AVX512BF16__)
// torch's brgemm is internal and carries no promise: it is taken where the processor has AMX, and only if it multiplies a
// small block rightly here and now. DIFFTRANSFORMER_BRGEMM=0 or 1 overrules the first condition.
bool has_amx() {
  unsigned a, b, c, d;
  constexpr unsigned bf16_tiles = 1u << 22, tiles = 1u << 24;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & bf16_tiles) && (d & tiles);
}
bool brgemm_works() {
  const char* wish = std::getenv("DIFFTRANSFORMER_BRGEMM");
  if (wish ? std::string(wish) != "1" : !has_amx()) return false;
  constexpr int64_t M = 5, N = W, K = 3;  // units
  alignas(64) BFloat16 A[M * 2 * K], B[K * N * 2];
  alignas(64) float by_torch[M * N], ours[M * N];
  for (int64_t i = 0; i < M * 2 * K; i++) A[i] = static_cast<float>(i % 7 - 3);
  for (int64_t i = 0; i < K * N * 2; i++) B[i] = static_cast<float>(i % 5 - 2);
  const auto multiply = [&](float* C) {
    gemm<Bf16>(M, N, K, reinterpret_cast<uint32_t*>(A), K, reinterpret_cast<uint32_t*>(B), N, C, N, false);
  };
  multiply(ours);
  try {
    use_brgemm = true;
    multiply(by_torch);
    at::native::cpublas::brgemm_release(true);
  } catch (const std::exception&) {
    return false;
  }
  return std::equal(ours, ours + M * N, by_torch);  // small integers: exact
}
const bool brgemm_chosen = use_brgemm = brgemm_works();
#endif

}  // namespace
}  // namespace difftransformer

TORCH_LIBRARY_IMPL(difftransformer, CPU, m) {
  m.impl("cpu_attention", difftransformer::attention);
  m.impl("cpu_attention_backward", difftransformer::attention_backward);
}
