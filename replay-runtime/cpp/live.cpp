#include "live.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstring>

namespace {

std::atomic<uint64_t> live{0};
std::atomic<uint64_t> peak{0};
// How LibTorch's own allocator frees. Written once, before anything can be allocated here.
c10::DeleterFnPtr inner_free = nullptr;

// Before each block stands its size, in as much room as keeps the alignment of LibTorch's allocator.
constexpr size_t kHeader = 64;

void count(size_t bytes) noexcept {
  const uint64_t now = live.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  uint64_t most = peak.load(std::memory_order_relaxed);
  while (most < now && !peak.compare_exchange_weak(most, now, std::memory_order_relaxed)) {
  }
}

void release(void* data) noexcept {
  if (data == nullptr) {
    return;
  }
  void* block = static_cast<char*>(data) - kHeader;
  uint64_t bytes = 0;
  std::memcpy(&bytes, block, sizeof bytes);
  live.fetch_sub(bytes, std::memory_order_relaxed);
  inner_free(block);
}

// A block carries the function that frees it, so those that LibTorch's own allocator made before stay its own.
struct Counting final : c10::Allocator {
  explicit Counting(c10::Allocator* inner) : inner(inner) {}

  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    // As LibTorch's own: nothing has no address.
    if (bytes == 0) {
      return {nullptr, nullptr, &release, cpu};
    }
    TORCH_CHECK(bytes <= SIZE_MAX - kHeader, "too large a tensor: ", bytes, " bytes");
    char* block = static_cast<char*>(inner->raw_allocate(bytes + kHeader));
    const uint64_t size = bytes;
    std::memcpy(block, &size, sizeof size);
    count(bytes);
    char* data = block + kHeader;
    return {data, data, &release, cpu};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  c10::Allocator* inner;
};

} // namespace

extern "C" {

int replay_live_install() {
  return replay::guarded([] {
    if (inner_free != nullptr) {
      return;
    }
    c10::Allocator* inner = c10::GetCPUAllocator();
    const c10::DeleterFnPtr free = inner->raw_deleter();
    TORCH_CHECK(free != nullptr, "LibTorch's CPU allocator cannot be counted");
    // Never destroyed: tensors may outlive all statics.
    auto* counting = new Counting(inner);
    inner_free = free;
    c10::SetCPUAllocator(counting, UINT8_MAX);
    TORCH_CHECK(c10::GetCPUAllocator() == counting, "LibTorch kept its CPU allocator");
  });
}

uint64_t replay_live_bytes() noexcept { return live.load(std::memory_order_relaxed); }

uint64_t replay_live_peak() noexcept { return peak.load(std::memory_order_relaxed); }

void replay_live_reset_peak() noexcept { peak.store(live.load(std::memory_order_relaxed), std::memory_order_relaxed); }

}
