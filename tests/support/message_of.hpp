// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <string>

namespace test {

/// The message of what a call throws; empty if it does not. Exceptions of other kinds pass.
template <class Error = std::exception, class Body>
[[nodiscard]] std::string message_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace test
