// SPDX-License-Identifier: Apache-2.0
#include <checkpoint_tools/peak_memory.hpp>

#include <malloc.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

std::atomic<std::int64_t> used{0};
std::atomic<std::int64_t> most{0};

void* counted(std::size_t size) {
  void* memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  const std::int64_t now = used += static_cast<std::int64_t>(malloc_usable_size(memory));
  std::int64_t seen = most;
  while (seen < now && !most.compare_exchange_weak(seen, now)) {
  }
  return memory;
}

void released(void* memory) noexcept {
  if (memory == nullptr) return;
  used -= static_cast<std::int64_t>(malloc_usable_size(memory));
  std::free(memory);
}

}  // namespace

void* operator new(std::size_t size) { return counted(size); }
void* operator new[](std::size_t size) { return counted(size); }
void operator delete(void* memory) noexcept { released(memory); }
void operator delete[](void* memory) noexcept { released(memory); }
void operator delete(void* memory, std::size_t) noexcept { released(memory); }
void operator delete[](void* memory, std::size_t) noexcept { released(memory); }

namespace test {

PeakMemory::PeakMemory() : before_(used) { most = before_; }

std::int64_t PeakMemory::bytes() const { return most - before_; }

}  // namespace test
