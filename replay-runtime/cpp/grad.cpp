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

uint64_t bytes_of(const at::Tensor& grad) {
  if (grad.is_sparse()) return grad._indices().nbytes() + grad._values().nbytes();
  return static_cast<uint64_t>(grad.numel()) * grad.element_size();
}

bool narrower(const at::Tensor& grad, at::ScalarType kind) {
  return grad.scalar_type() != kind && c10::promoteTypes(grad.scalar_type(), kind) == kind;
}

// A sparse tensor does not take a dense one; LibTorch's own rule.
bool takes(const at::Tensor& sum, const at::Tensor& addend) {
  return !sum.is_sparse() || addend.is_sparse();
}

at::Tensor sum_of(at::Tensor& old, at::Tensor fresh, bool widen, uint64_t& copied) {
  const bool holds = !widen || !narrower(old, fresh.scalar_type());
  if (holds && takes(old, fresh)) return old.add_(fresh);
  const auto kind = c10::promoteTypes(old.scalar_type(), fresh.scalar_type());
  if (fresh.scalar_type() == kind && takes(fresh, old)) return fresh.add_(old);
  // A dense old gradient of a narrower kind and a sparse new one, or a sparse old one of a wider kind and a dense one.
  at::Tensor sum = takes(old, fresh) ? old.to(kind).add_(fresh) : fresh.to(kind).add_(old);
  copied += bytes_of(sum);
  return sum;
}

} // namespace

bool has_grad(const at::Tensor& leaf) {
  const GradLock lock(leaf);
  return leaf.grad().defined();
}

bool settle_grad(const at::Tensor& leaf, uint64_t& copied) {
  const GradLock lock(leaf);
  if (!leaf.grad().defined()) return false;
  at::Tensor& grad = leaf.mutable_grad();
  if (!grad.has_storage() || grad.storage().nbytes() == 0) return true;
  if (grad.storage().use_count() > 1 || grad.storage().nbytes() > bytes_of(grad)) {
    at::AutoGradMode off(false);
    grad = grad.clone();
    copied += bytes_of(grad);
  }
  return true;
}

void WideGrads::widen(const at::Tensor& leaf, at::ScalarType kind, uint64_t& copied) {
  if (!leaf.requires_grad() || !leaf.is_leaf() || leaf.scalar_type() == kind) return;
  const GradLock lock(leaf);
  at::Tensor& grad = leaf.mutable_grad();
  if (grad.defined() && narrower(grad, kind)) {
    at::AutoGradMode off(false);
    grad = grad.to(kind);
    copied += bytes_of(grad);
  }
  auto accumulator = torch::autograd::impl::grad_accumulator(leaf);
  auto& expected = accumulator->mutable_input_metadata(0);
  before_.emplace_back(accumulator, expected.grad_dtype());
  expected.set_grad_dtype(kind);
}

// Last first: a leaf may have come twice.
WideGrads::~WideGrads() {
  for (auto it = before_.rbegin(); it != before_.rend(); ++it)
    it->first->mutable_input_metadata(0).set_grad_dtype(it->second);
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

int replay_add_grad(at::Tensor* tensor, at::Tensor* old, int widen, uint64_t* copied) {
  return guarded([&] {
    *copied = 0;
    at::AutoGradMode off(false);
    const replay::GradLock lock(*tensor);
    const at::Tensor fresh = tensor->grad();
    tensor->mutable_grad() = fresh.defined() ? replay::sum_of(*old, fresh, widen != 0, *copied) : *old;
  });
}
