// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/error.hpp>

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <utility>

namespace shardopt::inline v0::detail {

/// Holds the first failure of what has effects: it stays, and is thrown again by whatever asks later.
///
/// The failure's message gets rank, iteration and what was being done; the other ranks are told by the
/// collective, where it can.
class FailureLatch {
 public:
  /// @throws the first failure, if there was one
  void require_working() const {
    if (failure_) std::rethrow_exception(failure_);
  }

  /// Notes what is being done, for messages, and tells the collective. @param iteration  counted from 1
  template <class Comm>
  void enter(Comm& comm, std::int64_t iteration, std::string what) {
    position_ = std::move(what);
    if constexpr (requires { comm.label(position_); }) {
      comm.label("iteration " + std::to_string(iteration) + ", " + position_);
    }
  }

  /// Runs what has effects. @throws what it throws, with the place; from then on require_working() throws the
  /// same
  template <class Comm, class Body>
  auto run(Comm& comm, std::int64_t iteration, std::string_view call, const Body& body) -> decltype(body()) {
    const auto place = [&] {
      return "rank " + std::to_string(comm.rank()) + ", iteration " + std::to_string(iteration) + ", in " +
             std::string(call) + (position_.empty() ? "" : ": " + position_) + "; the optimizer is broken";
    };
    try {
      position_.clear();
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
  void keep(Comm& comm, const std::string& text) {
    failure_ = std::make_exception_ptr(Error(text));
    give_up(comm, text);
  }

  /// Lets the other ranks know that this one goes no further.
  template <class Comm>
  static void give_up(Comm& comm, const std::string& text) {
    if constexpr (requires { comm.abort(text); }) comm.abort(text);
  }

  std::string position_;
  std::exception_ptr failure_;
};

}  // namespace shardopt::inline v0::detail
