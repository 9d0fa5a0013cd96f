// What a tensor looks like without a copy of it, and whether it is still what it was.
#pragma once

#include "guard.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

namespace replay {

// What must not differ between forward and replay. `set_data` bumps no version, so the pointer counts too; and
// writes through `data()`, as LibTorch's SGD does, leave all of this as it was, so a few values count as well.
struct Fingerprint {
  uint64_t version;
  uint64_t data;
  uint64_t sample; // hash of a few values in host memory
  uint64_t layout; // hash of dtype, device, sizes and strides
  uint8_t requires_grad;
};

inline bool has_storage(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() && tensor.storage().nbytes() != 0;
}

Fingerprint fingerprint(const at::Tensor& tensor);

// Hash of dtype, device, sizes and strides.
uint64_t layout_hash(const at::Tensor& tensor);

} // namespace replay

extern "C" {

int replay_fingerprint(const at::Tensor* tensor, replay::Fingerprint* out);

// Equal sizes, dtypes, devices and bits. Sparse tensors are compared as dense ones.
int replay_same_bits(const at::Tensor* a, const at::Tensor* b, int* out);

// Whether a buffer that looked like `before` when it had the values of `value` has them still. LibTorch's kernels of
// normalisation write running statistics without a new version, so values are compared. These are vectors: a buffer of
// more dimensions and above 1 MiB is compared only where its version, or a few of its values, say that it was written.
int replay_keeps_values(const at::Tensor* buffer, const at::Tensor* value, const replay::Fingerprint* before, int* out);

// The first of `n` tensors, not before `from`, that is no longer as in `before`, or `n`. Where there is a value (null:
// none), it is a buffer, which is compared by that instead of its version; with `versions`, by both.
int replay_differing(
    const at::Tensor* const* tensors,
    const at::Tensor* const* values,
    const replay::Fingerprint* before,
    size_t n,
    size_t from,
    int versions,
    size_t* out);

// Gives a tensor values from before, and the version from before: for whoever saved it then, nothing has happened.
int replay_put_values(const at::Tensor* tensor, const at::Tensor* value, uint64_t version);

}
