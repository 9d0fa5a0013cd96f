#include "node.h"
#include "grad.h"
#include "hooks.h"
#include "pass.h"
#include "recorded_graph.h"

#include <ATen/ThreadLocalState.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

static_assert(
    TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR == 13,
    "replay-runtime is written for LibTorch 2.13, as is tch 0.26: run `cargo xtask libtorch`, or point LIBTORCH at 2.13");

namespace replay {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::Node;
using torch::autograd::variable_list;

namespace {

// A backward pass started in inference mode: its replays must record all the same.
class Recording {
 public:
  Recording() {
    if (c10::InferenceMode::is_enabled()) off_.emplace(false);
  }

 private:
  std::optional<c10::InferenceMode> off_;
};

void execute(
    const std::shared_ptr<Run>& run,
    const std::shared_ptr<Desk>& desk,
    const edge_list& roots,
    const variable_list& grads);

// Runs the block. Its one input is on the CPU, whatever device the block is on, so that the engine runs it on the
// thread that called the engine. The gradients come by way of its `Arrival`.
class ReplayNode : public Node {
 public:
  ReplayNode(uint64_t rollout, const char* block, const void* state, const NodeCallbacks* callbacks)
      : rollout_(rollout), block_(block), state_(state), callbacks_(callbacks) {}
  ~ReplayNode() override { callbacks_->drop(state_); }

  variable_list apply(variable_list&&) override;
  void release_variables() override { callbacks_->release(state_); }
  std::string name() const override { return "ReplayBlock(" + block_ + ")"; }

  // The token of the pass that the calling thread works for, if that may run this node; otherwise it is refused.
  Token admitted() const;
  void arrive(variable_list&& grads, std::optional<c10::Stream> stream) {
    arrived_ = std::move(grads);
    stream_ = stream;
  }

 private:
  [[noreturn]] void refuse(Code code, const char* why) const {
    throw Refused(code, "replay block `" + block_ + "`: " + why);
  }
  void on_owner(const Token& token, const std::function<void()>& call) const;
  Replayed replay(const Run& run);

  const uint64_t rollout_;
  const std::string block_;
  const void* const state_;
  const NodeCallbacks* const callbacks_;
  // Written by the arrival, in the one pass that is admitted, before the engine makes this node ready.
  variable_list arrived_;
  std::optional<c10::Stream> stream_;
};

// Stands before the outputs, and runs on their device's thread. Hands the gradients on without running user code.
class Arrival : public Node {
 public:
  explicit Arrival(const c10::intrusive_ptr<ReplayNode>& replay) { add_next_edge(Edge(replay, 0)); }
  variable_list apply(variable_list&& grads) override {
    // Before anything is touched: a foreign pass may come by on another thread while ours is under way.
    replay().admitted();
    replay().arrive(std::move(grads), stream());
    return {signal()};
  }
  std::string name() const override { return replay().name(); }

  // What travels along the edge; nobody reads it. Never destroyed: nodes may outlive the program's own end.
  static const at::Tensor& signal() {
    static const auto* zero = [] {
      const Recording recording;
      return new at::Tensor(at::zeros({}, at::kFloat));
    }();
    return *zero;
  }

