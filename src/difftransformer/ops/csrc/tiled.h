// The choice between two kernels for a bf16 call: with AMX tiles (tiled_forward.h), or buffered (forward.h).
#pragma once

#include "kernels.h"

namespace difftransformer {

// Whether the tiled kernel may be used: set by difftransformer_use_tiles if it agrees with the buffered kernel.
inline bool use_tiles = false;

template <class In>
bool takes_tiles(const Problem&) {
  return std::is_same_v<In, BFloat16> && use_tiles;
}

void attend_tiled(const Inputs&, const Outputs&, Runtime&);
void differentiate_tiled(const Inputs&, const Outputs&, const Gradients&, Runtime&);

// Adds up rows in their order, for any number of threads that made them.
void sum_rows(const float* rows, int64_t count, int64_t width, float* to);

}  // namespace difftransformer
