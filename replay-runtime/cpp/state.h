// Everything else that the runtime needs of LibTorch and tch does not offer: saved inputs, versions, gradients,
// thread modes. Functions that answer with a value instead of a code give 0 or null when LibTorch fails. Each function
// touches only what it is given and the state of the calling thread.
#pragma once

#include "guard.h"

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>

namespace replay {
struct SavedTensor;
struct WeakTensor;

// What must not differ between forward and replay. `set_data` bumps no version, so the pointer counts too; and
// writes through `data()`, as LibTorch's SGD does, leave all of this as it was, so a few values count as well.
struct Fingerprint {
  uint64_t version;
  uint64_t data;
  uint64_t sample; // hash of a few values in host memory
  uint64_t layout; // hash of dtype, device, sizes and strides
  uint8_t requires_grad;
};

// The modes of the calling thread (the last four: of the process) that change what an operation computes.
struct Modes {
  uint8_t grad;
  uint8_t autocast_cpu;
  uint8_t autocast_cuda;
  uint8_t autocast_cache;
  int8_t autocast_cpu_dtype;
  int8_t autocast_cuda_dtype;
  int8_t default_dtype;
  uint8_t deterministic;
  uint8_t deterministic_warn_only;
  uint8_t deterministic_fill;
};

// Hash of dtype, device, sizes and strides.
uint64_t layout_hash(const at::Tensor& tensor);
} // namespace replay

extern "C" {

// Output: detached; `aliases` says that its storage is known elsewhere too, and then it is handed out as a view
// on which an in-place operation is an error.
int replay_detach_output(const at::Tensor* tensor, int aliases, at::Tensor** out);

// A copy of whatever layout, without history.
int replay_copy(const at::Tensor* tensor, at::Tensor** out);

int replay_fingerprint(const at::Tensor* tensor, replay::Fingerprint* out);
// Equal sizes, dtypes, devices and bits. Sparse tensors are compared as dense ones.
int replay_same_bits(const at::Tensor* a, const at::Tensor* b, int* out);
// Gives a tensor values from before, and the version from before: for whoever saved it then, nothing has happened.
int replay_put_values(const at::Tensor* tensor, const at::Tensor* value, uint64_t version);

uintptr_t replay_impl(const at::Tensor* tensor);
// Identity of the storage, 0 where there is none or it is empty.
uintptr_t replay_storage(const at::Tensor* tensor);
uint64_t replay_nbytes(const at::Tensor* tensor);

int replay_saved_new(const at::Tensor* tensor, int on_host, replay::SavedTensor** out);
int replay_saved_leaf(const replay::SavedTensor* saved, int requires_grad, at::Tensor** out);
int replay_saved_on_host(const replay::SavedTensor* saved);
int replay_saved_fingerprint(const replay::SavedTensor* saved, replay::Fingerprint* out);
void replay_saved_free(replay::SavedTensor* saved);

replay::WeakTensor* replay_weak_new(const at::Tensor* tensor);
// A new tensor, or null when the last strong reference is gone.
at::Tensor* replay_weak_lock(const replay::WeakTensor* weak);
void replay_weak_free(replay::WeakTensor* weak);

int replay_inference_mode();
// For tests: inference mode on this thread, from the one call to the other.
void* replay_inference_enter();
void replay_inference_leave(void* guard);
int replay_modes_get(replay::Modes* out);
int replay_modes_set(const replay::Modes* modes);
int replay_autocast_enter(int device_type, int enabled, int dtype);
int replay_autocast_leave(int device_type, int enabled, int dtype);
int replay_autocast_clear_cache();

int replay_has_cuda();
// The version of the LibTorch that was loaded, as "2.13.0"; empty where it does not say.
int replay_version(char* out, size_t capacity);

}
