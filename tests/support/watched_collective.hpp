// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/collective.hpp>
#include <shardopt/core/error.hpp>

#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace test {

namespace so = shardopt;

/// What a rank called, and where it is to fail.
struct CallLog {
  struct Call {
    std::string operation;
    std::int64_t elements = 0;
    std::int64_t own = 0;
    friend bool operator==(const Call&, const Call&) = default;
  };
  std::vector<Call> calls;
  std::string fail_in = {};  ///< operation …
  int fail_at = 0;           ///< … and its how-manyth call from now on throws; 0: none

  void enter(const std::string& operation, std::int64_t elements, std::int64_t own = 0) {
    calls.push_back({operation, elements, own});
    if (fail_at > 0 && operation == fail_in && --fail_at == 0) throw std::runtime_error("the wire is cut");
  }
  [[nodiscard]] std::int64_t count(std::string_view operation) const {
    std::int64_t sum = 0;
    for (const Call& call : calls) sum += call.operation == operation ? 1 : 0;
    return sum;
  }
};

/// A collective of a user's own: passes every call on, keeps a log, and fails where it is told to.
template <so::Collective Inner>
class Watched {
 public:
  using Device = typename Inner::Device;
  using Stream = typename Device::Stream;
  static constexpr std::string_view name = "watched";

  Watched(Inner inner, std::shared_ptr<CallLog> log) : inner_(std::move(inner)), log_(std::move(log)) {}

  [[nodiscard]] int rank() const { return inner_.rank(); }
  [[nodiscard]] int world() const { return inner_.world(); }
  [[nodiscard]] Stream stream() const { return inner_.stream(); }
  [[nodiscard]] decltype(auto) device() const { return inner_.device(); }

  [[nodiscard]] static bool supports(so::Reduction reduction, so::Dtype type) {
    return Inner::supports(reduction, type);
  }
  [[nodiscard]] static so::Reduction automatic_reduction(so::Dtype type) {
    return Inner::automatic_reduction(type);
  }
  [[nodiscard]] static std::int64_t workspace_bytes(so::Reduction reduction, so::BlockLayout blocks,
                                                    so::Dtype type, int rank) {
    return Inner::workspace_bytes(reduction, blocks, type, rank);
  }

  void reduce_scatter(void* base, so::BlockLayout blocks, so::Dtype type, so::Reduction reduction,
                      void* workspace) {
    log_->enter("reduce_scatter", blocks.elements(), blocks.block(rank()).size());
    inner_.reduce_scatter(base, blocks, type, reduction, workspace);
  }
  void all_gather(void* base, so::BlockLayout blocks, so::Dtype type) {
    log_->enter("all_gather", blocks.elements(), blocks.block(rank()).size());
    inner_.all_gather(base, blocks, type);
  }
  void all_reduce(std::int64_t* values, std::int64_t count) {
    log_->enter("all_reduce", count);
    inner_.all_reduce(values, count);
  }
  void broadcast(void* data, std::int64_t bytes, int root) {
    log_->enter("broadcast", bytes);
    inner_.broadcast(data, bytes, root);
  }
  void exchange(std::span<const std::byte> mine, std::span<std::byte> all, void* scratch) {
    log_->enter("exchange", static_cast<std::int64_t>(mine.size()));
    inner_.exchange(mine, all, scratch);
  }

 private:
  Inner inner_;
  std::shared_ptr<CallLog> log_;
};

}  // namespace test
