// clowder_explore: runs random plans under random and adversarial interleavings until one breaks a promise.
//
//   clowder_explore --plans 100000 --seed 1            plans of seeds 1, 2, 3, ...
//   clowder_explore --plans 2000 --mutant NAME         a plan that is broken on purpose: must fail
//   clowder_explore --list                             the mutants
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "explorer.h"

namespace {

using namespace clowder::plan::explore;

struct Options {
  std::uint64_t plans = 20000;
  std::uint64_t seed = 1;
  const Mutant* mutant = nullptr;
};

int list_mutants() {
  for (const Mutant& mutant : all_mutants()) std::printf("%s\n", mutant.name);
  return 0;
}

int fail(const char* text) {
  std::fprintf(stderr, "%s\nusage: clowder_explore [--plans N] [--seed S] [--mutant NAME] [--list]\n", text);
  return 2;
}

bool parse(int count, char** words, Options& options) {
  for (int i = 1; i + 1 < count; i += 2) {
    if (std::strcmp(words[i], "--plans") == 0) {
      options.plans = std::strtoull(words[i + 1], nullptr, 10);
    } else if (std::strcmp(words[i], "--seed") == 0) {
      options.seed = std::strtoull(words[i + 1], nullptr, 10);
    } else if (std::strcmp(words[i], "--mutant") == 0) {
      options.mutant = find_mutant(words[i + 1]);
      if (options.mutant == nullptr) return false;
    } else {
      return false;
    }
  }
  return count % 2 == 1;
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

int explore(const Options& options) {
  Explorer explorer;
  const auto begin = std::chrono::steady_clock::now();
  double shown = 0;
  std::int64_t tasks = 0;
  for (std::uint64_t done = 1; done <= options.plans; ++done) {
    const std::uint64_t seed = options.seed + done - 1;
    const Result result = explorer.run(random_plan(seed), options.mutant);
    if (result.failed) {
      std::printf("%s\nfailed after %llu plans; again with --seed %llu --plans 1\n", result.what.c_str(),
                  static_cast<unsigned long long>(done), static_cast<unsigned long long>(seed));
      return 1;
    }
    tasks += result.tasks;
    const double elapsed = seconds_since(begin);
    if (elapsed - shown < 1 && done < options.plans) continue;
    shown = elapsed;
    std::fprintf(stderr, "\r%llu plans, %lld tasks, %.0f plans/s ", static_cast<unsigned long long>(done),
                 static_cast<long long>(tasks), static_cast<double>(done) / elapsed);
  }
  std::fprintf(stderr, "\n");
  return 0;
}

}  // namespace

int main(int count, char** words) {
  if (count == 2 && std::strcmp(words[1], "--list") == 0) return list_mutants();
  Options options;
  if (!parse(count, words, options)) return fail("unknown option or mutant");
  return explore(options);
}
