#include "group.h"

#define USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

// By NCCL's own headers, which LibTorch does not ship: its options have NCCL's by value, so there can be no stubs.
#ifdef REPLAY_NCCL
#define USE_C10D_NCCL
#include <torch/csrc/cuda/nccl.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace replay {

struct StoreHandle {
  c10::intrusive_ptr<c10d::Store> store;
};

struct GroupHandle {
  // Before the backend, which goes first.
  c10::intrusive_ptr<c10d::Store> store;
  // By its base class: what the stub headers do not declare is never called.
  c10::intrusive_ptr<c10d::Backend> backend;
  int world;
  // For tensors on a GPU; null where there is none.
  c10::intrusive_ptr<c10d::Backend> nccl;
};

// What was begun. Each work holds the tensors that it reads and writes, and the connections, also where nobody waits for it.
struct WorksHandle {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
};

namespace {

std::chrono::milliseconds milliseconds(int64_t count) {
  return std::chrono::milliseconds(count);
}

c10d::Backend& backend_of(const GroupHandle& group, const at::Tensor& tensor) {
  if (tensor.is_cpu()) return *group.backend;
  TORCH_CHECK(group.nccl, "the group has no backend for ", tensor.device());
  return *group.nccl;
}

void wait(const c10::intrusive_ptr<c10d::Work>& work) {
  work->wait();
}

} // namespace
} // namespace replay

using replay::guarded;
using replay::milliseconds;

int replay_store_tcp(
    const char* host,
    int port,
    int serves,
    size_t workers,
    int64_t timeout_ms,
    replay::StoreHandle** out) {
  return guarded([&] {
    TORCH_CHECK(port >= 0 && port <= std::numeric_limits<uint16_t>::max(), "no port has the number ", port);
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(port);
    options.isServer = serves != 0;
    options.numWorkers = workers;
    // The group itself waits for all ranks, and a store of torchrun's agent counts others.
    options.waitWorkers = false;
    options.timeout = milliseconds(timeout_ms);
    options.multiTenant = true;
    *out = new replay::StoreHandle{c10::make_intrusive<c10d::TCPStore>(host, options)};
  });
}

int replay_store_file(const char* path, size_t workers, int64_t timeout_ms, replay::StoreHandle** out) {
  return guarded([&] {
    auto store = c10::make_intrusive<c10d::FileStore>(path, static_cast<int>(workers));
    store->setTimeout(milliseconds(timeout_ms));
    *out = new replay::StoreHandle{std::move(store)};
  });
}

void replay_store_free(replay::StoreHandle* store) {
  delete store;
}

int replay_group_new(
    const replay::StoreHandle* store,
    const char* prefix,
    int rank,
    int world,
    int64_t timeout_ms,
    replay::GroupHandle** out) {
  return guarded([&] {
    auto own = c10::make_intrusive<c10d::PrefixStore>(prefix, store->store);
    auto options = c10d::ProcessGroupGloo::Options::create_default(milliseconds(timeout_ms));
    auto backend = c10::make_intrusive<c10d::ProcessGroupGloo>(
        c10::make_intrusive<c10d::PrefixStore>("gloo", own), rank, world, std::move(options));
    *out = new replay::GroupHandle{std::move(own), std::move(backend), world, nullptr};
  });
}

void replay_group_free(replay::GroupHandle* group) {
  // Destructors of LibTorch's: they end connections, and wait for no rank but for what is under way, a timeout at most.
  delete group;
}

int replay_group_add_nccl(
    replay::GroupHandle* group,
    [[maybe_unused]] int rank,
    [[maybe_unused]] int device,
    [[maybe_unused]] int64_t timeout_ms) {
  return guarded([&] {
#ifdef REPLAY_NCCL
    // The options' layout is that of NCCL's header.
    constexpr uint64_t ours =
        (static_cast<uint64_t>(NCCL_MAJOR) << 32) | (static_cast<uint64_t>(NCCL_MINOR) << 16) | NCCL_PATCH;
    TORCH_CHECK(
        torch::cuda::nccl::version() == ours, "the shim was compiled with nccl.h of NCCL ", NCCL_MAJOR, ".", NCCL_MINOR,
        ".", NCCL_PATCH, ", and LibTorch with another one: set NCCL_HOME to the one that it names");
    auto options = c10d::ProcessGroupNCCL::Options::create();
    options->timeout = milliseconds(timeout_ms);
    auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(
        c10::make_intrusive<c10d::PrefixStore>("nccl", group->store), rank, group->world, std::move(options));
    backend->setBoundDeviceId(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device)));
    group->nccl = std::move(backend);
#else
    TORCH_CHECK(group == nullptr, "the library was built without its feature `nccl`");
#endif
  });
}

int replay_group_note(const replay::GroupHandle* group, const char* key, const char* text) {
  return guarded([&] {
    const std::vector<uint8_t> bytes(text, text + std::strlen(text));
    group->store->set(key, bytes);
  });
}

int replay_group_read_note(const replay::GroupHandle* group, const char* key, char* out, size_t capacity) {
  return guarded([&] {
    out[0] = '\0';
    if (!group->store->check({key})) return;
    const auto bytes = group->store->get(key);
    const size_t length = std::min(bytes.size(), capacity - 1);
    std::memcpy(out, bytes.data(), length);
    out[length] = '\0';
  });
}

int replay_group_all_gather(const replay::GroupHandle* group, at::Tensor* all, const at::Tensor* own) {
  return guarded([&] {
    at::Tensor input = *own;
    replay::wait(group->backend->_allgather_base(*all, input));
  });
}

// By a broadcast of each piece: an all-gather of Gloo's copies all of it once more.
int replay_group_gather_pieces(
    const replay::GroupHandle* group,
    at::Tensor* const* wholes,
    size_t n,
    replay::WorksHandle** out) {
  return guarded([&] {
    at::AutoGradMode off(false);
    auto begun = std::make_unique<replay::WorksHandle>();
    for (size_t i = 0; i < n; ++i) {
      const int64_t chunk = wholes[i]->numel() / group->world;
      if (chunk == 0) continue;
      for (int rank = 0; rank < group->world; ++rank) {
        std::vector<at::Tensor> piece{wholes[i]->narrow(0, rank * chunk, chunk)};
        c10d::BroadcastOptions options;
        options.rootRank = rank;
        begun->works.push_back(replay::backend_of(*group, piece.front()).broadcast(piece, options));
      }
    }
    *out = begun.release();
  });
}

int replay_group_exchange_pieces(
    const replay::GroupHandle* group,
    at::Tensor* const* received,
    at::Tensor* const* pieces,
    size_t n,
    replay::WorksHandle** out) {
  return guarded([&] {
    auto begun = std::make_unique<replay::WorksHandle>();
    std::vector<int64_t> even;
    for (size_t i = 0; i < n; ++i)
      if (pieces[i]->numel() != 0)
        begun->works.push_back(replay::backend_of(*group, *pieces[i]).alltoall_base(*received[i], *pieces[i], even, even));
    *out = begun.release();
  });
}

int replay_works_wait(replay::WorksHandle* works) {
  return guarded([&] {
    for (const auto& work : works->works) replay::wait(work);
  });
}

void replay_works_free(replay::WorksHandle* works) {
  delete works;
}

int replay_group_broadcast(const replay::GroupHandle* group, at::Tensor* tensor, int root) {
  return guarded([&] {
    std::vector<at::Tensor> tensors{*tensor};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    replay::wait(group->backend->broadcast(tensors, options));
  });
}