 private:
  // By the edge, which the engine holds while this runs. A reference of its own would make the end of a long chain
  // recurse: LibTorch takes graphs down edge by edge.
  ReplayNode& replay() const { return static_cast<ReplayNode&>(*next_edge(0).function); }
};

// Closures of a rollout run on its own thread, whichever thread the engine is on.
void ReplayNode::on_owner(const Token& token, const std::function<void()>& call) const {
  if (std::this_thread::get_id() == token.run->owner) {
    if (token.run->ended) refuse(kUsed, "its rollout's backward has ended");
    call();
  } else if (token.desk == nullptr || !token.desk->ask(call)) {
    refuse(kThread, "it was to be replayed on another thread than its rollout's");
  }
}

Replayed ReplayNode::replay(const Run& run) {
  // While the user's code runs the token is hidden, so that a backward started by it is not taken for ours.
  c10::DebugInfoGuard hidden(kToken, std::make_shared<Token>(nullptr, nullptr));
  const Recording recording;
  c10::OptionalStreamGuard forward_stream(stream_);
  std::vector<const at::Tensor*> given(arrived_.size(), nullptr);
  for (size_t i = 0; i < arrived_.size(); ++i)
    if (arrived_[i].defined()) given[i] = &arrived_[i];
  Replayed replayed(rollout_, block_);
  replayed.leaves.resize(num_outputs());
  if (callbacks_->run(run.replayer, state_, given.data(), given.size(), &replayed) != 0)
    refuse(kCallback, "the replay failed");
  arrived_.clear();
  return replayed;
}

Token ReplayNode::admitted() const {
  auto* found = static_cast<Token*>(c10::ThreadLocalDebugInfo::get(kToken));
  if (found == nullptr || found->run == nullptr)
    refuse(
        kForeignBackward,
        "its gradient can only be taken by `Rollout::backward`; call `rollout.backward(&loss)` instead of `loss.backward()`");
  if (found->run->rollout != rollout_)
    refuse(kOtherRollout, "it belongs to another rollout\ntake each rollout's gradient with that rollout, and `detach` what one takes over from another");
  return Token(found->run, found->desk);
}

variable_list ReplayNode::apply(variable_list&&) {
  const Token token = admitted();
  Replayed replayed(rollout_, block_);
  on_owner(token, [&] { replayed = replay(*token.run); });
  if (!replayed.roots.empty()) {
    const auto start = std::chrono::steady_clock::now();
    execute(token.run, token.desk, replayed.roots, replayed.grads);
    // And with them the block's graph.
    replayed.roots.clear();
    replayed.graph.reset();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    on_owner(token, [&] { callbacks_->finished(token.run->replayer, state_, taken.count()); });
  }
  variable_list result(num_outputs());
  for (size_t i = 0; i < result.size(); ++i)
    if (replayed.leaves[i] != nullptr) result[i] = *replayed.leaves[i];
  return result;
}

// Stands before what an inner block returns in the forward of an outer one, whose graph is followed and then dropped.
struct Barrier : Node {
  variable_list apply(variable_list&&) override {
    throw Refused(
        kForeignBackward,
        "an inner replay block cannot be differentiated in the forward of the block around it; take the gradient of the rollout's loss with `Rollout::backward`");
  }
  std::string name() const override { return "ReplayBarrier"; }
};

// The engine counts passes inside passes and moves to threads of its own at 60; before that, a thread of ours calls
// it, and the owner is free to serve.
constexpr int kDirectDepth = 40;
thread_local int open_passes = 0;

void execute_elsewhere(const std::shared_ptr<Run>& run, const edge_list& roots, const variable_list& grads) {
  const auto desk = std::make_shared<Desk>();
  const at::ThreadLocalState state;
  std::exception_ptr error;
  std::thread thread([&] {
    try {
      at::ThreadLocalStateGuard same(state);
      execute(run, desk, roots, grads);
    } catch (...) {
      error = std::current_exception();
    }
    desk->close();
  });
  desk->serve();
  thread.join();
  if (error) std::rethrow_exception(error);
}

// Before the next pass adds to gradients in place, each has storage of its own.
void settle(Run& run) {
  auto& leaves = run.bare;
  const auto settled = [&](const at::Tensor& leaf) { return settle_grad(leaf, run.copied); };
  leaves.erase(std::remove_if(leaves.begin(), leaves.end(), settled), leaves.end());
}

// Runs the engine with the token that names `run`. Gradients are accumulated into the leaves.
void execute(
    const std::shared_ptr<Run>& run,
    const std::shared_ptr<Desk>& desk,
    const edge_list& roots,
    const variable_list& grads) {
  if (desk == nullptr && open_passes >= kDirectDepth) return execute_elsewhere(run, roots, grads);
  struct Count {
    Count() { ++open_passes; }
    ~Count() { --open_passes; }
  } count;
  settle(*run);
  {
    c10::DebugInfoGuard token(kToken, std::make_shared<Token>(run, desk));
    Engine::get_default_engine().execute(
        roots, grads, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/true, {});
  }
  settle(*run);
}

} // namespace
} // namespace replay

using replay::guarded;

namespace {
torch::autograd::edge_list edges_to(const at::Tensor* const* inputs, size_t n) {
  torch::autograd::edge_list edges(n);
  for (size_t i = 0; i < n; ++i)
    if (inputs[i] != nullptr && inputs[i]->requires_grad())
      edges[i] = torch::autograd::impl::gradient_edge(*inputs[i]);
  return edges;
}
} // namespace

