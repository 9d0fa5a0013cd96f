#include "node.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/headeronly/version.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_set>
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

// One `Rollout::backward`. Shared by the tokens that are pushed in its name.
struct Run {
  Run(uint64_t rollout, const void* replayer) : rollout(rollout), replayer(replayer) {}

  const uint64_t rollout;
  const void* const replayer;
  // How many replays of this rollout are open, each inside the one before.
  std::atomic<uint32_t> depth{0};

  // Nodes of one backward can sit on a device thread and on the caller's; when one of them fails, the engine
  // returns to the caller while the other still runs. Nothing of Rust's may end before it has.
  std::mutex mutex;
  std::condition_variable idle;
  size_t active = 0;
  bool closed = false;

  bool enter() {
    std::lock_guard<std::mutex> lock(mutex);
    if (closed) return false;
    ++active;
    return true;
  }
  void leave() noexcept {
    std::lock_guard<std::mutex> lock(mutex);
    if (--active == 0) idle.notify_all();
  }
  void close() noexcept {
    std::unique_lock<std::mutex> lock(mutex);
    closed = true;
    idle.wait(lock, [this] { return active == 0; });
  }
};

// Says in whose name the engine runs. A thread-local of LibTorch's own kind, because the engine carries those
// to its device and pool threads, and to no thread that another backward was started on.
struct Token : c10::DebugInfoBase {
  Token(std::shared_ptr<Run> run, uint32_t depth) : run(std::move(run)), depth(depth) {}
  const std::shared_ptr<Run> run;
  const uint32_t depth;
};

inline constexpr std::string_view kTokenName = "REPLAY_ROLLOUT";
inline const c10::DebugInfoKind kToken(&kTokenName);

// A replay under way: what `replay_differentiate` needs to go on in the same name, one level deeper.
struct Scope {
  std::shared_ptr<Run> run;
  uint32_t depth;
};

namespace {

class ReplayNode : public Node {
 public:
  ReplayNode(uint64_t rollout, const char* block, const void* state, const NodeCallbacks* callbacks)
      : rollout_(rollout), block_(block), state_(state), callbacks_(callbacks) {}
  ~ReplayNode() override { callbacks_->drop(state_); }

  variable_list apply(variable_list&& grads) override;
  void release_variables() override { callbacks_->release(state_); }
  std::string name() const override { return "ReplayBlock(" + block_ + ")"; }

 private:
  [[noreturn]] void refuse(Code code, const char* why) const {
    throw Refused(code, "replay block `" + block_ + "`: " + why);
  }

  const uint64_t rollout_;
  const std::string block_;
  const void* const state_;
  const NodeCallbacks* const callbacks_;
};

// A backward pass started in inference mode: its replays must record all the same.
class Recording {
 public:
  Recording() {
    if (c10::InferenceMode::is_enabled()) off_.emplace(false);
  }

 private:
  std::optional<c10::InferenceMode> off_;
};

// Leaves the run, and closes the level it opened, when the replay ends in whatever way.
class Entered {
 public:
  explicit Entered(Run& run) : run_(run) {}
  ~Entered() {
    if (opened_) run_.depth.store(level_);
    run_.leave();
  }
  bool open(uint32_t level) {
    uint32_t expected = level;
    opened_ = run_.depth.compare_exchange_strong(expected, level + 1);
    level_ = level;
    return opened_;
  }

 private:
  Run& run_;
  uint32_t level_ = 0;
  bool opened_ = false;
};

variable_list ReplayNode::apply(variable_list&& grads) {
  auto* token = static_cast<Token*>(c10::ThreadLocalDebugInfo::get(kToken));
  if (token == nullptr || token->run == nullptr)
    refuse(
        kForeignBackward,
        "its gradient can only be taken by `Rollout::backward`; call `rollout.backward(&loss)` instead of `loss.backward()`");
  if (token->run->rollout != rollout_)
    refuse(kOtherRollout, "it belongs to another rollout; take the gradient of each rollout's loss with that rollout");

  const auto run = token->run;
  if (!run->enter()) refuse(kUsed, "its rollout's backward has ended");
  Entered entered(*run);
  if (!entered.open(token->depth)) refuse(kBusy, "another replay of its rollout is running on another thread");

  const Scope scope{run, token->depth};
  // While the user's code runs the token is hidden, so that a backward started by it is not taken for ours.
  c10::DebugInfoGuard hidden(kToken, std::make_shared<Token>(nullptr, 0));
  const Recording recording;

  std::vector<const at::Tensor*> given(grads.size(), nullptr);
  for (size_t i = 0; i < grads.size(); ++i)
    if (grads[i].defined()) given[i] = &grads[i];
  std::vector<at::Tensor*> made(num_outputs(), nullptr);
  const int failed = callbacks_->run(
      run->replayer, state_, &scope, given.data(), given.size(), made.data(), made.size());

  variable_list result(made.size());
  for (size_t i = 0; i < made.size(); ++i) {
    std::unique_ptr<at::Tensor> grad(made[i]);
    if (grad) result[i] = std::move(*grad);
  }
  if (failed != 0) refuse(kCallback, "the replay failed");
  return result;
}

struct Barrier : Node {
  variable_list apply(variable_list&&) override { return {}; }
  std::string name() const override { return "ReplayBarrier"; }
};

// `execute` with the token that names `run` at `depth`. Gradients are accumulated into the leaves.
void execute(
    const std::shared_ptr<Run>& run,
    uint32_t depth,
    const edge_list& roots,
    const variable_list& grads) {
  c10::DebugInfoGuard token(kToken, std::make_shared<Token>(run, depth));
  Engine::get_default_engine().execute(
      roots, grads, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/true, {});
}

// Closes the run on every way out, exceptions included.
struct Closing {
  Run& run;
  ~Closing() { run.close(); }
};

} // namespace
} // namespace replay

