// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/error.hpp>

#include <nccl.h>

#include <string>

namespace shardopt::inline v0 {

namespace detail {

/// " (what NCCL said last)", if it said anything.
[[nodiscard]] inline std::string text_of_last(ncclComm_t comm) {
  const char* text = ncclGetLastError(comm);
  return text != nullptr && *text != '\0' ? std::string(" (") + text + ")" : std::string();
}

}  // namespace detail

/// A call of NCCL failed.
class NcclError : public Error {
 public:
  /// Names the call, NCCL's texts for the failure, and the place.
  NcclError(ncclResult_t status, const char* call, ncclComm_t comm, Location where)
      : Error(std::string("shardopt: ") + call + " failed: " + ncclGetErrorString(status) +
              detail::text_of_last(comm) + ", in " + detail::text_of(where)),
        status_(status) {}

  /// NCCL's code.
  [[nodiscard]] ncclResult_t status() const noexcept { return status_; }

 private:
  ncclResult_t status_;
};

/// @throws NcclError unless the call succeeded
inline void throw_if_failed(ncclResult_t status, const char* call, ncclComm_t comm = nullptr,
                            Location where = Location::current()) {
  if (status != ncclSuccess) throw NcclError(status, call, comm, where);
}

}  // namespace shardopt::inline v0
