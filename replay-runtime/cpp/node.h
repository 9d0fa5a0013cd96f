// The autograd node of a replay block, and the one way to run it.
//
// Ownership: a node owns one reference to a Rust `NodeState` (an `Arc`) and gives it back through
// `NodeCallbacks::drop`, on whatever thread the node dies. It owns no closure and nothing else of Rust's.
// Threads: `run` and `finished` are called only on the thread that called `replay_backward`, and only before that
// call returns; `release` and `drop` on any.
#pragma once

#include "guard.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace replay {

struct RecordedGraph;

// What a replayed block hands back to be differentiated.
struct Replayed {
  Replayed(uint64_t rollout, std::string block) : rollout(rollout), block(std::move(block)) {}

  // Whose they are.
  uint64_t rollout;
  std::string block;
  torch::autograd::edge_list roots;
  torch::autograd::variable_list grads; // of the roots
  // What arrives at the leaf of each input; null where there is none.
  std::vector<std::shared_ptr<at::Tensor>> leaves;
  // Where the roots are those of the forward's graph.
  std::shared_ptr<RecordedGraph> graph;
};

// Implemented in Rust (src/ffi/node.rs). None of them unwinds.
struct NodeCallbacks {
  // Runs the block again and fills `replayed`. `grads` (borrowed, null where undefined) are those of the recorded
  // outputs. Non-zero: failed, reason stored.
  int (*run)(
      const void* replayer,
      const void* node_state,
      const at::Tensor* const* grads,
      size_t n_grads,
      Replayed* replayed);
  // The block was differentiated, in that many seconds.
  void (*finished)(const void* replayer, const void* node_state, double seconds);
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

// Gives `outputs` a history that leads to `inputs` and cannot be differentiated: they require grad, may be changed in
// place, and hold no graph of the block between.
int replay_barrier(
    const at::Tensor* const* inputs,
    size_t n_inputs,
    at::Tensor* const* outputs,
    size_t n_outputs);

// Makes every backward pass that comes to `leaf` fail with `why`.
int replay_refuse_grad(const at::Tensor* leaf, const char* why);

// `loss.backward()` in the name of `rollout`, which may accumulate into `leaves`, in `kind` (a `c10::ScalarType` at
// least as wide as theirs; -1: each in its own). `replayer` is handed to `run` and `finished`, on the calling thread, and
// is not used after this function has returned. `copied` gets the bytes of gradients that were copied.
int replay_backward(
    uint64_t rollout,
    const void* replayer,
    const at::Tensor* loss,
    const at::Tensor* const* leaves,
    size_t n_leaves,
    int kind,
    uint64_t* copied);

// For `NodeCallbacks::run`: a root with the gradient that arrived for it (the root itself is not kept, only where
// its graph begins), and the leaf that stands for input `index`.
int replay_push_root(replay::Replayed* replayed, const at::Tensor* root, const at::Tensor* grad);
int replay_push_leaf(replay::Replayed* replayed, size_t index, const at::Tensor* leaf);
// In their place the forward's own graph, which is taken over in every case, with the gradients that arrived for its
// outputs (null: none).
int replay_push_graph(replay::Replayed* replayed, replay::RecordedGraph* graph, const at::Tensor* const* grads, size_t n);

}
