// SPDX-License-Identifier: Apache-2.0
#include <support/watched_new.hpp>

#include <malloc.h>

#include <cstdlib>
#include <new>

namespace test {

Allocations& allocations_here() {
  thread_local Allocations counts;
  return counts;
}

}  // namespace test

namespace {

void* counted(void* memory, std::size_t bytes) {
  if (memory == nullptr) throw std::bad_alloc();
  auto& counts = test::allocations_here();
  counts.largest = std::max(counts.largest, static_cast<std::int64_t>(bytes));
  counts.live += static_cast<std::int64_t>(malloc_usable_size(memory));
  counts.peak = std::max(counts.peak, counts.live);
  return memory;
}

void* plain(std::size_t bytes) { return counted(std::malloc(bytes > 0 ? bytes : 1), bytes); }

void* aligned(std::size_t bytes, std::align_val_t alignment) {
  const auto multiple = static_cast<std::size_t>(alignment);
  return counted(std::aligned_alloc(multiple, (bytes + multiple - 1) / multiple * multiple), bytes);
}

void release(void* memory) noexcept {
  if (memory == nullptr) return;
  test::allocations_here().live -= static_cast<std::int64_t>(malloc_usable_size(memory));
  std::free(memory);
}

}  // namespace

void* operator new(std::size_t bytes) { return plain(bytes); }
void* operator new[](std::size_t bytes) { return plain(bytes); }
void* operator new(std::size_t bytes, std::align_val_t alignment) { return aligned(bytes, alignment); }
void* operator new[](std::size_t bytes, std::align_val_t alignment) { return aligned(bytes, alignment); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  void* memory = std::malloc(bytes > 0 ? bytes : 1);
  return memory == nullptr ? nullptr : counted(memory, bytes);
}
void* operator new[](std::size_t bytes, const std::nothrow_t& tag) noexcept {
  return ::operator new(bytes, tag);
}
void operator delete(void* memory) noexcept { release(memory); }
void operator delete[](void* memory) noexcept { release(memory); }
void operator delete(void* memory, std::size_t) noexcept { release(memory); }
void operator delete[](void* memory, std::size_t) noexcept { release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }
