// What stands before the leaves of blocks' inputs when a backward pass comes to them.
#pragma once

#include "guard.h"
#include "pass.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

namespace replay {

using torch::autograd::variable_list;

// Where the gradient of one leaf goes: to whoever differentiates the block just now, if anybody does.
class Gate {
 public:
  // With `own_passes_alone` no body runs on the leaf, which could take a gradient of its own.
  explicit Gate(bool own_passes_alone) : own_passes_alone(own_passes_alone) {}
  const bool own_passes_alone;

  void open(const std::shared_ptr<at::Tensor>& slot) {
    std::lock_guard<std::mutex> lock(mutex_);
    slot_ = slot;
  }
  std::shared_ptr<at::Tensor> slot() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return slot_.lock();
  }

 private:
  mutable std::mutex mutex_; // a foreign pass may come by on another thread
  std::weak_ptr<at::Tensor> slot_;
};

// Takes what arrives at a leaf in place of its `.grad`. LibTorch lays a `.grad` out like its leaf, and a sum, which goes
// through memory in its order, would then differ in the last bits from that of a plain graph. Only in passes of its
// rollout: a body may take a gradient with respect to a leaf of the block around it.
class Catch : public torch::autograd::FunctionPreHook {
 public:
  Catch(uint64_t rollout, std::string block, std::shared_ptr<const Gate> gate)
      : rollout_(rollout), block_(std::move(block)), gate_(std::move(gate)) {}

  variable_list operator()(const variable_list& grads) override {
    const auto slot = gate_->slot();
    const auto* token = static_cast<Token*>(c10::ThreadLocalDebugInfo::get(kToken));
    const bool own = token != nullptr && token->run != nullptr && token->run->rollout == rollout_;
    // The block is not being differentiated, or not by this pass: the leaf is held by a graph that left the body.
    if (slot == nullptr || (gate_->own_passes_alone && !own))
      throw Refused(
          kEscaped,
          "a tensor that replay block `" + block_ +
              "` computed from its inputs in its replay and did not return is being differentiated\nreturn it as an output, or detach it: its gradient would end at the block");
    if (!own) return grads;
    // Twice where a block inside captures the leaf.
    if (grads[0].defined()) *slot = slot->defined() ? sum(*slot, grads[0]) : grads[0];
    return {at::Tensor()};
  }

 private:
  // A sparse tensor does not take a dense one; LibTorch's own rule.
  static at::Tensor sum(const at::Tensor& a, const at::Tensor& b) {
    return a.is_sparse() && !b.is_sparse() ? b + a : a + b;
  }

  const uint64_t rollout_;
  const std::string block_;
  const std::shared_ptr<const Gate> gate_;
};

// Stands before a leaf that outlived its block's forward: what was computed from it has left the body.
struct Escape : torch::autograd::FunctionPreHook {
  explicit Escape(std::string why) : why(std::move(why)) {}
  variable_list operator()(const variable_list&) override { throw Refused(kEscaped, why); }
  const std::string why;
};

inline void refuse_grad(const at::Tensor& leaf, const std::string& why) {
  torch::autograd::impl::add_hook(leaf, std::make_unique<Escape>(why));
}

} // namespace replay
