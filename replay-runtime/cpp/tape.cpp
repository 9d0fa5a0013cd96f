#include "tape.h"
#include "print.h"
#include "rng.h"

#include <ATen/SequenceNumber.h>
#include <ATen/SparseCsrTensorUtils.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <typeinfo>
#include <utility>

namespace replay {
namespace {

// Ends a body whose tape is full. An operation of LibTorch throws it, so that tch makes an error of it.
struct Full : std::exception {
  const char* what() const noexcept override {
    return "a replay block ends here, since all that its gradient needs has been computed again; this is no failure";
  }
};

// Ends a body that takes a gradient of its own, for which the tensors are gone: it begins again.
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

// False where an exception thrown now would meet a panic that is under way, which ends the process.
bool may_unwind() {
  const auto ask = rust_may_unwind.load();
  return ask == nullptr || ask() != 0;
}

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

// By LibTorch's own rule of detaching, without an operation: same storage and version counter.
at::Tensor detached(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/false));
}

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

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

// Of a tensor without a storage of its own: a sparse one, a quantity for reports.
uint64_t bytes_of(const at::Tensor& tensor) {
  if (tensor.layout() == at::kSparse) return tensor._indices().nbytes() + tensor._values().nbytes();
  if (at::sparse_csr::is_sparse_compressed(tensor)) return tensor.values().nbytes();
  return static_cast<uint64_t>(tensor.numel()) * tensor.element_size();
}

uint64_t version_of(const at::Tensor& tensor) {
  return static_cast<uint64_t>(tensor._version());
}

// A node with its edges and metadata, and the hooks of a tensor that it saved: measured with a counting allocator.
constexpr uint64_t kNodeBytes = 560;
constexpr uint64_t kSlotBytes = 260;

} // namespace

void Tape::add_input(const at::Tensor& input) {
  if (const auto* storage = storage_of(input)) inputs_.insert(storage);
}

void Tape::begin_record(bool drops) {
  recording_ = true;
  drops_ = drops;
  first_node_ = at::sequence_number::peek();
}

size_t Tape::pack(const at::Tensor& tensor) {
  std::lock_guard<std::mutex> lock(mutex_);
  Slot slot;
  slot.layout = layout_hash(tensor);
  slot.nodes = at::sequence_number::peek() - first_node_;
  slot.variable = is_variable(tensor);
  if (!slot.variable) slot.generators = generators_stand(cuda_index_);
  if (drops_ && !slot.variable) slot.note(tensor);
  else slot.take(tensor);
  slots_.push_back(std::move(slot));
  return slots_.size() - 1;
}

void Tape::end_body() {
  std::lock_guard<std::mutex> lock(mutex_);
  end_node_ = at::sequence_number::peek();
}

void Tape::end_record() {
  std::lock_guard<std::mutex> lock(mutex_);
  recording_ = false;
  auto counted = inputs_;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (slot.variable || !slot.owned) continue;
    if (!slot.intact()) spoiled_ = true; // LibTorch's own graph says so best
    needed_ = i + 1;
    if (!slot.tensor.defined()) continue;
    const auto* storage = storage_of(slot.tensor);
    if (storage == nullptr) {
      bytes_ += bytes_of(slot.tensor);
    } else if (counted.insert(storage).second) {
      bytes_ += storage->nbytes();
    }
  }
}

void Tape::drop_tensors() {
  std::vector<at::Tensor> freed; // outside of the lock
  std::lock_guard<std::mutex> lock(mutex_);
  filled_ = needed_ == 0;
  for (auto& slot : slots_)
    if (!slot.variable) freed.push_back(std::move(slot.tensor));
}

void Tape::begin_refill(bool unwinds) {
  unwinds_ = unwinds;
  first_brought_node_ = at::sequence_number::peek();
  generators_at_start_ = generators_stand(cuda_index_);
}

void Tape::bring(const at::Tensor& tensor) {
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t index = next_++;
  if (index < needed_) {
    auto& slot = slots_[index];
    if (slot.layout != layout_hash(tensor) || slot.variable != is_variable(tensor) ||
        slot.nodes != at::sequence_number::peek() - first_brought_node_) {
      differ("tensor " + std::to_string(index) + " that its graph saves is another one than in the forward");
    } else if (!slot.variable && slot.owned) {
      slot.take(tensor);
    }
    if (next_ < needed_ || !mismatch_.empty()) return;
    filled_ = true;
    const uint64_t expected = slot.generators != 0 ? slot.generators : generators_at_start_;
    generators_agree_ = generators_stand(cuda_index_) == expected;
  } else if (index >= slots_.size()) {
    differ("its graph saves more than " + std::to_string(slots_.size()) + " tensors");
  }
  if (!unwinds_ || !mismatch_.empty() || !may_unwind()) return;
  stopped_ = stopping = true;
  throw Full();
}

void Tape::differ(std::string what) {
  if (mismatch_.empty()) mismatch_ = std::move(what);
}

void Tape::spoil(const char* what) {
  std::lock_guard<std::mutex> lock(mutex_);
  spoiled_ = true;
  differ(what);
}

void Tape::check_refilled() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!mismatch_.empty()) throw Refused(kMismatch, mismatch_);
  if (next_ < needed_ || (!stopped_ && next_ < slots_.size()))
    throw Refused(
        kMismatch,
        "its graph saves " + std::to_string(next_) + " tensors instead of " + std::to_string(slots_.size()));
}

