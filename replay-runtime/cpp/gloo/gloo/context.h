// LibTorch has Gloo inside and ships no header of it. `ProcessGroupGloo.hpp` names a few of its types and holds them by
// pointers alone; these files declare just those names. Nothing of Gloo is called from here.
#pragma once

#include <chrono>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

} // namespace gloo
