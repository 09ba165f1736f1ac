// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/agreement.hpp>
#include <shardopt/checkpoint/checkpoint_error.hpp>
#include <shardopt/checkpoint/commit.hpp>
#include <shardopt/checkpoint/file_system.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <thread>

namespace shardopt::inline v0::checkpoint::detail {

/// How ranks that save in the background learn of each other: by files in the folder they write into. The
/// communicator is busy with training, and belongs to another thread.
class FolderAgreement {
 public:
  /// @param timeout  of each wait
  FolderAgreement(FileSystem& files, const SavePlace& place, std::int64_t world,
                  std::chrono::milliseconds timeout)
      : files_(files), place_(place), world_(world), timeout_(timeout) {}

  /// Says that a rank has failed; of rank 0: that the save has. Best effort: a full disk may not take the
  /// note; then others wait until their timeout.
  void tell_failure(std::int64_t rank, const std::string& text) const noexcept {
    static_cast<void>(failure_of([&] { write_note(files_, note_path(rank), text); }));
  }

  /// On rank 0: returns when every rank's part is there. @throws CheckpointError if one has failed, or none
  /// came in time
  void await_parts() const {
    std::int64_t rank = 0;
    await(
        [&] {
          while (rank < world_ && files_.exists(part_path(place_, rank))) ++rank;
          for (std::int64_t other = rank; other < world_; ++other) {
            if (files_.exists(note_path(other)))
              throw CheckpointError("rank " + std::to_string(other) + ": " +
                                    read_text(files_, note_path(other)));
          }
          return rank == world_;
        },
        [&] { return "rank " + std::to_string(rank) + " has not written its file"; });
  }

  /// On the other ranks: returns when the generation is complete. @throws CheckpointError if rank 0 gave it
  /// up, or did nothing in time
  void await_completion() const {
    await(
        [&] {
          if (files_.exists(place_.complete)) return true;
          if (files_.exists(note_path(0))) throw CheckpointError(read_text(files_, note_path(0)));
          if (!files_.exists(place_.saving) && !files_.exists(place_.complete))
            throw CheckpointError("the folder that it was written into has gone");
          return false;
        },
        [] { return std::string("rank 0 has not completed it"); });
  }

 private:
  [[nodiscard]] std::filesystem::path note_path(std::int64_t rank) const {
    return place_.saving / ("failed-" + std::to_string(rank) + ".txt");
  }

  template <class Done, class Missing>
  void await(const Done& done, const Missing& missing) const {
    using namespace std::chrono;
    const auto begin = steady_clock::now();
    milliseconds pause(1);
    while (!done()) {
      // In milliseconds, and no sum: nanoseconds cannot count the longest timeout.
      if (duration_cast<milliseconds>(steady_clock::now() - begin) >= timeout_)
        throw CheckpointError(missing() + " in time");
      std::this_thread::sleep_for(pause);
      pause = (std::min)(pause * 2, milliseconds(200));
    }
  }

  FileSystem& files_;
  const SavePlace& place_;
  std::int64_t world_;
  std::chrono::milliseconds timeout_;
};

}  // namespace shardopt::inline v0::checkpoint::detail
