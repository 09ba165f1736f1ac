// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

namespace shardopt::inline v0::checkpoint::detail {

/// Calls `advise(begin, bytes)` for the pages that hold memory.
template <class Advise>
void advise_pages(void* memory, std::size_t bytes, const Advise& advise) noexcept {
  static const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(memory) / page * page;
  const auto end = reinterpret_cast<std::uintptr_t>(memory) + bytes;
  static_cast<void>(advise(reinterpret_cast<void*>(begin), end - begin));
}

/// Says that memory is all used: of pages of 2 MiB the system has fewer to find. A hint; none for less than
/// that.
inline void prefer_large_pages([[maybe_unused]] void* memory, [[maybe_unused]] std::size_t bytes) noexcept {
#ifdef MADV_HUGEPAGE
  if (bytes < std::size_t{2} << 20) return;
  advise_pages(memory, bytes,
               [](void* begin, std::size_t size) { return ::madvise(begin, size, MADV_HUGEPAGE); });
#endif
}

/// Asks for the pages of memory now, so that who writes it first need not wait for them. Leaves the content
/// as it is, also while another thread writes. A hint.
inline void make_resident([[maybe_unused]] void* memory, [[maybe_unused]] std::size_t bytes) noexcept {
#ifdef MADV_POPULATE_WRITE
  advise_pages(memory, bytes,
               [](void* begin, std::size_t size) { return ::madvise(begin, size, MADV_POPULATE_WRITE); });
#endif
}

}  // namespace shardopt::inline v0::checkpoint::detail
