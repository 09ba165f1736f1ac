// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_test_macros.hpp>
#include <shardopt/core/error.hpp>

#include <stdexcept>
#include <string>

namespace so = shardopt;

namespace {
so::Location where(so::Location location = so::Location::current()) { return location; }
}  // namespace

TEST_CASE("An error collects what the layers above it know", "[core][host]") {
  so::CollectiveError error("the wire is cut");
  error.add_context("bucket 3");
  error.add_context("step 7");
  CHECK(std::string(error.what()) == "the wire is cut; bucket 3; step 7");
  const so::Error& base = error;
  const std::runtime_error& standard = base;
  CHECK(std::string(standard.what()) == error.what());
}

TEST_CASE("A location as a default argument is the caller's", "[core][host]") {
  const int line = __LINE__ + 1;
  const so::Location location = where();
  CHECK(location.line == line);
  CHECK(std::string(location.file).find("error_test.cpp") != std::string::npos);
  CHECK(so::detail::text_of(location).find(std::to_string(line)) != std::string::npos);
}
