#include "saved.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace replay {

using WeakImpl = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

struct WeakTensor {
  WeakImpl impl;
};

// The last three keep the addresses of what the input was made of (not its data) from being used again, so that equal
// addresses mean the same thing for as long as this lives.
struct SavedTensor {
  at::Tensor data; // detached: same storage and version counter; or a copy on the host
  at::Device device;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides; // empty where the layout has none
  int64_t offset;
  std::vector<int64_t> once; // the strides without expanded dimensions, for a copy on the host
  bool on_host;
  bool conj;
  bool neg;
  c10::VariableVersion counter; // a handle to the shared one
  WeakStorage storage;
  WeakImpl impl;
};

namespace {

// LibTorch compares versions, and not whose they are.
uintptr_t address_of(const c10::VariableVersion& counter) {
  static_assert(sizeof(counter) == sizeof(uintptr_t), "a version is one pointer to a counter");
  uintptr_t address = 0;
  std::memcpy(&address, static_cast<const void*>(&counter), sizeof(address));
  return address;
}

// A tensor without its expanded dimensions, so that a copy holds each value once.
at::Tensor collapse(at::Tensor tensor) {
  if (tensor.layout() != at::kStrided) return tensor;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    if (tensor.stride(dim) == 0 && tensor.size(dim) > 1) tensor = tensor.narrow(dim, 0, 1);
  return tensor;
}

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return has_storage(tensor) ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

WeakStorage weak_storage(const at::Tensor& tensor) {
  if (!has_storage(tensor)) return WeakStorage(c10::intrusive_ptr<c10::StorageImpl>());
  return WeakStorage(tensor.storage().getWeakStorageImpl());
}

} // namespace
} // namespace replay

using replay::guarded;
using replay::value_of;

uintptr_t replay_counter(const at::Tensor* tensor) {
  return replay::address_of(tensor->unsafeGetTensorImpl()->version_counter());
}

uint64_t replay_storage_nbytes(const at::Tensor* tensor) {
  return value_of<uint64_t>([&] { return replay::has_storage(*tensor) ? tensor->storage().nbytes() : 0; });
}

uint64_t replay_nbytes(const at::Tensor* tensor) {
  return value_of<uint64_t>([&] { return replay::collapse(tensor->detach()).nbytes(); });
}

int replay_saved_new(const at::Tensor* tensor, int on_host, replay::SavedTensor** out) {
  return guarded([&] {
    at::AutoGradMode off(false);
    const bool strided = tensor->layout() == at::kStrided;
    auto saved = std::make_unique<replay::SavedTensor>(replay::SavedTensor{
        tensor->detach(),
        tensor->device(),
        tensor->sizes().vec(),
        strided ? tensor->strides().vec() : std::vector<int64_t>(),
        strided ? tensor->storage_offset() : 0,
        {},
        on_host != 0 && tensor->is_cuda() && strided,
        tensor->is_conj(),
        tensor->is_neg(),
        tensor->unsafeGetTensorImpl()->version_counter(),
        replay::weak_storage(*tensor),
        replay::WeakImpl(tensor->getIntrusivePtr())});
    if (saved->on_host) {
      const at::Tensor once = replay::collapse(saved->data);
      at::Tensor host = at::empty_like(once, once.options().device(at::kCPU).pinned_memory(true));
      host.copy_(once);
      saved->once = once.strides().vec();
      saved->data = std::move(host);
    }
    *out = saved.release();
  });
}

int replay_saved_is(const replay::SavedTensor* saved, const at::Tensor* tensor) {
  return value_of<int>([&] {
    const bool strided = tensor->layout() == at::kStrided;
    const auto* storage = replay::storage_of(*tensor);
    if (storage == nullptr && saved->impl._unsafe_get_target() != tensor->unsafeGetTensorImpl()) return false;
    return replay::address_of(saved->counter) == replay_counter(tensor) &&
        saved->storage._unsafe_get_target() == storage && saved->device == tensor->device() &&
        saved->data.layout() == tensor->layout() && saved->data.scalar_type() == tensor->scalar_type() &&
        tensor->sizes() == saved->sizes && saved->conj == tensor->is_conj() && saved->neg == tensor->is_neg() &&
        (!strided || (tensor->strides() == saved->strides && tensor->storage_offset() == saved->offset));
  });
}

int replay_saved_leaf(const replay::SavedTensor* saved, int requires_grad, at::Tensor** out) {
  return guarded([&] {
    at::AutoGradMode off(false);
    at::Tensor leaf = saved->data;
    if (saved->on_host) {
      // In the strides of the forward, since kernels are chosen by them too.
      leaf = at::empty_strided(leaf.sizes(), saved->once, leaf.options().device(saved->device).pinned_memory(false));
      leaf.copy_(saved->data);
      leaf = leaf.expand(saved->sizes);
    }
    leaf = leaf.detach();
    if (requires_grad != 0) leaf.set_requires_grad(true);
    *out = new at::Tensor(std::move(leaf));
  });
}

int replay_saved_on_host(const replay::SavedTensor* saved) {
  return saved->on_host;
}

int replay_saved_fingerprint(const replay::SavedTensor* saved, replay::Fingerprint* out) {
  return replay_fingerprint(&saved->data, out);
}

void replay_saved_free(replay::SavedTensor* saved) {
  delete saved;
}

replay::WeakTensor* replay_weak_new(const at::Tensor* tensor) {
  return value_of<replay::WeakTensor*>(
      [&] { return new replay::WeakTensor{replay::WeakImpl(tensor->getIntrusivePtr())}; });
}

at::Tensor* replay_weak_lock(const replay::WeakTensor* weak) {
  return value_of<at::Tensor*>([&]() -> at::Tensor* {
    auto impl = weak->impl.lock();
    return impl.defined() ? new at::Tensor(std::move(impl)) : nullptr;
  });
}

void replay_weak_free(replay::WeakTensor* weak) {
  delete weak;
}
