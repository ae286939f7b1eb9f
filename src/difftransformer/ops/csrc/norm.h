// Stores the output's rows, with the headwise norm fused in, and computes their gradients.
#pragma once

#include <cmath>

#include "problem.h"

namespace difftransformer {

// Stores finished rows, normalised on request.
template <class In>
struct Output {
  View<In> out, plain;  // plain: the output before the norm, kept for the backward pass
  float* inverse_rms;   // (B, H, T)
  Norm norm;

  void store_row(const Problem& p, int64_t b, int64_t h, int64_t t, float* row) const {
    const int64_t width = p.value_width;
    if (norm.on) {
      convert_row(row, width, plain.at(b, h, t));
      float squares = 0;
#pragma omp simd reduction(+ : squares)
      for (int64_t e = 0; e < width; e++) squares += row[e] * row[e];
      const float inverse = 1.f / std::sqrt(squares / static_cast<float>(width) + norm.eps),
                  factor = inverse * norm.factor;
      inverse_rms[(b * p.heads + h) * p.queries + t] = inverse;
      if (norm.weight)
        for (int64_t e = 0; e < width; e++) row[e] *= factor * norm.weight[e];
      else
        for (int64_t e = 0; e < width; e++) row[e] *= factor;
    }
    convert_row(row, width, out.at(b, h, t));
  }
};

// Gradients of the output before the norm: with n = O / rms and h = dY * weight * factor, dO = (h - n mean(h n)) / rms.
template <class In>
struct OutputGradient {
  View<const In> grad, plain;  // plain: the output before the norm
  const float* inverse_rms;
  Norm norm;

  // Reads a row and adds its part to the weight's gradient. scratch has as many numbers as the row.
  void load_row(const Problem& p, int64_t b, int64_t h, int64_t t, float* row, float* scratch,
                float* weight_gradient) const {
    const int64_t width = p.value_width;
    convert_row(grad.at(b, h, t), width, row);
    if (!norm.on) return;
    const float inverse = inverse_rms[(b * p.heads + h) * p.queries + t];
    convert_row(plain.at(b, h, t), width, scratch);
    float mean = 0;
#pragma omp simd reduction(+ : mean)
    for (int64_t e = 0; e < width; e++) {
      scratch[e] *= inverse;
      row[e] *= norm.factor;
      weight_gradient[e] += row[e] * scratch[e];
      row[e] *= norm.weight ? norm.weight[e] : 1.f;
      mean += row[e] * scratch[e];
    }
    mean /= static_cast<float>(width);
#pragma omp simd
    for (int64_t e = 0; e < width; e++) row[e] = (row[e] - scratch[e] * mean) * inverse;
  }
};

}  // namespace difftransformer
