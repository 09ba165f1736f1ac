// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/error.hpp>

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>

namespace shardopt::inline v0::detail {

/// What is being done, for messages: made a text only when one is needed.
struct Position {
  std::int64_t iteration = 0;  ///< counted from 1
  std::string_view what;
  std::int64_t index = -1;  ///< of the bucket, or negative

  /// "the reduction of bucket 3"
  [[nodiscard]] std::string place() const {
    return std::string(what) + (index < 0 ? "" : " " + std::to_string(index));
  }
  /// "iteration 7, the reduction of bucket 3": what a collective takes as a label.
  operator std::string() const {  // NOLINT: implicit
    return "iteration " + std::to_string(iteration) + ", " + place();
  }
};

/// Lets the other ranks know that this one goes no further, where the collective can.
template <class Comm>
void give_up(Comm& comm, std::string_view text) noexcept {
  if constexpr (requires { comm.abort(text); }) {
    try {
      comm.abort(text);
    } catch (...) {
      // What failed is thrown on this rank, at least.
    }
  }
}

/// Holds the first failure of what has effects: it stays, and is thrown again by whatever asks later.
///
/// The failure's message gets rank, iteration and what was being done; the other ranks are told by the
/// collective, where it can. What is no Error of the library's becomes one, with the original nested in it
/// (std::rethrow_if_nested).
class FailureLatch {
 public:
  /// @throws the first failure, if there was one
  void require_working() const {
    if (failure_) std::rethrow_exception(failure_);
  }

  /// Notes what is being done, for messages, and tells the collective.
  template <class Comm>
  void enter(Comm& comm, const Position& position) {
    position_ = position;
    label(comm, position);
  }

  /// Runs what has effects. @throws what it throws, with the place; from then on require_working() throws the
  /// same
  template <class Comm, class Body>
  auto run(Comm& comm, std::int64_t iteration, std::string_view call, const Body& body) -> decltype(body()) {
    const auto place = [&] {
      const std::string what = position_.place();
      return "rank " + std::to_string(comm.rank()) + ", iteration " + std::to_string(iteration) + ", in " +
             std::string(call) + (what.empty() ? "" : ": " + what) + "; the optimizer is broken";
    };
    try {
      position_ = {};
      label(comm, {iteration, call});
      if constexpr (requires { comm.throw_if_failed(); }) comm.throw_if_failed();
      return body();
    } catch (Error& error) {
      error.add_context(place());
      failure_ = std::current_exception();
      give_up(comm, error.what());
    } catch (const std::exception& error) {
      keep(comm, std::string(error.what()) + "; " + place());
    } catch (...) {
      keep(comm, "shardopt: an unknown exception; " + place());
    }
    std::rethrow_exception(failure_);
  }

 private:
  template <class Comm>
  static void label(Comm& comm, const Position& position) {
    if constexpr (requires { comm.label(position); }) comm.label(position);
  }

  /// @pre an exception is being handled
  template <class Comm>
  void keep(Comm& comm, const std::string& text) {
    try {
      std::throw_with_nested(Error(text));
    } catch (...) {
      failure_ = std::current_exception();
    }
    give_up(comm, text);
  }

  Position position_;
  std::exception_ptr failure_;
};

}  // namespace shardopt::inline v0::detail
