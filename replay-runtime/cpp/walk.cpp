#include "walk.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <vector>

namespace replay {
namespace {

// A set of addresses. Each block's graph is followed once, and is small: no memory is had for each of them.
class Seen {
 public:
  // Whether it is new.
  bool add(const void* address) {
    if (2 * ++count_ > slots_.size()) grow();
    const bool added = place(address);
    if (!added) --count_;
    return added;
  }

 private:
  bool place(const void* address) {
    size_t at = (reinterpret_cast<uintptr_t>(address) >> 4) * 0x9e3779b97f4a7c15ULL >> 32;
    while (true) {
      auto& slot = slots_[at++ & (slots_.size() - 1)];
      if (slot == address) return false;
      if (slot != nullptr) continue;
      slot = address;
      return true;
    }
  }

  void grow() {
    std::vector<const void*> old(2 * slots_.size());
    old.swap(slots_);
    for (const void* address : old)
      if (address != nullptr) place(address);
  }

  std::vector<const void*> slots_ = std::vector<const void*>(128); // a power of two, at most half full
  size_t count_ = 0;
};

} // namespace
} // namespace replay

using replay::guarded;
using replay::kAnyAge;

uint64_t replay_sequence() {
  return at::sequence_number::peek();
}

int replay_leaves(
    const at::Tensor* const* roots,
    size_t n,
    uint64_t since,
    void (*visit)(void* context, uintptr_t impl, const at::Tensor* variable),
    void* context,
    int* cuda_index,
    const uint64_t* spans,
    size_t n_spans,
    uint8_t* touched) {
  return guarded([&] {
    *cuda_index = -1;
    replay::Seen seen;
    std::vector<torch::autograd::Node*> open;
    const auto push = [&](torch::autograd::Node* node) {
      if (node != nullptr && seen.add(node)) open.push_back(node);
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
      // The cast is slow, and most nodes lead on.
      auto* leaf = node->num_outputs() == 0 ? dynamic_cast<torch::autograd::AccumulateGrad*>(node) : nullptr;
      if (leaf != nullptr) {
        visit(context, reinterpret_cast<uintptr_t>(leaf->variable.unsafeGetTensorImpl()), &leaf->variable);
        continue;
      }
      // Numbers are per thread, and a gradient taken inside the body makes nodes on the threads of devices.
      if (since != kAnyAge && node->sequence_nr() < since && node->thread_id() == thread)
        throw replay::Refused(replay::kCaptured, node->name());
      if (n_spans != 0 && node->thread_id() == thread) {
        // The number of bounds that are not beyond it is odd inside of a span.
        const auto at = std::upper_bound(spans, spans + 2 * n_spans, node->sequence_nr()) - spans;
        if (at % 2 == 1) touched[at / 2] = 1;
      }
      for (uint32_t i = 0; i < node->num_inputs(); ++i) {
        const auto device = node->input_metadata(i).device();
        if (device.is_cuda()) *cuda_index = device.index();
      }
      for (const auto& edge : node->next_edges()) push(edge.function.get());
    }
  });
}
