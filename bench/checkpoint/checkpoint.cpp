// SPDX-License-Identifier: Apache-2.0
// checkpoint FOLDER [PARAMETERS [ROUNDS]]: how fast checkpoints are written and read, as a part of what dd
// reaches on the same disk in the same run. dd writes the same bytes, which the system holds in memory, with
// one fsync at the end, and reads them back; both readings begin with nothing of the file in memory. Ends
// with 1 if either ratio's median is below 0.8.
#include <shardopt/checkpoint.hpp>
#include <shardopt/shardopt.hpp>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace so = shardopt;

namespace {

using Optimizer = so::ZeroOptimizer<so::AdamW, so::FlatSharding, so::Solo<so::Host>, so::FullPrecision>;

template <class Body>
double seconds(const Body& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void run(const std::string& command) {
  if (std::system(command.c_str()) != 0) throw std::runtime_error("failed: " + command);
}

/// Takes files out of the system's memory. They must be on the disk.
void forget(const std::filesystem::path& path) {
  if (std::filesystem::is_directory(path)) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
      if (entry.is_regular_file()) forget(entry.path());
    }
    return;
  }
  const int file = ::open(path.c_str(), O_RDONLY);
  if (file < 0) return;
  static_cast<void>(::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED));
  static_cast<void>(::close(file));
}

/// What comes next begins with an idle disk and with memory at hand, dd and checkpoints alike: for seconds
/// after a gigabyte was written or removed a disk is slower, and a virtual machine gives free memory back to
/// its host, which takes its time to bring it again.
void come_to_rest(std::size_t bytes) {
  ::sync();
  void* const held = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (held == MAP_FAILED)
    throw std::runtime_error("there is no memory of " + std::to_string(bytes) + " bytes");
  static_cast<void>(::madvise(held, bytes, MADV_HUGEPAGE));
  std::memset(held, 1, bytes);
  std::this_thread::sleep_for(std::chrono::seconds(4));
  static_cast<void>(::munmap(held, bytes));
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int measure(const std::filesystem::path& folder, std::int64_t parameters, int rounds) {
  so::ParameterTable table;
  table.add({.name = "weights", .shape = {parameters}, .offset = 0});
  std::vector<float> values(static_cast<std::size_t>(parameters), 0.5f);
  std::vector<float> gradients(values.size(), 1.0f);
  Optimizer optimizer(table, {}, so::Solo<so::Host>{}, so::FlatBuffers{values.data(), gradients.data()}, {});
  optimizer.step({}, {});
  const auto checkpoints = folder / "checkpoints";
  const auto plain = folder / "plain";
  const auto memory = static_cast<std::size_t>(parameters) * 12 * 5 / 2;
  const double megabytes = static_cast<double>(parameters) * 12 / 1e6;
  so::checkpoint::save(optimizer, checkpoints, {}, {});
  const auto source = folder / "source";
  std::filesystem::rename(
      so::checkpoint::newest(checkpoints) / so::checkpoint::shard_name({{"pp", 0, 1}}, 0, 1), source);
  std::vector<double> writes;
  std::vector<double> reads;
  std::printf("%.0f MB  dd write  save  ratio   dd read  load  ratio   (MB/s)\n", megabytes);
  for (int round = 0; round < rounds; ++round) {
    double dd_write = 0;
    double save = 0;
    double dd_read = 0;
    double load = 0;
    const auto plainly = [&] {
      std::filesystem::remove(plain);
      come_to_rest(memory);
      dd_write = seconds([&] {
        run("dd if='" + source.string() + "' of='" + plain.string() + "' bs=1M conv=fsync status=none");
      });
      forget(plain);
      come_to_rest(memory);
      dd_read = seconds([&] { run("dd if='" + plain.string() + "' of=/dev/null bs=1M status=none"); });
    };
    const auto as_checkpoint = [&] {
      std::filesystem::remove_all(checkpoints);
      come_to_rest(memory);
      save = seconds([&] { so::checkpoint::save(optimizer, checkpoints, {}, {}); });
      forget(checkpoints);
      come_to_rest(memory);
      load = seconds([&] { so::checkpoint::load(optimizer, checkpoints, {}, {}); });
    };
    // Which comes first takes turns.
    if (round % 2 == 0) plainly();
    as_checkpoint();
    if (round % 2 != 0) plainly();
    writes.push_back(dd_write / save);
    reads.push_back(dd_read / load);
    std::printf("round %d  %8.0f %6.0f  %.2f  %8.0f %6.0f  %.2f\n", round + 1, megabytes / dd_write,
                megabytes / save, writes.back(), megabytes / dd_read, megabytes / load, reads.back());
    std::fflush(stdout);
  }
  std::filesystem::remove_all(checkpoints);
  std::filesystem::remove(plain);
  std::filesystem::remove(source);
  std::printf("median of the ratios: save %.2f, load %.2f of dd\n", median(writes), median(reads));
  return median(writes) >= 0.8 && median(reads) >= 0.8 ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) {
    std::fprintf(stderr, "checkpoint FOLDER [PARAMETERS [ROUNDS]]\n");
    return 2;
  }
  try {
    std::filesystem::create_directories(arguments[1]);
    return measure(arguments[1], count > 2 ? std::atoll(arguments[2]) : 89'478'485,
                   count > 3 ? std::atoi(arguments[3]) : 5);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
