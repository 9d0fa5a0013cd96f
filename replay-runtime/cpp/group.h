// A Gloo process group of the library's own, and the store by which its ranks find each other.
//
// Ownership: a `GroupHandle` owns its backend and a share of the store, and gives up the backend first. Threads: one thread
// uses a group at a time; LibTorch's own threads do the work. What may throw: everything that waits for another rank.
#pragma once

#include "guard.h"

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>

namespace replay {

struct StoreHandle; // opaque to Rust
struct GroupHandle; // likewise
struct WorksHandle; // likewise

} // namespace replay

extern "C" {

// `serves`: this rank runs the server. With `timeout_ms` waits for it, or, where it serves, for nobody.
int replay_store_tcp(const char* host, int port, int serves, size_t workers, int64_t timeout_ms, replay::StoreHandle** out);
int replay_store_file(const char* path, size_t workers, int64_t timeout_ms, replay::StoreHandle** out);
void replay_store_free(replay::StoreHandle* store);

// Keys are the group's own: they do not meet those of others in the same store.
int replay_group_new(
    const replay::StoreHandle* store,
    const char* prefix,
    int rank,
    int world,
    int64_t timeout_ms,
    replay::GroupHandle** out);
void replay_group_free(replay::GroupHandle* group);
// From now on tensors on CUDA device `device` go by NCCL. An error where the shim was built without `REPLAY_NCCL`.
int replay_group_add_nccl(replay::GroupHandle* group, int rank, int device, int64_t timeout_ms);

// A note for the other ranks, which they read without this rank's help.
int replay_group_note(const replay::GroupHandle* group, const char* key, const char* text);
// The note, cut to `capacity`; empty where there is none.
int replay_group_read_note(const replay::GroupHandle* group, const char* key, char* out, size_t capacity);

// Each rank's `own`, one after the other, in `all`.
int replay_group_all_gather(const replay::GroupHandle* group, at::Tensor* all, const at::Tensor* own);
// Each of `wholes` has pieces of one size for all ranks, one after the other; each rank's own piece is right before, and all of
// them are after `replay_works_wait`.
int replay_group_gather_pieces(
    const replay::GroupHandle* group,
    at::Tensor* const* wholes,
    size_t n,
    replay::WorksHandle** out);
// Piece `i` of each of `pieces` goes to rank `i`; `received` has the pieces that all ranks sent to this one, in their order, after
// `replay_works_wait`.
int replay_group_exchange_pieces(
    const replay::GroupHandle* group,
    at::Tensor* const* received,
    at::Tensor* const* pieces,
    size_t n,
    replay::WorksHandle** out);
// Until all of it is done, or LibTorch gives it up; with NCCL, until it is in the current stream's order.
int replay_works_wait(replay::WorksHandle* works);
// LibTorch goes on with what is not done, and holds its tensors meanwhile.
void replay_works_free(replay::WorksHandle* works);
// `tensor` of rank `root` on all ranks.
int replay_group_broadcast(const replay::GroupHandle* group, at::Tensor* tensor, int root);

}
