// Runs a program over blocks: each step is one pass over a block that stays in the L1 cache.
#pragma once

#include "program.h"

namespace gnfuse {

// Applies the steps to `n` values in place. `mask` is positioned at the first value. Values past n, up to a whole vector,
// are overwritten (kPadding).
template <typename acc>
void run_forward(const Program& program, acc* values, int64_t n, const MaskView& mask);

// Elements of scratch that `run_backward` needs for blocks of n.
int64_t backward_scratch(const Program& program, int64_t n);

// Turns the gradient at the end of the chain into the gradient at its start, in place. `y` are the values at the start.
template <typename acc>
void run_backward(const Program& program, const acc* y, acc* grad, int64_t n, const MaskView& mask, acc* scratch);

} // namespace gnfuse
