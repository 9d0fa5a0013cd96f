#include "recorded_graph.h"
#include "guard.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>
#include <utility>

namespace replay {
namespace {

// Why the tensors of a graph cannot be brought again, if so. An operation may fill a tensor that it has saved before it ran:
// `rrelu` its noise, alone among LibTorch's. When such a tensor is brought it has no values yet. And what operations on
// another thread have saved, no tape has seen.
const char* cannot_be_brought(const torch::autograd::edge_list& roots) {
  const uint64_t thread = at::RecordFunction::currentThreadId();
  std::unordered_set<torch::autograd::Node*> seen;
  std::vector<torch::autograd::Node*> open;
  const auto push = [&](const torch::autograd::Edge& edge) {
    if (edge.function && seen.insert(edge.function.get()).second) open.push_back(edge.function.get());
  };
  for (const auto& edge : roots) push(edge);
  while (!open.empty()) {
    auto* node = open.back();
    open.pop_back();
    if (node->name().compare(0, 5, "Rrelu") == 0) return "an operation fills what it has saved";
    // Accumulators, which lead nowhere, are as old as their leaves.
    if (node->num_outputs() != 0 && node->thread_id() != thread) return "an operation ran on another thread";
    for (const auto& edge : node->next_edges()) push(edge);
  }
  return nullptr;
}

} // namespace

void RecordedGraph::strip() {
  at::AutoGradMode off(false);
  for (auto& leaf : inputs) {
    // A handle here, and, where the outputs depend on it, one in the node that would accumulate into it.
    const size_t ours = torch::autograd::impl::try_get_grad_accumulator(leaf) ? 2 : 1;
    if (leaf.use_count() > ours || leaf.layout() != at::kStrided) continue;
    const std::vector<int64_t> strides(leaf.dim(), 0);
    leaf.set_data(at::empty_strided(leaf.sizes(), strides, leaf.options()));
  }
}

} // namespace replay

using replay::guarded;

int replay_graph_new(
    const replay::TapeHandle* tape,
    uint64_t rollout,
    const char* block,
    const at::Tensor* const* outputs,
    size_t n_outputs,
    const at::Tensor* const* leaves,
    size_t n_leaves,
    replay::RecordedGraph** out) {
  return guarded([&] {
    auto graph = std::make_unique<replay::RecordedGraph>();
    graph->tape = tape->tape;
    for (size_t i = 0; i < n_outputs; ++i) graph->roots.push_back(torch::autograd::impl::gradient_edge(*outputs[i]));
    if (const char* why = replay::cannot_be_brought(graph->roots)) tape->tape->spoil(why);
    graph->leaves.resize(n_leaves);
    for (size_t i = 0; i < n_leaves; ++i) {
      if (leaves[i] == nullptr) continue;
      graph->leaves[i] = std::make_shared<replay::Gate>(/*own_passes_alone=*/true);
      graph->inputs.push_back(*leaves[i]);
      torch::autograd::impl::add_hook(
          *leaves[i], std::make_unique<replay::Catch>(rollout, block, graph->leaves[i]));
    }
    *out = graph.release();
  });
}

int replay_graph_end_record(replay::RecordedGraph* graph) {
  return guarded([&] {
    graph->tape->end_record();
    graph->strip();
  });
}

int replay_graph_drop_tensors(replay::RecordedGraph* graph) {
  return guarded([&] {
    graph->tape->drop_tensors();
    graph->strip();
  });
}

void replay_graph_free(replay::RecordedGraph* graph) {
  delete graph;
}
