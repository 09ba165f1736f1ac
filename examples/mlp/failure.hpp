// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "options.hpp"

#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>

namespace mlp {

/// A failure of all ranks at once that rank 0 has told already: the program only has to end.
struct Told : std::runtime_error {
  Told(const std::string& what, int exit_code) : std::runtime_error(what), code(exit_code) {}
  int code;
};

/// Prints one line on standard error.
/// @param who  begins it where several processes may print, such as "rank 2: "
/// @return the program's exit code: 2 for bad input, 1 for any other failure
inline int report(const std::exception_ptr& failure, const std::string& who = {}) {
  const auto say = [&](const char* what, int code) {
    std::fprintf(stderr, "mlp: %s%s\n", who.c_str(), what);
    return code;
  };
  try {
    std::rethrow_exception(failure);
  } catch (const Told& told) {
    return told.code;
  } catch (const UsageError& error) {
    return say(error.what(), 2);
  } catch (const std::invalid_argument& error) {  // the library refuses a setting
    return say(error.what(), 2);
  } catch (const std::exception& error) {
    return say(error.what(), 1);
  }
}

}  // namespace mlp