using replay::guarded;
using replay::kAnyAge;

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
  c10::intrusive_ptr<torch::autograd::Node> node;
  const int made = guarded(
      [&] { node = c10::make_intrusive<replay::ReplayNode>(rollout, block, state, callbacks); });
  if (made != replay::kOk) {
    callbacks->drop(state);
    return made;
  }
  return guarded([&] {
    torch::autograd::edge_list edges(n_inputs);
    for (size_t i = 0; i < n_inputs; ++i)
      if (inputs[i] != nullptr && inputs[i]->requires_grad())
        edges[i] = torch::autograd::impl::gradient_edge(*inputs[i]);
    node->set_next_edges(std::move(edges));
    for (size_t i = 0; i < n_outputs; ++i) torch::autograd::set_history(*outputs[i], node);
  });
}

int replay_barrier(at::Tensor* const* outputs, size_t n_outputs) {
  return guarded([&] {
    auto node = c10::make_intrusive<replay::Barrier>();
    for (size_t i = 0; i < n_outputs; ++i) torch::autograd::set_history(*outputs[i], node);
  });
}

int replay_backward(uint64_t rollout, const void* replayer, const at::Tensor* loss) {
  return guarded([&] {
    const auto run = std::make_shared<replay::Run>(rollout, replayer);
    replay::Closing closing{*run};
    const replay::Recording recording;
    replay::execute(run, 0, {torch::autograd::impl::gradient_edge(*loss)}, {at::ones_like(*loss)});
  });
}

int replay_edges_new(const at::Tensor* const* roots, size_t n, torch::autograd::edge_list** out) {
  return guarded([&] {
    auto edges = std::make_unique<torch::autograd::edge_list>();
    for (size_t i = 0; i < n; ++i) {
      // The engine takes an edge to nowhere without a look.
      TORCH_CHECK(roots[i]->requires_grad(), "output ", i, " of a replay does not require grad");
      edges->push_back(torch::autograd::impl::gradient_edge(*roots[i]));
    }
    *out = edges.release();
  });
}

void replay_edges_free(torch::autograd::edge_list* edges) {
  delete edges;
}

int replay_differentiate(
    const replay::Scope* scope,
    const torch::autograd::edge_list* edges,
    const at::Tensor* const* grads,
    size_t n) {
  return guarded([&] {
    torch::autograd::variable_list given;
    for (size_t i = 0; i < n; ++i) given.push_back(*grads[i]);
    replay::execute(scope->run, scope->depth + 1, *edges, given);
  });
}

uint64_t replay_sequence() {
  return at::sequence_number::peek();
}

int replay_leaves(
    const at::Tensor* const* roots,
    size_t n,
    uint64_t since,
    void (*visit)(void* context, uintptr_t impl, const at::Tensor* variable),
    void* context) {
  return guarded([&] {
    std::unordered_set<torch::autograd::Node*> seen;
    std::vector<torch::autograd::Node*> open;
    const auto push = [&](torch::autograd::Node* node) {
      if (node != nullptr && seen.insert(node).second) open.push_back(node);
    };
    // A leaf among the roots has an accumulator that only this edge keeps alive.
    std::vector<torch::autograd::Edge> edges;
    for (size_t i = 0; i < n; ++i)
      if (roots[i]->requires_grad()) edges.push_back(torch::autograd::impl::gradient_edge(*roots[i]));
    for (const auto& edge : edges) push(edge.function.get());

    const uint64_t thread = at::RecordFunction::currentThreadId();
    while (!open.empty()) {
      auto* node = open.back();
      open.pop_back();
      if (auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node)) {
        visit(context, reinterpret_cast<uintptr_t>(leaf->variable.unsafeGetTensorImpl()), &leaf->variable);
        continue;
      }
      if (since != kAnyAge && (node->sequence_nr() < since || node->thread_id() != thread))
        throw replay::Refused(replay::kCaptured, node->name());
      for (const auto& edge : node->next_edges()) push(edge.function.get());
    }
  });
}
