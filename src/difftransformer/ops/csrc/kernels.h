// The interface of the kernels: one call of attention and of its backward pass, in pointers and strides.
#pragma once

#include "problem.h"

namespace difftransformer {

// query (B, H, T, maps * D); key (B, G, S, maps * D) or (B, G, S, D); value (B, G, S, E), all of one type.
struct Inputs {
  Problem problem;
  Norm norm;
  Rows query, key, value;
};

// out and, with a norm, plain (the output before it): (B, H, T, E). lse: (maps, B, H, T), in units of scores.
// inverse_rms: (B, H, T).
struct Outputs {
  Rows out, plain;
  float *lse, *inverse_rms;
};

// out and query have the shapes of the output and the query; key and value those of key and value, contiguous. lam is
// (B, H, T). weight is (E), and written only if there is a norm.
struct Gradients {
  Rows out, query;
  void *key, *value;
  float *lam, *weight;
};

template <class In>
void attend(const Inputs&, const Outputs&, Runtime&);
template <class In>
void differentiate(const Inputs&, const Outputs&, const Gradients&, Runtime&);

// Products in fp32, or in the given type if the processor supports it.
template <class In>
struct ProductsOf {
  using Type = Fp32;
};
#if defined(__AVX512BF16__)
template <>
struct ProductsOf<BFloat16> {
  using Type = Bf16;
};
#endif

}  // namespace difftransformer
