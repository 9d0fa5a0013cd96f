// The graph of a tensor, followed from node to node.
#pragma once

#include "guard.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

namespace replay {

// For `replay_leaves`: nodes of any age and thread.
constexpr uint64_t kAnyAge = UINT64_MAX;

} // namespace replay

extern "C" {

// The number that the next node made on this thread will get.
uint64_t replay_sequence();

// Calls `visit(context, impl, variable)` for each leaf that the graphs of `roots` accumulate into. Unless `since`
// is `kAnyAge`, a node of this thread with a lower number ends the walk with `kCaptured` and its name. `cuda_index` gets
// the index of a CUDA device that the graphs compute on, -1 where there is none. `spans` are pairs of numbers, ascending and
// apart: `touched` gets 1 for each that the number of a node of this thread is in, from the first to before the second.
int replay_leaves(
    const at::Tensor* const* roots,
    size_t n,
    uint64_t since,
    void (*visit)(void* context, uintptr_t impl, const at::Tensor* variable),
    void* context,
    int* cuda_index,
    const uint64_t* spans,
    size_t n_spans,
    uint8_t* touched);

}
