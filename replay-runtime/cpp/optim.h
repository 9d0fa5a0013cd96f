// LibTorch's own optimizers, whose state for each parameter can be read and set.
//
// Ownership: an `OptimHandle` owns its optimizer, which has a share of each parameter; so the addresses by which LibTorch
// finds a parameter's state are not used again while it lives. Threads: one thread uses a handle at a time. What may
// throw: everything but `replay_optim_slot` and `replay_optim_free`. Parameters and groups go by their number, in the order
// in which they were added.
#pragma once

#include "guard.h"

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>

namespace replay {

enum OptimKind : int { kSgd = 0, kAdam = 1, kAdamW = 2, kRmsProp = 3 };

enum OptimSetting : int { kLr = 0, kMomentum = 1, kWeightDecay = 2 };

// Those of all kinds; an algorithm does not look at those that it has not.
struct OptimOptions {
  double lr;
  double weight_decay;
  double momentum;
  double dampening;
  double beta1;
  double beta2;
  double alpha;
  double eps;
  int nesterov;
  int amsgrad;
  int centered;
};

// The most tensors in a parameter's state.
constexpr size_t kSlots = 3;

struct OptimHandle; // opaque to Rust

} // namespace replay

extern "C" {

// The name of a tensor in a parameter's state; null after the last one.
const char* replay_optim_slot(int kind, size_t slot);

int replay_optim_new(int kind, const replay::OptimOptions* options, replay::OptimHandle** out);
void replay_optim_free(replay::OptimHandle* optim);
// One more group, with the options that all began with.
int replay_optim_add_group(replay::OptimHandle* optim);
// `name` is for messages.
int replay_optim_add_parameter(replay::OptimHandle* optim, const at::Tensor* parameter, size_t group, const char* name);

// Nothing has changed where a gradient or a state does not fit its parameter.
int replay_optim_step(replay::OptimHandle* optim);

int replay_optim_set(replay::OptimHandle* optim, size_t group, int setting, double value);
int replay_optim_lr(const replay::OptimHandle* optim, size_t group, double* out);

// Whether there is a state; its tensors by slot, on the optimizer's own storage, null where undefined.
int replay_optim_state(
    const replay::OptimHandle* optim,
    size_t parameter,
    int* exists,
    int64_t* step,
    at::Tensor** tensors);
// Puts copies in, on the parameter's device; nothing has changed where they do not fit.
int replay_optim_set_state(
    replay::OptimHandle* optim,
    size_t parameter,
    int64_t step,
    const at::Tensor* const* tensors);
int replay_optim_drop_state(replay::OptimHandle* optim, size_t parameter);

}
