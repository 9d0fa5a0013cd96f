// Counts the bytes of LibTorch's CPU tensors, for the benchmark. Nothing here runs unless it is asked for.
#pragma once

#include "guard.h"

#include <cstdint>

extern "C" {

// Puts a counting allocator before LibTorch's own, for all that is allocated from now on. Not while another thread runs.
int replay_live_install();
// The bytes that live now and that came from the counting allocator, as their owners asked for them.
uint64_t replay_live_bytes() noexcept;
// The most that lived at once since the last reset.
uint64_t replay_live_peak() noexcept;
void replay_live_reset_peak() noexcept;

}
