// SPDX-License-Identifier: Apache-2.0
// saver DIRECTORY KEEP [LIMIT]: continues the run of checkpoint_engine.hpp from the newest checkpoint on
// three ranks, and saves after each step until it is killed; prints each iteration that is saved. With LIMIT:
// one save with files of at most that many bytes; prints what each rank is told.
#include <support/checkpoint_engine.hpp>

#include <sys/resource.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

using namespace test;

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  const std::filesystem::path folder = argv[1];
  const ckpt::SaveOptions options{.keep = std::atoi(argv[2])};
  const bool limited = argc > 3;
  if (limited) {
    const auto limit = static_cast<rlim_t>(std::atoll(argv[3]));
    const rlimit bytes{limit, limit};
    std::signal(SIGXFSZ, SIG_IGN);
    if (setrlimit(RLIMIT_FSIZE, &bytes) != 0) return 2;
  }
  const auto told = messages_of_ranks<so::CheckpointError>(3, [&](HostThreads comm) {
    CheckpointEngine<CheckpointAdam> engine(std::move(comm));
    if (!ckpt::generations(folder, ckpt::PosixFiles::instance()).empty())
      ckpt::load(engine.optimizer, folder, {}, {});
    if (limited) {
      engine.train(10);
      ckpt::save(engine.optimizer, folder, options, {});
      return;
    }
    while (true) {
      engine.train(1);
      const auto report = ckpt::save(engine.optimizer, folder, options, {});
      if (engine.optimizer.rank() != 0) continue;
      std::printf("%lld\n", static_cast<long long>(report.iteration));
      std::fflush(stdout);
    }
  });
  // Pipes have no limit of size.
  for (const std::string& message : told) std::printf("%s\n", message.c_str());
  return limited ? 0 : 1;
}