const char* replay_last_error(int full) {
  const auto& error = replay::last_error();
  return full != 0 ? error.full.c_str() : error.brief.c_str();
}

int replay_attach(
    uint64_t rollout,
    const char* block,
    const void* state,
    const replay::NodeCallbacks* callbacks,
    const at::Tensor* const* inputs,
    size_t n_inputs,
    at::Tensor* const* outputs,
    size_t n_outputs) {
  c10::intrusive_ptr<replay::ReplayNode> node;
  const int made =
      guarded([&] { node = c10::make_intrusive<replay::ReplayNode>(rollout, block, state, callbacks); });
  if (made != replay::kOk) {
    callbacks->drop(state);
    return made;
  }
  return guarded([&] {
    node->set_next_edges(edges_to(inputs, n_inputs));
    node->add_input_metadata(replay::Arrival::signal());
    const auto arrival = c10::make_intrusive<replay::Arrival>(node);
    for (size_t i = 0; i < n_outputs; ++i) torch::autograd::set_history(*outputs[i], arrival);
  });
}

int replay_barrier(
    const at::Tensor* const* inputs,
    size_t n_inputs,
    at::Tensor* const* outputs,
    size_t n_outputs) {
  return guarded([&] {
    auto node = c10::make_intrusive<replay::Barrier>();
    node->set_next_edges(edges_to(inputs, n_inputs));
    for (size_t i = 0; i < n_outputs; ++i) torch::autograd::set_history(*outputs[i], node);
  });
}

int replay_refuse_grad(const at::Tensor* leaf, const char* why) {
  return guarded([&] { replay::refuse_grad(*leaf, why); });
}

int replay_backward(
    uint64_t rollout,
    const void* replayer,
    const at::Tensor* loss,
    const at::Tensor* const* leaves,
    size_t n_leaves,
    int kind,
    uint64_t* copied) {
  return guarded([&] {
    const auto run = std::make_shared<replay::Run>(
        replay::Run{rollout, replayer, std::this_thread::get_id(), {}});
    replay::WideGrads wide;
    for (size_t i = 0; i < n_leaves; ++i) {
      if (kind >= 0) wide.widen(*leaves[i], static_cast<at::ScalarType>(kind), run->copied);
      if (leaves[i]->requires_grad() && !replay::has_grad(*leaves[i])) run->bare.push_back(*leaves[i]);
    }
    struct Ending {
      replay::Run& run;
      ~Ending() { run.ended = true; }
    } ending{*run};
    const replay::Recording recording;
    replay::execute(run, nullptr, {torch::autograd::impl::gradient_edge(*loss)}, {at::ones_like(*loss)});
    *copied = run->copied;
  });
}

int replay_push_root(replay::Replayed* replayed, const at::Tensor* root, const at::Tensor* grad) {
  return guarded([&] {
    // The engine takes an edge to nowhere without a look.
    TORCH_CHECK(root->requires_grad(), "an output of the replay does not require grad");
    replayed->roots.push_back(torch::autograd::impl::gradient_edge(*root));
    replayed->grads.push_back(*grad);
  });
}

int replay_push_leaf(replay::Replayed* replayed, size_t index, const at::Tensor* leaf) {
  return guarded([&] {
    auto& slot = replayed->leaves.at(index);
    slot = std::make_shared<at::Tensor>();
    const auto gate = std::make_shared<replay::Gate>(/*own_passes_alone=*/false);
    gate->open(slot);
    torch::autograd::impl::add_hook(
        *leaf, std::make_unique<replay::Catch>(replayed->rollout, replayed->block, gate));
  });
}

int replay_push_graph(
    replay::Replayed* replayed,
    replay::RecordedGraph* graph,
    const at::Tensor* const* grads,
    size_t n) {
  std::unique_ptr<replay::RecordedGraph> owned(graph);
  return guarded([&] {
    replayed->graph = std::move(owned);
    for (size_t i = 0; i < n; ++i) {
      if (grads[i] == nullptr) continue;
      replayed->roots.push_back(graph->roots.at(i));
      replayed->grads.push_back(*grads[i]);
    }
    for (size_t i = 0; i < graph->leaves.size(); ++i) {
      if (graph->leaves[i] == nullptr) continue;
      auto& slot = replayed->leaves.at(i);
      slot = std::make_shared<at::Tensor>();
      graph->leaves[i]->open(slot);
    }
    graph->tape->open();
  });
}
