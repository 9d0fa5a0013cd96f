#include "tape.h"
#include "engine.h"
#include "print.h"
#include "rng.h"

#include <ATen/SequenceNumber.h>
#include <ATen/SparseCsrTensorUtils.h>

#include <algorithm>
#include <utility>

namespace replay {
namespace {

// By LibTorch's own rule of detaching, without an operation: same storage and version counter.
at::Tensor detached(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/false));
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

bool Slot::intact() const {
  return !owned || counter.current_version() == version;
}

void Slot::take(const at::Tensor& saved) {
  note(saved);
  tensor = detached(saved);
}

void Slot::note(const at::Tensor& saved) {
  counter = saved.unsafeGetTensorImpl()->version_counter();
  version = counter.current_version();
}

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
  // A destructor that runs while the body unwinds may take a gradient of what it computes.
  if (drops_ && !slot.variable && may_unwind()) slot.note(tensor);
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
  stopped_ = true;
  end_full();
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
    if (!slot.tensor.defined() && !(follows_here(this) && may_unwind()))
      throw Refused(
          kEscaped,
          "replay block `" + block_ + "` takes a gradient inside " +
              (may_unwind() ? "on another thread than its own" : "while it unwinds, of what it had computed before") +
              ", which a block that is marked `early_stop` cannot");
    if (!slot.tensor.defined()) {
      abandoned_ = true;
      end_abandoned();
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
  TapeInfo info;
  info.usable = engine_is_ours() && !spoiled_;
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

void replay_tape_info(const replay::TapeHandle* tape, replay::TapeInfo* out) {
  *out = tape->tape->info();
}

int replay_tape_check(const replay::TapeHandle* tape) {
  return guarded([&] { tape->tape->check_refilled(); });
}
