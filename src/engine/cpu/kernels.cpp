#include "engine/cpu/kernels.h"

#include <cstdlib>
#include <string>

namespace clowder::cpu {
namespace {

#ifdef CLOWDER_HAS_X86_KERNELS
constexpr const Kernels* kAll[] = {&kAvx512Kernels, &kAvx2Kernels, &kBaselineKernels};

int num_unusable() {
  const bool has_avx2 = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") != 0 &&
                          __builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512vl") != 0 &&
                          __builtin_cpu_supports("avx512dq") != 0;
  return has_avx512 ? 0 : (has_avx2 ? 1 : 2);
}
#else
constexpr const Kernels* kAll[] = {&kBaselineKernels};

int num_unusable() { return 0; }
#endif

const Kernels& choose() {
  const KernelList usable = usable_kernels();
  const char* wanted = std::getenv("CLOWDER_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') return **usable.begin();
  std::string names;
  for (const Kernels* candidate : usable) {
    if (candidate->name == std::string(wanted)) return *candidate;
    names += (names.empty() ? "" : ", ") + std::string(candidate->name);
  }
  throw Error(ErrorCode::kUnsupported,
              "CLOWDER_CPU_ISA: \"" + std::string(wanted) + "\", this machine and build can use: " + names);
}

}  // namespace

KernelList usable_kernels() { return {std::begin(kAll) + num_unusable(), std::end(kAll)}; }

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

const char* cpu_engine_isa() { return kernels().name; }

}  // namespace clowder::cpu
