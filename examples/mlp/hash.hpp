// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace mlp {

/// The 64-bit FNV-1a hash of a sequence of bytes.
class Fnv1a {
 public:
  void add(const void* bytes, std::size_t count) {
    const auto* at = static_cast<const unsigned char*>(bytes);
    for (std::size_t n = 0; n < count; ++n) value_ = (value_ ^ at[n]) * 0x100000001B3U;
  }
  [[nodiscard]] std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0xCBF29CE484222325U;
};

/// The value as 16 hexadecimal digits.
inline std::string hex(std::uint64_t value) {
  std::string text(16, '0');
  for (std::size_t at = text.size(); at-- > 0; value >>= 4U) text[at] = "0123456789abcdef"[value & 15U];
  return text;
}

}  // namespace mlp
