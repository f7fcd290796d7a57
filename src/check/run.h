// Runs a problem through the public C++ API, as a user would.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "check/problem.h"
#include "check/report.h"
#include "clowder/layer.h"

namespace clowder::check {

// A number of rows as users write it: a count, a fraction of the rows that the fullest rank receives, or a name.
struct RowCount {
  enum class Kind { kDefault, kRows, kFraction, kMinimum, kEverything };
  Kind kind = Kind::kDefault;
  std::int64_t numerator = 0;  // the rows of kRows
  std::int64_t denominator = 1;
};

// "N", "min", "A/B" or "full"; "N", "A/B" or "all". Throw Error(kArgument) that names the option.
RowCount parse_ring_rows(const std::string& text);
RowCount parse_saved_rows(const std::string& text);

enum class Phase { kSchedule, kForward, kBackward };

// A rank that makes no call from `phase` on.
struct LostRank {
  int rank = 0;
  Phase phase = Phase::kForward;
};

// "R" or "R:PHASE"
LostRank parse_lost_rank(const std::string& text);

struct RunOptions {
  RowCount ring_rows;
  RowCount saved_rows;
  WorkspaceOptions workspace;  // everything but the two above, and the jitter
  bool jitter = false;
  int repeat = 1;
  int threads = 1;  // of the data and of the reference
  std::function<void(const char* stage)> progress = [](const char*) {};
};

// Those of a workspace for `problem`. Each repeat with jitter draws other delays.
WorkspaceOptions make_workspace_options(const Problem& problem, const RunOptions& options, int repeat);

// Runs every repeat, compares the first with the reference and the others with the first, bit by bit.
Report run_check(const ProblemSpec& spec, const RunOptions& options);

// What became of one rank while another was lost. An empty error: its calls returned.
struct RankOutcome {
  int rank = 0;
  bool timed_out = false;
  std::string error;
};

// The outcomes of all other ranks, each driven by a thread and a workspace of its own.
std::vector<RankOutcome> run_with_lost_rank(const ProblemSpec& spec, const RunOptions& options, const LostRank& lost);

}  // namespace clowder::check
