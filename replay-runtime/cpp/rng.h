// The default generators of random numbers: their states, and the order among threads that draw from them.
//
// LibTorch has one CPU generator for the whole process. A block must find in its replay the numbers of its forward, so
// while a block draws, no other thread may. There is one mutex for that, held by a thread between `replay_draws_hold` and
// `replay_draws_release`, and for as long as it has a `Watch` that has seen a draw. As soon as two threads have had rollouts, LibTorch runs a callback of ours
// before each operation; on a thread that joined, one that draws takes the mutex there, for itself alone outside of
// blocks, and inside a block to the block's end. So blocks that draw nothing never wait.
#pragma once

#include "guard.h"

#include <ATen/ATen.h>

namespace replay {
struct GeneratorState;
struct Watch;

// A number that changes with every draw, for comparing a block's two runs. 0 where the thread watches for its first draw and
// has seen none: what others draw meanwhile must not count.
uint64_t generators_stand(int cuda_index);
}

extern "C" {

// Where the device's default generator stands.
int replay_rng_read(int device_type, int index, replay::GeneratorState** out);
// Puts the generator there again.
int replay_rng_write(const replay::GeneratorState* state);
// Whether it stands there now.
int replay_rng_stands(const replay::GeneratorState* state, int* out);
int replay_rng_equal(const replay::GeneratorState* a, const replay::GeneratorState* b, int* out);
void replay_rng_free(replay::GeneratorState* state) noexcept;

// The same as bytes, in LibTorch's own form, to be kept in a file.
int replay_rng_bytes(int device_type, int index, at::Tensor** out);
int replay_rng_set_bytes(int device_type, int index, const at::Tensor* bytes);

// Counts the calling thread among those with rollouts, until it ends. It joins, if wanted: while it is not alone,
// its draws wait for those of others that joined, and theirs for its own.
int replay_draws_register(int join);
// Whether more than one thread is counted.
int replay_draws_shared();

// Takes and gives back the mutex, for the calling thread, as often as wanted.
void replay_draws_hold() noexcept;
void replay_draws_release() noexcept;

// Notes the states of the CPU's generator and of that of the CUDA device (`-1`: none) before the first draw of the
// calling thread, which joins, and then holds the mutex until its end. Ends on the same thread, innermost first.
int replay_watch_begin(int cuda_index, replay::Watch** out);
// The state before the first draw; null where nothing was drawn.
int replay_watch_state(const replay::Watch* watch, int device_type, replay::GeneratorState** out);
void replay_watch_end(replay::Watch* watch) noexcept;

}
