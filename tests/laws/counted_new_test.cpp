// SPDX-License-Identifier: Apache-2.0
#include <laws/counted_new.hpp>

#include <cstdlib>
#include <new>

namespace test {

AllocationCounts& allocations() {
  thread_local AllocationCounts counts;
  return counts;
}

}  // namespace test

namespace {

void* plain(std::size_t bytes) {
  test::allocations().plain_bytes += static_cast<std::int64_t>(bytes);
  if (void* memory = std::malloc(bytes > 0 ? bytes : 1)) return memory;
  throw std::bad_alloc();
}

void* aligned(std::size_t bytes, std::size_t alignment) {
  auto& counts = test::allocations();
  ++counts.aligned_calls;
  counts.aligned_bytes += static_cast<std::int64_t>(bytes);
  if (void* memory = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment))
    return memory;
  throw std::bad_alloc();
}

}  // namespace

void* operator new(std::size_t bytes) { return plain(bytes); }
void* operator new[](std::size_t bytes) { return plain(bytes); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return aligned(bytes, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  return aligned(bytes, static_cast<std::size_t>(alignment));
}
// Algorithms of the standard library ask like this for temporary memory, and give it back like the rest.
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  test::allocations().plain_bytes += static_cast<std::int64_t>(bytes);
  return std::malloc(bytes > 0 ? bytes : 1);
}
void* operator new[](std::size_t bytes, const std::nothrow_t& tag) noexcept {
  return ::operator new(bytes, tag);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
