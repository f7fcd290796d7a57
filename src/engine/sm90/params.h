// What the host hands to the kernels: plain structs, nothing else crosses.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "clowder/layer.h"
#include "engine/sm90/timeline.h"
#include "plan/pass.h"
#include "plan/schedule.h"

namespace clowder::sm90 {

// What the first wait to be given up says, in host memory. Zero while all is well.
struct GivenUp {
  std::int32_t is_set;
  std::int32_t rank;        // who waited
  std::int32_t waited_for;  // a rank; the waiting rank itself for its own tasks
  std::int32_t pass;        // plan::Pass
  std::int32_t task;        // plan::TaskKind of the waiting task
  std::int32_t is_flag;     // 1: `what` is a plan::FlagKind, 0: a plan::CounterKind
  std::int32_t what;
};

struct Watch {
  std::int64_t limit_ns;  // of every wait
  std::int32_t* leaves;   // on the device: 1 once somebody has given up, and everything leaves
  GivenUp* report;        // on the host
};

// Maps of one expert's weights, boxes of 128 rows by 64 terms.
struct WeightMaps {
  CUtensorMap w1, w3, w2;
};

// One rank of the launch. Rows of rings stand at row block modulo ring blocks.
struct ForwardRank {
  // Loads by boxes of 64 rows, stores by boxes of 16.
  CUtensorMap x_ring;                              // [ring_rows, H], with peers
  CUtensorMap x_staged;                            // [max_tokens, H], with peers
  CUtensorMap h_load, h_store;                     // [ring_rows, I]
  CUtensorMap shared_h_load, shared_h_store;       // [max_tokens in whole blocks, Is]
  CUtensorMap gate_store, up_store;                // [saved_rows, I] each, interleaved by rows
  CUtensorMap shared_gate_store, shared_up_store;  // [max_tokens, Is] each
  CUtensorMap slots;                               // [max_tokens, K, H], boxes of 128 tokens of one slot

  plan::ConstSchedule schedule;
  const plan::RankPass* pass;  // written on the device
  const bf16* x;               // [T, H]
  const float* topk_weights;   // [T, K]
  bf16* gate_up;               // [saved_rows, 2I], or null
  bf16* shared_gate_up;        // [T, 2Is], or null
  bf16* out;                   // [T, H]
  std::byte* x_ring_rows;      // what x_ring maps
  std::int32_t* counters[plan::kNumCounterKinds];
  const WeightMaps* weights;  // [E_l], then the shared expert's
};

// All pointers are the device's.
template <int kRanks>
struct ForwardParams {
  ForwardRank local_ranks[kRanks];
  plan::PassShape shape;
  std::int32_t num_local_ranks;
  std::int32_t num_ranks;
  std::int64_t hidden, intermediate, shared_intermediate;
  std::int32_t num_experts;  // of a rank
  std::int32_t topk;
  Activation activation;

  // With one rank the compiler knows where everything stands.
  CLOWDER_HD const ForwardRank& rank(int i) const { return local_ranks[kRanks == 1 ? 0 : i]; }

  const plan::Queue* math;  // written on the device
  std::int32_t* next_ticket;
  std::int32_t* progress;      // of all clusters, see pace.cuh
  bf16* const* slots_of_rank;  // [R] every rank's slot buffer
  Watch watch;
  DeviceTimeline timeline;
};

}  // namespace clowder::sm90
