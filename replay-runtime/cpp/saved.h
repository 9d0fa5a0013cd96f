// Inputs kept from the forward to the replay, and references that keep nothing.
#pragma once

#include "guard.h"
#include "print.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace replay {
struct SavedTensor;
struct WeakTensor;
} // namespace replay

extern "C" {

// The identity of its version counter, which its views and what is detached from it have too.
uintptr_t replay_counter(const at::Tensor* tensor);
// Bytes of the whole storage, 0 where there is none.
uint64_t replay_storage_nbytes(const at::Tensor* tensor);
// Bytes of the values, expanded dimensions counted once.
uint64_t replay_nbytes(const at::Tensor* tensor);

int replay_saved_new(const at::Tensor* tensor, int on_host, replay::SavedTensor** out);
// Whether it was made of the same part of the same storage, under the same version counter; of the same tensor where
// that has no storage. It holds the same values where the fingerprints are equal too.
int replay_saved_is(const replay::SavedTensor* saved, const at::Tensor* tensor);
int replay_saved_leaf(const replay::SavedTensor* saved, int requires_grad, at::Tensor** out);
int replay_saved_on_host(const replay::SavedTensor* saved);
int replay_saved_fingerprint(const replay::SavedTensor* saved, replay::Fingerprint* out);
void replay_saved_free(replay::SavedTensor* saved);

replay::WeakTensor* replay_weak_new(const at::Tensor* tensor);
// A new tensor, or null when the last strong reference is gone.
at::Tensor* replay_weak_lock(const replay::WeakTensor* weak);
void replay_weak_free(replay::WeakTensor* weak);

}
