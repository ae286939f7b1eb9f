// The arguments of an operator in the forms that the kernels read, and the choice of a kernel by dtype.
#pragma once

#include <optional>

#include "problem.h"

namespace difftransformer {

using at::Tensor;
using Optional = std::optional<Tensor>;

// The inputs of a call, in the forms that the kernels read.
struct Inputs {
  Tensor query, key, value, lam, mask, weight;
  Problem problem;
  Norm norm;

  Inputs(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& lam_, const Optional& attn_mask,
         bool is_causal, std::optional<int64_t> window, const Optional& kv_start, const Optional& kv_lengths,
         const Optional& cu_seqlens, double scale, const Optional& norm_weight, std::optional<double> norm_eps,
         double norm_factor)
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
  bool is_empty() const {
    return problem.batch == 0 || problem.heads == 0 || problem.queries == 0 || problem.keys == 0;
  }
};

// Calls work with the type that products are made in and the type of the inputs.
template <class Work>
void by_type(const Tensor& query, const Work& work) {
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

}  // namespace difftransformer
