// The operator difftransformer::cpu_attention (its schema is in ops/cpu.py).
#include "forward.h"

#include <cpuid.h>
#include <torch/library.h>

#include <cstdlib>
#include <string>
#include <tuple>

#include "decode.h"
#include "inputs.h"

namespace difftransformer {
namespace {

template <class Type, class In, int maps>
void forward(const Inputs& in, const Output<In>& output, float* lse) {
  const Problem& p = in.problem;
  const View<const In> query(in.query), key(in.key), value(in.value);
  if (p.rows() <= kDecodeRows && p.keys > kDecodeChunk / 2) {
    Decode<In, maps>{p, query, key, value, output, lse}.run();
    return;
  }
  Operand<Type> keys[2];
  for (int m = 0; m < maps; m++)
    keys[m] = m && p.shared_key ? keys[0] : make_operand<Type, In>(p, in.key, m * p.width, p.width, false);
  Forward<Type, In, maps>{
      p, query, {keys[0], keys[1]}, make_operand<Type, In>(p, in.value, 0, p.value_width, true), output, lse}
      .run();
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                                     const Optional& lam, const Optional& attn_mask, bool is_causal,
                                                     std::optional<int64_t> window, const Optional& kv_start,
                                                     const Optional& kv_lengths, const Optional& cu_seqlens,
                                                     double scale, const Optional& norm_weight,
                                                     std::optional<double> norm_eps, double norm_factor) {
  const Inputs in(query, key, value, lam, attn_mask, is_causal, window, kv_start, kv_lengths, cu_seqlens, scale,
                  norm_weight, norm_eps, norm_factor);
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

#if defined(DIFFTRANSFORMER_BRGEMM) && defined(__AVX512BF16__)
// torch's brgemm is internal and carries no promise: it is taken where the processor has AMX, and only if it multiplies
// a small block rightly here and now. DIFFTRANSFORMER_BRGEMM=0 or 1 overrules the first condition.
bool has_amx() {
  unsigned a, b, c, d;
  constexpr unsigned bf16_tiles = 1u << 22, tiles = 1u << 24;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & bf16_tiles) && (d & tiles);
}
bool brgemm_works() {
  const char* wish = std::getenv("DIFFTRANSFORMER_BRGEMM");
  if (wish ? std::string(wish) != "1" : !has_amx()) return false;
  constexpr int64_t M = 5, N = W, K = kBrgemmUnits;
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

TORCH_LIBRARY_IMPL(difftransformer, CPU, m) { m.impl("cpu_attention", difftransformer::attention); }
