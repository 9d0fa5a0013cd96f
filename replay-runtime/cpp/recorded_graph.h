// The graph of one block between its forward and the pass that differentiates it.
#pragma once

#include "hooks.h"
#include "tape.h"

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <vector>

namespace replay {

// Where a block's graph begins and ends.
struct RecordedGraph {
  ~RecordedGraph() {
    if (tape != nullptr) tape->close();
  }
  // What the graph has saved is saved by itself: leaves that nobody else holds give up the inputs' storages, which may be
  // dropped, or moved to the host, before the graph is.
  void strip();

  torch::autograd::edge_list roots; // of the recorded outputs
  std::vector<at::Tensor> inputs; // the leaves themselves
  std::vector<std::shared_ptr<Gate>> leaves; // of the inputs that require grad, null for the others
  std::shared_ptr<Tape> tape;
};

} // namespace replay

extern "C" {

// The graph of `outputs` (all require grad) down to `leaves` (null where an input does not require grad).
int replay_graph_new(
    const replay::TapeHandle* tape,
    uint64_t rollout,
    const char* block,
    const at::Tensor* const* outputs,
    size_t n_outputs,
    const at::Tensor* const* leaves,
    size_t n_leaves,
    replay::RecordedGraph** out);
// All that only the forward needed is gone.
int replay_graph_end_record(replay::RecordedGraph* graph);
int replay_graph_drop_tensors(replay::RecordedGraph* graph);
void replay_graph_free(replay::RecordedGraph* graph);

}
