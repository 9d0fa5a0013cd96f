// `.grad`, which is the accumulator. Whoever moves one holds the mutex under which LibTorch adds to it, from whatever
// thread.
#pragma once

#include "guard.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace replay {

bool has_grad(const at::Tensor& leaf);

// Whether the leaf has a gradient; if so, one with storage of its own afterwards. LibTorch hands over the first one
// without a look at who else holds its storage: the gradient of another leaf, or one that is still on its way. What is
// then added in place would be added there too. Or it is a part of a larger storage, which would live as long. Adds the
// bytes of a copy to `copied`.
bool settle_grad(const at::Tensor& leaf, uint64_t& copied);

// Gives leaves gradients of a wider kind for one backward pass. The engine casts what goes to a leaf's accumulator to
// the kind that is written there, before it adds anything up. Only the accumulator is changed, one byte in it, and it
// is kept alive until it has been changed back: the leaf itself says what it said before.
class WideGrads {
 public:
  WideGrads() = default;
  WideGrads(const WideGrads&) = delete;
  WideGrads& operator=(const WideGrads&) = delete;
  ~WideGrads();

  // From here on. A gradient that is there already is converted; its bytes are added to `copied`.
  void widen(const at::Tensor& leaf, at::ScalarType kind, uint64_t& copied);

 private:
  std::vector<std::pair<c10::intrusive_ptr<torch::autograd::Node>, std::optional<at::ScalarType>>> before_;
};

} // namespace replay

extern "C" {

// Reads `.grad` or moves it out (null where undefined), or puts one in (null: undefined).
int replay_get_grad(const at::Tensor* tensor, at::Tensor** out);
int replay_take_grad(at::Tensor* tensor, at::Tensor** out);
int replay_set_grad(at::Tensor* tensor, const at::Tensor* grad);
// Adds `old` and `.grad` and puts the sum into `.grad`: in place in `old` where that can hold it, else in place in
// `.grad`. Where neither can, `copied` gets the bytes of the sum, otherwise 0. With `widen` an `old` of a narrower kind
// cannot hold it.
int replay_add_grad(at::Tensor* tensor, at::Tensor* old, int widen, uint64_t* copied);

}
