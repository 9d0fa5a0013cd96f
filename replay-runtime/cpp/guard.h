// The error channel of the shim. No exception leaves an `extern "C"` function: an entry that could throw runs its body
// in `guarded` and answers with a code; the text waits in a thread-local of our own until the caller, on the same
// thread, reads it. torch-sys has a channel too, and it is never touched: tch panics in `Drop for Tensor` while
// an error is pending there.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>

namespace replay {

enum Code : int {
  kOk = 0,
  kException = 1,
  // A node of ours refused to run; `Refused` below.
  kForeignBackward = 2,
  kOtherRollout = 3,
  kThread = 4,
  kUsed = 5,
  // The Rust callback failed and has stored why.
  kCallback = 6,
  // The graph of a block reaches a node that was made outside the block.
  kCaptured = 7,
  // A pass came to what left a body by another way than its outputs.
  kEscaped = 8,
  // A replay does not do what its forward did.
  kMismatch = 9,
};

struct Refused : std::exception {
  Refused(Code code, std::string text) : code(code), text(std::move(text)) {}
  const char* what() const noexcept override { return text.c_str(); }
  Code code;
  std::string text;
};

struct LastError {
  std::string brief;
  std::string full;
};

// Never destroyed: destructors of other thread-locals may still call in while a thread ends.
inline LastError& last_error() {
  static thread_local auto* error = new LastError;
  return *error;
}

// Keeping the text may itself run out of memory; then the code alone has to do.
inline void remember(const char* brief, const char* full) noexcept {
  try {
    last_error().brief = brief;
    last_error().full = full;
  } catch (...) {
  }
}

template <class Body>
int guarded(Body&& body) noexcept {
  try {
    body();
    return kOk;
  } catch (const Refused& error) {
    remember(error.what(), error.what());
    return error.code;
  } catch (const c10::Error& error) {
    remember(error.what_without_backtrace(), error.what());
    return kException;
  } catch (const std::exception& error) {
    remember(error.what(), error.what());
    return kException;
  } catch (...) {
    remember("unknown C++ exception", "unknown C++ exception");
    return kException;
  }
}

// The value of `body`, or zero where it throws.
template <class Value, class Body>
Value value_of(Body&& body) noexcept {
  Value value{};
  guarded([&] { value = body(); });
  return value;
}

} // namespace replay