at::Tensor Tape::unpack(size_t index) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Slot& slot = slots_.at(index);
  if (recording_) {
    spoiled_ = true;
    if (!slot.tensor.defined() && !followed_here())
      throw Refused(
          kEscaped,
          "replay block `" + block_ +
              "` takes a gradient inside on another thread than its own, which a block that is marked `early_stop` cannot");
    if (!slot.tensor.defined()) {
      abandoned_ = true;
      if (may_unwind()) stopping = true;
      throw Abandoned();
    }
  } else if (!open_ && !(filled_ && slot.tensor.defined())) {
    throw Refused(
        kEscaped,
        "a tensor that replay block `" + block_ +
            "` computed and did not return is being differentiated\nreturn it as an output, or do not mark the block `early_stop`: its graph is without tensors until its replay");
  }
  TORCH_CHECK(slot.tensor.defined(), "the saved tensors of replay block `", block_, "` have been used already");
  TORCH_CHECK(
      version_of(slot.tensor) == slot.version,
      "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of shape ",
      slot.tensor.sizes(),
      " that an operation in replay block `",
      block_,
      "` saved is at version ",
      version_of(slot.tensor),
      "; expected version ",
      slot.version);
  return slot.tensor;
}

void Tape::release(size_t index) noexcept {
  at::Tensor freed; // outside of the lock
  std::lock_guard<std::mutex> lock(mutex_);
  slots_[index].owned = false;
  if (!recording_ && !open_) used_up_ = true;
  freed = std::move(slots_[index].tensor);
}

bool Slot::intact() const {
  return !owned || counter.current_version() == version;
}

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

void Slot::take(const at::Tensor& saved) {
  note(saved);
  tensor = detached(saved);
}

void Slot::note(const at::Tensor& saved) {
  counter = saved.unsafeGetTensorImpl()->version_counter();
  version = counter.current_version();
}

// Whether it is this tape that follows the calling thread.
bool Tape::followed_here() const {
  const auto& stack = entered();
  return !stack.empty() && stack.back().tape.get() == this;
}

void Tape::give_up() noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  recording_ = false;
}

bool Tape::is_variable(const at::Tensor& tensor) const {
  const auto* storage = storage_of(tensor);
  return storage != nullptr && variables_->storages.count(storage) != 0;
}

void Tape::open() {
  std::lock_guard<std::mutex> lock(mutex_);
  open_ = true;
}

void Tape::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  open_ = false;
}

TapeInfo Tape::info() const {
  std::lock_guard<std::mutex> lock(mutex_);
  const bool ours = &torch::autograd::Engine::get_default_engine() == &hooked_engine();
  TapeInfo info;
  info.usable = ours && !spoiled_;
  info.abandoned = abandoned_;
  // Variables are watched by their snapshots, and buffers among them put back.
  const auto intact = [](const Slot& slot) { return slot.variable || !slot.tensor.defined() || slot.intact(); };
  info.intact = !used_up_ && std::all_of(slots_.begin(), slots_.end(), intact);
  info.filled = filled_;
  info.stopped = stopped_;
  info.generators_agree = generators_agree_;
  info.bytes = bytes_;
  info.graph_bytes = (end_node_ - first_node_) * kNodeBytes + slots_.size() * kSlotBytes;
  info.first_node = first_node_;
  info.end_node = end_node_;
  return info;
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
  return installed && &Engine::get_default_engine() == &replay::hooked_engine();
}

int replay_storage_set_new(const at::Tensor* const* tensors, size_t n, replay::StorageSetHandle** out) {
  return guarded([&] {
    auto set = std::make_shared<replay::StorageSet>();
    for (size_t i = 0; i < n; ++i)
      if (const auto* storage = replay::storage_of(*tensors[i])) set->storages.insert(storage);
    *out = new replay::StorageSetHandle{std::move(set)};
  });
}

void replay_storage_set_free(replay::StorageSetHandle* set) {
  delete set;
}

int replay_tape_new(
    const char* block,
    const at::Tensor* const* inputs,
    size_t n_inputs,
    const replay::StorageSetHandle* variables,
    int cuda_index,
    replay::TapeHandle** out) {
  return guarded([&] {
    const auto tape = std::make_shared<replay::Tape>(block, variables->set, cuda_index);
    for (size_t i = 0; i < n_inputs; ++i)
      if (inputs[i] != nullptr) tape->add_input(*inputs[i]);
    *out = new replay::TapeHandle{tape};
  });
}

void replay_tape_free(replay::TapeHandle* tape) {
  // A graph that lives on, since something in it left the body, is not recorded any more.
  tape->tape->give_up();
  delete tape;
}

int replay_tape_enter(const replay::TapeHandle* tape, int use) {
  return guarded([&] {
    auto& stack = replay::entered();
    if (tape == nullptr) {
      if (!stack.empty() && stack.back().tape != nullptr) stack.back().tape->spoil("it runs a block inside, which its forward did not");
      stack.push_back({nullptr, replay::Use::kNone});
      return;
    }
    const bool records = use == 0 || use == 3;
    stack.push_back({tape->tape, records ? replay::Use::kRecord : replay::Use::kRefill});
    if (records) tape->tape->begin_record(use == 3);
    else tape->tape->begin_refill(use == 2);
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

int replay_tape_end_record(const replay::TapeHandle* tape) {
  return guarded([&] { tape->tape->end_record(); });
}

void replay_tape_info(const replay::TapeHandle* tape, replay::TapeInfo* out) {
  *out = tape->tape->info();
}

int replay_tape_check(const replay::TapeHandle* tape) {
  return guarded([&] { tape->tape->check_refilled(); });
}

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

int replay_graph_drop_tensors(replay::RecordedGraph* graph) {
  return guarded([&] {
    graph->tape->drop_tensors();
    if (!graph->tape->info().filled) graph->strip();
  });
}

void replay_graph_free(replay::RecordedGraph* graph) {
  delete graph;
}
