// What the graph of one block has saved for its derivative, between forward and replay.
//
// LibTorch hands each tensor that an operation saves to the engine's hooks, and the engine is one of ours (engine.cpp).
// While a tape records, on the thread of the body, they go into its slots. The graph that is built meanwhile holds no
// tensor of its own, only the numbers of slots. So its tensors can be dropped when the forward is over, and brought again by
// a replay, which runs the body only up to the last of them; or they stay, and there is no replay.
//
// Ownership: the hooks in the graph and `RecordedGraph` share the tape; the tape holds no part of the graph, so that
// nothing goes in a circle. Threads: a tape records and is refilled on one thread; its graph may die on any, and passes on any
// may come to it, so slots are behind a mutex.
#pragma once

#include "guard.h"

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

namespace replay {

// The storages of a rollout's variables: what is saved of them stays where it is and costs nothing.
struct StorageSet {
  std::unordered_set<const c10::StorageImpl*> storages;
};

struct Slot {
  void take(const at::Tensor& saved);
  // As `take`, without the tensor.
  void note(const at::Tensor& saved);
  bool intact() const;

  at::Tensor tensor; // detached; undefined once it was dropped or used
  c10::VariableVersion counter; // the tensor's, which holds nothing else of it
  uint64_t layout = 0; // hash of dtype, device, sizes and strides
  uint64_t nodes = 0; // how many nodes the body had made by then
  uint64_t generators = 0; // where the generators stood
  uint64_t version = 0;
  bool variable = false; // of the rollout's store: neither dropped nor counted
  bool owned = true; // by a node that lives
};

// What Rust asks a tape.
struct TapeInfo {
  uint8_t usable; // nothing has spoilt it
  uint8_t abandoned; // the forward's body was ended, because it asked for a tensor that was dropped
  uint8_t intact; // no tensor was changed since it was saved, and no other pass used any up
  uint8_t filled; // its graph can be differentiated as it is
  uint8_t stopped; // the replay's body was ended
  uint8_t generators_agree; // and the generators stand where they stood at that place in the forward
  uint64_t bytes; // of the tensors that the forward saved, each storage once, without inputs and variables
  uint64_t graph_bytes; // of the graph itself, estimated
  uint64_t first_node; // the numbers of the nodes that the forward made on this thread: from this one
  uint64_t end_node; // to before this one
};

class Tape {
 public:
  Tape(std::string block, std::shared_ptr<const StorageSet> variables, int cuda_index)
      : block_(std::move(block)), variables_(std::move(variables)), cuda_index_(cuda_index) {}

  // Called once per input, whose storages are not counted.
  void add_input(const at::Tensor& input);

  // The forward: from the body's beginning on tensors are packed, and dropped at once if `drops`; at its end, when all that
  // it does not need is gone, they are counted.
  void begin_record(bool drops);
  size_t pack(const at::Tensor& tensor);
  void end_body();
  void end_record();

  // Makes the graph one whose tensors a replay must bring again, all but variables.
  void drop_tensors();
  // The replay. The body `unwinds` if it is to end with the last tensor.
  void begin_refill(bool unwinds);
  void bring(const at::Tensor& tensor);
  // Throws `Refused` with `kMismatch` where the body did not do what it had done in the forward.
  void check_refilled() const;

  // What the graph asks for, and what it needs no more.
  at::Tensor unpack(size_t index);
  void release(size_t index) noexcept;
  // The block is differentiated by its own rollout between these. Before and after, the graph gives only what the forward
  // kept, to passes from a tensor that the body left aside.
  void open();
  void close();
  // Recording is over without `end_record`.
  void give_up() noexcept;
  // The graph cannot be used: something happened in the body that the tape does not follow.
  void spoil(const char* what);

  TapeInfo info() const;

 private:
  void differ(std::string what);
  bool is_variable(const at::Tensor& tensor) const;

  const std::string block_;
  const std::shared_ptr<const StorageSet> variables_;
  const int cuda_index_;
  std::unordered_set<const c10::StorageImpl*> inputs_;
  mutable std::mutex mutex_;
  std::vector<Slot> slots_;
  uint64_t bytes_ = 0;
  uint64_t first_node_ = 0;
  uint64_t end_node_ = 0;
  bool recording_ = false;
  bool drops_ = false;
  bool abandoned_ = false;
  bool filled_ = true;
  bool open_ = false;
  bool used_up_ = false;
  bool spoiled_ = false;
  // Of the refill.
  size_t needed_ = 0; // slots up to the last one that has to be brought
  size_t next_ = 0;
  uint64_t first_brought_node_ = 0;
  uint64_t generators_at_start_ = 0;
  bool unwinds_ = false;
  bool stopped_ = false;
  bool generators_agree_ = true;
  std::string mismatch_;
};

// Opaque to Rust.
struct TapeHandle {
  std::shared_ptr<Tape> tape;
};
struct StorageSetHandle {
  std::shared_ptr<const StorageSet> set;
};

} // namespace replay

extern "C" {

int replay_storage_set_new(const at::Tensor* const* tensors, size_t n, replay::StorageSetHandle** out);
void replay_storage_set_free(replay::StorageSetHandle* set);

int replay_tape_new(
    const char* block,
    const at::Tensor* const* inputs,
    size_t n_inputs,
    const replay::StorageSetHandle* variables,
    int cuda_index,
    replay::TapeHandle** out);
void replay_tape_free(replay::TapeHandle* tape);

void replay_tape_info(const replay::TapeHandle* tape, replay::TapeInfo* out);
int replay_tape_check(const replay::TapeHandle* tape);

}
