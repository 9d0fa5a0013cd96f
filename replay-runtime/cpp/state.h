// Everything else that the runtime needs of LibTorch and tch does not offer: detached tensors, identities, thread modes. Functions that answer with a value instead of a code give 0 or null when LibTorch fails. Each function
// touches only what it is given and the state of the calling thread.
#pragma once

#include "guard.h"

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>

namespace replay {

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
} // namespace replay

extern "C" {

// Output: detached; `aliases` says that its storage is known elsewhere too, and then it is handed out as a view
// on which an in-place operation is an error.
int replay_detach_output(const at::Tensor* tensor, int aliases, at::Tensor** out);

// A copy of whatever layout, without history.
int replay_copy(const at::Tensor* tensor, at::Tensor** out);

uintptr_t replay_impl(const at::Tensor* tensor);
// Identity of the storage, 0 where there is none or it is empty.
uintptr_t replay_storage(const at::Tensor* tensor);
// Whether no other tensor has its storage.
int replay_owns_storage(const at::Tensor* tensor);
int replay_inference_mode();
// For tests: inference mode on this thread, from the one call to the other.
void* replay_inference_enter();
void replay_inference_leave(void* guard);
int replay_modes_get(replay::Modes* out);
int replay_modes_set(const replay::Modes* modes);
int replay_autocast_enter(int device_type, int enabled, int dtype);
int replay_autocast_leave(int device_type, int enabled, int dtype);
int replay_autocast_clear_cache();
// How many scopes of autocast are open on this thread; and ends those beyond so many, which an unwinding body left open.
int replay_autocast_nesting();
int replay_autocast_end_beyond(int nesting);

int replay_has_cuda();
// The version of the LibTorch that was loaded, as "2.13.0"; empty where it does not say.
int replay_version(char* out, size_t capacity);

}
