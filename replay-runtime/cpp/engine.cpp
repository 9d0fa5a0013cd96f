#include "engine.h"
#include "tape.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <atomic>
#include <exception>
#include <memory>
#include <typeinfo>
#include <utility>
#include <vector>

namespace replay {
namespace {

// An operation of LibTorch throws it, so that tch makes an error of it.
struct Full : std::exception {
  const char* what() const noexcept override {
    return "a replay block ends here, since all that its gradient needs has been computed again; this is no failure";
  }
};

struct Abandoned : std::exception {
  const char* what() const noexcept override {
    return "a replay block that is marked `early_stop` begins again, since it takes a gradient inside; this is no failure";
  }
};

enum class Use { kNone, kRecord, kRefill };

// What happens to tensors that are saved on this thread: the innermost entry counts.
struct Entered {
  std::shared_ptr<Tape> tape;
  Use use;
};

// Never destroyed: graphs may be built while the thread ends.
std::vector<Entered>& entered() {
  static thread_local auto* stack = new std::vector<Entered>;
  return *stack;
}

thread_local bool stopping = false;
std::atomic<int (*)()> rust_may_unwind{nullptr};

// A tensor in the graph of a forward.
class SlotHooks : public torch::autograd::SavedVariableHooks {
 public:
  explicit SlotHooks(std::shared_ptr<Tape> tape) : tape_(std::move(tape)) {}
  ~SlotHooks() override {
    if (packed_) tape_->release(index_);
  }
  void call_pack_hook(const at::Tensor& tensor) override {
    index_ = tape_->pack(tensor);
    packed_ = true;
  }
  at::Tensor call_unpack_hook() override { return tape_->unpack(index_); }

 private:
  const std::shared_ptr<Tape> tape_;
  size_t index_ = 0;
  bool packed_ = false;
};

// A tensor in the graph that a replay builds on its way, which nobody needs.
class BringHooks : public torch::autograd::SavedVariableHooks {
 public:
  explicit BringHooks(std::shared_ptr<Tape> tape) : tape_(std::move(tape)) {}
  void call_pack_hook(const at::Tensor& tensor) override { tape_->bring(tensor); }
  at::Tensor call_unpack_hook() override {
    constexpr auto* what = "it takes a gradient inside, which its forward did not";
    tape_->spoil(what);
    throw Refused(kMismatch, what);
  }

 private:
  const std::shared_ptr<Tape> tape_;
};

class HookedEngine : public torch::autograd::Engine {
 public:
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    const auto& stack = entered();
    if (stack.empty()) return nullptr;
    switch (stack.back().use) {
      case Use::kRecord: return std::make_unique<SlotHooks>(stack.back().tape);
      case Use::kRefill: return std::make_unique<BringHooks>(stack.back().tape);
      case Use::kNone: break;
    }
    return nullptr;
  }
};

// Never destroyed, as threads may be in it.
torch::autograd::Engine& hooked_engine() {
  static auto* engine = new HookedEngine;
  return *engine;
}

} // namespace

bool engine_is_ours() {
  return &torch::autograd::Engine::get_default_engine() == &hooked_engine();
}

bool follows_here(const Tape* tape) {
  const auto& stack = entered();
  return !stack.empty() && stack.back().tape.get() == tape;
}

bool may_unwind() {
  const auto ask = rust_may_unwind.load();
  return ask == nullptr || ask() != 0;
}

void end_full() {
  stopping = true;
  throw Full();
}

void end_abandoned() {
  stopping = true;
  throw Abandoned();
}

} // namespace replay

using replay::guarded;

int replay_tape_install(int (*may_unwind)()) {
  using torch::autograd::Engine;
  // One of another library stays: it may have hooks of its own.
  static const bool installed = [] {
    auto& found = Engine::get_default_engine();
    if (typeid(found) != typeid(Engine)) return false;
    torch::autograd::set_default_engine_stub(&replay::hooked_engine);
    return true;
  }();
  replay::rust_may_unwind = may_unwind;
  return installed && replay::engine_is_ours();
}

int replay_tape_enter(const replay::TapeHandle* tape, int use) {
  return guarded([&] {
    auto& stack = replay::entered();
    if (tape == nullptr) {
      if (!stack.empty() && stack.back().tape != nullptr)
        stack.back().tape->spoil("it runs a block inside, which its forward did not");
      stack.push_back({nullptr, replay::Use::kNone});
      return;
    }
    const bool records = use == 0 || use == 3;
    if (records) tape->tape->begin_record(use == 3);
    else tape->tape->begin_refill(use == 2);
    // Last: when an error is answered, nothing was entered.
    stack.push_back({tape->tape, records ? replay::Use::kRecord : replay::Use::kRefill});
  });
}

void replay_tape_leave() {
  auto last = std::move(replay::entered().back());
  replay::entered().pop_back();
  if (last.use == replay::Use::kRecord) last.tape->end_body();
  if (last.use != replay::Use::kNone) replay::stopping = false;
}

int replay_tape_stopping() {
  return replay::stopping;
}
