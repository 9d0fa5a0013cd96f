// The autograd node of a replay block, and the only two ways to run it.
//
// Ownership: a node owns one reference to a Rust `NodeState` (an `Arc`) and gives it back through
// `NodeCallbacks::drop`, on whatever thread the node dies. It owns no closure and nothing else of Rust's.
// Threads: `apply` runs on the thread the engine chose. Before it calls into Rust it checks, on data that any
// thread may read, that a `Rollout::backward` of its own rollout is under way and is the one that runs it.
#pragma once

#include "guard.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <cstdint>

namespace replay {

struct Scope;

// For `replay_leaves`: nodes of any age and thread.
constexpr uint64_t kAnyAge = UINT64_MAX;

// Implemented in Rust (src/ffi/node.rs). None of them unwinds.
struct NodeCallbacks {
  // Replays the block. `grads` (borrowed, null where undefined) are those of the recorded outputs; a non-null
  // pointer written to `input_grads` is a new tensor that the caller owns. Non-zero: failed, reason stored.
  int (*run)(
      const void* replayer,
      const void* node_state,
      const Scope* scope,
      const at::Tensor* const* grads,
      size_t n_grads,
      at::Tensor** input_grads,
      size_t n_inputs);
  // Frees what the node keeps for its replay.
  void (*release)(const void* node_state);
  // Takes the node's reference back.
  void (*drop)(const void* node_state);
};

} // namespace replay

extern "C" {

const char* replay_last_error(int full);

// Puts a node before `outputs` (differentiable, without history) whose edges lead to `inputs` (null or not
// requiring grad: no edge). Takes `state` over in every case, also when it fails.
int replay_attach(
    uint64_t rollout,
    const char* block,
    const void* state,
    const replay::NodeCallbacks* callbacks,
    const at::Tensor* const* inputs,
    size_t n_inputs,
    at::Tensor* const* outputs,
    size_t n_outputs);

// Gives `outputs` a history that leads nowhere: they require grad, may be changed in place, and hold no graph.
int replay_barrier(at::Tensor* const* outputs, size_t n_outputs);

// `loss.backward()` in the name of `rollout`. `replayer` is handed to every callback and is not used after
// this function has returned.
int replay_backward(uint64_t rollout, const void* replayer, const at::Tensor* loss);

// Where the gradients of `roots` enter their graph, kept without the tensors themselves.
int replay_edges_new(const at::Tensor* const* roots, size_t n, torch::autograd::edge_list** out);
void replay_edges_free(torch::autograd::edge_list* edges);

// The backward pass of one replayed block, inside the callback that `scope` belongs to.
int replay_differentiate(
    const replay::Scope* scope,
    const torch::autograd::edge_list* edges,
    const at::Tensor* const* grads,
    size_t n);

// The number that the next node made on this thread will get.
uint64_t replay_sequence();

// Calls `visit(context, impl, variable)` for each leaf that the graphs of `roots` accumulate into. Unless `since`
// is `kAnyAge`, a node with a lower number or of another thread ends the walk with `kCaptured` and its name.
int replay_leaves(
    const at::Tensor* const* roots,
    size_t n,
    uint64_t since,
    void (*visit)(void* context, uintptr_t impl, const at::Tensor* variable),
    void* context);

}
