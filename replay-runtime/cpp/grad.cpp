#include "grad.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>

namespace replay {
namespace {

// LibTorch adds to a leaf's gradient under the mutex of its accumulator, from whatever thread. Whoever moves one holds
// the same mutex.
class GradLock {
 public:
  explicit GradLock(const at::Tensor& leaf) {
    if (!leaf.requires_grad() || !leaf.is_leaf()) return;
    accumulator_ = torch::autograd::impl::grad_accumulator(leaf);
    lock_ = std::unique_lock<std::mutex>((*accumulator_).*Access::mutex());
  }

 private:
  // The mutex is for classes derived from `Node`.
  struct Access : torch::autograd::Node {
    static std::mutex torch::autograd::Node::* mutex() { return &Access::mutex_; }
  };

  c10::intrusive_ptr<torch::autograd::Node> accumulator_;
  std::unique_lock<std::mutex> lock_;
};

} // namespace

bool has_grad(const at::Tensor& leaf) {
  const GradLock lock(leaf);
  return leaf.grad().defined();
}

bool settle_grad(const at::Tensor& leaf) {
  const GradLock lock(leaf);
  if (!leaf.grad().defined()) return false;
  at::Tensor& grad = leaf.mutable_grad();
  if (grad.has_storage() && grad.storage().nbytes() != 0 && grad.storage().use_count() > 1) {
    at::AutoGradMode off(false);
    grad = grad.clone();
  }
  return true;
}

} // namespace replay

using replay::guarded;

int replay_get_grad(const at::Tensor* tensor, at::Tensor** out) {
  return guarded([&] {
    *out = nullptr;
    const replay::GradLock lock(*tensor);
    if (tensor->grad().defined()) *out = new at::Tensor(tensor->grad());
  });
}

int replay_take_grad(at::Tensor* tensor, at::Tensor** out) {
  return guarded([&] {
    *out = nullptr;
    const replay::GradLock lock(*tensor);
    if (!tensor->grad().defined()) return;
    *out = new at::Tensor(tensor->grad());
    tensor->mutable_grad() = at::Tensor();
  });
}

int replay_set_grad(at::Tensor* tensor, const at::Tensor* grad) {
  return guarded([&] {
    const replay::GradLock lock(*tensor);
    tensor->mutable_grad() = grad != nullptr ? *grad : at::Tensor();
  });
}

int replay_add_grad(at::Tensor* tensor, at::Tensor* old) {
  return guarded([&] {
    at::AutoGradMode off(false);
    const replay::GradLock lock(*tensor);
    const at::Tensor fresh = tensor->grad();
    if (!fresh.defined()) {
      tensor->mutable_grad() = *old;
    } else if (old->is_sparse() && !fresh.is_sparse()) {
      // A sparse gradient cannot take a dense one; LibTorch's own rule.
      tensor->mutable_grad() = fresh + *old;
    } else {
      tensor->mutable_grad() = old->add_(fresh);
    }
  });
}
