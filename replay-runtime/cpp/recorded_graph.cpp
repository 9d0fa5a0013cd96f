#include "recorded_graph.h"
#include "guard.h"

#include <torch/csrc/autograd/variable.h>

#include <unordered_set>
#include <utility>

namespace replay {
namespace {

// Whether an operation in the graph fills a tensor that it has saved before it ran: `rrelu` its noise, alone among LibTorch's.
// When such a tensor is brought it has no values yet.
bool fills_what_it_saved(const torch::autograd::edge_list& roots) {
  std::unordered_set<torch::autograd::Node*> seen;
  std::vector<torch::autograd::Node*> open;
  const auto push = [&](const torch::autograd::Edge& edge) {
    if (edge.function && seen.insert(edge.function.get()).second) open.push_back(edge.function.get());
  };
  for (const auto& edge : roots) push(edge);
  while (!open.empty()) {
    auto* node = open.back();
    open.pop_back();
    if (node->name().compare(0, 5, "Rrelu") == 0) return true;
    for (const auto& edge : node->next_edges()) push(edge);
  }
  return false;
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
    if (replay::fills_what_it_saved(graph->roots)) tape->tape->spoil("an operation fills what it has saved");
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
