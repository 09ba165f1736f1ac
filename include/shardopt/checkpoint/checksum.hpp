// SPDX-License-Identifier: Apache-2.0
#pragma once

// The library's functions become static here: nothing to link, and no clash with an engine's own copy.
#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace shardopt::inline v0::checkpoint {

/// XXH3, 64 bits, seed 0 (https://xxhash.com), of the bytes. Finds damage, resists no attack.
[[nodiscard]] inline std::uint64_t checksum(std::span<const std::byte> bytes) noexcept {
  return XXH3_64bits(bytes.data(), bytes.size());
}

/// A checksum as files hold it: 16 lower-case hexadecimal digits.
[[nodiscard]] inline std::string hexadecimal(std::uint64_t value) {
  constexpr const char* digits = "0123456789abcdef";
  std::string text(16, '0');
  for (std::size_t k = 16; k-- > 0; value >>= 4) text[k] = digits[value & 15U];
  return text;
}

/// Bytes of a file are checked in blocks of this size from its first byte on; the last one is shorter.
inline constexpr std::int64_t block_bytes = std::int64_t{1} << 20;

/// Number of blocks of a file.
[[nodiscard]] constexpr std::int64_t blocks_in(std::int64_t bytes) noexcept {
  return bytes / block_bytes + (bytes % block_bytes != 0 ? 1 : 0);
}

/// Checksums of the blocks of a file that is written from its beginning to its end.
class BlockChecksums {
 public:
  /// Appends bytes.
  void add(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      if (filled_ == 0) XXH3_64bits_reset(&state_);
      const auto count = (std::min)(bytes.size(), static_cast<std::size_t>(block_bytes - filled_));
      XXH3_64bits_update(&state_, bytes.data(), count);
      filled_ += static_cast<std::int64_t>(count);
      if (filled_ == block_bytes) finish();
      bytes = bytes.subspan(count);
    }
  }

  /// Those of all blocks. Nothing can be added afterwards.
  [[nodiscard]] std::vector<std::uint64_t> take() {
    if (filled_ > 0) finish();
    return std::move(blocks_);
  }

 private:
  void finish() {
    blocks_.push_back(XXH3_64bits_digest(&state_));
    filled_ = 0;
  }

  XXH3_state_t state_;
  std::int64_t filled_ = 0;
  std::vector<std::uint64_t> blocks_;
};

}  // namespace shardopt::inline v0::checkpoint
