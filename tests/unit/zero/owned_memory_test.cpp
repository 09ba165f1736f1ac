// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <shardopt/zero/owned_memory.hpp>

#include <cstddef>
#include <cstdint>
#include <new>
#include <stdexcept>

namespace so = shardopt;

namespace {

/// Pieces that are allocated, and when there are no more.
struct Heap {
  int pieces = 0;
  int left = 100;
};

/// What OwnedMemory needs of a device.
class CountingDevice {
 public:
  explicit CountingDevice(Heap& heap) : heap_(&heap) {}

  [[nodiscard]] void* allocate(std::int64_t bytes) const {
    if (heap_->left-- == 0) throw std::bad_alloc();
    ++heap_->pieces;
    return ::operator new(static_cast<std::size_t>(bytes), std::align_val_t(256));
  }
  void deallocate(void* memory) const noexcept {
    --heap_->pieces;
    ::operator delete(memory, std::align_val_t(256));
  }
  [[nodiscard]] void* allocate_pinned(std::int64_t bytes) const { return allocate(bytes); }
  void deallocate_pinned(void* memory) const noexcept { deallocate(memory); }

 private:
  Heap* heap_;
};

/// Throws from one of its calls.
class Thrower : public so::Observer {
 public:
  explicit Thrower(bool before) : before_(before) {}
  void before_allocation(const so::MemoryPlan&) override {
    if (before_) throw std::runtime_error("no room");
  }
  void after_allocation(const so::MemoryPlan&) override {
    if (!before_) throw std::runtime_error("log file is full");
  }

 private:
  bool before_;
};

const so::MemoryPlan& plan() {
  static const so::MemoryPlan small = [] {
    so::MemoryPlan result;
    result.device_bytes = 512;
    result.pinned_bytes = 256;
    return result;
  }();
  return small;
}

}  // namespace

using so::detail::OwnedMemory;

TEST_CASE("What was allocated is given back, also when an observer or the second allocation throws",
          "[zero][host]") {
  Heap heap;
  {
    const OwnedMemory<CountingDevice> memory(CountingDevice(heap), plan(), {}, false, nullptr);
    CHECK(heap.pieces == 2);
  }
  CHECK(heap.pieces == 0);
  for (const bool before : {false, true}) {
    Thrower thrower(before);
    CHECK_THROWS_AS(OwnedMemory<CountingDevice>(CountingDevice(heap), plan(), {}, false, &thrower),
                    std::runtime_error);
    CHECK(heap.pieces == 0);
  }
  for (const int left : {0, 1}) {
    heap.left = left;
    CHECK_THROWS_AS(OwnedMemory<CountingDevice>(CountingDevice(heap), plan(), {}, false, nullptr),
                    std::bad_alloc);
    CHECK(heap.pieces == 0);
  }
}

TEST_CASE("An arena is never given back, and a part that is missing is allocated only where it may be",
          "[zero][host]") {
  Heap heap;
  alignas(256) std::byte storage[1024];
  {
    const OwnedMemory<CountingDevice> given(CountingDevice(heap), plan(), {storage, storage + 512}, true,
                                            nullptr);
    const OwnedMemory<CountingDevice> half(CountingDevice(heap), plan(), {storage, nullptr}, false, nullptr);
    CHECK(given.at<std::byte>(7) == storage + 7);
    CHECK(given.pinned() == storage + 512);
    CHECK(heap.pieces == 1);
  }
  CHECK(heap.pieces == 0);
  CHECK_THROWS_AS(
      OwnedMemory<CountingDevice>(CountingDevice(heap), plan(), {storage, nullptr}, true, nullptr),
      std::invalid_argument);
  CHECK_THROWS_AS(
      OwnedMemory<CountingDevice>(CountingDevice(heap), plan(), {storage + 1, storage + 512}, true, nullptr),
      std::invalid_argument);
  CHECK(heap.pieces == 0);
}
