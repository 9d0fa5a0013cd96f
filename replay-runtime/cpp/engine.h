// The engine whose hooks know tapes, and which tape follows the body that runs on a thread.
//
// LibTorch asks its default engine for hooks whenever an operation saves a tensor. Ours answers with those of the tape that
// the calling thread entered last; where it entered none, there are none, as in LibTorch's own.
#pragma once

#include "guard.h"

namespace replay {

class Tape;
struct TapeHandle;

// Whether the default engine is still the one that asks tapes.
bool engine_is_ours();

// Whether it is this tape that follows the calling thread.
bool follows_here(const Tape* tape);

// False where an exception thrown now would meet a panic that is under way, which ends the process.
bool may_unwind();

// Ends a body whose tape is full.
[[noreturn]] void end_full();
// Ends a body that takes a gradient of its own, for which the tensors are gone: it begins again.
[[noreturn]] void end_abandoned();

} // namespace replay

extern "C" {

// Makes the default engine one whose hooks know tapes. `may_unwind` is called before an exception ends a body: 0 where the
// calling thread unwinds already. The answer is 0 where another library has an engine of its own, as libtorch_python: then
// there are no tapes.
int replay_tape_install(int (*may_unwind)());

// From here to `replay_tape_leave`, on this thread, the tape records (`use` 0; 3: and drops each tensor at once), or is
// refilled to the end (1) or until it is full, when the operation that would go on throws (2). A null tape: nothing is
// recorded inside, and the tape around cannot be used.
int replay_tape_enter(const replay::TapeHandle* tape, int use);
void replay_tape_leave();
// Whether this thread unwinds because of its tape.
int replay_tape_stopping();

}
