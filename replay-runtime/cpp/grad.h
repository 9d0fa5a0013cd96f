// `.grad`, which is the accumulator. Whoever moves one holds the mutex under which LibTorch adds to it, from whatever
// thread.
#pragma once

#include "guard.h"

#include <ATen/ATen.h>

namespace replay {

bool has_grad(const at::Tensor& leaf);

// Whether the leaf has a gradient; if so, one with storage of its own afterwards. LibTorch hands over the first one
// without a look at who else holds its storage: the gradient of another leaf, or one that is still on its way. What is
// then added in place would be added there too.
bool settle_grad(const at::Tensor& leaf);

} // namespace replay

extern "C" {

// Reads `.grad` or moves it out (null where undefined), or puts one in (null: undefined).
int replay_get_grad(const at::Tensor* tensor, at::Tensor** out);
int replay_take_grad(at::Tensor* tensor, at::Tensor** out);
int replay_set_grad(at::Tensor* tensor, const at::Tensor* grad);
// Adds `.grad` to `old`, in place where `old` can hold the sum, and puts the sum into `.grad`.
int replay_add_grad(at::Tensor* tensor, at::Tensor* old);

}
