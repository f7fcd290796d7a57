// The verdict on one step: each tensor's errors beside their bounds.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "check/bounds.h"
#include "check/compare.h"
#include "check/problem.h"
#include "model/reference.h"

namespace clowder::check {

// What an engine computed for the global batch; bf16 values are held as floats. Empty where nothing was computed.
// Shared experts' gradients are the sums of all ranks'.
struct LayerTensors {
  std::vector<float> out;            // [T, H]
  std::vector<float> dx;             // [T, H]
  std::vector<float> dtopk_weights;  // [T, K]
  std::vector<float> dw13;           // [E, 2I, H]
  std::vector<float> dw2;            // [E, H, I]
  std::vector<float> dshared_w13;    // [2Is, H]
  std::vector<float> dshared_w2;     // [H, Is]
};

struct TensorReport {
  std::string name;
  bool has_experts = false;
  Comparison errors;
  TensorBounds bounds;
  std::string digest;

  bool ok() const;
};

// The fp64 reference of a problem, without main gradients.
ReferenceResults compute_reference(const Problem& problem, int threads);

// The tensors that this problem has, in order. `reference` is that of the problem, without main gradients, which are
// added to it here.
std::vector<TensorReport> judge(const Problem& problem, const LayerTensors& tensors, ReferenceResults& reference);

struct Report {
  std::string engine;
  std::vector<TensorReport> tensors;
  std::int64_t skipped_ids = 0;
  std::int64_t expected_skipped_ids = 0;
  bool repeats_identical = true;
  double seconds = 0.0;  // of one step of the engine

  bool ok() const;
};

// One JSON object. Infinite numbers, which JSON lacks, become the largest double.
std::string to_json(const Report& report);
// A table for people.
std::string to_text(const Report& report);

}  // namespace clowder::check
